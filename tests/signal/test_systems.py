"""Known systems against what is known about them, and each fast path against a plain one."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from itertools import permutations
from typing import Any

import antropy
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import toeplitz
from scipy.stats import spearmanr

from softgap.errors import SoftgapError, UnknownNameError, ValueInputError
from softgap.signal import chaos, permutation_entropy, simulate, systems
from softgap.signal.systems import fgn_covariance, fgn_from_normals

NAMES = tuple(systems())


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def pattern_shares(x: np.ndarray, order: int = 3) -> dict[str, float]:
    """Share of each pattern, written as the ranks of the window's values."""
    windows = np.lib.stride_tricks.sliding_window_view(x, order, axis=-1).reshape(-1, order)
    ranks = np.argsort(np.argsort(windows, axis=-1), axis=-1)
    code = ranks @ 10 ** np.arange(order)[::-1]
    return {"".join(map(str, p)): float((code == int("".join(map(str, p)))).mean()) for p in permutations(range(order))}


def slope_of_spectrum(x: np.ndarray) -> float:
    power = (np.abs(np.fft.rfft(x * np.hanning(x.shape[-1]))) ** 2).mean(0)
    at = np.arange(4, x.shape[-1] // 8)
    return float(np.polyfit(np.log(at), np.log(power[at]), 1)[0])


@pytest.mark.parametrize("name", NAMES)
def test_shape_and_determinism(name: str) -> None:
    series = simulate(name, 50, rng=generator(1), size=(2, 3))
    assert series.shape == (2, 3, 50)
    assert series.dtype == np.float64
    np.testing.assert_array_equal(series, simulate(name, 50, rng=generator(1), size=(2, 3)))
    assert np.abs(series - simulate(name, 50, rng=generator(2), size=(2, 3))).max() > 1e-3
    assert simulate(name, 50, rng=generator(1)).shape == (50,)
    assert simulate(name, 1, rng=generator(1), size=4).shape == (4, 1)
    # Series of a batch are different ones.
    assert len(np.unique(series[..., -1])) == 6


@pytest.mark.parametrize("name", NAMES)
def test_no_system_ties_at_its_defaults(name: str) -> None:
    found = permutation_entropy(simulate(name, 400, rng=generator(3), size=20))
    assert found.eligible.all()
    assert found.tie_rate.max() == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_registry_says_what_is_taken(name: str) -> None:
    system = systems()[name]
    assert len(system.description) > 40
    assert set(system.parameters) == set(system.ranges)
    assert set(system.parameters) == set(inspect.signature(system.make).parameters) - {"shape", "rng"}
    assert system.kind in ("noise", "periodic", "map", "flow")
    given = simulate(name, 20, rng=generator(), size=(), **system.parameters)
    np.testing.assert_array_equal(given, simulate(name, 20, rng=generator()))


def test_global_random_state_is_left_alone() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    for name in NAMES:
        simulate(name, 20, rng=generator())
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize(("name", "slope"), [("white", 0), ("pink", -1), ("brown", -2)])
def test_noises_have_their_spectra(name: str, slope: float) -> None:
    found = slope_of_spectrum(simulate(name, 4096, rng=generator(), size=100))
    assert found == pytest.approx(slope, abs=0.05)


def test_pink_noise_does_not_run_into_its_own_beginning() -> None:
    x = simulate("pink", 512, rng=generator(), size=2000)
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    # Of a periodic series the two ends are neighbours and correlate at about 0.6.
    assert (x[:, 0] * x[:, -1]).mean() < 0.1 < 0.4 < (x[:, 0] * x[:, 1]).mean()


@pytest.mark.parametrize("hurst", [0.05, 0.3, 0.5, 0.75, 0.95])
@pytest.mark.parametrize("n", [2, 3, 16, 31])
def test_fgn_has_exactly_its_covariance(n: int, hurst: float) -> None:
    """The noise is a linear map L of normal numbers: L L^T is its covariance, without any sampling error."""
    linear = fgn_from_normals(np.eye(2 * n), n, hurst).T
    assert fgn_covariance(n, hurst)[0] == 1
    np.testing.assert_allclose(linear @ linear.T, toeplitz(fgn_covariance(n, hurst)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("hurst", [0.2, 0.5, 0.8])
def test_fbm_increments_scale_with_two_h(hurst: float) -> None:
    x = simulate("fbm", 1000, rng=generator(1), size=400, hurst=hurst)
    lags = np.array([1, 2, 4, 8, 16, 32])
    variance = np.array([((x[:, lag:] - x[:, :-lag]) ** 2).mean() for lag in lags])
    assert np.polyfit(np.log(lags), np.log(variance), 1)[0] == pytest.approx(2 * hurst, abs=0.02)
    np.testing.assert_allclose(variance, lags ** (2 * hurst), rtol=0.05)
    assert (x[:, 99] ** 2).mean() == pytest.approx(100 ** (2 * hurst), rel=0.25)


@pytest.mark.parametrize("hurst", [0.2, 0.5, 0.8])
def test_fbm_has_its_fractal_dimension(hurst: float) -> None:
    """2 - H, by the curve lengths of Higuchi in another library."""
    x = simulate("fbm", 4000, rng=generator(2), size=20, hurst=hurst)
    assert np.mean([antropy.higuchi_fd(row) for row in x]) == pytest.approx(2 - hurst, abs=0.03)


def test_fbm_of_one_half_has_independent_increments() -> None:
    assert fgn_covariance(50, 0.5) == pytest.approx([1.0] + [0.0] * 49, abs=1e-13)


@pytest.mark.parametrize("hurst", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_fbm_has_the_pattern_probabilities_of_bandt_and_shiha(hurst: float) -> None:
    found = pattern_shares(simulate("fbm", 500, rng=generator(2), size=400, hurst=hurst))
    rising = math.asin(2 ** (hurst - 1)) / math.pi
    # Long memory lets a whole series drift up or down, so a pattern and its mirror image are taken together.
    for pattern, mirror in (("012", "210"), ("021", "201"), ("102", "120")):
        expected = rising if pattern == "012" else (1 - 2 * rising) / 4
        assert (found[pattern] + found[mirror]) / 2 == pytest.approx(expected, abs=0.004)


def test_entropy_of_fbm_falls_with_the_hurst_exponent() -> None:
    """Spearman over 19 exponents and 50 seeds each, every series by itself; and the means fall without exception."""
    exponents = np.round(np.arange(0.05, 1, 0.05), 2)
    rng = generator(4)
    entropy = np.stack([permutation_entropy(simulate("fbm", 400, rng=rng, size=50, hurst=h)).value for h in exponents])
    rho = spearmanr(np.repeat(exponents, 50), entropy.ravel()).statistic
    assert rho < -0.97, f"Spearman of H and entropy over {entropy.size} series of 400 steps: {rho:.4f}"
    assert (np.diff(entropy.mean(-1)) < 0).all(), entropy.mean(-1)


@pytest.mark.parametrize("phi", [-0.7, 0.0, 0.9])
def test_ar1_is_its_loop_and_has_its_autocorrelation(phi: float) -> None:
    x = simulate("ar1", 300, rng=generator(5), size=2000, phi=phi)
    noise = generator(5).standard_normal((2000, 300))
    plain = np.empty_like(noise)
    plain[:, 0] = noise[:, 0]
    for t in range(1, 300):
        plain[:, t] = phi * plain[:, t - 1] + math.sqrt(1 - phi**2) * noise[:, t]
    np.testing.assert_allclose(x, plain, rtol=0, atol=1e-12)
    np.testing.assert_allclose((x**2).mean(0), 1, atol=0.2)  # from the first step on
    for lag in (1, 2, 5):
        assert (x[:, lag:] * x[:, :-lag]).mean() == pytest.approx(phi**lag, abs=0.02)


def test_sine_has_its_period() -> None:
    x = simulate("sine", 400, rng=generator(), period=25.0)
    np.testing.assert_allclose(x[25:], x[:-25], atol=1e-12)
    assert np.abs(x[12:] - x[:-12]).max() > 1.9
    starts = simulate("sine", 1, rng=generator(), size=4000)
    assert (starts**2).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("name", ["logistic", "henon"])
def test_chaotic_maps_never_fall_three_times(name: str) -> None:
    x = simulate(name, 10_000, rng=generator(6), size=20)
    shares = pattern_shares(x)
    assert shares.pop("210") == 0
    assert min(shares.values()) > 0.05


def test_logistic_is_its_loop() -> None:
    x = generator(7).uniform(0.05, 0.95, (3, 1))[:, 0]
    for _ in range(1000):
        x = 3.9 * x * (1 - x)
    found = simulate("logistic", 40, rng=generator(7), size=3, r=3.9)
    for t in range(40):
        np.testing.assert_array_equal(found[:, t], x)
        x = 3.9 * x * (1 - x)


def test_logistic_at_four_has_its_density_and_exponent() -> None:
    x = simulate("logistic", 10_000, rng=generator(8), size=20)
    for at in (0.05, 0.25, 0.5, 0.9):
        assert (x < at).mean() == pytest.approx(2 / math.pi * math.asin(math.sqrt(at)), abs=0.005)
    assert np.log(np.abs(4 - 8 * x)).mean() == pytest.approx(math.log(2), abs=0.005)
    # Of the stationary law, the share of each pattern of order 3 (Amigo et al. 2006).
    shares = pattern_shares(x)
    expected = {"012": 1 / 3, "021": 1 / 15, "120": 4 / 15, "102": 2 / 15, "201": 3 / 15, "210": 0}
    assert shares == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize(("r", "values"), [(0.0, 1), (2.5, 1), (3.2, 2), (3.5, 4), (3.83, 3)])
def test_logistic_cycles_where_it_should(r: float, values: int) -> None:
    x = simulate("logistic", 60, rng=generator(9), r=r)
    assert len(np.unique(np.round(x, 6))) == values
    if r > 1:
        assert x.mean() > 0.3


def test_henon_obeys_its_rule_and_stays_in_its_bounds() -> None:
    x = simulate("henon", 10_000, rng=generator(10), size=5)
    np.testing.assert_allclose(x[:, 2:], 1 - 1.4 * x[:, 1:-1] ** 2 + 0.3 * x[:, :-2], rtol=0, atol=1e-13)
    assert np.abs(x).max() < 1.3
    assert x.mean() == pytest.approx(0.257, abs=0.01)


def trajectory_of_flow(name: str, start: np.ndarray, times: np.ndarray) -> np.ndarray:
    """By an integrator of eighth order that adapts its steps."""

    def slope(_: float, state: np.ndarray) -> list[float]:
        x, y, z = state
        if name == "lorenz":
            return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]
        return [-y - z, x + 0.2 * y, 0.2 + z * (x - 5.7)]

    found = solve_ivp(slope, (0, times[-1]), start, method="DOP853", t_eval=times, rtol=1e-11, atol=1e-12)
    return np.asarray(found.y[0])


@pytest.mark.parametrize(("name", "steps", "interval"), [("lorenz", 50, 0.1), ("rossler", 60, 0.75)])
def test_flows_follow_an_adaptive_integrator(
    name: str, steps: int, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the transient, from the same start, until chaos has had time to multiply errors by a few thousand."""
    monkeypatch.setattr(chaos, f"_{name.upper()}_TRANSIENT", 0.0)
    found = simulate(name, steps, rng=generator(11))
    rng = generator(11)
    start = rng.uniform(-10, 10, 3) + np.array([0, 0, 25]) if name == "lorenz" else rng.uniform(-4, 4, 3) * [1, 1, 0]
    expected = trajectory_of_flow(name, start, np.arange(steps) * interval)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3)
    np.testing.assert_allclose(found[:10], expected[:10], rtol=0, atol=2e-4)


def test_lorenz_stays_on_its_attractor() -> None:
    x = simulate("lorenz", 2000, rng=generator(12), size=20)
    assert 17 < np.abs(x).max() < 20
    # Symmetric under (x, y) -> (-x, -y): both wings are visited alike.
    assert x.mean() == pytest.approx(0, abs=0.3)
    assert x.std() == pytest.approx(7.92, abs=0.1)
    assert simulate("lorenz", 500, rng=generator(), rho=10.0).std() < 1e-6  # below 24.06 both foci attract


def test_rossler_turns_about_once_in_its_period() -> None:
    x = simulate("rossler", 8000, rng=generator(13), interval=0.25)
    assert -10 < x.min() < -8.5
    assert 10.5 < x.max() < 12
    turns = ((x[:-1] < 0) & (x[1:] >= 0)).sum()
    assert 8000 * 0.25 / turns == pytest.approx(5.86, abs=0.1)


def mackey_glass_by_steps(start: float, tau: float, until: float) -> np.ndarray:
    """The method of steps: over one delay the past is known, as a dense solution, and the rest is an ODE."""
    pieces: list[Any] = []

    def value(t: float) -> float:
        return start if t <= 0 else float(pieces[min(int(t // tau), len(pieces) - 1)](t)[0])

    def slope(t: float, x: np.ndarray) -> Any:
        past = value(t - tau)
        return 0.2 * past / (1 + past**10) - 0.1 * x

    while len(pieces) * tau < until:
        begin = len(pieces) * tau
        options: dict[str, Any] = {"method": "DOP853", "rtol": 1e-10, "atol": 1e-12, "dense_output": True}
        pieces.append(solve_ivp(slope, (begin, begin + tau), [value(begin)], **options).sol)
    return np.array([value(t) for t in np.arange(until)])


@pytest.mark.parametrize("tau", [17.0, 6.0])
def test_mackey_glass_follows_the_method_of_steps(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "_MACKEY_GLASS_TRANSIENT", 0.0)
    found = simulate("mackey_glass", 100, rng=generator(14), interval=1.0, tau=tau)
    expected = mackey_glass_by_steps(generator(14).uniform(0.5, 1.5, 1)[0], tau, 100.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_mackey_glass_is_chaotic_only_with_a_long_delay() -> None:
    x = simulate("mackey_glass", 1000, rng=generator(15), size=5)
    assert 0.2 < x.min() < 0.5
    assert 1.2 < x.max() < 1.4
    short = simulate("mackey_glass", 100, rng=generator(15), tau=2.0)
    np.testing.assert_allclose(short, 1.0, atol=1e-9)  # the fixed point of beta / gamma = 2


@pytest.mark.parametrize(("name", "given"), [("markov_fair", {}), ("markov_biased", {}), ("markov_fair", {"up": 0.2})])
def test_markov_walks_have_their_known_patterns(name: str, given: dict[str, float]) -> None:
    values = dict(systems()[name].parameters) | given
    up, down = values["up"], values["down"]
    high = up / (up + down)
    found = pattern_shares(simulate(name, 500, rng=generator(16), size=600, **given))
    expected = dict.fromkeys(found, (1 - high) * up / 2) | {"012": high * (1 - down), "210": (1 - high) * (1 - up)}
    assert sum(expected.values()) == pytest.approx(1)
    assert found == pytest.approx(expected, abs=0.006)


def test_markov_states_follow_their_transitions() -> None:
    steps = np.diff(simulate("markov_biased", 2000, rng=generator(17), size=50, up=0.1, down=0.3)) > 0
    before, after = steps[:, :-1], steps[:, 1:]
    assert after[~before].mean() == pytest.approx(0.1, abs=0.01)
    assert (~after[before]).mean() == pytest.approx(0.3, abs=0.01)
    assert np.abs(np.diff(simulate("markov_fair", 100, rng=generator()))).max() < 1


CASES: dict[str, tuple[Callable[[], Any], type[SoftgapError], str]] = {
    "unknown": (lambda: simulate("lorentz", 9, rng=generator()), UnknownNameError, "unknown system 'lorentz'; did you"),
    "hurst": (
        lambda: simulate("fbm", 9, rng=generator(), hurst=1.0),
        ValueInputError,
        "hurst of system 'fbm' must be a number between 0 and 1, both excluded, got 1.0",
    ),
    "r": (
        lambda: simulate("logistic", 9, rng=generator(), r=4.1),
        ValueInputError,
        "r of system 'logistic' must be a number between 0 and 4, got 4.1",
    ),
    "phi": (
        lambda: simulate("ar1", 9, rng=generator(), phi=-1),
        ValueInputError,
        "phi of system 'ar1' must be a number between -1 and 1, both excluded, got -1",
    ),
    "interval": (
        lambda: simulate("rossler", 9, rng=generator(), interval=0),
        ValueInputError,
        "interval of system 'rossler' must be a number above 0, got 0",
    ),
    "nan": (
        lambda: simulate("lorenz", 9, rng=generator(), rho=math.nan),
        ValueInputError,
        "rho of system 'lorenz' must be a number, got nan",
    ),
    "text": (
        lambda: simulate("fbm", 9, rng=generator(), hurst="a"),  # type: ignore[arg-type]
        ValueInputError,
        "hurst of system 'fbm' must be a number between 0 and 1, both excluded, got 'a'",
    ),
    "unknown parameter": (
        lambda: simulate("lorenz", 9, rng=generator(), roh=3.0),
        UnknownNameError,
        "unknown parameter of system 'lorenz' 'roh'; did you mean 'rho'?",
    ),
    "no parameters": (
        lambda: simulate("white", 9, rng=generator(), hurst=0.5),
        ValueInputError,
        "system 'white' has no parameters, got hurst=0.5",
    ),
    "escape": (
        lambda: simulate("henon", 9, rng=generator(), a=3.0),
        ValueInputError,
        "system 'henon' runs off to infinity with {'a': 3.0, 'b': 0.3}; stay nearer to its defaults",
    ),
    "no steps": (
        lambda: simulate("white", 0, rng=generator()),
        ValueInputError,
        "n must be a whole number from 1, got 0",
    ),
    "no size": (
        lambda: simulate("white", 9, rng=generator(), size=(3, -1)),
        ValueInputError,
        "size must be a whole number from 1, got -1",
    ),
    "a seed": (
        lambda: simulate("white", 9, rng=0),  # type: ignore[arg-type]
        ValueInputError,
        "rng must be a numpy Generator, got 0; use np.random.default_rng(seed)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case: str) -> None:
    call, error, sentence = CASES[case]
    with pytest.raises(error, match=re.escape(sentence)):
        call()

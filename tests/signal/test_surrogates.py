"""Each surrogate keeps what it must keep and destroys what it must; the batch equals the loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from softgap.errors import ShapeError, SoftgapError, UnknownNameError, UnsupportedError, ValueInputError
from softgap.signal.reference import iaaft_loop
from softgap.signal.surrogates import SURROGATES, spectrum_error, surrogates
from softgap.signal.systems import simulate

OPTIONS: dict[str, dict[str, int]] = {name: {} for name in SURROGATES} | {"block_shuffle": {"block": 3}}
KEEP_VALUES = ("shuffle", "block_shuffle", "aaft", "iaaft")


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def skewed(n: int, seed: int = 0) -> np.ndarray:
    """Correlated and far from Gaussian, as a divergence is."""
    return np.asarray(np.exp(simulate("ar1", n, rng=generator(seed), phi=0.8)))


def bounded(n: int, size: int, seed: int = 0) -> np.ndarray:
    """Correlated, between 0 and 1, not Gaussian but without tails."""
    return np.asarray(1 / (1 + np.exp(-1 - simulate("ar1", n, rng=generator(seed), size=size, phi=0.8))))


def autocorrelation(x: np.ndarray, lag: int = 1) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray((centred[..., lag:] * centred[..., :-lag]).mean(-1) / centred.var(-1))


def asymmetry(x: np.ndarray) -> np.ndarray:
    """Skewness of the differences: 0 for every series that is the same forwards and backwards in time."""
    step = np.diff(x)
    return np.asarray((step**3).mean(-1) / (step**2).mean(-1) ** 1.5)


@pytest.mark.parametrize("method", SURROGATES)
@pytest.mark.parametrize("n", [14, 15, 400, 401])
def test_shape_and_mean(method: str, n: int) -> None:
    x = np.stack([skewed(n, seed) for seed in range(6)]).reshape(2, 3, n)
    found = surrogates(x, method, 5, rng=generator(), **OPTIONS[method]).series
    assert found.shape == (2, 3, 5, n)
    np.testing.assert_allclose(found.mean(-1), np.broadcast_to(x.mean(-1)[..., None], (2, 3, 5)), rtol=1e-12)
    if n > 15:  # a short series may come back as it was
        assert (np.abs(found - x[..., None, :]).max(-1) > 0).all()
        assert (np.abs(found[..., 1:, :] - found[..., :1, :]).max(-1) > 0).all()


@pytest.mark.parametrize("method", KEEP_VALUES)
@pytest.mark.parametrize("n", [14, 401])
def test_values_are_kept_exactly(method: str, n: int) -> None:
    x = np.stack([skewed(n), np.round(skewed(n, 1), 1)])  # the second with ties
    found = surrogates(x, method, 9, rng=generator(1), **OPTIONS[method]).series
    np.testing.assert_array_equal(np.sort(found), np.broadcast_to(np.sort(x)[:, None], found.shape))


@pytest.mark.parametrize("n", [4, 5, 14, 15, 400, 401])
def test_phase_keeps_the_spectrum_to_rounding(n: int) -> None:
    x = skewed(n)
    found = surrogates(x, "phase", 20, rng=generator()).series
    assert spectrum_error(x, found).max() < 1e-13
    np.testing.assert_allclose(found.var(-1), x.var(), rtol=1e-12)


def test_phase_makes_the_values_gaussian() -> None:
    x = skewed(2000)
    found = surrogates(x, "phase", 50, rng=generator()).series

    def skewness(y: np.ndarray) -> np.ndarray:
        return np.asarray((((y - y.mean(-1, keepdims=True)) / y.std(-1, keepdims=True)) ** 3).mean(-1))

    assert skewness(x) > 2
    assert np.abs(skewness(found)).max() < 0.6


def test_iaaft_keeps_the_spectrum_closely_and_aaft_roughly() -> None:
    """AAFT is off by 20 %, IAAFT by less than 1 %."""
    x = bounded(1000, 5)
    once = surrogates(x, "aaft", 20, rng=generator())
    iterated = surrogates(x, "iaaft", 20, rng=generator())
    assert once.convergence is None
    assert iterated.convergence is not None
    error = iterated.convergence.spectrum_error
    np.testing.assert_allclose(error, spectrum_error(x[:, None], iterated.series), rtol=1e-9)
    assert iterated.convergence.converged.all()
    assert error.max() < 0.01
    assert 0.1 < np.median(spectrum_error(x[:, None], once.series)) < 0.3
    # The spectrum fixes the correlation around a circle; along a line its ends are missing.
    assert np.abs(autocorrelation(iterated.series) - autocorrelation(x)[:, None]).max() < 0.01
    assert np.abs(autocorrelation(once.series) - autocorrelation(x)[:, None]).max() > 0.02


def test_tails_cost_accuracy_and_the_result_says_so() -> None:
    x = np.stack([skewed(1000, seed) for seed in range(5)])
    found = surrogates(x, "iaaft", 10, rng=generator()).convergence
    assert found is not None
    assert 0.02 < np.median(found.spectrum_error) < 0.1


def test_shuffle_destroys_the_autocorrelation() -> None:
    x = skewed(2000)
    assert autocorrelation(x) > 0.6
    assert np.abs(autocorrelation(surrogates(x, "shuffle", 50, rng=generator()).series)).max() < 0.1


def test_every_order_is_equally_likely_under_shuffle() -> None:
    found = surrogates([0, 1, 2, 3], "shuffle", 24000, rng=generator()).series
    _, counts = np.unique(found @ (4.0 ** np.arange(4)), return_counts=True)
    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 49.7  # chi squared of 23 degrees of freedom, 0.1 %


@pytest.mark.parametrize("block", [1, 4, 50, 100])
def test_blocks_stay_whole_and_are_cut_anywhere(block: int) -> None:
    found = surrogates(np.arange(200), "block_shuffle", 400, rng=generator(), block=block).series
    joined = np.diff(found) == 1
    assert (~joined).sum(-1).max() <= 200 // block + 1
    if block > 1:
        assert joined.mean() >= 1 - (200 / block + 1) / 199
        # Almost every value begins a block in some surrogate: no place of the data is always kept together.
        assert len(np.unique(found[:, 1:][~joined])) > 150
    else:
        assert joined.mean() < 0.02


def test_block_shuffle_keeps_short_and_destroys_long_correlation() -> None:
    x = simulate("ar1", 5000, rng=generator(3), phi=0.9)
    found = surrogates(x, "block_shuffle", 40, rng=generator(), block=20).series
    np.testing.assert_allclose(autocorrelation(found).mean(), autocorrelation(x) * 0.95, atol=0.02)
    assert autocorrelation(x, 10) > 0.25
    assert np.abs(autocorrelation(found, 20).mean()) < 0.03


@pytest.mark.parametrize("method", ["phase", "aaft", "iaaft", "shuffle"])
def test_the_direction_of_time_of_a_chaotic_map_is_destroyed(method: str) -> None:
    x = simulate("logistic", 2000, rng=generator(4))
    found = asymmetry(surrogates(x, method, 99, rng=generator()).series)
    assert asymmetry(x) < -0.3
    assert asymmetry(x) < found.min()
    assert abs(found.mean()) < 0.05


def test_iaaft_keeps_a_linear_process_within_its_surrogates() -> None:
    """Under the null the data's rank among its surrogates is uniform: 10 % of 300 series in the lowest 10 %."""
    x = bounded(150, 300, seed=5)
    null = asymmetry(surrogates(x, "iaaft", 19, rng=generator()).series)
    p = (1 + (null <= asymmetry(x)[:, None]).sum(-1)) / 20
    rates = [float((p <= level).mean()) for level in (0.1, 0.5, 0.9)]
    assert rates == pytest.approx([0.1, 0.5, 0.9], abs=0.07), rates


@pytest.mark.parametrize("n", [4, 5, 64, 127, 500])
def test_the_batch_equals_the_loop(n: int) -> None:
    x = np.stack([skewed(n, 1), simulate("logistic", n, rng=generator(2)), np.round(skewed(n, 3), 1)])
    found = surrogates(x, "iaaft", 4, rng=generator(9), max_iterations=300)
    start = surrogates(x, "shuffle", 4, rng=generator(9)).series
    assert found.convergence is not None
    for i in range(3):
        for j in range(4):
            series, iterations = iaaft_loop(x[i], start[i, j], 300)
            np.testing.assert_array_equal(found.series[i, j], series)
            assert found.convergence.iterations[i, j] == iterations


def test_iterations_are_counted_and_bounded() -> None:
    found = surrogates(skewed(300), "iaaft", 30, rng=generator(), max_iterations=3).convergence
    assert found is not None
    assert found.iterations.max() == 3
    assert not found.converged.any()
    free = surrogates(skewed(300), "iaaft", 30, rng=generator()).convergence
    assert free is not None
    assert free.converged.all()
    assert len(np.unique(free.iterations)) > 5
    assert (free.spectrum_error < found.spectrum_error).all()


def test_a_converged_surrogate_is_a_fixed_point() -> None:
    x = skewed(200)
    found = surrogates(x, "iaaft", 10, rng=generator())
    for series in found.series:
        again, iterations = iaaft_loop(x, series, 5)
        np.testing.assert_array_equal(again, series)
        assert iterations == 1


@pytest.mark.parametrize("method", SURROGATES)
def test_neither_blocks_nor_workers_change_the_result(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.stack([skewed(50, seed) for seed in range(3)])

    def run(workers: int) -> np.ndarray:
        return surrogates(x, method, 7, rng=generator(), workers=workers, **OPTIONS[method]).series

    whole = run(1)
    np.testing.assert_array_equal(run(2), whole)
    if method in ("shuffle", "iaaft"):
        monkeypatch.setattr(import_module("softgap.signal.surrogates"), "_BLOCK_VALUES", 150)
        np.testing.assert_array_equal(run(2), whole)


@pytest.mark.parametrize("method", SURROGATES)
def test_the_generator_alone_decides(method: str) -> None:
    x, before = skewed(60), np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    first = surrogates(x, method, 3, rng=generator(5), **OPTIONS[method]).series
    again = surrogates(x, method, 3, rng=generator(5), **OPTIONS[method]).series
    other = surrogates(x, method, 3, rng=generator(6), **OPTIONS[method]).series
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0
    np.testing.assert_array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize("method", SURROGATES)
def test_a_constant_series_is_its_own_surrogate(method: str) -> None:
    x = np.stack([np.full(20, 0.3), np.zeros(20), skewed(20)])
    found = surrogates(x, method, 3, rng=generator(), **OPTIONS[method])
    np.testing.assert_allclose(found.series[:2], np.broadcast_to(x[:2, None], (2, 3, 20)), rtol=0, atol=1e-15)
    if found.convergence is not None:
        assert found.convergence.converged.all()
        assert found.convergence.spectrum_error[:2].max() < 1e-5


def test_no_series_give_no_surrogates() -> None:
    assert surrogates(np.empty((0, 10)), "iaaft", 3, rng=generator()).series.shape == (0, 3, 10)


CASES: dict[str, tuple[Callable[[], Any], type[SoftgapError], str]] = {
    "unknown": (
        lambda: surrogates(np.arange(9), "iaft", rng=generator()),
        UnknownNameError,
        "unknown surrogate 'iaft'; did you mean 'iaaft'?",
    ),
    "short": (
        lambda: surrogates([1, 2, 3], "phase", rng=generator()),
        ShapeError,
        "surrogate 'phase' needs at least 4 steps, got 3; use longer series",
    ),
    "nan": (
        lambda: surrogates([1, 2, np.nan, 4], "shuffle", rng=generator()),
        ValueInputError,
        "a series must be finite, got nan at step 2 of the series",
    ),
    "text": (lambda: surrogates(["a"] * 9, "aaft", rng=generator()), ValueInputError, "got an array of <U1"),
    "no block": (
        lambda: surrogates(np.arange(9), "block_shuffle", rng=generator()),
        ValueInputError,
        "block must be a whole number from 1 to 4, got None; the series has 9 steps",
    ),
    "long block": (
        lambda: surrogates(np.arange(9), "block_shuffle", rng=generator(), block=10),
        ValueInputError,
        "block must be a whole number from 1 to 4, got 10; the series has 9 steps",
    ),
    "block of another": (
        lambda: surrogates(np.arange(9), "aaft", rng=generator(), block=3),
        UnsupportedError,
        "surrogate 'aaft' has no blocks, got block=3; use 'block_shuffle'",
    ),
    "iterations of another": (
        lambda: surrogates(np.arange(9), "aaft", rng=generator(), max_iterations=3),
        UnsupportedError,
        "surrogate 'aaft' does not iterate, got max_iterations=3; use 'iaaft'",
    ),
    "no iterations": (
        lambda: surrogates(np.arange(9), "iaaft", rng=generator(), max_iterations=0),
        ValueInputError,
        "max_iterations must be a whole number from 1, got 0",
    ),
    "no surrogates": (
        lambda: surrogates(np.arange(9), "iaaft", 0, rng=generator()),
        ValueInputError,
        "count must be a whole number from 1, got 0",
    ),
    "half a surrogate": (
        lambda: surrogates(np.arange(9), "iaaft", 1.5, rng=generator()),  # type: ignore[arg-type]
        ValueInputError,
        "count must be a whole number from 1, got 1.5",
    ),
    "no workers": (
        lambda: surrogates(np.arange(9), "iaaft", rng=generator(), workers=0),
        ValueInputError,
        "workers must be a whole number from 1, got 0",
    ),
    "a seed": (
        lambda: surrogates(np.arange(9), "shuffle", rng=3),  # type: ignore[arg-type]
        ValueInputError,
        "rng must be a numpy Generator, got 3; use np.random.default_rng(seed)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case: str) -> None:
    call, error, sentence = CASES[case]
    with pytest.raises(error, match=re.escape(sentence)):
        call()

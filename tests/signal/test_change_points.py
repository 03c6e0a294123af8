"""Entropy over time and its change points: the definition, the error rate on noise, and changes that are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from softgap.errors import ShapeError, SoftgapError, UnknownNameError, ValueInputError
from softgap.signal import entropy as module
from softgap.signal.change_points import change_points
from softgap.signal.entropy import permutation_entropy, windowed_entropy
from softgap.signal.systems import simulate


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize(("width", "stride"), [(80, None), (100, 7), (70, 150), (500, 1)])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_each_window_has_its_own_entropy(
    width: int, stride: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BLOCK_VALUES", block)
    x = np.round(simulate("ar1", 500, rng=generator(), size=(2, 3)), 1)  # with ties
    found = windowed_entropy(x, width=width, stride=stride, order=3, delay=2)
    starts = list(range(0, 500 - width + 1, stride or width))
    assert found.starts.tolist() == starts
    assert found.value.shape == (2, 3, len(starts))
    np.testing.assert_allclose(found.centres, [start + (width - 1) / 2 for start in starts])
    for i, start in enumerate(starts):
        alone = permutation_entropy(x[..., start : start + width], order=3, delay=2)
        for name in ("value", "windows", "tie_rate", "eligible"):
            np.testing.assert_array_equal(getattr(found, name)[..., i], getattr(alone, name))


def test_options_reach_the_entropy() -> None:
    x = np.round(simulate("white", 400, rng=generator()), 1)
    assert windowed_entropy(x, width=40).eligible.any() is np.False_
    assert windowed_entropy(x, width=40, eligibility=10).eligible.all()
    assert (windowed_entropy(x, width=100, ties="stable").windows == 98).all()
    with pytest.raises(SoftgapError):
        windowed_entropy(x, width=100, ties="jitter")


def best_arc_by_loop(x: np.ndarray, shortest: int) -> tuple[float, set[int]]:
    """The largest scaled difference between the inside and the outside of an arc, and its ends."""
    n, best, ends = len(x), -1.0, set[int]()
    for i in range(n):
        for j in range(i + 1, n + 1):
            m, parts = j - i, [size for size in (i, j - i, n - j) if size]
            if m == n or min(parts) < shortest:
                continue
            outside = np.concatenate([x[:i], x[j:]])
            value = abs(x[i:j].mean() - outside.mean()) * math.sqrt(m * (n - m) / n)
            if value > best + 1e-9:
                best, ends = value, {i, j} - {0, n}
    return best, ends


@pytest.mark.parametrize(("n", "shortest"), [(6, 3), (7, 2), (40, 3), (41, 10), (5, 1)])
@pytest.mark.parametrize("bump", [False, True])
def test_the_statistic_is_the_scaled_difference_of_means(n: int, shortest: int, bump: bool) -> None:
    t = np.arange(n)
    high = (t >= n // 3) & (t < 2 * n // 3) if bump else t >= n // 2
    x = simulate("white", n, rng=generator(n)) + 9 * high
    found = change_points(x, rng=generator(), shortest=shortest, level=0.9)
    statistic, ends = best_arc_by_loop(x, shortest)
    assert found.statistic == pytest.approx(statistic, rel=1e-12)
    assert found.whole_p_value == (1 + sum(found.null >= statistic * (1 - 1e-9))) / 200
    assert all(found.starts[end] and found.p_value[end] <= 0.9 for end in ends)


def test_levels_and_their_means() -> None:
    x = np.repeat([0.0, 3.0, 1.0], 20) + 0.1 * simulate("white", 60, rng=generator())
    found = change_points(x, rng=generator(), level=0.01)
    assert np.flatnonzero(found.starts).tolist() == [20, 40]
    assert np.flatnonzero(~np.isnan(found.p_value)).tolist() == [20, 40]
    assert np.nanmax(found.p_value) <= 0.01
    for part in (slice(0, 20), slice(20, 40), slice(40, 60)):
        np.testing.assert_allclose(found.mean[part], x[part].mean(), rtol=1e-12)


def test_a_constant_series_does_not_change() -> None:
    found = change_points(np.full((2, 30), 0.7), rng=generator())
    assert not found.starts.any()
    assert found.whole_p_value.tolist() == [1, 1]


def test_leading_axes_and_determinism() -> None:
    x = simulate("white", 30, rng=generator(), size=(2, 3))
    found, again = change_points(x, rng=generator(1)), change_points(x, rng=generator(1))
    assert found.starts.shape == found.mean.shape == found.p_value.shape == (2, 3, 30)
    assert found.whole_p_value.shape == found.statistic.shape == (2, 3)
    assert found.null.shape == (2, 3, 199)
    np.testing.assert_array_equal(found.null, again.null)


@pytest.mark.parametrize("law", ["normal", "cauchy", "entropy"])
def test_noise_is_split_no_more_often_than_the_level(law: str) -> None:
    """600 series without a change: at level 0.1, from 0.07 to 0.13 (2.5 standard errors), whatever their law."""
    if law == "entropy":
        x = windowed_entropy(simulate("white", 1600, rng=generator(2), size=600), width=80).value
    else:
        x = generator(3).standard_normal((600, 20)) if law == "normal" else generator(4).standard_cauchy((600, 20))
    found = change_points(x, rng=generator(5), level=0.1, permutations=99)
    rate = float(found.starts.any(-1).mean())
    assert 0.07 <= rate <= 0.13, f"false positive rate at level 0.1 over 600 series: {rate:.3f}"
    assert float((found.whole_p_value <= 0.5).mean()) == pytest.approx(0.5, abs=0.06)


def test_overlapping_windows_break_the_error_rate() -> None:
    """Why windows must not overlap: with a stride of a quarter of the width two series in three are split."""
    x = windowed_entropy(simulate("white", 1600, rng=generator(2), size=100), width=80, stride=20).value
    rate = float(change_points(x, rng=generator(5), permutations=99).starts.any(-1).mean())
    assert rate > 0.5, rate


def test_a_change_of_dynamics_is_found_where_it_happens() -> None:
    """White noise that turns into brown noise at step 1,200 of 2,400, window 100: the change is window 12."""
    white = simulate("white", 1200, rng=generator(6), size=100)
    brown = simulate("brown", 1200, rng=generator(7), size=100)
    entropy = windowed_entropy(np.concatenate([white, brown], axis=-1), width=100)
    found = change_points(entropy.value, rng=generator(8))
    detected = found.starts.any(-1).mean()
    near = found.starts[:, 11:14].any(-1).mean()
    assert detected >= 0.85, f"found in {detected:.2f} of 100 series"
    assert near >= 0.75, f"within one window in {near:.2f} of 100 series"
    assert entropy.starts[12] == 1200


def test_two_changes_are_both_found() -> None:
    parts = [simulate(name, 1000, rng=generator(i), size=40) for i, name in enumerate(("white", "logistic", "white"))]
    entropy = windowed_entropy(np.concatenate(parts, axis=-1), width=100)
    starts = change_points(entropy.value, rng=generator()).starts
    assert (starts[:, 10] & starts[:, 20]).mean() >= 0.9
    assert starts.sum(-1).mean() < 2.4


CASES: dict[str, tuple[Callable[[], Any], type[SoftgapError], str]] = {
    "wide": (
        lambda: windowed_entropy(np.arange(50), width=51),
        ValueInputError,
        "width must be a whole number from 2 to 50, got 51; the series has 50 steps",
    ),
    "stride": (
        lambda: windowed_entropy(np.arange(50), width=10, stride=0),
        ValueInputError,
        "stride must be a whole number from 1, got 0",
    ),
    "nan in a series": (
        lambda: windowed_entropy([1.0, np.nan], width=2),
        ValueInputError,
        "a series must be finite, got nan at step 1 of the series",
    ),
    "ties": (lambda: windowed_entropy(np.arange(99.0), width=80, ties="drop"), UnknownNameError, "'drop'"),
    "short": (
        lambda: change_points(np.arange(5.0), rng=generator()),
        ShapeError,
        "a change point needs at least 6 steps, got 5; use longer series",
    ),
    "level": (
        lambda: change_points(np.arange(9.0), rng=generator(), level=1.0),
        ValueInputError,
        "level must be between 0 and 1, both excluded, got 1.0",
    ),
    "few permutations": (
        lambda: change_points(np.arange(9.0), rng=generator(), level=0.01, permutations=50),
        ValueInputError,
        "permutations must be at least 1 / level - 1 to reach level 0.01, got 50; use more",
    ),
    "shortest": (
        lambda: change_points(np.arange(9.0), rng=generator(), shortest=0),
        ValueInputError,
        "shortest must be a whole number from 1, got 0",
    ),
    "entropies of ineligible windows": (
        lambda: change_points(windowed_entropy(np.arange(90.0), width=10).value, rng=generator()),
        ValueInputError,
        "a series must be finite, got nan at step 0 of the series",
    ),
    "a seed": (
        lambda: change_points(np.arange(9.0), rng=1),  # type: ignore[arg-type]
        ValueInputError,
        "rng must be a numpy Generator, got 1; use np.random.default_rng(seed)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case: str) -> None:
    call, error, sentence = CASES[case]
    with pytest.raises(error, match=re.escape(sentence)):
        call()


def test_parts_are_searched_again() -> None:
    """Each part is tested at the level: two sure changes leave three parts, and 15 % of series get one more."""
    x = np.repeat([0.0, 3.0, 1.0], 20) + 0.1 * simulate("white", 60, rng=generator(), size=300)
    starts = change_points(x, rng=generator(1)).starts
    assert (starts[:, 20] & starts[:, 40]).all()
    assert (starts.sum(-1) > 2).mean() == pytest.approx(0.15, abs=0.06)

"""Differences, segments and residuals against what they are by definition; bad input by its sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from softgap.errors import ShapeError, SoftgapError, UnknownNameError, UnsupportedError, ValueInputError
from softgap.signal.transforms import (
    SEGMENTS,
    TRANSFORMS,
    apply_transform,
    residuals,
    segment,
    segment_slice,
    steps_lost,
)


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(("name", "lost"), [("raw", 0), ("diff", 1), ("diff2", 2), ("diff3", 3)])
def test_differences_are_those_of_the_loop(name: str, lost: int) -> None:
    x = noise(2, 3, 17)
    expected = x
    for _ in range(lost):
        expected = np.stack([expected[..., t + 1] - expected[..., t] for t in range(expected.shape[-1] - 1)], axis=-1)
    found = apply_transform(x, name)
    assert steps_lost(name) == lost
    assert found.shape == (2, 3, 17 - lost)
    np.testing.assert_array_equal(found, expected)


def test_raw_is_a_copy_and_the_input_stays() -> None:
    x = noise(5)
    before = x.copy()
    apply_transform(x, "raw")[:] = 0
    np.testing.assert_array_equal(x, before)


def test_whole_numbers_and_float32_become_float64() -> None:
    assert apply_transform([1, 4, 9], "diff").tolist() == [3.0, 5.0]
    assert apply_transform(np.array([1, 0], dtype=np.uint8), "diff").tolist() == [-1.0]
    assert apply_transform(np.ones(3, dtype=np.float32), "raw").dtype == np.float64


@pytest.mark.parametrize(("n", "cuts"), [(3, (1, 2)), (9, (3, 6)), (10, (3, 6)), (11, (3, 7)), (400, (133, 266))])
def test_thirds(n: int, cuts: tuple[int, int]) -> None:
    assert segment_slice(n, "early") == slice(0, cuts[0])
    assert segment_slice(n, "mid") == slice(cuts[0], cuts[1])
    assert segment_slice(n, "late") == slice(cuts[1], n)
    assert segment_slice(n, "full") == slice(0, n)


def test_a_segment_is_cut_from_the_last_axis() -> None:
    np.testing.assert_array_equal(segment(np.arange(20).reshape(2, 10), "mid"), [[3, 4, 5], [13, 14, 15]])


def position_trend(n: int) -> np.ndarray:
    """Steep, then flat, with a bump that no low polynomial follows."""
    p = np.arange(n)
    return 1 / (1 + p) + 0.3 * np.exp(-(((p - 40) / 4) ** 2))


def residual_by_loop(samples: list[np.ndarray], i: int, p: int, shrinkage: float, degree: int) -> float:
    """The formula for one series, one position, in words of the docstring."""
    log = np.concatenate([np.log(1 + np.arange(len(x))) for x in samples])
    smooth = np.polyval(np.polyfit(log, np.concatenate(samples), degree), np.log(1 + p))
    others = [x[p] for j, x in enumerate(samples) if j != i and len(x) > p]
    weight = len(others) / (len(others) + shrinkage)
    mean = np.mean(others) if others else 0.0
    return float(samples[i][p] - (weight * mean + (1 - weight) * smooth))


@pytest.mark.parametrize("lengths", [(40,), (40, 40), (40, 25, 33), (20, 21, 22, 60, 64)])
@pytest.mark.parametrize(("shrinkage", "degree"), [(8.0, 3), (0.5, 2)])
def test_residuals_are_those_of_the_formula(lengths: tuple[int, ...], shrinkage: float, degree: int) -> None:
    samples = [noise(n, seed=i) for i, n in enumerate(lengths)]
    found = residuals(samples, shrinkage=shrinkage, degree=degree).series
    for i, x in enumerate(samples):
        expected = [residual_by_loop(samples, i, p, shrinkage, degree) for p in range(len(x))]
        np.testing.assert_allclose(found[i], expected, rtol=0, atol=1e-11)


def test_heads_do_not_mix() -> None:
    samples = [noise(2, 3, n, seed=n) for n in (30, 41)]
    whole = residuals(samples).series
    alone = residuals([x[1, 2] for x in samples]).series
    for a, b in zip(whole, alone, strict=True):
        np.testing.assert_allclose(a[1, 2], b, rtol=0, atol=1e-12)


def test_many_samples_remove_a_trend_of_any_shape() -> None:
    trend = position_trend(80)
    samples = [trend + 0.01 * noise(80, seed=i) for i in range(200)]
    left = np.stack(residuals(samples).series)
    assert np.abs(left.mean(0)).max() < 0.02 < np.abs(trend - trend.mean()).max()
    assert left.std() == pytest.approx(0.01, rel=0.15)


def test_one_sample_alone_loses_its_smooth_trend_and_keeps_its_dynamics() -> None:
    p = np.arange(400)
    wiggle = 0.1 * noise(400)
    left = residuals([2 - 0.3 * np.log1p(p) + wiggle]).series[0]
    assert np.corrcoef(left, wiggle)[0, 1] > 0.98
    assert abs(np.polyfit(np.log1p(p), left, 1)[0]) < 1e-12


def test_no_sample_is_subtracted_from_itself() -> None:
    samples = [noise(30, seed=i) for i in range(6)]
    plain = residuals(samples, shrinkage=0).series
    common = np.mean(samples, axis=0)
    for x, left in zip(samples, plain, strict=True):
        np.testing.assert_allclose(left, 6 / 5 * (x - common), rtol=0, atol=1e-12)


def test_positions_line_the_samples_up() -> None:
    trend = position_trend(120)
    late, early = np.arange(40, 120), np.arange(0, 90)
    samples = [trend[at] for at in [late] * 10 + [early] * 10]
    found = residuals(samples, [late] * 10 + [early] * 10, shrinkage=0)
    both = (late >= 40) & (late < 90)
    assert np.abs(found.series[0][both]).max() < 1e-12
    assert found.trend.samples[[0, 39, 40, 89, 90, 119]].tolist() == [10, 10, 20, 20, 10, 10]
    np.testing.assert_allclose(found.trend.mean, trend, rtol=0, atol=1e-12)


def test_only_the_polynomial_when_shrinkage_is_infinite() -> None:
    samples = [noise(30, seed=i) for i in range(3)]
    found = residuals(samples, shrinkage=np.inf)
    np.testing.assert_array_equal(found.series[1], samples[1] - found.trend.smooth)


CASES: dict[str, tuple[Callable[[], Any], type[SoftgapError], str]] = {
    "unknown transform": (
        lambda: apply_transform([1.0, 2.0], "dif"),
        UnknownNameError,
        "unknown transform 'dif'; did you mean 'diff'?",
    ),
    "residual of an array": (
        lambda: apply_transform([1.0, 2.0], "residual"),
        UnsupportedError,
        "transform 'residual' is fitted over the samples of a study and not over one array; use residuals(samples)",
    ),
    "too short": (
        lambda: apply_transform([1.0, 2.0], "diff2"),
        ShapeError,
        "transform 'diff2' needs at least 3 steps, got 2; use longer series",
    ),
    "empty": (
        lambda: apply_transform([], "raw"),
        ShapeError,
        "transform 'raw' needs at least 1 steps, got 0; use longer series",
    ),
    "nan": (
        lambda: apply_transform([[1.0, 2.0], [np.nan, np.nan]], "diff"),
        ValueInputError,
        "a series must be finite, got nan at step 0 of series (1,); leave out heads and steps",
    ),
    "inf": (lambda: segment([1.0, -np.inf], "full"), ValueInputError, "got -inf at step 1 of the series"),
    "text": (
        lambda: apply_transform(["a", "b"], "raw"),
        ValueInputError,
        "a series must hold real numbers, got an array of <U1",
    ),
    "several lengths": (
        lambda: apply_transform([[1, 2, 3], [1, 2]], "diff"),
        ShapeError,
        "series must have one length in memory, got list of several; pad them and give lengths",
    ),
    "complex": (lambda: apply_transform([1j, 2], "raw"), ValueInputError, "got an array of complex128"),
    "one number": (
        lambda: apply_transform(3.0, "raw"),
        ShapeError,
        "a series must have a time axis, got the single number 3.0",
    ),
    "unknown segment": (
        lambda: segment([1.0, 2.0, 3.0], "middle"),
        UnknownNameError,
        "unknown segment 'middle'; did you mean 'mid'?",
    ),
    "third of two": (
        lambda: segment([1.0, 2.0], "late"),
        UnsupportedError,
        "segment 'late' needs at least 3 steps, got 2; use segment 'full'",
    ),
    "no samples": (lambda: residuals([]), ValueInputError, "needs at least one sample, got none"),
    "short sample": (
        lambda: residuals([noise(30), noise(9)]),
        ShapeError,
        "transform 'residual' needs at least 16 steps, got 9; use longer series",
    ),
    "other heads": (
        lambda: residuals([noise(2, 30), noise(3, 30)]),
        ShapeError,
        "samples must agree in all axes but the last, [2], got [3] for sample 1",
    ),
    "degree": (
        lambda: residuals([noise(90)], degree=6),
        ValueInputError,
        "degree must be a whole number from 1 to 5, got 6",
    ),
    "shrinkage": (
        lambda: residuals([noise(90)], shrinkage=-1),
        ValueInputError,
        "shrinkage must be a number from 0, got -1",
    ),
    "positions missing": (
        lambda: residuals([noise(30), noise(30)], [range(30)]),
        ShapeError,
        "positions must have one array for each of 2 samples, got 1",
    ),
    "positions too few": (
        lambda: residuals([noise(30)], [range(29)]),
        ShapeError,
        "positions of sample 0 must be 30 whole numbers, got an array of int64 with shape [29]",
    ),
    "positions fall": (
        lambda: residuals([noise(30)], [range(30, 0, -1)]),
        ValueInputError,
        "positions of sample 0 must increase from 0, got [30, 29, 28, 27, 26, 25, 24, 23] ...",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_sentence(case: str) -> None:
    call, error, sentence = CASES[case]
    with pytest.raises(error, match=re.escape(sentence)):
        call()


def test_names() -> None:
    assert set(TRANSFORMS) == {"raw", "diff", "diff2", "diff3", "residual"}
    assert SEGMENTS == ("full", "early", "mid", "late")

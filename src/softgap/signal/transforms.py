"""Transforms and segments of a series, and residuals after the trend with position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64

from softgap.errors import ShapeError, UnsupportedError, ValueInputError, unknown_name
from softgap.inputs import check_count
from softgap.signal.validation import check_series

__all__ = [
    "SEGMENTS",
    "TRANSFORMS",
    "Residuals",
    "Trend",
    "apply_transform",
    "fewest_steps",
    "residuals",
    "segment",
    "segment_slice",
    "steps_lost",
]


TRANSFORMS: Mapping[str, int] = MappingProxyType({"raw": 0, "diff": 1, "diff2": 2, "diff3": 3, "residual": 0})


"""Transforms by name, with the steps that each one loses at the end of the time axis."""


SEGMENTS = ("full", "early", "mid", "late")


"""The whole series and its three thirds."""


def steps_lost(name: str) -> int:
    """By how many steps the transform ``name`` shortens a series: a series of T steps has T - ``steps_lost`` after."""
    if name not in TRANSFORMS:
        raise unknown_name("transform", name, TRANSFORMS)
    return TRANSFORMS[name]


def apply_transform(x: Any, name: str) -> Float64[np.ndarray, "*batch shorter"]:
    """A series, or its first, second or third differences, along the last axis.

    ``diff``: y_t = x_{t+1} - x_t; ``diff2`` and ``diff3`` apply it two and three times; ``raw`` leaves x as it is.
    Each difference removes one step and one degree of a polynomial trend in time, and makes noise less white: the
    differences of white noise are correlated at -1/2. A null has to be put through the same transform.

    Parameters
    ----------
    x
        Real numbers, time last, any leading axes. Never modified; ``raw`` returns a copy too.
    name
        "raw", "diff", "diff2" or "diff3"; see ``steps_lost`` for the lengths.
    """
    lost = steps_lost(name)
    if name == "residual":
        raise UnsupportedError(
            "transform 'residual' is fitted over the samples of a study and not over one array; use residuals(samples)"
        )
    series = check_series(x, least=lost + 1, use=f"transform '{name}'")
    return np.diff(series, n=lost, axis=-1) if lost else series.copy()


def segment_slice(n: int, name: str) -> slice:
    """The steps of ``n`` that a segment takes.

    The thirds begin at floor(k n / 3), k = 0, 1, 2: they do not overlap, leave nothing out, and differ in length by at
    most one step.
    """
    if name not in SEGMENTS:
        raise unknown_name("segment", name, SEGMENTS)
    check_count("the number of steps", n, least=0)
    if name == "full":
        return slice(0, n)
    if n < 3:
        raise UnsupportedError(f"segment '{name}' needs at least 3 steps, got {n}; use segment 'full'")
    third = SEGMENTS.index(name) - 1
    return slice(third * n // 3, (third + 1) * n // 3)


def segment(x: Any, name: str) -> Float64[np.ndarray, "*batch part"]:
    """The whole of a series, or its early, middle or late third.

    Cut the series that was transformed, not the one that will be: thirds of a residual or of differences then share
    one trend and lose no steps at the cuts.
    """
    series = check_series(x)
    return series[..., segment_slice(series.shape[-1], name)]


# A smooth trend with as many coefficients as steps would leave nothing.
_STEPS_PER_COEFFICIENT = 4


@dataclass(frozen=True, eq=False)
class Trend:
    """The trend of a study with position.

    Attributes
    ----------
    positions : int64 [position]
        Every position that some sample reaches, increasing.
    samples : int64 [position]
        How many samples reach it.
    mean : float64 [..., position]
        Mean over those samples.
    smooth : float64 [..., position]
        The polynomial in log(1 + position).
    """

    positions: Int64[np.ndarray, " position"]
    samples: Int64[np.ndarray, " position"]
    mean: Float64[np.ndarray, "*batch position"]
    smooth: Float64[np.ndarray, "*batch position"]


@dataclass(frozen=True, eq=False)
class Residuals:
    """The samples of a study without their trend.

    Attributes
    ----------
    series : tuple of float64 [..., step]
        One per sample, as long as the sample.
    trend : Trend
        What was fitted over all samples.
    """

    series: tuple[Float64[np.ndarray, "*batch step"], ...]
    trend: Trend


def residuals(
    samples: Sequence[Any], positions: Sequence[Any] | None = None, *, shrinkage: float = 8.0, degree: int = 3
) -> Residuals:
    """Subtract from each sample the position trend of its study.

    ``e_i(p) = x_i(p) - [w m_i(p) + (1 - w) s(p)]`` with ``w = c / (c + shrinkage)``, where at position p, for each
    leading index (layer and head) by itself,

    - ``m_i(p)`` is the mean of the *other* samples that reach p, and c their number: a sample is not subtracted from
      itself. Where all N samples reach p this is N / (N - 1) times the deviation from the common mean;
    - ``s(p)`` is a polynomial of ``degree`` in log(1 + p), fitted to all samples by least squares: trends of causal
      attention are steep at first and flat later, which a low degree in the logarithm follows.

    One formula for every study. Many samples: the mean by position, whatever its shape. Few samples, or the tail that
    only long samples reach: towards the smooth trend, since a mean of two or three is mostly noise and would write
    the noise of one sample into another. One sample alone: its own smooth trend, which takes ``degree + 1`` degrees
    of freedom and no more. The weight changes with c by small amounts, so that no seam appears where a sample ends.

    Parameters
    ----------
    samples
        Arrays of the same leading axes, time last; lengths may differ.
    positions
        The position of every step, one increasing array from 0 per sample; without it each sample begins at 0.
    shrinkage
        The number of other samples at which mean and polynomial weigh the same; 0 is the mean alone wherever another
        sample exists, ``inf`` the polynomial alone.
    degree
        Of the polynomial, 1 to 5.
    """
    check_count("degree", degree, least=1, most=5)
    if not shrinkage >= 0:  # NaN too
        raise ValueInputError(f"shrinkage must be a number from 0, got {shrinkage!r}")
    series = _check_samples(samples, least=fewest_steps(degree))
    where = _check_positions(positions, series)
    trend = _fit_trend(series, where, degree)
    left = tuple(_subtract_trend(x, at, trend, shrinkage) for x, at in zip(series, where, strict=True))
    return Residuals(series=left, trend=trend)


def fewest_steps(degree: int = 3) -> int:
    """Steps that a sample must have for a trend of this degree."""
    return _STEPS_PER_COEFFICIENT * (degree + 1)


def _subtract_trend(
    x: Float64[np.ndarray, "*batch step"], at: Int64[np.ndarray, " step"], trend: Trend, shrinkage: float
) -> Float64[np.ndarray, "*batch step"]:
    index = np.searchsorted(trend.positions, at)
    others = trend.samples[index] - 1
    weight = np.zeros(len(at)) if np.isinf(shrinkage) else others / np.maximum(others + shrinkage, 1e-300)
    sample_mean = trend.mean[..., index]
    # The mean of the others without a second pass over them; with no others the weight is 0 and it may be anything.
    mean = sample_mean + (sample_mean - x) / np.maximum(others, 1)
    return np.asarray(x - (weight * mean + (1 - weight) * trend.smooth[..., index]))


def _fit_trend(
    series: Sequence[Float64[np.ndarray, "*batch step"]], where: Sequence[Int64[np.ndarray, " step"]], degree: int
) -> Trend:
    positions = np.unique(np.concatenate(where))
    counts = np.zeros(len(positions), dtype=np.int64)
    total = np.zeros((*series[0].shape[:-1], len(positions)))
    for x, at in zip(series, where, strict=True):
        index = np.searchsorted(positions, at)
        counts[index] += 1
        total[..., index] += x
    mean = total / counts
    # Least squares over all samples is least squares on the means, weighted by their numbers of samples.
    log = np.log1p(positions)
    basis = np.polynomial.legendre.legvander(2 * (log - log[0]) / (log[-1] - log[0]) - 1, degree)
    root = np.sqrt(counts)
    coefficients = np.linalg.lstsq(basis * root[:, None], (mean * root).reshape(-1, len(positions)).T)[0]
    smooth = (basis @ coefficients).T.reshape(mean.shape)
    return Trend(positions=positions, samples=counts, mean=mean, smooth=smooth)


def _check_samples(samples: Sequence[Any], least: int) -> list[Float64[np.ndarray, "*batch step"]]:
    series = [check_series(x, least=least, use="transform 'residual'") for x in samples]
    if not series:
        raise ValueInputError("transform 'residual' needs at least one sample, got none")
    for i, x in enumerate(series):
        if x.shape[:-1] != series[0].shape[:-1]:
            raise ShapeError(
                f"samples must agree in all axes but the last, {list(series[0].shape[:-1])}, "
                f"got {list(x.shape[:-1])} for sample {i}"
            )
    return series


def _check_positions(
    positions: Sequence[Any] | None, series: Sequence[Float64[np.ndarray, "*batch step"]]
) -> list[Int64[np.ndarray, " step"]]:
    if positions is None:
        return [np.arange(x.shape[-1]) for x in series]
    if len(positions) != len(series):
        raise ShapeError(f"positions must have one array for each of {len(series)} samples, got {len(positions)}")
    arrays = []
    for i, (sample_positions, x) in enumerate(zip(positions, series, strict=True)):
        at = np.asarray(sample_positions)
        if at.dtype.kind not in "iu" or at.shape != x.shape[-1:]:
            raise ShapeError(
                f"positions of sample {i} must be {x.shape[-1]} whole numbers, "
                f"got an array of {at.dtype} with shape {list(at.shape)}"
            )
        at = at.astype(np.int64)
        if at[0] < 0 or (np.diff(at) <= 0).any():
            raise ValueInputError(f"positions of sample {i} must increase from 0, got {at[:8].tolist()} ...")
        arrays.append(at)
    return arrays

"""Null distributions: what white noise of the same length scores after the same transform.

Differences of white noise are not white: at 400 steps their permutation entropy of order 3 lies almost three standard
deviations below that of white noise. A null that skips the transform finds structure in everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.inputs import check_count
from softgap.signal.complexity import missing_fraction, statistical_complexity
from softgap.signal.entropy import permutation_entropy, weighted_permutation_entropy
from softgap.signal.patterns import Options, SeriesBatch, check_batch
from softgap.signal.results import Entropy, SeriesResult
from softgap.signal.transforms import apply_transform
from softgap.signal.transitions import irreversibility
from softgap.signal.validation import check_order

__all__ = ["MEASURES", "NoiseNull", "ZScores", "noise_null", "score_against_null", "z_scores"]

Transform = str | Callable[[np.ndarray], np.ndarray]
Randomness = int | np.random.Generator

MEASURES: Mapping[str, Callable[..., Entropy]] = MappingProxyType(
    {
        "permutation_entropy": permutation_entropy,
        "weighted_permutation_entropy": weighted_permutation_entropy,
        "statistical_complexity": statistical_complexity,
        "irreversibility": irreversibility,
        "missing_fraction": missing_fraction,
    }
)
"""The measures that can be compared with noise, by name."""

# Samples of noise in memory at a time.
_BLOCK = 1 << 21


@dataclass(frozen=True, eq=False)
class NoiseNull:
    """A measure on simulated white noise of ``length`` steps before the transform."""

    values: Float[np.ndarray, " sample"]
    length: int

    @property
    def mean(self) -> float:
        """Mean over the samples."""
        return float(self.values.mean())

    @property
    def deviation(self) -> float:
        """Standard deviation over the samples."""
        return float(self.values.std(ddof=1))


@dataclass(frozen=True, eq=False)
class ZScores(SeriesResult):
    """A measure of each series, with its distance from noise.

    ``z`` = (value - mean) / deviation of the null, ``p`` two-sided with (k + 1) / (n + 1); ``nulls`` holds the
    samples, by the number of windows of the series they belong to.
    """

    value: Float[np.ndarray, "*lead"]
    z: Float[np.ndarray, "*lead"]
    p: Float[np.ndarray, "*lead"]
    nulls: Mapping[int, NoiseNull]
    windows: Int[np.ndarray, "*lead"]
    tie_rate: Float[np.ndarray, "*lead"]
    eligible: Bool[np.ndarray, "*lead"]


def noise_null(
    length: int,
    order: int = 3,
    delay: int = 1,
    *,
    measure: str = "permutation_entropy",
    transform: Transform = "raw",
    samples: int = 999,
    rng: Randomness = 0,
) -> NoiseNull:
    """A measure on ``samples`` series of Gaussian white noise of ``length`` steps, each put through ``transform``.

    Parameters
    ----------
    transform
        A name that ``apply_transform`` knows, or a function of an array along its last axis.
    rng
        A generator, or a seed. With a seed the null is kept and not simulated again in this process.
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    check_order(order)
    check_count("length", length)
    check_count("samples", samples, least=2)
    key = (int(length), int(order), delay, measure, transform, int(samples))
    if isinstance(rng, np.random.Generator):
        return _simulate_null(*key, rng)
    return _cached_null(*key, check_count("a seed", rng, least=0))


def z_scores(
    x: Any,
    order: int = 3,
    delay: int = 1,
    *,
    measure: str = "permutation_entropy",
    transform: Transform = "raw",
    samples: int = 999,
    seed: Randomness = 0,
    **options: Unpack[Options],
) -> ZScores:
    """A measure of ``transform(x)`` per series, against white noise of the same length under the same transform.

    The noise is as long as leaves it the windows that were counted: a series that lost windows to ties is compared
    with noise that is shorter by as many steps.

    Parameters
    ----------
    x
        Real numbers, time last, any leading axes: one value per series.
    order
        Values per window, 2 to 8.
    delay
        Steps between neighbouring values of a window.
    measure
        One of ``MEASURES``, by name.
    transform
        A name that ``apply_transform`` knows, or a function of an array along its last axis.
    samples
        Series of noise for each length.
    seed
        A seed or a generator for the noise; ``rng`` stays that of the jitter.
    **options
        ``ties``, ``rng``, ``lengths`` and ``eligibility``; see ``Options``. ``lengths`` are those of ``x``, before the
        transform.

    Returns
    -------
    ZScores
        ``z`` and p-values, per series.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.signal import z_scores
    >>> walk = np.random.default_rng(0).standard_normal(300).cumsum()
    >>> float(z_scores(walk, samples=199).z) < -3  # far more regular than noise
    True
    >>> abs(float(z_scores(walk, transform="diff", samples=199).z)) < 3  # its steps are noise
    True
    """
    if measure not in MEASURES:
        raise unknown_name("measure", measure, MEASURES)
    batch = check_batch(x, order, delay, options)
    changed = _apply(_zero_padded(batch), transform)
    lost = batch.rows.shape[1] - changed.shape[-1]
    after: Options = {**options, "lengths": batch.restore_shape(np.maximum(batch.lengths - lost, 0))}
    result = MEASURES[measure](changed, order, delay, **after)
    z, p = np.full(result.value.shape, np.nan), np.full(result.value.shape, np.nan)
    nulls = {}
    for windows in np.unique(result.windows[result.eligible]):
        length = int(windows) + batch.span + lost
        null = noise_null(length, order, delay, measure=measure, transform=transform, samples=samples, rng=seed)
        nulls[int(windows)] = null
        some = result.eligible & (result.windows == windows)
        z[some], p[some] = score_against_null(result.value[some], null.values)
    return ZScores(result.value, z, p, MappingProxyType(nulls), result.windows, result.tie_rate, result.eligible)


def score_against_null(
    values: Float[np.ndarray, " series"], null: Float[np.ndarray, " sample"]
) -> tuple[Float[np.ndarray, " series"], Float[np.ndarray, " series"]]:
    """Distance of each value from the null in its standard deviations, and p: twice (k + 1) / (n + 1), at most 1.

    z is NaN where the null does not spread.
    """
    ordered, n = np.sort(null), null.size
    # Sums in another order move a measure by a rounding error, which must not decide a tie with the null.
    slack = 1e-12 * np.maximum(np.abs(values), 1)
    below = np.searchsorted(ordered, values + slack, side="right") + 1
    above = n - np.searchsorted(ordered, values - slack, side="left") + 1
    p = np.minimum(1.0, 2 * np.minimum(below, above) / (n + 1))
    deviation = null.std(ddof=1)
    z = (values - null.mean()) / deviation if deviation > 0 else np.full(values.shape, np.nan)
    return z, p


def _zero_padded(batch: SeriesBatch) -> np.ndarray:
    """The series with zeros behind the end of each, where anything may stand that a transform would refuse."""
    steps = batch.rows.shape[1]
    if (batch.lengths == steps).all():
        return batch.restore_shape(batch.rows)
    return batch.restore_shape(np.where(np.arange(steps) < batch.lengths[:, None], batch.rows, 0))


def _apply(x: np.ndarray, transform: Transform) -> np.ndarray:
    changed = np.asarray(transform(x) if callable(transform) else apply_transform(x, transform))
    same = changed.ndim == x.ndim and changed.shape[:-1] == x.shape[:-1]
    if not same or changed.shape[-1] > x.shape[-1]:
        raise ShapeError(
            "a transform must keep the leading axes and never lengthen the last, "
            f"got {list(changed.shape)} from {list(x.shape)}"
        )
    return changed


def _simulate_null(
    length: int, order: int, delay: int, measure: str, transform: Transform, samples: int, rng: np.random.Generator
) -> NoiseNull:
    values = np.empty(samples)
    rows = max(1, _BLOCK // length)
    for start in range(0, samples, rows):
        noise = rng.standard_normal((min(rows, samples - start), length))
        result = MEASURES[measure](_apply(noise, transform), order, delay, eligibility=1)
        values[start : start + rows] = result.value
    if np.isnan(values).any():
        raise ValueInputError(f"a null needs noise with at least one window, got length {length}; use longer series")
    values.flags.writeable = False
    return NoiseNull(values, length)


@lru_cache(maxsize=1024)
def _cached_null(
    length: int, order: int, delay: int, measure: str, transform: Transform, samples: int, seed: int
) -> NoiseNull:
    return _simulate_null(length, order, delay, measure, transform, samples, np.random.default_rng(seed))

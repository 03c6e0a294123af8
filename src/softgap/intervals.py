"""Intervals of estimates: bootstrap over texts, and over clusters of heads that share their keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Float64, Int64
from scipy.stats import rankdata

from softgap.errors import ShapeError

__all__ = [
    "ArrayInterval",
    "ClusterInterval",
    "Interval",
    "cluster_interval",
    "interval_of",
    "joint_level",
    "rank_correlation",
    "ratio",
    "resampled",
    "weighted_mean",
]


RESAMPLES = 999


@dataclass(frozen=True)
class Interval:
    """An estimate between ``low`` and ``high``, which hold the truth with the chance ``level``.

    >>> Interval(0.5, 0.4, 0.7)
    Interval(value=0.5, low=0.4, high=0.7, level=0.95)
    >>> print(Interval(0.5, 0.4, 0.7))
    +0.500 (+0.400 to +0.700)
    >>> Interval(0.5, 0.4, 0.7).sign
    1
    """

    value: float
    low: float
    high: float
    level: float = field(default=0.95, kw_only=True)

    @property
    def half_width(self) -> float:
        """Half of the interval's length: how far the estimate may be off."""
        return (self.high - self.low) / 2

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        return 1 if self.low > 0 else -1 if self.high < 0 else 0

    def to_json(self) -> dict[str, float]:
        """As plan and calibration files hold it, which know 95 % only: ``Interval(**data)`` reads it."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


@dataclass(frozen=True, eq=False)
class ArrayInterval:
    """An ``Interval`` for every entry of an array; ``value``, ``low`` and ``high`` have one shape."""

    value: Float[np.ndarray, ...]
    low: Float[np.ndarray, ...]
    high: Float[np.ndarray, ...]
    level: float = field(default=0.95, kw_only=True)


def resampled(
    values: Float[np.ndarray, "*units text"], *, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Float[np.ndarray, "*units resample"]:
    """Means over texts that are drawn with replacement, the same texts for all units."""
    n = values.shape[-1]
    counts = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
    means: np.ndarray = values @ counts.T / n
    return means


def interval_of(values: Float[np.ndarray, " text"], *, rng: np.random.Generator) -> Interval:
    """The mean of one value per text, with its middle 95 % over resampled texts; of one text it has no width."""
    low, high = np.quantile(resampled(values, rng=rng), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


_REPLICATES = 999


_FEWEST = 8


# Draws beyond each end of an interval, at least: fewer leave its ends to chance.
_BEYOND = 10


Table = Float64[np.ndarray, "row head"]


Statistic = Callable[[Table, Float64[np.ndarray, "draw head"]], Float64[np.ndarray, " draw"]]


"""A number for each row of weights: how often each head was drawn."""


@dataclass(frozen=True)
class ClusterInterval(Interval):
    """A bootstrap interval over clusters of heads, with how many heads and clusters it rests on.

    All three numbers are NaN where fewer than 8 heads have values or one side does not vary. ``level`` is above 95 %
    where many intervals have to hold the truth together.
    """

    heads: int
    clusters: int


def joint_level(intervals: int, level: float = 0.95) -> float:
    """The level at which each of so many intervals has to stand for all to hold together (Bonferroni)."""
    return 1 - (1 - level) / max(intervals, 1)


def rank_correlation(
    x: Any,
    y: Any,
    clusters: Any,
    *,
    rng: np.random.Generator,
    covariate: Any | None = None,
    replicates: int = _REPLICATES,
    level: float = 0.95,
) -> ClusterInterval:
    """Spearman's correlation of x and y across heads, with an interval from drawing whole clusters.

    With a ``covariate`` g it is the partial correlation, (r_xy - r_xg r_yg) / sqrt((1 - r_xg^2) (1 - r_yg^2)) on ranks.
    Heads in which any of them is NaN are left out. Ranks are those of all heads; the draws weigh them and do not rank
    anew.
    """
    columns = [np.asarray(c, dtype=np.float64) for c in ((x, y) if covariate is None else (x, y, covariate))]
    groups = np.asarray(clusters)
    if any(c.shape != groups.shape for c in columns):
        raise ShapeError(f"one value per head is needed, got {[list(c.shape) for c in (*columns, groups)]}")
    table = np.stack(columns)
    finite = np.isfinite(table).all(axis=0)
    ranks = np.stack([rankdata(row) for row in table[:, finite]])
    return cluster_interval(ranks, groups[finite], _correlation, rng=rng, replicates=replicates, level=level)


def cluster_interval(
    table: Table,
    clusters: Int64[np.ndarray, " head"],
    statistic: Statistic,
    *,
    rng: np.random.Generator,
    replicates: int = _REPLICATES,
    level: float = 0.95,
) -> ClusterInterval:
    """A statistic of the columns of a table, with its quantiles when clusters of columns are drawn with replacement.

    There are ``replicates`` draws, or as many as put ten beyond each end of the interval.
    """
    names, place = np.unique(clusters, return_inverse=True)
    nothing = ClusterInterval(float("nan"), float("nan"), float("nan"), table.shape[1], len(names), level=level)
    if table.shape[1] < _FEWEST:
        return nothing
    draws = max(replicates, round(2 * _BEYOND / (1 - level)))
    times = rng.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    weights = np.concatenate([np.ones((1, table.shape[1])), times[:, place]])
    statistics = statistic(table, weights)
    replicated = statistics[1:][np.isfinite(statistics[1:])]
    if not np.isfinite(statistics[0]) or not len(replicated):
        return nothing
    low, high = np.quantile(replicated, [(1 - level) / 2, (1 + level) / 2])
    return ClusterInterval(float(statistics[0]), float(low), float(high), table.shape[1], len(names), level=level)


def weighted_mean(table: Table, weights: Float64[np.ndarray, "draw head"]) -> Float64[np.ndarray, " draw"]:
    """Mean of the first row."""
    return np.asarray(weights @ table[0] / weights.sum(axis=1))


def ratio(table: Table, weights: Float64[np.ndarray, "draw head"]) -> Float64[np.ndarray, " draw"]:
    """Sum of the first row over that of the second."""
    return np.asarray(weights @ table[0] / np.maximum(weights @ table[1], 1e-300))


def _correlation(table: Table, weights: Float64[np.ndarray, "draw head"]) -> Float64[np.ndarray, " draw"]:
    """Of the first two rows; at equal third where there is one."""
    # Centred first, so that moments of large ranks do not cancel.
    rows = table - table.mean(axis=1, keepdims=True)
    total = weights.sum(axis=1)
    mean = weights @ rows.T / total[:, None]
    products = np.einsum("dh,ih,jh->dij", weights, rows, rows, optimize=True) / total[:, None, None]
    covariance = products - mean[:, :, None] * mean[:, None, :]
    spread = np.sqrt(np.maximum(np.einsum("dii->di", covariance), 0))
    with np.errstate(invalid="ignore", divide="ignore"):
        r = covariance / (spread[:, :, None] * spread[:, None, :])
        if len(table) == 2:
            return np.asarray(np.where(spread.min(axis=1) > 0, r[:, 0, 1], np.nan))
        xy, xg, yg = r[:, 0, 1], r[:, 0, 2], r[:, 1, 2]
        # What a copy as covariate leaves of a row is rounding, not variation.
        room = np.sqrt(np.maximum((1 - xg**2) * (1 - yg**2), 0))
        return np.asarray(np.where((spread.min(axis=1) > 0) & (room > 1e-6), (xy - xg * yg) / room, np.nan))

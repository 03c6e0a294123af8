"""Change points in the mean of a series, by binary segmentation with a permutation null."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64

from softgap.errors import ValueInputError
from softgap.signal.checked import checked_count, checked_rng, checked_series
from softgap.signal.compiling import compiled

__all__ = ["ChangePoints", "change_points"]


@dataclass(frozen=True, eq=False)
class ChangePoints:
    """Where the mean of each series changes.

    Attributes
    ----------
    starts : bool [..., time]
        True at the first value of each new level.
    p_value : float64 [..., time]
        Of the test that found the change; NaN where there is none.
    mean : float64 [..., time]
        Mean of the level that each value belongs to.
    whole_p_value : float64 [...]
        Of the test on the whole series, found a change or not.
    statistic : float64 [...]
        Of that test.
    null : float64 [..., permutation]
        The statistic on permutations of the whole series.
    """

    starts: Bool[np.ndarray, "*batch time"]
    p_value: Float64[np.ndarray, "*batch time"]
    mean: Float64[np.ndarray, "*batch time"]
    whole_p_value: Float64[np.ndarray, "*batch"]
    statistic: Float64[np.ndarray, "*batch"]
    null: Float64[np.ndarray, "*batch permutation"]


def change_points(
    x: Any, *, rng: np.random.Generator, level: float = 0.05, permutations: int = 199, shortest: int = 3
) -> ChangePoints:
    """Split each series where its mean changes, as long as chance does not explain the split.

    In a segment of n values the split k maximises the CUSUM ``|S_k - (k / n) S_n| / sqrt(k (n - k) / n)``, S_k the sum
    of the first k values (Vostrikova 1981 for the repeated splitting). It is kept if
    p = (1 + #{null >= statistic}) / (1 + permutations) <= level, the null being the same maximum over random orders of
    that segment; then both parts are split again. Chosen over PELT with a penalty because the values, entropies of
    windows, are neither normal nor of known variance, and no penalty holds its error rate for all of them, while the
    permutation test does for any exchangeable values: a series without change is split with probability at most
    ``level``. Each part is tested at the same level.

    Values that depend on each other are not exchangeable: entropies of overlapping windows are cut up at any level.
    Use windows that do not overlap. Over many heads, correct ``whole_p_value`` for their number.

    Parameters
    ----------
    x
        Real finite numbers, time last, any leading axes; at least ``2 shortest`` values.
    level
        Probability of a false change in a series that has none.
    permutations
        Random orders per test; at least 1 / level - 1, or no split could ever be kept.
    shortest
        Fewest values of a level.
    """
    checked_rng(rng)
    _check_options(level, permutations, shortest)
    series = checked_series(x, least=2 * shortest, use="a change point")
    rows = series.reshape(-1, series.shape[-1])
    starts, p_value, mean = np.zeros(rows.shape, dtype=bool), np.full(rows.shape, np.nan), np.empty(rows.shape)
    whole_p, statistic, null = np.empty(len(rows)), np.empty(len(rows)), np.empty((len(rows), permutations))
    for i, row in enumerate(rows):
        segments = [(0, len(row))]
        while segments:
            begin, end = segments.pop()
            p, best, at, orders = _tested(row[begin:end], permutations, shortest, rng)
            if end - begin == len(row):
                whole_p[i], statistic[i], null[i] = p, best, orders
            if p <= level:
                cut = begin + at
                starts[i, cut], p_value[i, cut] = True, p
                segments += [(a, b) for a, b in ((cut, end), (begin, cut)) if b - a >= 2 * shortest]
        for part in np.split(np.arange(len(row)), np.flatnonzero(starts[i])):
            mean[i, part] = row[part].mean()
    lead = series.shape[:-1]
    return ChangePoints(
        starts=starts.reshape(series.shape),
        p_value=p_value.reshape(series.shape),
        mean=mean.reshape(series.shape),
        whole_p_value=whole_p.reshape(lead),
        statistic=statistic.reshape(lead),
        null=null.reshape(*lead, permutations),
    )


def _check_options(level: float, permutations: int, shortest: int) -> None:
    checked_count("shortest", shortest)
    checked_count("permutations", permutations)
    if not 0 < level < 1:
        raise ValueInputError(f"level must be between 0 and 1, both excluded, got {level!r}")
    if (permutations + 1) * level < 1:
        raise ValueInputError(
            f"permutations must be at least 1 / level - 1 to reach level {level:g}, got {permutations}; use more"
        )


def _tested(
    segment: Float64[np.ndarray, " time"], permutations: int, shortest: int, rng: np.random.Generator
) -> tuple[float, float, int, Float64[np.ndarray, " permutation"]]:
    """p-value, statistic and place of the best split of a segment, and the statistic of each random order."""
    orders = np.empty((permutations + 1, len(segment)))
    orders[0] = segment - segment.mean()
    orders[1:] = rng.permuted(np.broadcast_to(orders[0], orders[1:].shape), axis=-1)
    statistics, places = np.empty(len(orders)), np.empty(len(orders), dtype=np.int64)
    _largest_cusum(orders, shortest, statistics, places)
    best, null = float(statistics[0]), statistics[1:]
    # Equal sums in another order differ in the last digits, and count as equal.
    p = (1 + np.count_nonzero(null >= best * (1 - 1e-9))) / (1 + permutations)
    return p, best, int(places[0]), null


@compiled
def _largest_cusum(orders: np.ndarray, shortest: int, statistics: np.ndarray, places: np.ndarray) -> None:
    n = orders.shape[1]
    for i in range(orders.shape[0]):
        total, best, place = 0.0, -1.0, shortest
        for k in range(1, n - shortest + 1):
            total += orders[i, k - 1]
            if k >= shortest:
                value = abs(total) / np.sqrt(k * (n - k) / n)
                if value > best:
                    best, place = value, k
        statistics[i], places[i] = best, place

"""Change points in the mean of a series, by circular binary segmentation with a permutation null."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from softgap.errors import ValueInputError
from softgap.inputs import check_count, check_rng, check_share
from softgap.signal.kernels import compiled
from softgap.signal.validation import check_series

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

    In a segment of n values the arc of m values from i to j maximises
    ``|mean inside - mean outside| sqrt(m (n - m) / n)``; an arc that touches an end of the segment is a single change,
    any other a level that comes and goes, which a search for single changes overlooks (circular binary segmentation:
    Olshen et al. 2004, Biostatistics 5, 557). It is kept if p = (1 + #{null >= statistic}) / (1 + permutations) <=
    level, the null being the same maximum over random orders of the segment. Of an arc with two ends, an end whose
    two sides do not differ by a permutation test at the same level is dropped. Then the parts are searched again.

    Chosen over PELT with a penalty because entropies of windows are neither normal nor of known variance: no penalty
    holds its error rate for all of them, while the permutation test does for any exchangeable values. A series
    without change is split with probability at most ``level``.

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
    check_rng(rng)
    _check_options(level, permutations, shortest)
    series = check_series(x, least=2 * shortest, use="a change point")
    rows = series.reshape(-1, series.shape[-1])
    starts, p_value, mean = np.zeros(rows.shape, dtype=bool), np.full(rows.shape, np.nan), np.empty(rows.shape)
    whole_p, statistic, null = np.empty(len(rows)), np.empty(len(rows)), np.empty((len(rows), permutations))
    for i, row in enumerate(rows):
        segments = [(0, len(row))]
        while segments:
            begin, end = segments.pop()
            p, best, arc, null_here = _test_segment(row[begin:end], permutations, shortest, rng)
            if end - begin == len(row):
                whole_p[i], statistic[i], null[i] = p, best, null_here
            if p <= level:
                cuts = begin + _significant_ends(row[begin:end], arc, level, permutations, rng)
                starts[i, cuts], p_value[i, cuts] = True, p
                edges = [begin, *cuts, end]
                # From the left: the stack gives the last one first.
                segments += [(a, b) for a, b in reversed(list(pairwise(edges))) if b - a >= 2 * shortest]
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
    check_count("shortest", shortest)
    check_count("permutations", permutations)
    check_share("level", level, usual=0.05)
    if (permutations + 1) * level < 1:
        raise ValueInputError(
            f"permutations must be at least 1 / level - 1 to reach level {level:g}, got {permutations}; use more"
        )


def _test_segment(
    segment: Float64[np.ndarray, " time"], permutations: int, shortest: int, rng: np.random.Generator
) -> tuple[float, float, tuple[int, int], Float64[np.ndarray, " permutation"]]:
    """p-value, statistic and ends of the best arc of a segment, and the statistic of each random order."""
    orders = _with_random_orders(segment - segment.mean(), permutations, rng)
    statistics, arcs = np.empty(len(orders)), np.empty((len(orders), 2), dtype=np.int64)
    _best_arcs(orders, shortest, statistics, arcs)
    p = _p_value(statistics)
    return p, float(statistics[0]), (int(arcs[0, 0]), int(arcs[0, 1])), statistics[1:]


def _significant_ends(
    segment: Float64[np.ndarray, " time"],
    arc: tuple[int, int],
    level: float,
    permutations: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " cut"]:
    """The ends of an arc that are changes: the one inside the segment, or those of two whose sides differ."""
    begin, end = arc
    if begin == 0:
        return np.array([end])
    if end == len(segment):
        return np.array([begin])
    p = []
    for sides, size in ((segment[:end], begin), (segment[begin:], end - begin)):
        orders = _with_random_orders(sides, permutations, rng)
        p.append(_p_value(np.abs(orders[:, :size].mean(-1) - orders[:, size:].mean(-1))))
    ends = np.array(arc)[np.array(p) <= level]
    return ends if len(ends) else np.array([arc[int(np.argmin(p))]])


def _with_random_orders(
    x: Float64[np.ndarray, " time"], permutations: int, rng: np.random.Generator
) -> Float64[np.ndarray, "order time"]:
    orders = np.broadcast_to(x, (permutations + 1, len(x))).copy()
    orders[1:] = rng.permuted(orders[1:], axis=-1)
    return orders


def _p_value(statistics: Float64[np.ndarray, " order"]) -> float:
    """Of the first statistic among all; equal sums in another order differ in the last digits, and count as equal."""
    return int(np.count_nonzero(statistics >= statistics[0] * (1 - 1e-9))) / len(statistics)


@compiled
def _best_arcs(orders: np.ndarray, shortest: int, statistics: np.ndarray, arcs: np.ndarray) -> None:
    """Search every arc of every centred row; parts inside and beside it are empty or have ``shortest`` values."""
    n = orders.shape[1]
    weight = np.empty(n)
    for m in range(1, n):
        weight[m] = 1 / np.sqrt(m * (n - m) / n)
    total = np.zeros(n + 1)
    for row in range(orders.shape[0]):
        for t in range(n):
            total[t + 1] = total[t] + orders[row, t]
        best = -1.0
        for i in range(0, n - shortest + 1):
            if 0 < i < shortest:
                continue
            for j in range(i + shortest, n + 1):
                if n - shortest < j < n or j - i == n:
                    continue
                value = abs(total[j] - total[i]) * weight[j - i]
                if value > best:
                    best = value
                    arcs[row, 0], arcs[row, 1] = i, j
        statistics[row] = best

"""Ordinal patterns: their indices, their tables and how often each occurs.

Bandt and Pompe, Phys. Rev. Lett. 88, 174102 (2002). The pattern of the window x_t, x_{t+delay}, ... is its rank
permutation; its index is the place of that permutation in the lexicographic list, so 0 is increasing and order! - 1
decreasing.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from typing import Any, Unpack

import numpy as np
from jaxtyping import Int

from softgap.signal.batch import Options, checked_batch
from softgap.signal.checked import checked_order
from softgap.signal.results import PatternCounts, Patterns

__all__ = ["ordinal_patterns", "pattern_counts", "pattern_ranks", "reversed_patterns", "sorting_patterns"]


def ordinal_patterns(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Patterns:
    """The pattern index of every window, time last; -1 where the window is excluded or past the end of its series.

    ``pattern_ranks(order)[index]`` gives the rank permutation. See :class:`Options` for the keywords.
    """
    batch = checked_batch(x, order, delay, options)
    series, windows = len(batch.rows), batch.rows.shape[1] - batch.span
    index = np.empty((series, windows), np.int32)
    counted, rate = np.empty(series, np.int64), np.empty(series)
    for block in batch.indices():
        index[block.where], counted[block.where], rate[block.where] = block.table, block.windows, block.tie_rate
    return Patterns(batch.shaped(index), batch.shaped(counted), batch.shaped(rate))


def pattern_counts(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> PatternCounts:
    """How often each of the order! patterns occurs, as a last axis. See :class:`Options` for the keywords."""
    batch = checked_batch(x, order, delay, options)
    series = len(batch.rows)
    counts = np.empty((series, batch.patterns), np.int64)
    windows, rate, eligible = np.empty(series, np.int64), np.empty(series), np.empty(series, bool)
    for block in batch.counts():
        counts[block.where], windows[block.where] = block.table, block.windows
        rate[block.where], eligible[block.where] = block.tie_rate, block.eligible
    return PatternCounts(*map(batch.shaped, (counts, windows, rate, eligible)))


@cache
def pattern_ranks(order: int) -> Int[np.ndarray, "pattern order"]:
    """The rank permutation of every pattern index."""
    ranks = np.array(list(itertools.permutations(range(checked_order(order)))), np.int64)
    ranks.flags.writeable = False
    return ranks


@cache
def reversed_patterns(order: int) -> Int[np.ndarray, " pattern"]:
    """The index of each pattern read backwards in time."""
    return _indices(pattern_ranks(order)[:, ::-1])


@cache
def sorting_patterns(order: int) -> Int[np.ndarray, " pattern"]:
    """For each pattern index, that of the permutation that sorts the window (argsort, the inverse of the ranks)."""
    return _indices(np.argsort(pattern_ranks(order), axis=1))


def _indices(permutations: np.ndarray) -> np.ndarray:
    order = permutations.shape[1]
    index = np.zeros(len(permutations), np.int64)
    for i in range(order - 1):
        index += (permutations[:, i + 1 :] < permutations[:, i : i + 1]).sum(axis=1) * math.factorial(order - 1 - i)
    index.flags.writeable = False
    return index

"""Compiled loops over samples: pattern indices, counts, weights, transitions and resampled entropies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

__all__ = [
    "compiled",
    "count_rows",
    "entropy_rows",
    "first_unusable_row",
    "index_rows",
    "link_rows",
    "resample_row",
    "shannon_rows",
    "stretch_rows",
    "weigh_rows",
]


Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` as machine code that leaves other Python threads alone.

    One thread, always: numba's own thread pool may not be entered from two Python threads at once, and a caller who
    wants more cores can run calls in threads, since the interpreter lock is released.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to cache in: a read-only install with no user cache either
        return cast(Function, numba.njit(**options)(function))


Array = np.ndarray[Any, Any]


# Windows per pass: index, tie marks and the slices of a block stay in the first-level cache.
BLOCK = 1024


@compiled
def encode(series: Array, order: int, delay: int, index: Array, tied: Array) -> None:
    """Write the pattern index of each window (ties in order of appearance) and whether it holds equal values."""
    for start in range(0, index.size, BLOCK):
        size = min(BLOCK, index.size - start)
        code = index[start : start + size]
        equal = tied[start : start + size]
        code[:] = 0
        equal[:] = 0
        place = 1
        for i in range(order - 2, -1, -1):
            place *= order - 1 - i
            weight = np.int32(place)
            earlier = series[start + i * delay : start + i * delay + size]
            for j in range(i + 1, order):
                later = series[start + j * delay : start + j * delay + size]
                for t in range(size):
                    code[t] += weight if later[t] < earlier[t] else np.int32(0)
                    equal[t] |= np.int32(later[t] == earlier[t])


@compiled
def first_unusable_row(rows: Array, lengths: Array) -> int:
    """The first row that holds NaN or infinity within its length, or -1."""
    for row in range(rows.shape[0]):
        bad = np.int32(0)
        series = rows[row, : lengths[row]]
        for t in range(series.size):
            bad |= np.int32(series[t] - series[t] != 0)
        if bad:
            return row
    return -1


@compiled
def count_row(series: Array, order: int, delay: int, keep_ties: bool, index: Array, tied: Array, count: Array) -> int:
    """Add the windows of a series to ``count`` [pattern], and return how many hold equal values.

    ``index`` and ``tied`` have a place for each window, filled as by ``encode``.
    """
    encode(series, order, delay, index, tied)
    equal = 0
    for t in range(index.size):
        equal += tied[t]
        if keep_ties or tied[t] == 0:
            count[index[t]] += 1
    return equal


@compiled
def count_rows(
    rows: Array, lengths: Array, order: int, delay: int, keep_ties: bool, counts: Array, ties: Array
) -> None:
    """Add the windows of each row to ``counts`` [row, pattern] and those with equal values to ``ties`` [row]."""
    scratch = np.empty(max(1, rows.shape[1]), np.int32)
    marks = np.empty(max(1, rows.shape[1]), np.int32)
    for row in range(rows.shape[0]):
        windows = max(0, lengths[row] - (order - 1) * delay)
        index, tied = scratch[:windows], marks[:windows]
        ties[row] = count_row(rows[row], order, delay, keep_ties, index, tied, counts[row])


@compiled
def index_rows(rows: Array, lengths: Array, order: int, delay: int, keep_ties: bool, out: Array, ties: Array) -> None:
    """Write the pattern index of each window to ``out`` [row, window]; -1 for excluded ones and past the end."""
    marks = np.empty(max(1, rows.shape[1]), np.int32)
    for row in range(rows.shape[0]):
        windows = max(0, lengths[row] - (order - 1) * delay)
        index, tied = out[row, :windows], marks[:windows]
        encode(rows[row], order, delay, index, tied)
        out[row, windows:] = -1
        equal = 0
        for t in range(windows):
            equal += tied[t]
            if tied[t] and not keep_ties:
                index[t] = -1
        ties[row] = equal


@compiled
def weigh_rows(
    values: Array, rows: Array, lengths: Array, order: int, delay: int, keep_ties: bool, weights: Array, ties: Array
) -> None:
    """Add the variance of each window of ``values`` to ``weights`` [row, pattern]; the rest as ``count_rows``.

    ``rows`` holds the order of the values: the values themselves, or their ranks.
    """
    scratch = np.empty(max(1, rows.shape[1]), np.int32)
    marks = np.empty(max(1, rows.shape[1]), np.int32)
    for row in range(rows.shape[0]):
        windows = max(0, lengths[row] - (order - 1) * delay)
        index, tied = scratch[:windows], marks[:windows]
        series = values[row]
        encode(rows[row], order, delay, index, tied)
        # Entropy does not depend on the unit, and squares of the raw values could overflow or vanish.
        unit = 0.0
        for t in range(lengths[row]):
            unit = max(unit, abs(np.float64(series[t])))
        equal = 0
        for t in range(windows):
            equal += tied[t]
            if unit > 0 and (keep_ties or tied[t] == 0):
                mean = 0.0
                for i in range(order):
                    mean += np.float64(series[t + i * delay]) / unit
                mean /= order
                variance = 0.0
                for i in range(order):
                    variance += (np.float64(series[t + i * delay]) / unit - mean) ** 2
                weights[row, index[t]] += variance / order
        ties[row] = equal


@compiled
def shannon(counts: Array, total: float) -> float:
    """-sum p log p in nats, p = counts / total."""
    entropy = 0.0
    for i in range(counts.size):
        if counts[i] > 0:
            p = counts[i] / total
            entropy -= p * math.log(p)
    return min(entropy, math.log(counts.size))


@compiled
def entropy_rows(
    rows: Array, lengths: Array, order: int, delay: int, keep_ties: bool, entropy: Array, ties: Array
) -> None:
    """Write the Shannon entropy in nats of each row to ``entropy`` [row, 1]; the rest as ``count_rows``.

    One row of counts serves all series. Where patterns outnumber windows it is read and cleared through the windows,
    so that a short series never pays for order! bins.
    """
    patterns = 1
    for i in range(2, order + 1):
        patterns *= i
    count = np.zeros(patterns, np.int32)
    scratch = np.empty(max(1, rows.shape[1]), np.int32)
    marks = np.empty(max(1, rows.shape[1]), np.int32)
    for row in range(rows.shape[0]):
        windows = max(0, lengths[row] - (order - 1) * delay)
        index, tied = scratch[:windows], marks[:windows]
        ties[row] = count_row(rows[row], order, delay, keep_ties, index, tied, count)
        total = windows if keep_ties else windows - ties[row]
        if windows < patterns:
            result = 0.0
            for t in range(windows):
                seen = count[index[t]]
                if seen > 0:
                    p = seen / total
                    result -= p * math.log(p)
                    count[index[t]] = 0
            entropy[row, 0] = min(result, math.log(patterns))
        else:
            entropy[row, 0] = shannon(count, total)
            count[:] = 0


@compiled
def shannon_rows(counts: Array, out: Array) -> None:
    """Shannon entropy in nats of each row of counts or weights."""
    for row in range(counts.shape[0]):
        total = 0.0
        for i in range(counts.shape[1]):
            total += counts[row, i]
        out[row] = shannon(counts[row], total)


@compiled
def link_rows(index: Array, patterns: int, keys: Array, counts: Array, n_links: Array) -> None:
    """The distinct steps from one window's pattern to the next one's, per row, sorted by source and target.

    ``keys`` [row, window - 1] holds source * patterns + target, ``counts`` how often each was taken, ``n_links`` how
    many there are. A step needs both windows: an excluded one breaks the chain.
    """
    for row in range(index.shape[0]):
        steps = np.empty(index.shape[1], np.int64)
        used = 0
        for t in range(index.shape[1] - 1):
            if index[row, t] >= 0 and index[row, t + 1] >= 0:
                steps[used] = np.int64(index[row, t]) * patterns + index[row, t + 1]
                used += 1
        steps = np.sort(steps[:used])
        distinct = 0
        for t in range(used):
            if t == 0 or steps[t] != steps[t - 1]:
                keys[row, distinct] = steps[t]
                counts[row, distinct] = 0
                distinct += 1
            counts[row, distinct - 1] += 1
        n_links[row] = distinct


@compiled
def resample_row(index: Array, patterns: int, block: int, draws: Array, out: Array) -> None:
    """Entropy in nats of resampled pattern sequences: blocks that start where ``draws`` in [0, 1) says, in a circle."""
    size = index.size
    counts = np.zeros(patterns, np.int64)
    for replicate in range(draws.shape[0]):
        counts[:] = 0
        filled, piece = 0, 0
        while filled < size:
            position = int(draws[replicate, piece] * size)
            for _ in range(min(block, size - filled)):
                counts[index[position]] += 1
                position += 1
                if position == size:
                    position = 0
            filled += block
            piece += 1
        out[replicate] = shannon(counts, size)


@compiled
def stretch_rows(index: Array, patterns: int, windows: int, out: Array, stretches: Array) -> None:
    """Mean entropy in nats over evenly spaced stretches of ``windows`` counted windows; 0 stretches if too few."""
    counts = np.zeros(patterns, np.int64)
    for row in range(index.shape[0]):
        sequence = index[row][index[row] >= 0]
        spare = sequence.size - windows
        if spare < 0:
            stretches[row] = 0
            continue
        pieces = (sequence.size + windows - 1) // windows
        total = 0.0
        for piece in range(pieces):
            start = 0 if pieces == 1 else (spare * piece) // (pieces - 1)
            counts[:] = 0
            for t in range(start, start + windows):
                counts[sequence[t]] += 1
            total += shannon(counts, windows)
        out[row] = total / pieces
        stretches[row] = pieces

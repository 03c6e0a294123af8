"""Ordinal patterns: series read in blocks, pattern indices and counts, and how many windows a series needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.inputs import check_count, check_rng, is_whole
from softgap.signal.kernels import count_rows, entropy_rows, first_unusable_row, index_rows, shannon_rows, weigh_rows
from softgap.signal.results import PatternCounts, Patterns
from softgap.signal.validation import check_delay, check_order, not_finite, real_array, series_name

__all__ = [
    "ELIGIBILITY",
    "LEAST_WINDOWS",
    "TIES",
    "Block",
    "Options",
    "SeriesBatch",
    "Spread",
    "check_batch",
    "least_windows",
    "noise_spread",
    "ordinal_patterns",
    "pattern_counts",
    "pattern_ranks",
    "reversed_patterns",
]


LEAST_WINDOWS: Mapping[int, int] = MappingProxyType({2: 32, 3: 64, 4: 128, 5: 360, 6: 1440, 7: 10080, 8: 80640})


"""The default rule, by order."""


ELIGIBILITY = ("spread", "2*order!")


"""Rules by name: the simulated one above, and the one in common use."""


# Samples drawn at a time, so that memory does not grow with the number of series.
_NOISE_BLOCK = 1 << 21


def least_windows(rule: str | int, order: int) -> int:
    """The least number of windows of an eligible series, by the name of a rule or as a number of your own."""
    if isinstance(rule, str):
        if rule not in ELIGIBILITY:
            raise unknown_name("eligibility rule", rule, ELIGIBILITY)
        return LEAST_WINDOWS[order] if rule == "spread" else 2 * math.factorial(order)
    if not is_whole(rule) or rule < 1:
        raise ValueInputError(
            f"eligibility must be {' or '.join(map(repr, ELIGIBILITY))} or a number of windows from 1, got {rule!r}"
        )
    return int(rule)


@dataclass(frozen=True)
class Spread:
    """Normalised permutation entropy of white noise at one length: mean, standard deviation and 2.5 % quantile.

    ``patterns`` is the mean number of different patterns seen.
    """

    mean: float
    deviation: float
    low: float
    patterns: float


def noise_spread(order: int, windows: int, *, delay: int = 1, series: int = 2000, rng: np.random.Generator) -> Spread:
    """Simulate ``series`` white-noise series of ``windows`` windows each."""
    check_order(order)
    check_delay(delay)
    check_count("windows", windows)
    check_count("series", series, least=2)
    check_rng(rng)
    patterns, length = math.factorial(order), windows + (order - 1) * delay
    entropy, seen = np.empty(series), np.empty(series)
    rows = max(1, _NOISE_BLOCK // max(length, patterns))
    for start in range(0, series, rows):
        noise = rng.random((min(rows, series - start), length))
        counts = np.zeros((len(noise), patterns), np.int64)
        # Ties are kept, so that every series has all its windows: in 53 random bits they are rarer than one in 10^12.
        count_rows(noise, np.full(len(noise), length), order, delay, True, counts, np.empty(len(noise), np.int64))
        shannon_rows(counts, entropy[start : start + rows])
        seen[start : start + rows] = (counts > 0).sum(axis=1)
    entropy /= math.log(patterns)
    low = float(np.quantile(entropy, 0.025))
    return Spread(float(entropy.mean()), float(entropy.std(ddof=1)), low, float(seen.mean()))


TIES = ("exclude", "stable", "jitter", "raise")


"""What happens to windows with equal values."""


# Bins, samples or windows in memory at a time.
_BLOCK = 1 << 20


Kernel = Callable[..., None]


class Options(TypedDict, total=False):
    """What every ordinal measure accepts by keyword beside order and delay.

    ties
        "exclude" (default) leaves windows with equal values out, "stable" ranks equal values by appearance, "jitter"
        at random (needs ``rng``), "raise" refuses them.
    rng
        The generator that "jitter" draws from.
    lengths
        Steps of each series, broadcast to the leading axes; what lies behind them is never read.
    eligibility
        "spread" (default), "2*order!", or a least number of windows.
    """

    ties: str
    rng: np.random.Generator | None
    lengths: Any
    eligibility: str | int


@dataclass(frozen=True, eq=False)
class Block:
    """Some series of a batch: where they stand in it, a table made from their windows, and what was counted."""

    where: slice
    table: np.ndarray
    windows: Int[np.ndarray, " series"]
    tie_rate: Float[np.ndarray, " series"]
    eligible: Bool[np.ndarray, " series"]


@dataclass(frozen=True, eq=False)
class SeriesBatch:
    """Checked series [series, time] with the leading axes they came with and how their windows are taken."""

    rows: np.ndarray
    lengths: Int[np.ndarray, " series"]
    lead: tuple[int, ...]
    order: int
    delay: int
    ties: str
    rng: np.random.Generator | None
    least: int

    @property
    def patterns(self) -> int:
        """The number of patterns, order!."""
        return math.factorial(self.order)

    def unit(self, normalised: bool) -> float:
        """What an entropy in nats is divided by: the greatest one, log(order!), or 1."""
        return math.log(self.patterns) if normalised else 1.0

    @property
    def span(self) -> int:
        """Steps from the first to the last value of a window."""
        return (self.order - 1) * self.delay

    def counts(self) -> Iterator[Block]:
        """Blocks whose table is [series, pattern]: how often each pattern occurs."""
        for where in self._slices(self.patterns):
            yield self._fill_block(where, count_rows, np.zeros((where.stop - where.start, self.patterns), np.int64))

    def entropies(self) -> Iterator[Block]:
        """Blocks whose table is [series, 1]: Shannon entropy in nats, without a table of counts."""
        for where in self._slices(1):
            yield self._fill_block(where, entropy_rows, np.empty((where.stop - where.start, 1)))

    def weights(self) -> Iterator[Block]:
        """Blocks whose table is [series, pattern]: the summed variance of the windows of each pattern."""
        for where in self._slices(self.patterns):
            weigh = partial(weigh_rows, kernel_rows(self.rows[where]))
            yield self._fill_block(where, weigh, np.zeros((where.stop - where.start, self.patterns)))

    def indices(self) -> Iterator[Block]:
        """Blocks whose table is [series, window]: the index of each pattern, or -1."""
        windows = max(0, self.rows.shape[1] - self.span)
        for where in self._slices(windows):
            yield self._fill_block(where, index_rows, np.empty((where.stop - where.start, windows), np.int32))

    def restore_shape(self, array: np.ndarray) -> np.ndarray:
        """An array [series, ...] with the leading axes of the input."""
        return array.reshape((*self.lead, *array.shape[1:]))

    def _slices(self, columns: int) -> Iterator[slice]:
        step = max(1, _BLOCK // max(1, columns, self.rows.shape[1]))
        for start in range(0, len(self.rows), step):
            yield slice(start, min(start + step, len(self.rows)))

    def _fill_block(self, where: slice, kernel: Kernel, table: np.ndarray) -> Block:
        rows, lengths = kernel_rows(self.rows[where]), self.lengths[where]
        self._check_finite(rows, lengths, where.start)
        ties = np.zeros(len(rows), np.int64)
        keep = self.ties in ("stable", "jitter")
        kernel(rows, lengths, self.order, self.delay, keep, table, ties)
        if self.ties == "raise":
            self._check_ties(ties, where.start)
        if self.ties == "jitter" and ties.any() and self.rng is not None:
            # Equal values are put into a random order by ranking (value, random number) pairs.
            order = np.lexsort((self.rng.random(rows.shape), rows), axis=-1)
            table[...] = 0
            kernel(np.argsort(order, axis=-1), lengths, self.order, self.delay, keep, table, np.empty_like(ties))
        total = np.maximum(lengths - self.span, 0)
        windows = total if keep else total - ties
        rate = ties / np.maximum(total, 1)
        return Block(where, table, windows, rate, windows >= self.least)

    def _check_finite(self, rows: np.ndarray, lengths: np.ndarray, start: int) -> None:
        row = first_unusable_row(rows, lengths)
        if row >= 0:
            step = int(np.argmin(np.isfinite(rows[row, : lengths[row]])))
            raise not_finite(rows[row, step], step, self._at(start + row))

    def _check_ties(self, ties: np.ndarray, start: int) -> None:
        if ties.any():
            row = int(np.argmax(ties > 0))
            raise ValueInputError(
                f"ties='raise' allows no equal values in a window, got {ties[row]} windows with them in "
                f"{series_name(self._at(start + row))}; choose another policy: {', '.join(TIES[:-1])}"
            )

    def _at(self, row: int) -> tuple[int, ...]:
        return tuple(int(i) for i in np.unravel_index(row, self.lead)) if self.lead else ()


def kernel_rows(rows: np.ndarray) -> np.ndarray:
    """Rows in memory order and a type the kernels compare exactly: float32, float64, int64 or uint64."""
    kind = rows.dtype.kind
    if kind == "f":
        dtype: type = np.float32 if rows.dtype.itemsize <= 4 else np.float64
    else:
        dtype = np.uint64 if rows.dtype == np.uint64 else np.int64
    return np.ascontiguousarray(rows, dtype=dtype)


def check_batch(x: Any, order: int, delay: Any, options: Options, *, short: bool = False) -> SeriesBatch:
    """The batch of a call, or the error that says what does not fit; ``short`` lets series have no window at all."""
    order, delay = check_order(order), check_delay(delay)
    for name in options:
        if name not in Options.__annotations__:
            raise unknown_name("option", name, Options.__annotations__)
    ties, rng = options.get("ties", "exclude"), options.get("rng")
    if ties not in TIES:
        raise unknown_name("ties policy", str(ties), TIES)
    if ties == "jitter" and not isinstance(rng, np.random.Generator):
        raise ValueInputError(f"ties='jitter' needs a numpy Generator, got rng={rng!r}; use np.random.default_rng(0)")
    least = least_windows(options.get("eligibility", "spread"), order)
    array = real_array(x)
    steps, lead = array.shape[-1], array.shape[:-1]
    if steps <= (order - 1) * delay and not short:
        length = "an empty series" if steps == 0 else f"{steps} steps"
        raise ShapeError(
            f"a series must hold one window, {(order - 1) * delay + 1} steps at order {order} and delay {delay}, "
            f"got {length}; use longer series or a shorter pattern"
        )
    # The count is spelled out: reshape cannot infer it where an axis is empty.
    rows = array.reshape(math.prod(lead), steps)
    return SeriesBatch(rows, _lengths(options.get("lengths"), lead, steps), lead, order, delay, ties, rng, least)


def _lengths(value: Any, lead: tuple[int, ...], steps: int) -> np.ndarray:
    if value is None:
        return np.full(math.prod(lead), steps, np.int64)
    lengths = np.asarray(value)
    if lengths.dtype.kind not in "iu":
        raise ValueInputError(f"lengths must be whole numbers, got an array of {lengths.dtype}")
    try:
        lengths = np.broadcast_to(lengths, lead)
    except ValueError as error:
        raise ShapeError(
            f"lengths must have one entry per series, shape {list(lead)}, got {list(lengths.shape)}"
        ) from error
    if lengths.size and (lengths.min() < 0 or lengths.max() > steps):
        wrong = lengths.min() if lengths.min() < 0 else lengths.max()
        raise ValueInputError(f"lengths must be from 0 to the {steps} steps of the time axis, got {wrong}")
    return lengths.reshape(-1).astype(np.int64)


def ordinal_patterns(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> Patterns:
    """The pattern index of every window, time last; -1 where the window is excluded or past the end of its series.

    ``pattern_ranks(order)[index]`` gives the rank permutation. See ``Options`` for the keywords.
    """
    batch = check_batch(x, order, delay, options)
    series, windows = len(batch.rows), batch.rows.shape[1] - batch.span
    index = np.empty((series, windows), np.int32)
    counted, rate = np.empty(series, np.int64), np.empty(series)
    for block in batch.indices():
        index[block.where], counted[block.where], rate[block.where] = block.table, block.windows, block.tie_rate
    return Patterns(batch.restore_shape(index), batch.restore_shape(counted), batch.restore_shape(rate))


def pattern_counts(x: Any, order: int = 3, delay: int = 1, **options: Unpack[Options]) -> PatternCounts:
    """How often each of the order! patterns occurs, as a last axis. See ``Options`` for the keywords."""
    batch = check_batch(x, order, delay, options)
    series = len(batch.rows)
    counts = np.empty((series, batch.patterns), np.int64)
    windows, rate, eligible = np.empty(series, np.int64), np.empty(series), np.empty(series, bool)
    for block in batch.counts():
        counts[block.where], windows[block.where] = block.table, block.windows
        rate[block.where], eligible[block.where] = block.tie_rate, block.eligible
    return PatternCounts(*map(batch.restore_shape, (counts, windows, rate, eligible)))


@cache
def pattern_ranks(order: int) -> Int[np.ndarray, "pattern order"]:
    """The rank permutation of every pattern index."""
    ranks = np.array(list(itertools.permutations(range(check_order(order)))), np.int64)
    ranks.flags.writeable = False
    return ranks


@cache
def reversed_patterns(order: int) -> Int[np.ndarray, " pattern"]:
    """The index of each pattern read backwards in time."""
    return _indices(pattern_ranks(order)[:, ::-1])


def _indices(permutations: np.ndarray) -> np.ndarray:
    order = permutations.shape[1]
    index = np.zeros(len(permutations), np.int64)
    for i in range(order - 1):
        index += (permutations[:, i + 1 :] < permutations[:, i : i + 1]).sum(axis=1) * math.factorial(order - 1 - i)
    index.flags.writeable = False
    return index

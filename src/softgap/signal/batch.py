"""The input of every ordinal measure, checked once and handed out in blocks of series."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.signal.checked import checked_delay, checked_order, not_finite, real_array, series_name
from softgap.signal.eligibility import least_windows
from softgap.signal.kernels import count_rows, entropy_rows, first_unusable_row, index_rows, weigh_rows

__all__ = ["TIES", "Batch", "Block", "Options", "checked_batch"]

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
class Batch:
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
            yield self._filled(where, count_rows, np.zeros((where.stop - where.start, self.patterns), np.int64))

    def entropies(self) -> Iterator[Block]:
        """Blocks whose table is [series, 1]: Shannon entropy in nats, without a table of counts."""
        for where in self._slices(1):
            yield self._filled(where, entropy_rows, np.empty((where.stop - where.start, 1)))

    def weights(self) -> Iterator[Block]:
        """Blocks whose table is [series, pattern]: the summed variance of the windows of each pattern."""
        for where in self._slices(self.patterns):
            weigh = partial(weigh_rows, native(self.rows[where]))
            yield self._filled(where, weigh, np.zeros((where.stop - where.start, self.patterns)))

    def indices(self) -> Iterator[Block]:
        """Blocks whose table is [series, window]: the index of each pattern, or -1."""
        windows = max(0, self.rows.shape[1] - self.span)
        for where in self._slices(windows):
            yield self._filled(where, index_rows, np.empty((where.stop - where.start, windows), np.int32))

    def shaped(self, array: np.ndarray) -> np.ndarray:
        """An array [series, ...] with the leading axes of the input."""
        return array.reshape((*self.lead, *array.shape[1:]))

    def _slices(self, columns: int) -> Iterator[slice]:
        step = max(1, _BLOCK // max(1, columns, self.rows.shape[1]))
        for start in range(0, len(self.rows), step):
            yield slice(start, min(start + step, len(self.rows)))

    def _filled(self, where: slice, kernel: Kernel, table: np.ndarray) -> Block:
        rows, lengths = native(self.rows[where]), self.lengths[where]
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


def native(rows: np.ndarray) -> np.ndarray:
    """Rows in memory order and a type the kernels compare exactly: float32, float64, int64 or uint64."""
    kind = rows.dtype.kind
    if kind == "f":
        wanted: type = np.float32 if rows.dtype.itemsize <= 4 else np.float64
    else:
        wanted = np.uint64 if rows.dtype == np.uint64 else np.int64
    return np.ascontiguousarray(rows, dtype=wanted)


def checked_batch(x: Any, order: int, delay: Any, options: Options, *, short: bool = False) -> Batch:
    """The batch of a call, or the error that says what does not fit; ``short`` lets series have no window at all."""
    order, delay = checked_order(order), checked_delay(delay)
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
        what = "an empty series" if steps == 0 else f"{steps} steps"
        raise ShapeError(
            f"a series must hold one window, {(order - 1) * delay + 1} steps at order {order} and delay {delay}, "
            f"got {what}; use longer series or a shorter pattern"
        )
    # The count is spelled out: reshape cannot infer it where an axis is empty.
    rows = array.reshape(math.prod(lead), steps)
    return Batch(rows, _lengths(options.get("lengths"), lead, steps), lead, order, delay, ties, rng, least)


def _lengths(given: Any, lead: tuple[int, ...], steps: int) -> np.ndarray:
    if given is None:
        return np.full(math.prod(lead), steps, np.int64)
    lengths = np.asarray(given)
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

"""The two classes of sequences that softmax attention is said to tell apart and linear attention not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from softgap.errors import ValueInputError

__all__ = ["GAP", "Construction", "Draw", "block_column", "construct", "draw_many", "sequences"]

# tau = (c + GAP) sqrt(log n), and the least b and c of the source.
GAP = 0.1
# P(the signs fail) that the default number of columns m = 4 log(n / DELTA) is meant for.
DELTA = 0.01


@dataclass(frozen=True)
class Construction:
    """The sizes of Deng, Song and Zhou 2023 (arXiv:2310.11685), section 6.

    With L = sqrt(log n), the n x d matrix of a sequence has ``a L`` in column 1 of one row and 0 elsewhere in it,
    t stacked copies of ``b L I`` in columns 2 to d - 1, and ``c L`` throughout column d. Class D0 has ``a = a0``,
    D1 has ``a = a1``. The network thresholds ``C Y``, Y d x m random signs, at ``tau = (c + 0.1) L``.

    Attributes
    ----------
    cross
        False: queries, keys and values are one sequence. True: the queries are one sequence and the keys and values
        another of the same class, each with a marked row of its own.
    """

    n: int
    d: int
    t: int
    m: int
    a0: float = 0.05
    a1: float = 1.0
    b: float = 0.5
    c: float = 0.5
    cross: bool = False

    @property
    def unit(self) -> float:
        """L = sqrt(log n)."""
        return math.sqrt(math.log(self.n))

    @property
    def tau(self) -> float:
        """The threshold (c + 0.1) L."""
        return (self.c + GAP) * self.unit

    @property
    def regular(self) -> bool:
        """Whether every block column has the same number of rows, n = (d - 2) t."""
        return self.n == (self.d - 2) * self.t

    def level(self, label: int) -> float:
        """The a of a class, 0 or 1."""
        return self.a1 if label else self.a0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Draw:
    """What is random: the marked row of the queries and of the keys (one and the same in self-attention), and Y."""

    row: int
    key_row: int
    signs: Int[np.ndarray, "d m"]

    @cached_property
    def block_sums(self) -> Int[np.ndarray, " m"]:
        """The signs of columns 2 to d - 1, added up."""
        return np.asarray(self.signs[1:-1].sum(axis=0, dtype=np.int64))


def construct(
    n: int | None = None,
    d: int | None = None,
    t: int | None = None,
    *,
    m: int | None = None,
    a0: float = 0.05,
    a1: float = 1.0,
    b: float = 0.5,
    c: float | None = None,
    cross: bool = False,
    allow_breaks: bool = False,
) -> Construction:
    """A construction from what is given of n, d and t, refused where it is none.

    Parameters
    ----------
    n, d, t
        Two of them give the third; one alone goes with t = 1; none is d = 514. n = (d - 2) t.
    m
        Columns of Y; ceil(4 log(n / 0.01)) by default.
    c
        1 - b by default.
    allow_breaks
        Take sizes outside the construction, the break conditions of the source: any n, any b and c.
    """
    n, d, t = _sizes(n, d, t, allow_breaks)
    c = 1 - b if c is None else c
    _check_levels(a0, a1, b, c, allow_breaks)
    m = math.ceil(4 * math.log(n / DELTA)) if m is None else m
    if m < 1:
        raise ValueInputError(f"m must be a whole number from 1, got {m}; leave it out for 4 log(n / {DELTA})")
    return Construction(n, d, t, m, a0, a1, b, c, cross)


def _sizes(n: int | None, d: int | None, t: int | None, allow_breaks: bool) -> tuple[int, int, int]:
    if d is None and n is None:
        d = 514
    if t is None:
        t = 1 if n is None or d is None else max(1, n // max(1, d - 2))
    if d is None:
        d = 2 + (n or 0) // max(1, t)
    n = (d - 2) * t if n is None else n
    if d < 5 or t < 1:
        raise ValueInputError(f"the construction needs d >= 5 and t >= 1, got d = {d} and t = {t}; enlarge them")
    if n < 3:
        raise ValueInputError(f"the construction needs n >= 3 rows, got n = {n}; enlarge it")
    if n != (d - 2) * t and not allow_breaks:
        raise ValueInputError(
            f"n must be (d - 2) t, got n = {n}, d = {d}, t = {t} with (d - 2) t = {(d - 2) * t}; leave one of them "
            "out, or allow the source's break conditions with --allow-breaks"
        )
    return n, d, t


def _check_levels(a0: float, a1: float, b: float, c: float, allow_breaks: bool) -> None:
    for name, value in (("a0", a0), ("a1", a1), ("b", b), ("c", c)):
        if not (math.isfinite(value) and 0 <= value <= 10):
            raise ValueInputError(f"{name} must lie between 0 and 10, got {value:g}; the source has it below 2")
    if allow_breaks:
        return
    if abs(b + c - 1) > 1e-9:
        raise ValueInputError(
            f"b + c must be 1, got {b:g} + {c:g} = {b + c:g}; leave c out, or allow the source's break conditions with "
            "--allow-breaks"
        )
    if min(b, c) < GAP - 1e-9:
        raise ValueInputError(
            f"b and c must be at least {GAP}, got b = {b:g} and c = {c:g}; or allow the source's break conditions with "
            "--allow-breaks"
        )


def draw_many(construction: Construction, draws: int, *, rng: np.random.Generator) -> tuple[Draw, ...]:
    """Independent marked rows and signs."""
    if draws < 1:
        raise ValueInputError(f"draws must be a whole number from 1, got {draws}")
    size = (construction.d, construction.m)
    drawn = []
    for _ in range(draws):
        row = int(rng.integers(construction.n))
        key_row = int(rng.integers(construction.n)) if construction.cross else row
        drawn.append(Draw(row, key_row, 2 * rng.integers(0, 2, size, dtype=np.int8) - 1))
    return tuple(drawn)


def sequences(
    construction: Construction, label: int, draw: Draw
) -> tuple[Float[np.ndarray, "n d"], Float[np.ndarray, "n d"]]:
    """The queries, and the keys that are also the values, of one sample of class D0 or D1."""
    queries = _sequence(construction, label, draw.row)
    return queries, _sequence(construction, label, draw.key_row) if construction.cross else queries


def _sequence(construction: Construction, label: int, row: int) -> Float[np.ndarray, "n d"]:
    size, unit = construction, construction.unit
    matrix = np.zeros((size.n, size.d))
    matrix[row, 0] = size.level(label) * unit
    rows = np.arange(size.n)
    matrix[rows, 1 + rows % (size.d - 2)] = size.b * unit
    matrix[:, -1] = size.c * unit
    return matrix


def block_column(construction: Construction, row: int) -> int:
    """The column of columns 2 to d - 1 (counted from 0 in the matrix) that a row has its b in."""
    return 1 + row % (construction.d - 2)

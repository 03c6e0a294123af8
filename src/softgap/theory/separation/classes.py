"""The two classes of sequences, and attention on them without its n x n matrix."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend
from softgap.attention.catalogue import top_k
from softgap.attention.feature_maps import featurise
from softgap.errors import UnsupportedError, ValueInputError
from softgap.trajectories.validation import BASELINE

__all__ = [
    "GAP",
    "ClassOutputs",
    "Construction",
    "Draw",
    "block_column",
    "class_outputs",
    "construct",
    "dense_outputs",
    "dense_products",
    "distinct_products",
    "draw_many",
    "form_of",
    "same_column",
    "sequences",
]


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
            "out, or allow sizes outside the construction with --allow-breaks"
        )
    return n, d, t


def _check_levels(a0: float, a1: float, b: float, c: float, allow_breaks: bool) -> None:
    for name, value in (("a0", a0), ("a1", a1), ("b", b), ("c", c)):
        if not (math.isfinite(value) and 0 <= value <= 10):
            raise ValueInputError(f"{name} must be between 0 and 10, got {value:g}; the paper uses values below 2")
    if allow_breaks:
        return
    if abs(b + c - 1) > 1e-9:
        raise ValueInputError(
            f"b + c must be 1, got {b:g} + {c:g} = {b + c:g}; leave c out, or allow sizes outside the construction "
            "with --allow-breaks"
        )
    if min(b, c) < GAP - 1e-9:
        raise ValueInputError(
            f"b and c must be at least {GAP}, got b = {b:g} and c = {c:g}; enlarge them, or allow sizes outside the "
            "construction with --allow-breaks"
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


# Maps that act on every column alike, so that permuting columns permutes nothing but names.
_ALIKE = frozenset(
    {
        *("softmax", "elu1", "relu", "identity", "exp_dim", "hedgehog", "focused", "taylor2", "polynomial"),
        *("l2_normalised", "inline", "relu2_scores", "top_k", BASELINE, "zero"),
    }
)


# Maps that mix columns by a matrix or a shift, still without looking at positions.
_POSITION_FREE = _ALIKE | {"favor", "relu_affine", "dpfp"}


# Rows up to which the n x n form is worth waiting for.
DENSE_ROWS = 8192


# Different rows up to which the distinct form is.
DISTINCT_ROWS = 4096


def form_of(mechanism: Mechanism, construction: Construction) -> str:
    """The cheapest form that serves: classes, distinct or dense; a user's own map is always dense."""
    if mechanism.name in _ALIKE and construction.regular:
        return "classes"
    if mechanism.name in _POSITION_FREE and construction.d <= DISTINCT_ROWS:
        return "distinct"
    if construction.n > DENSE_ROWS:
        raise UnsupportedError(
            f"mechanism '{mechanism.name}' has no structured form here and is computed up to n = {DENSE_ROWS:,}, got "
            f"n = {construction.n:,} and d = {construction.d:,}; use a smaller n"
        )
    return "dense"


def counted_weights(
    mechanism: Mechanism,
    q: Float[Tensor, "query d"],
    k: Float[Tensor, "key d"],
    counts: Float[Tensor, " key"],
    *,
    normalised: bool = True,
) -> Float[Tensor, "query key"]:
    """Weights of keys that stand for ``counts`` equal ones each: of all of them together, in a row that sums to 1.

    Not ``normalised``: u_j itself, without the division by its sum; for mechanisms without a normaliser of their own.
    """
    if mechanism.kind == "constant":
        return q.new_zeros(len(q), len(k))
    if mechanism.score_weights is not None:
        weights = _score_weights(mechanism, q @ k.T, counts, relative=normalised)
    else:
        weights = _feature_weights(mechanism, q, k)
    total = counts.sum()
    if mechanism.normaliser == "centred":
        return (1 + weights - (weights * counts).sum(-1, keepdim=True) / total) / total * counts
    weights = weights * counts
    if not normalised:
        return weights
    denominator = weights.sum(-1, keepdim=True)
    return torch.where(denominator == 0, 0.0, weights / denominator)


def _score_weights(mechanism: Mechanism, scores: Tensor, counts: Tensor, *, relative: bool) -> Tensor:
    if mechanism.score_weights is None:
        raise AssertionError(f"mechanism '{mechanism.name}' has no score weights")  # callers ask first
    if not relative and mechanism.name == "softmax":
        return scores.exp()
    if mechanism.score_weights is top_k:
        return _counted_top_k(mechanism, scores, counts)
    seen = torch.ones_like(scores, dtype=torch.bool)[None, None]
    return mechanism.score_weights(scores[None, None], seen, mechanism.options)[0, 0]


def _counted_top_k(mechanism: Mechanism, scores: Tensor, counts: Tensor) -> Tensor:
    """exp(s) on the keys that hold the k largest scores, all keys counted; scores equal to the k-th are kept."""
    present = scores.masked_fill(counts == 0, -torch.inf)
    ordered, order = present.sort(dim=-1, descending=True)
    reached = counts[order].cumsum(-1) >= min(mechanism.options["k"], float(counts.sum()))
    threshold = ordered.gather(-1, reached.int().argmax(-1, keepdim=True))
    weights = (present - ordered[:, :1]).exp()
    return weights.masked_fill(present < threshold, 0)


def _feature_weights(mechanism: Mechanism, q: Tensor, k: Tensor) -> Tensor:
    features = featurise(
        mechanism,
        q[None, None],
        k[None, None],
        scale=1.0,
        query_positions=torch.zeros(len(q), dtype=torch.long),
        key_positions=torch.zeros(len(k), dtype=torch.long),
    )
    query, key = features.query[0, 0], features.key[0, 0]
    if not features.log:
        return query @ key.T
    # A factor per query cancels in the normaliser; one per key does not, so keys share theirs.
    return (query - query.amax(-1, keepdim=True)).exp() @ (key - key.max()).exp().T


def distinct_products(
    mechanism: Mechanism, construction: Construction, label: int, draw: Draw
) -> Float[np.ndarray, "row m"]:
    """C Y of the different rows of a sample; each stands for its equals."""
    queries, keys = (torch.from_numpy(matrix) for matrix in sequences(construction, label, draw))
    q, _ = torch.unique(queries, dim=0, return_counts=True)
    k, counts = torch.unique(keys, dim=0, return_counts=True)
    weights = counted_weights(mechanism, q, k, counts.to(torch.float64))
    # f (A Y) rather than (f A) Y: m is far smaller than d.
    return np.asarray(weights @ (k @ torch.from_numpy(draw.signs).to(torch.float64)))


def dense_outputs(
    mechanism: Mechanism, construction: Construction, label: int, draw: Draw
) -> Float[np.ndarray, "row d"]:
    """C of all n rows, by softgap's own attention: no mask, no scaling, float64."""
    queries, keys = (torch.from_numpy(matrix) for matrix in sequences(construction, label, draw))
    return _attend_rows(mechanism, queries, keys, keys)


def dense_products(
    mechanism: Mechanism, construction: Construction, label: int, draw: Draw
) -> Float[np.ndarray, "row m"]:
    """C Y of all n rows, in the same way with A Y for the values."""
    queries, keys = (torch.from_numpy(matrix) for matrix in sequences(construction, label, draw))
    return _attend_rows(mechanism, queries, keys, keys @ torch.from_numpy(draw.signs).to(torch.float64))


def _attend_rows(
    mechanism: Mechanism, queries: Tensor, keys: Tensor, values: Tensor
) -> Float[np.ndarray, "row value_dim"]:
    everything = Visible(mask=torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool))
    q, k, v = (matrix[None, None] for matrix in (queries, keys, values))
    attention = attend(mechanism, q, k, v, visible=everything, scale=1.0, form="quadratic", dtype=torch.float64)
    return attention.output[0, 0].numpy()


@dataclass(frozen=True, eq=False)
class ClassOutputs:
    """Rows of C by the class of their query, in the columns that differ.

    Rows: marked query in the marked key's block column, marked query in another, unmarked in the same, unmarked in
    another. Columns: column 1; the marked key's block column; the query's own block column (for queries in the marked
    key's column: any other); each of the other d - 4 block columns; column d.
    """

    rows: Float[np.ndarray, "4 5"]

    @property
    def marked(self) -> Float[np.ndarray, " 5"]:
        """The marked query in the marked key's block column: row j of self-attention."""
        return np.asarray(self.rows[0])

    @property
    def unmarked(self) -> Float[np.ndarray, " 5"]:
        """An unmarked query in another block column: nearly all rows."""
        return np.asarray(self.rows[3])


def class_outputs(
    mechanism: Mechanism, construction: Construction, label: int, *, normalised: bool = True
) -> ClassOutputs:
    """C by classes of rows, in O(d): exact for mechanisms that treat the block columns alike."""
    size, unit = construction, construction.unit
    level = size.level(label) * unit

    def vector(first: float, column: int) -> Tensor:
        x = torch.zeros(size.d, dtype=torch.float64)
        x[0], x[column], x[-1] = first, size.b * unit, size.c * unit
        return x

    q = torch.stack([vector(level, 1), vector(level, 2), vector(0.0, 1), vector(0.0, 2)])
    k = torch.stack([vector(level, 1), vector(0.0, 1), vector(0.0, 2), vector(0.0, 3)])
    counts = torch.tensor([1, size.t - 1, size.t, (size.d - 4) * size.t], dtype=torch.float64)
    weights = counted_weights(mechanism, q, k, counts, normalised=normalised).numpy()
    columns = [
        weights[:, 0] * level,
        (weights[:, 0] + weights[:, 1]) * size.b * unit,
        weights[:, 2] * size.b * unit,
        weights[:, 3] * size.b * unit / (size.d - 4),
        weights.sum(1) * size.c * unit,
    ]
    return ClassOutputs(np.stack(columns, axis=1))


def same_column(construction: Construction, draw: Draw) -> bool:
    """Whether the marked rows of queries and keys have their b in one block column."""
    return block_column(construction, draw.row) == block_column(construction, draw.key_row)

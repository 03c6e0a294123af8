"""Attention on the separation's data without its n x n matrix: equal rows are counted, not repeated.

A sequence has d - 1 different rows, whatever n is: the *distinct* form works on them and serves every mechanism that
ignores positions. If the mechanism also treats columns 2 to d - 1 alike, a permutation of them maps all unmarked rows
onto each other, and four keys with counts answer for everything: the *classes* form, whose cost is O(d).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend
from softgap.attention.features import featurise
from softgap.attention.row_weights import top_k
from softgap.errors import UnsupportedError
from softgap.theory.separation.data import Construction, Draw, block_column, sequences

__all__ = [
    "ClassOutputs",
    "class_outputs",
    "counted_weights",
    "dense_outputs",
    "dense_products",
    "distinct_products",
    "form_of",
    "same_column",
]

# Maps that act on every column alike, so that permuting columns permutes nothing but names.
_ALIKE = frozenset(
    {
        *("softmax", "elu1", "relu", "identity", "exp_dim", "hedgehog", "focused", "taylor2", "polynomial"),
        *("l2_normalised", "inline", "relu2_scores", "top_k", "uniform", "zero"),
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
            f"n = {construction.n:,} and d = {construction.d:,}; take a smaller n"
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
    return _attended(mechanism, queries, keys, keys)


def dense_products(
    mechanism: Mechanism, construction: Construction, label: int, draw: Draw
) -> Float[np.ndarray, "row m"]:
    """C Y of all n rows, in the same way with A Y for the values."""
    queries, keys = (torch.from_numpy(matrix) for matrix in sequences(construction, label, draw))
    return _attended(mechanism, queries, keys, keys @ torch.from_numpy(draw.signs).to(torch.float64))


def _attended(
    mechanism: Mechanism, queries: Tensor, keys: Tensor, values: Tensor
) -> Float[np.ndarray, "row value_dim"]:
    everything = Visible(mask=torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool))
    q, k, v = (matrix[None, None] for matrix in (queries, keys, values))
    found = attend(mechanism, q, k, v, visible=everything, scale=1.0, form="quadratic", dtype=torch.float64)
    return found.output[0, 0].numpy()


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

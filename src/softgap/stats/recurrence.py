"""Test whether the same heads rank highest in several modes more often than by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Float64, Int64

from softgap.errors import ShapeError
from softgap.inputs import check_count, check_rng
from softgap.stats.design import design_of
from softgap.stats.effects import contrast_of
from softgap.stats.permutation import numerator_and_error, statistic_terms
from softgap.stats.validation import check_codes, check_labels, check_strata, check_values

__all__ = ["Recurrence", "recurrence"]

# Values of t held at once.
_BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class Recurrence:
    """In how many modes each head is among the first ``top`` by |t|.

    Attributes
    ----------
    counts
        Of each head.
    p_head
        Of each head: the chance that any head recurs as often (permuted, largest count).
    recurring, p_recurring
        Entry r - 1: how many heads are on top in at least r modes, and the chance of so many.
    null
        ``recurring`` of every permutation.
    """

    counts: Int64[np.ndarray, " head"]
    p_head: Float64[np.ndarray, " head"]
    recurring: Int64[np.ndarray, " mode"]
    p_recurring: Float64[np.ndarray, " mode"]
    null: Int64[np.ndarray, "permutation mode"]
    top: int


def recurrence(
    values: Any,
    labels: Any,
    *,
    rng: np.random.Generator,
    top: int = 5,
    clusters: Any = None,
    strata: Any = None,
    exchange: str = "auto",
    first: Any = None,
    permutations: int = 1999,
) -> Recurrence:
    """Count the modes of a table [sample, mode, head] in which each head is among the first ``top``.

    Modes (mechanisms, orders, transforms) are measured on the same samples and resemble each other, so heads recur
    without any effect: far more often than if each mode drew its heads by lot. Each permutation is therefore applied to
    all modes together, which keeps their resemblance, and the whole count is made anew.
    """
    table, shape = check_values(values)
    if len(shape) != 2:
        raise ShapeError(f"values must be [sample, mode, head], got {1 + len(shape)} axes; put other axes into one")
    modes, heads = shape
    check_count("top", top, least=1, most=max(1, heads - 1), remedy="with all heads on top nothing can recur")
    count = check_count("permutations", permutations, least=19)
    check_rng(rng)
    in_first, groups = check_labels(labels, len(table), first)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    design = design_of(in_first, codes, check_strata(strata, len(table)), exchange)
    rows = design.reduce(table)
    observed = contrast_of(rows, design, groups, shape, 0.95).t
    counts = _on_top(np.abs(observed)[None].astype(np.float32), top)[0]
    prepared = statistic_terms(rows, design)
    null = np.empty((count, modes), np.int64)
    step = max(1, _BLOCK // (modes * heads))
    for start in range(0, count, step):
        size = min(step, count - start)
        s, root = numerator_and_error(prepared, design.permuted_labels(size, rng), slice(None))
        null[start : start + size] = _recurring(_on_top(np.abs(s / root).reshape(size, modes, heads), top), modes)
    recurring = _recurring(counts[None], modes)[0]
    # A head that is on top in r modes is matched by a permutation in which any head is.
    p_any = ((null > 0).sum(axis=0) + 1) / (count + 1)
    return Recurrence(
        counts=counts,
        p_head=np.where(counts > 0, p_any[np.maximum(counts, 1) - 1], 1.0),
        recurring=recurring,
        p_recurring=((null >= recurring).sum(axis=0) + 1) / (count + 1),
        null=null,
        top=top,
    )


def _on_top(size: Float32[np.ndarray, "permutation mode head"], top: int) -> Int64[np.ndarray, "permutation head"]:
    first = np.argpartition(-size, top - 1, axis=-1)[..., :top]
    counts = np.zeros((size.shape[0], size.shape[2]), np.int64)
    np.add.at(counts, (np.arange(len(size))[:, None, None], first), 1)
    return counts


def _recurring(counts: Int64[np.ndarray, "permutation head"], modes: int) -> Int64[np.ndarray, "permutation mode"]:
    return np.stack([(counts >= least).sum(axis=1) for least in range(1, modes + 1)], axis=1)

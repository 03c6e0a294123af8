"""Folds for cross-validation that keep clusters together and labels balanced."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int64

from softgap.errors import ValueInputError

__all__ = ["grouped_folds"]


def grouped_folds(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    folds: int,
    rng: np.random.Generator,
) -> Int64[np.ndarray, " sample"]:
    """The fold of each sample.

    Clusters in random order, those with most samples first, go to the fold that is furthest behind its share of their
    labels. Every fold ends with both labels, or the folds are refused.
    """
    codes = np.arange(len(labels)) if clusters is None else clusters
    both = np.stack([np.bincount(codes, weights=labels), np.bincount(codes, weights=~labels)], axis=1)
    whole = both.sum(axis=0)
    held = np.zeros((folds, 2))
    fold_of = np.empty(len(both), np.int64)
    shuffled = rng.permutation(len(both))
    for cluster in shuffled[np.argsort(-both[shuffled].sum(axis=1), kind="stable")]:
        filled = (((held + both[cluster]) / whole) ** 2).sum(axis=1) - ((held / whole) ** 2).sum(axis=1)
        fold = int(np.argmin(filled))
        held[fold] += both[cluster]
        fold_of[cluster] = fold
    if (held == 0).any():
        raise ValueInputError(
            f"every fold needs samples of both groups, got {folds} folds for {int((both[:, 0] > 0).sum())} and "
            f"{int((both[:, 1] > 0).sum())} clusters with them; use fewer folds or more samples"
        )
    return fold_of[codes]

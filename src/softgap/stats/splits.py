"""Splits of samples: cross-validation folds that keep clusters together, and a confirmation set decided by a hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from softgap.errors import ShapeError, ValueInputError
from softgap.inputs import check_share, refuse_string

__all__ = ["Split", "cluster_folds", "confirmation_split"]


@dataclass(frozen=True, eq=False)
class Split:
    """Which samples are kept back for confirmation, and the hash that fixes it."""

    confirmation: Bool[np.ndarray, " sample"]
    hash: str
    fraction: float
    salt: str


def confirmation_split(
    ids: Sequence[str], *, fraction: float = 0.3, salt: str = "softgap", clusters: Sequence[str] | None = None
) -> Split:
    """Keep back about ``fraction`` of the samples, the same ones whoever asks and in whatever order.

    A sample is kept back if SHA-256 of the salt and its id, read as a number from 0 to 1, is below ``fraction``. So a
    sample added later moves no other. With ``clusters`` their names decide, and samples of one cluster stay together.
    ``hash`` is SHA-256 of everything that the split depends on: write it down before looking.
    """
    share = check_share("fraction", fraction, 0.3)
    refuse_string("ids", ids, "one name per sample")
    refuse_string("clusters", clusters, "one name per sample")
    names = [str(name) for name in ids]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueInputError(f"sample ids must differ, got '{repeated[0]}' more than once; name every sample once")
    deciding = names if clusters is None else [str(name) for name in clusters]
    if len(deciding) != len(names):
        raise ShapeError(
            f"clusters must have one entry per sample, got {len(deciding)} for {len(names)} samples; "
            "give each sample its own entry"
        )
    confirmation = np.array([_number(salt, name) < share for name in deciding], bool)
    if not 0 < confirmation.sum() < len(names):
        raise ValueInputError(
            f"a split needs samples on both sides, got {int(confirmation.sum())} of {len(names)} for confirmation; "
            "use more samples or another fraction"
        )
    document = json.dumps([salt, share, sorted(zip(names, deciding, strict=True))], ensure_ascii=False)
    return Split(confirmation, hashlib.sha256(document.encode()).hexdigest(), share, salt)


def _number(salt: str, name: str) -> float:
    digest = hashlib.sha256(json.dumps([salt, name], ensure_ascii=False).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def cluster_folds(
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
    label_counts = np.stack([np.bincount(codes, weights=labels), np.bincount(codes, weights=~labels)], axis=1)
    totals = label_counts.sum(axis=0)
    fold_counts = np.zeros((folds, 2))
    fold_of = np.empty(len(label_counts), np.int64)
    shuffled = rng.permutation(len(label_counts))
    for cluster in shuffled[np.argsort(-label_counts[shuffled].sum(axis=1), kind="stable")]:
        filled = (((fold_counts + label_counts[cluster]) / totals) ** 2).sum(axis=1) - (
            (fold_counts / totals) ** 2
        ).sum(axis=1)
        fold = int(np.argmin(filled))
        fold_counts[fold] += label_counts[cluster]
        fold_of[cluster] = fold
    if (fold_counts == 0).any():
        raise ValueInputError(
            f"every fold needs samples of both groups, got {folds} folds for {int((label_counts[:, 0] > 0).sum())} and "
            f"{int((label_counts[:, 1] > 0).sum())} clusters with them; use fewer folds or more samples"
        )
    return fold_of[codes]

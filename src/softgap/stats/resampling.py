"""Cluster bootstrap: how often each sample is drawn when whole clusters are drawn with replacement."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64

__all__ = ["drawn_weights", "percentile_interval"]


def drawn_weights(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    replicates: int,
    rng: np.random.Generator,
) -> Float64[np.ndarray, "replicate sample"]:
    """How often each sample is drawn.

    Clusters are drawn among those with the same labels in them (only the first, only the second, both), so that both
    groups are in every replicate and keep their share. Without clusters each sample is its own.
    """
    codes = np.arange(len(labels)) if clusters is None else clusters
    size, first = np.bincount(codes), np.bincount(codes, weights=labels)
    kind = np.where(first == 0, 0, np.where(first == size, 1, 2))
    times = np.empty((replicates, len(size)))
    for value in np.unique(kind):
        members = np.flatnonzero(kind == value)
        times[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), size=replicates)
    return times[:, codes]


def percentile_interval(sample: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """The middle ``level`` of replicates, along the first axis."""
    tail = (1 - level) / 2
    low, high = np.quantile(sample, [tail, 1 - tail], axis=0)
    return np.asarray(low), np.asarray(high)

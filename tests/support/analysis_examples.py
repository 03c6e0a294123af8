"""Runs whose divergences are given series, and columns of an analysis, for the tests of the dynamics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from softgap.analysis import Findings
from softgap.trajectories import Manifest, Trajectories


def run_of(series: np.ndarray, sample_id: str = "0", heads: Sequence[int] = ()) -> Trajectories:
    """A run whose divergence from elu1 is ``series`` [layer, head, step], and from uniform its mirror."""
    layers, width, steps = series.shape
    counts = tuple(heads) or (width,) * layers
    padding = np.arange(width) >= np.array(counts)[:, None]
    values = np.where(padding[..., None], np.nan, series).astype(np.float32)
    both = np.stack([values, 1 - values])
    return Trajectories(
        mechanisms=("elu1", "uniform"),
        layers=tuple(range(layers)),
        kv_group=np.where(padding, -1, np.arange(width) // 2).astype(np.int32),
        quantities={"divergence": both, "relative_l2": 2 * both, "norm_ratio": 3 * both},
        positions=np.arange(10, 10 + steps, dtype=np.int32),
        token_ids=np.arange(steps, dtype=np.int32),
        tokens=("a",) * steps,
        logprob=np.zeros(steps, np.float32),
        entropy=np.zeros(steps, np.float32),
        heads_per_layer=counts,
        sample_id=sample_id,
        manifest=Manifest(model="tiny", mechanisms={"elu1": {}, "uniform": {}}),
    )


def noise(seed: int, steps: int = 200, layers: int = 2, heads: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((layers, heads, steps)).astype(np.float32)


def column(findings: Findings, name: str) -> np.ndarray:
    return np.array([getattr(head, name) for head in findings.heads])

"""The fixed public names, and what a name stands for."""

from __future__ import annotations

from functools import reduce
from typing import Any

import softgap

NAMES = [
    "softgap.load_model",
    "softgap.generate",
    "softgap.read",
    "softgap.record",
    "softgap.Recording.trajectories",
    "softgap.Trajectories",
    "softgap.Trajectories.divergence",
    "softgap.Trajectories.relative_l2",
    "softgap.Trajectories.norm_ratio",
    "softgap.Trajectories.select",
    "softgap.Trajectories.to_xarray",
    "softgap.Trajectories.to_frame",
    "softgap.Trajectories.save",
    "softgap.load",
    "softgap.mechanisms",
    "softgap.register_mechanism",
    "softgap.Mechanism",
    "softgap.doctor",
    "softgap.Diagnosis",
    "softgap.calibrate",
    "softgap.Calibration",
    "softgap.signal.permutation_entropy",
    "softgap.stats.compare",
    "softgap.theory.focus.sparsity",
    "softgap.linearize.swap",
    "softgap.linearize.impact",
]


def resolve_name(name: str) -> Any:
    """The object behind a dotted name that begins with ``softgap``."""
    return reduce(getattr, name.split(".")[1:], softgap)

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
    "softgap.evaluate",
    "softgap.Evaluation",
]


# What a user calls first. Each has a docstring with every argument and a runnable example.
EXPLAINED = [
    "softgap.load_model",
    "softgap.generate",
    "softgap.read",
    "softgap.record",
    "softgap.load",
    "softgap.open_study",
    "softgap.mechanisms",
    "softgap.register_mechanism",
    "softgap.attend",
    "softgap.compare_outputs",
    "softgap.doctor",
    "softgap.calibrate",
    "softgap.Calibration.mechanism",
    "softgap.Calibration.save",
    "softgap.Calibration.load",
    "softgap.Calibration.report",
    "softgap.Trajectories.select",
    "softgap.Trajectories.to_xarray",
    "softgap.Trajectories.to_frame",
    "softgap.Trajectories.save",
    "softgap.evaluate",
    "softgap.evaluation.lm_eval",
    "softgap.linearize.attach",
    "softgap.linearize.export_plan",
    "softgap.linearize.import_pattern",
    "softgap.linearize.find_plan",
    "softgap.linearize.generate",
    "softgap.linearize.head_scores",
    "softgap.linearize.recall_scores",
    "softgap.linearize.impact",
    "softgap.linearize.swap",
    "softgap.linearize.apply",
    "softgap.linearize.load_plan",
    "softgap.signal.permutation_entropy",
    "softgap.signal.entropy_interval",
    "softgap.signal.z_scores",
    "softgap.signal.surrogates",
    "softgap.stats.compare",
    "softgap.stats.compare_table",
    "softgap.stats.joint_control",
    "softgap.stats.hedges_g",
    "softgap.stats.equivalence",
    "softgap.analysis.analyze",
    "softgap.analysis.compare_study",
    "softgap.study.measure",
    "softgap.study.run_study",
    "softgap.report.explorer",
    "softgap.report.write_explorer",
    "softgap.theory.focus_lab",
    "softgap.theory.injectivity_lab",
    "softgap.theory.separation_lab",
    "softgap.theory.position_lab",
    "softgap.theory.locality_lab",
]


def resolve_name(name: str) -> Any:
    """The object behind a dotted name that begins with ``softgap``."""
    return reduce(getattr, name.split(".")[1:], softgap)

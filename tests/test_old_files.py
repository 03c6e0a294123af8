"""Files that softgap 0.1 wrote still load: a study, a calibration and a plan of a tiny model.

They were made with the commands that stand in ``tests/data/v0.1/README.md``, before the modules moved.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import softgap
from softgap.linearize import load_plan

OLD = Path(__file__).parent / "data" / "v0.1"
MODEL = "46c83fb7706e962915ed8e72181fcbab"


def test_a_study_of_version_0_1_loads() -> None:
    runs = {run.sample_id: run for run in softgap.open_study(OLD / "study")}
    assert {name: (run.label, len(run.positions)) for name, run in runs.items()} == {
        "p0": ("long", 90),
        "p1": ("short", 99),
        "p2": ("long", 93),
        "p3": ("short", 93),
    }
    divergence = runs["p1"].quantities["divergence"]
    assert runs["p1"].mechanisms == ("elu1", "fitted", "uniform")
    assert divergence.shape == (3, 2, 4, 99)
    assert np.isfinite(divergence).all()


def test_a_calibration_of_version_0_1_loads() -> None:
    calibration = softgap.Calibration.load(OLD / "calibration.safetensors")
    assert calibration.metadata["fingerprint"] == MODEL
    assert {name.split(".")[0] for name in calibration.tensors} == {"fitted", "mean_ablation", "profile"}
    assert tuple(calibration.tensors["fitted.query_weight"].shape) == (2, 4, 4, 32)
    assert calibration.held_out.gap_closed["elu1"].value == pytest.approx(0.1105624258)
    assert calibration.held_out.tokens == 768


def test_a_plan_of_version_0_1_loads() -> None:
    plan = load_plan(OLD / "plan.json")
    assert plan.fingerprint == MODEL
    assert plan.heads == tuple((layer, head) for layer in range(2) for head in range(4))
    assert plan.substitute.window == 8
    assert plan.expected["loss"].low <= plan.expected["loss"].high

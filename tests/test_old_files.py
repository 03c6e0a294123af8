"""Files that softgap 0.1 wrote still load: a study, a calibration and a plan of a tiny model.

They were made with the commands that stand in ``tests/data/v0.1/README.md``, before the modules moved.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import softgap
from softgap.linearize import apply, load_plan, split_sequences
from softgap.linearize.sequences import read_swapped

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
    assert plan.baselines is None


def test_a_plan_of_version_0_1_computes_the_same(tmp_path: Path) -> None:
    """Its file says what the plan cost on the last quarter of its text; the hybrid of today costs the same."""
    golden = runpy.run_path(str(OLD.parents[2] / "experiments" / "golden.py"))
    model, tokenizer = softgap.load_model(str(golden["make_models"](tmp_path)["llama"]))
    plan = load_plan(OLD / "plan.json")
    plan.check(model)
    sequences = split_sequences(model, tokenizer, [golden["words"](900, 1)], length=64, tokens=1024)
    unseen = sequences.part(slice(-(len(sequences) // 4), None))
    original, swapped = (
        read_swapped(model, unseen, None, heads, plan.substitute).means() for heads in ((), plan.heads)
    )
    assert original["loss"] == pytest.approx(plan.original["loss"], abs=1e-5)
    assert swapped["loss"] - original["loss"] == pytest.approx(plan.expected["loss"].value, abs=1e-5)
    ids = unseen.ids[:, :40]
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        steps = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(13, dim=1)]
        whole = model(ids, use_cache=False).logits
    assert float((torch.cat(steps, dim=1) - whole).abs().max()) < 1e-4

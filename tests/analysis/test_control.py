"""The transform `control` of an analysis: the divergence minus that of the running mean of values."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from softgap.analysis import analyze
from softgap.cli import main
from softgap.signal import permutation_entropy
from softgap.trajectories import Trajectories
from support.analysis_examples import column, noise, run_of
from support.cli_examples import failure


def drifting() -> tuple[Trajectories, np.ndarray]:
    """Heads that follow a common slow trend, which their control has too, and white noise on top of it."""
    own = noise(1, 300)
    trend = 40 * np.log1p(np.arange(300, dtype=np.float32)) * np.ones((2, 3, 1), np.float32)
    run = run_of(trend + own)
    both = np.stack([trend + own, trend])
    return dataclasses.replace(run, quantities={**run.quantities, "divergence": both}), own


def test_the_control_is_subtracted_step_by_step() -> None:
    run, own = drifting()
    found = analyze(run, transform="control", order=4)
    both = run.quantities["divergence"].astype(np.float64)
    left = (both[0] - both[1]).reshape(6, -1)
    assert column(found, "entropy") == pytest.approx(permutation_entropy(left, 4).value, abs=1e-12)
    # The noise is back, where the raw series rises and hardly anything else.
    assert column(found, "entropy").min() > 0.95
    assert column(analyze(run, transform="raw", segment="early"), "entropy").max() < 0.9
    assert np.abs(left - own.reshape(6, -1)).max() < 1e-3
    # Mean and slope stay those of the divergence itself.
    np.testing.assert_allclose(column(found, "mean"), both[0].reshape(6, -1).mean(axis=1))


def test_the_null_of_the_control_is_plain_noise() -> None:
    run, _ = drifting()
    control, raw = (analyze(run, transform=name) for name in ("control", "raw"))
    assert control.noise_entropy == raw.noise_entropy


def test_a_study_without_control_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = drifting()
    run.save(tmp_path / "study")
    base = ["analyze", str(tmp_path / "study"), "--transform", "control", "--json"]
    assert main(base) == 0
    capsys.readouterr()
    assert failure([*base, "--mechanism", "uniform"], capsys) == (
        "transform 'control' subtracts 'uniform' from another mechanism of the study, got 'uniform' of elu1, uniform; "
        "measure both or use transform 'residual'"
    )

"""A calibration made in float32 serves the same weights in half precision, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap.analysis.headline import held_out_sentence
from softgap.calibration import Recipe
from softgap.errors import UnsupportedError
from softgap.models.fingerprint import model_fingerprint, rounded_fingerprints
from softgap.models.tensor_files import calibration_path, default_mechanisms, equip_mechanism, find_calibration
from support.model_examples import attending_llama, byte_tokenizer, save_folder

TOKENIZER = byte_tokenizer()
HALVES = [torch.bfloat16, torch.float16]


def llama(seed: int = 0) -> Any:
    return attending_llama(seed, max_position_embeddings=512)


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A calibration of the float32 model where every part finds it."""
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path))
    text = " ".join(np.random.default_rng(0).choice(["boat", "left", "harbour", "the", "old", "fox"], size=520))
    softgap.calibrate(llama(), TOKENIZER, [text], recipe=Recipe(features=4, steps=2), positions=128, stability=False)
    return calibration_path(model_fingerprint(llama()))


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_finds_the_calibration_of_its_weights(calibrated: Path, dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    assert find_calibration(model_fingerprint(model)) == calibrated
    assert default_mechanisms(model) == ("elu1", "uniform", "fitted")
    run = softgap.read(model, TOKENIZER, "Boat 3 left", mechanisms=["fitted", f"constant@{calibrated}"])
    assert run.manifest.dtype == str(dtype).removeprefix("torch.")
    assert run.manifest.extra["held_out"]["calibrated_in"] == "float32"
    plain = softgap.read(llama(), TOKENIZER, "Boat 3 left", mechanisms=["fitted"])
    assert "calibrated_in" not in plain.manifest.extra["held_out"]
    assert run.manifest.mechanisms["fitted"] == plain.manifest.mechanisms["fitted"]
    assert np.allclose(run.select("fitted").divergence, plain.divergence, atol=0.05)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_loaded_in_half_precision_is_the_same_as_one_that_was_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save_folder(tmp_path / "saved", llama())
    loaded = softgap.load_model(folder, dtype=dtype, progress=False)[0]
    assert rounded_fingerprints(llama())[str(dtype).removeprefix("torch.")] == model_fingerprint(loaded)


def test_other_weights_and_longer_dtypes_find_nothing(calibrated: Path) -> None:
    for model in (llama(1), llama(1).to(torch.bfloat16), llama().double()):
        with pytest.raises(UnsupportedError, match="there is no calibration for this model"):
            equip_mechanism("fitted", model)
        with pytest.raises(UnsupportedError, match="was fitted to the model"):
            equip_mechanism(f"fitted@{calibrated}", model)
    assert rounded_fingerprints(llama().to(torch.bfloat16)) == {}


def test_files_that_are_no_calibrations_are_passed_by(calibrated: Path) -> None:
    (calibrated.parent / "0.safetensors").write_bytes(b"no tensors")
    assert find_calibration(model_fingerprint(llama().to(torch.float16))) == calibrated


def test_the_report_says_that_the_calibration_was_fitted_in_float32() -> None:
    numbers = {"gap_closed": 0.8, "against_profile": 0.7, "explained": 0.6}
    assert held_out_sentence({**numbers, "calibrated_in": "float32"}) == (
        held_out_sentence(numbers) + " It was calibrated in float32, and these numbers are of that dtype."
    )

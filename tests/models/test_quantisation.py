"""Models with quantised weights are measured as they are, and a missing library is named."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap.calibration import Recipe
from softgap.errors import ModelError
from softgap.linearize import swap
from softgap.models import quantisation
from softgap.models.fingerprint import model_fingerprint
from softgap.models.quantisation import quantisation_of
from softgap.probe.layout import attention_layers, output_weight
from support.model_examples import attending_llama, byte_tokenizer, save_folder

TOKENIZER = byte_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_folder(tmp_path / "whole", attending_llama(max_position_embeddings=512))


def int8(folder: Path) -> Any:
    """The model in a folder, in int8; torchao warns while it is imported."""
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("torchao", reason="pip install 'softgap[quantised]'")
        return softgap.load_model(folder, quantise="int8", progress=False)[0]


def test_int8_weights_are_recorded_calibrated_and_swapped(folder: Path, tmp_path: Path) -> None:
    model, original = int8(folder), softgap.load_model(folder, progress=False)[0]
    assert quantisation_of(model) == "torchao Int8Tensor"
    run, plain = (softgap.read(m, TOKENIZER, "Boat 3 left at night", mechanisms=["elu1"]) for m in (model, original))
    assert run.manifest.extra["quantisation"] == "torchao Int8Tensor"
    assert 0 < np.abs(run.divergence - plain.divergence).max() < 0.05
    assert [g for g in softgap.doctor(model, TOKENIZER, repeats=4).gates if g.verdict != "pass"] == []
    text = " ".join(np.random.default_rng(0).choice(["boat", "left", "harbour", "the", "old", "fox"], size=520))
    made = softgap.calibrate(
        model, TOKENIZER, [text], recipe=Recipe(features=4, steps=2), positions=128, stability=False,
        out=str(tmp_path / "c.safetensors"),
    )  # fmt: skip
    assert made.metadata["rounded"] == {}, "codes and scales are no roundings of float32 weights"
    ids = torch.tensor([TOKENIZER("the old fox")["input_ids"]])
    with torch.inference_mode():
        before = model(ids).logits
        with swap(model, [(0, 1)], made.mechanism()):
            assert not torch.equal(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)


def test_the_fingerprint_covers_codes_and_scales(folder: Path, tmp_path: Path) -> None:
    model = int8(folder)
    found = model_fingerprint(model)
    assert found == model_fingerprint(int8(folder)) != model_fingerprint(attending_llama(max_position_embeddings=512))
    saved = tmp_path / "int8"
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(saved)
        TOKENIZER.save_pretrained(saved)
        assert model_fingerprint(softgap.load_model(saved, progress=False)[0]) == found
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        weight.scale.mul_(2)
    assert model_fingerprint(model) != found


def test_the_norm_of_what_heads_write_is_that_of_the_unpacked_weight(folder: Path) -> None:
    layer, expected = (attention_layers(m)[0] for m in (int8(folder), softgap.load_model(folder, progress=False)[0]))
    found, known = (output_weight(each, 8) for each in (layer, expected))
    assert found is not None
    assert known is not None
    assert torch.allclose(found, known, atol=float(known.abs().max()) / 100)


def test_an_unknown_quantisation_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="quantise must be int8, got 'int3'; leave it out for whole weights"):
        softgap.load_model(folder, quantise="int3", progress=False)


@pytest.mark.parametrize(
    ("method", "library"),
    [("torchao", "torchao"), ("bitsandbytes", "bitsandbytes"), ("gptq", "gptqmodel"), ("awq", "gptqmodel")],
)
def test_a_missing_library_is_named(method: str, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantisation, "find_spec", lambda name: None)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=f"quantised with {method}, and the library {library} that unpacks them is"):
        softgap.load_model(folder, progress=False)
    with pytest.raises(ModelError, match="quantise='int8' needs the library torchao; install it with pip install"):
        softgap.load_model(folder, quantise="int8", progress=False)


def test_importing_torchao_says_nothing_on_standard_error(folder: Path) -> None:
    pytest.importorskip("torchao", reason="pip install 'softgap[quantised]'")
    command = [sys.executable, "-m", "softgap", "doctor", str(folder), "--gate", "oracle", "--quantise", "int8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [line for line in done.stderr.splitlines() if not line.startswith("[")] == []

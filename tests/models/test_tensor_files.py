"""Files of tensors fitted to a model: found in other dtypes of its weights, and refused where they do not fit it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import softgap
from softgap.analysis.headline import held_out_sentence
from softgap.calibration import Recipe
from softgap.cli import main
from softgap.errors import UnsupportedError
from softgap.models import load_model
from softgap.models.fingerprint import model_fingerprint, rounded_fingerprints
from softgap.models.tensor_files import (
    BLOCK,
    FORMAT,
    calibration_path,
    default_mechanisms,
    equip_mechanism,
    find_calibration,
    save_calibration,
)
from support.cli_examples import failure, tiny_folder
from support.linearize_cases import with_random_parameters
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
    assert default_mechanisms(model) == default_mechanisms(llama())
    assert default_mechanisms(model)[2] == "fitted"
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


def test_a_quick_calibration_counts_only_where_there_is_no_other(calibrated: Path) -> None:
    fingerprint, half = model_fingerprint(llama()), model_fingerprint(llama().to(torch.bfloat16))
    quick = calibration_path(fingerprint, quick=True)
    quick.write_bytes(calibrated.read_bytes())
    assert find_calibration(fingerprint) == find_calibration(half) == calibrated
    calibrated.unlink()
    assert find_calibration(fingerprint) == find_calibration(half) == quick


def test_the_report_says_that_the_calibration_was_fitted_in_float32() -> None:
    numbers = {"gap_closed": 0.8, "against_profile": 0.7, "explained": 0.6}
    assert held_out_sentence({**numbers, "calibrated_in": "float32"}) == (
        held_out_sentence(numbers) + " It was calibrated in float32, and these numbers are of that dtype."
    )


Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def sound() -> Tensors:
    """The tensors of a calibration of the tiny model: two layers, four heads, two KV heads of dimension 8."""
    return {
        f"fitted.{name}": x.float() for name, x in with_random_parameters("fitted", 2, 4, 2, 8, 8).parameters.items()
    }


def read_with(folder: Path, path: Path) -> list[str]:
    return ["read", str(path.parent / "fox.txt"), "--model", str(folder), "--mechanism", f"fitted@{path}"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fox.txt").write_text("A fox.", encoding="utf-8")
    return tmp_path


def save(folder: Path, path: Path, tensors: Tensors) -> Path:
    metadata = {"fingerprint": model_fingerprint(load_model(str(folder))[0]), "model": "tiny"}
    save_calibration(path, tensors, metadata)
    return path


def test_a_sound_calibration_is_measured(folder: Path, place: Path) -> None:
    path = save(folder, place / "c.safetensors", sound())
    assert main([*read_with(folder, path), "--out", "a"]) == 0


def cut(name: str, axis: int) -> Callable[[Tensors], Tensors]:
    return lambda x: {**x, name: x[name].narrow(axis, 0, x[name].shape[axis] - 1)}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda x: {key: value for key, value in x.items() if key != name}


AXES = r"does not fit the model: its tensor 'fitted\.\w+' must have the axes \[.*\], got shape \[.*\]; calibrate the"
HOLDS = r"must hold float32 or float64 tensors with at least one number, got 'fitted\.\w+' with shape .* of \w+; cali"


FINITE = r"must hold finite numbers, got NaN or infinity in '\w+\.rate', with which nothing can"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        pytest.param(cut("fitted.query_weight", 0), AXES, id="one layer of two"),
        pytest.param(lambda x: {key: value[:1] for key, value in x.items()}, AXES, id="one layer of two everywhere"),
        pytest.param(cut("fitted.query_bias", 1), AXES, id="a head too few"),
        pytest.param(lambda x: {**x, "fitted.rate": x["fitted.rate"].repeat(1, 2, 1)}, AXES, id="KV heads repeated"),
        pytest.param(cut("fitted.key_bias", 2), AXES, id="a feature too few"),
        pytest.param(cut("fitted.key_weight", 3), AXES, id="a cut dimension"),
        pytest.param(
            lambda x: {key: value[..., :5] if "weight" in key else value for key, value in x.items()},
            AXES,
            id="a dimension cut everywhere",
        ),
        pytest.param(lambda x: {**x, "fitted.rate": x["fitted.rate"][0]}, AXES, id="an axis too few"),
        pytest.param(lambda x: {**x, "fitted.rate": x["fitted.rate"][:, :, :0]}, HOLDS, id="an empty tensor"),
        pytest.param(lambda x: {key: value.half() for key, value in x.items()}, HOLDS, id="float16"),
        pytest.param(lambda x: {**x, "fitted.rate": x["fitted.rate"] * torch.nan}, FINITE, id="NaN"),
        pytest.param(lambda x: {**x, "other.rate": torch.full((2, 2), torch.inf)}, FINITE, id="infinite, and not used"),
        pytest.param(without("fitted.rate"), r"the calibration has no rate for mechanism 'fitted'", id="missing"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Tensors], Tensors],
    sentence: str,
) -> None:
    path = save(folder, place / "c.safetensors", damage(sound()))
    assert re.search(sentence, failure(read_with(folder, path), capsys))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types_that_numpy_lacks_are_refused(
    folder: Path, place: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    import json

    from safetensors.torch import save_file

    tensors = {name: x.to(dtype) for name, x in sound().items()}
    save_file(tensors, place / "c.safetensors", metadata={BLOCK: json.dumps({"format": FORMAT, "digest": "0" * 32})})
    assert re.search(HOLDS, failure(read_with(folder, place / "c.safetensors"), capsys))

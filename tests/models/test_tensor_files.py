"""A calibration that does not fit its model, or holds what no calibration does, is refused in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from softgap.cli import main
from softgap.models import load_model
from softgap.models.fingerprint import model_fingerprint
from softgap.models.tensor_files import BLOCK, FORMAT, save_calibration
from support.cli_examples import failure, tiny_folder
from support.linearize_cases import with_random_parameters

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

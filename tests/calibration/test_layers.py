"""Layers that a Ray cluster fits are those of this machine, byte by byte, also where a worker dies or some are done."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from softgap.calibration import Recipe, calibrate, layers
from softgap.cli import main
from softgap.errors import UnknownNameError
from support.cli_examples import failure
from support.model_examples import attending_llama, byte_tokenizer, save_folder

TEXT = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))


def fit(place: Path, recipe: Any, **options: Any) -> bytes:
    model = attending_llama(max_position_embeddings=512)
    calibrate(model, byte_tokenizer(), [TEXT], recipe=recipe, positions=128, stability=False, out=place, **options)
    return place.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_worker_that_dies_is_replaced_and_the_calibration_is_that_of_this_machine(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = fit(tmp_path / "local.safetensors", Recipe(features=4, steps=3))
    marker = Path.cwd() / "marker" / "died"
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.chdir(tmp_path)  # workers do not import from the current folder
    deadly = importlib.import_module("deadly")
    spread = fit(tmp_path / "spread.safetensors", deadly.Recipe(features=4, steps=3), engine="ray", address=cluster)
    assert int(marker.read_text()) != os.getpid()
    assert spread == local


def test_layers_that_are_done_are_not_handed_out_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[int] = []

    def here(function: Any, tasks: Any, **_: Any) -> Any:
        for layer, arguments in tasks.items():
            handed.append(layer)
            if len(handed) == 4:  # the second layer of the hybrids
                raise KeyboardInterrupt
            yield layer, function(*arguments())

    monkeypatch.setattr(layers, "run_tasks", here)
    monkeypatch.setattr("softgap.calibration.whole_model.check_engine", lambda engine: None)
    recipe = Recipe(features=4, steps=3)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "spread.safetensors", recipe, engine="ray")
    assert handed == [0, 1, 0, 1]
    spread = fit(tmp_path / "spread.safetensors", recipe, engine="ray")
    assert handed[4:] == [1]
    assert spread == fit(tmp_path / "local.safetensors", recipe)


def test_an_unknown_engine_and_an_address_without_ray_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownNameError, match="engine"):
        fit(tmp_path / "x.safetensors", Recipe(features=4, steps=3), engine="dask")
    folder = save_folder(tmp_path / "tiny", attending_llama(max_position_embeddings=512))
    capsys.readouterr()
    assert failure(["calibrate", str(folder), "--ray-address", "10.0.0.9:1"], capsys) == (
        "--ray-address needs --engine ray, got '10.0.0.9:1' without it; add --engine ray"
    )


def test_a_missing_ray_is_named_before_anything_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    folder = save_folder(tmp_path / "tiny", attending_llama(max_position_embeddings=512))
    capsys.readouterr()
    assert main(["calibrate", str(folder), "--engine", "ray", "--out", str(tmp_path / "x.safetensors")]) == 2
    assert "the engine 'ray' needs Ray; install it with: pip install 'softgap[ray]'" in capsys.readouterr().err

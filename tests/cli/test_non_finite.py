"""A model whose numbers are not finite: every command says so first, and blames the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softgap.cli import main
from support.cli_examples import failure
from support.model_examples import overflowing_llama, save_folder, tiny_llama

MARK = "Not a sound measurement: "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders: ``nan`` with one weight that is none, ``large`` whose activations float16 does not hold."""
    root = tmp_path_factory.mktemp("models")
    broken = tiny_llama()
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight[3, 3] = torch.nan
    save_folder(root / "nan", broken)
    save_folder(root / "large", overflowing_llama())
    return root


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Standard output of a command, its lines unwrapped."""
    assert main(list(arguments)) == code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["run", "read", "study", "calibrate", "evaluate"])
def test_a_weight_that_is_none_is_refused(
    command: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A fox went out at night. " * 200)
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a fox"}\n')
    model = str(models / "nan")
    arguments = {
        "run": ["run", "a fox", "--model", model],
        "read": ["read", "text.txt", "--model", model],
        "study": ["study", "run", "asked.jsonl", "--model", model],
        "calibrate": ["calibrate", model, "--text", "text.txt"],
        "evaluate": ["evaluate", model, "--text", "text.txt"],
    }[command]
    if command == "read":
        (tmp_path / "text.txt").write_text("A fox went out.")
    assert failure(arguments, capsys).startswith(
        "the weights of a model must be finite numbers, got NaN or infinity in 'model.layers.1.self_attn.v_proj.weight'"
    )
    assert not (tmp_path / "runs").exists()


def test_run_read_study_and_report_count_them_first(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A fox went out.")
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a fox"}\n{"prompt": "an owl"}\n')
    options = ("--model", str(models / "large"), "--dtype", "float16")
    shown = said(capsys, "run", "a fox", *options, "--out", "run", "--max-new-tokens", "4")
    assert f"greedy {MARK}64 of 128 divergences (50 %) and 4 of 4 log-probabilities (100 %) are not finite" in shown
    shown = said(capsys, "read", "text.txt", *options, "--out", "read")
    assert f"steps {MARK}" in shown
    study = ("study", "run", "asked.jsonl", *options, "--out", "study", "--max-new-tokens", "4")
    shown = said(capsys, *study)
    assert shown.startswith(MARK)
    assert said(capsys, *study).startswith(MARK)  # also where all was measured earlier
    document: dict[str, Any] = json.loads(
        said(capsys, "run", "a fox", *options, "--out", "run", "--overwrite", "--max-new-tokens", "4", "--json")
    )
    assert document["non_finite"]["scores"] == 4
    said(capsys, "report", "run")
    assert f'"headline":"{MARK}' in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_doctor_blames_the_model(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "doctor", str(models / "nan"), "--gate", "oracle", code=1)
    assert "The fault is the model's, not softgap's: the weights of a model must be finite numbers" in shown
    shown = said(capsys, "doctor", str(models / "large"), "--dtype", "float16", "--gate", "oracle", code=1)
    assert "The fault is the model's, not softgap's: a model must give finite numbers" in shown
    assert "passed of 1 gates" in said(capsys, "doctor", str(models / "large"), "--gate", "oracle")

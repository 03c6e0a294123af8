"""`softgap export` and `softgap import`, through the real entry point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softgap.attention import resolve
from softgap.cli import main
from softgap.linearize import Plan, Substitute, load_plan
from softgap.models import load_model
from softgap.models.fingerprint import model_fingerprint
from support.cli_examples import failure
from support.model_examples import save_folder, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_llama())


@pytest.fixture(autouse=True)
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model, _ = load_model(str(folder))
    window = Substitute(resolve("elu1+window:w=5,sinks=2"))
    Plan(str(folder), model_fingerprint(model), ((0, 0), (0, 1)), ((0, 0),), (), window).save("plan.json")
    return tmp_path


def test_a_plan_goes_out_and_comes_back(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json", "--model", str(folder), "--out", "pattern"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "The pattern loses what the heads become" in shown
    assert "Wrote config.json, full_attention_heads.tsv to pattern" in shown
    assert main(["import", "pattern", "--model", str(folder), "--out", "back.json", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"out": "back.json", "groups": [[0, 0]], "name": "window:w=5,sinks=2"}
    assert load_plan("back.json").groups == ((0, 0),)
    assert main(["export", "back.json", "--model", str(folder), "--format", "layers", "--out", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["files"] == ["full_attention_layers.json"]


def test_bad_input_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", str(folder)]
    assert "format must be one of duo, layers" in failure(
        ["export", "plan.json", *model, "--format", "gguf", "--out", "pattern"], capsys
    )
    assert "cannot read a pattern from" in failure(["import", "nowhere", *model, "--out", "back.json"], capsys)
    assert "plan.json" in failure(["import", "nowhere", *model, "--out", "plan.json"], capsys)
    assert not Path("pattern").exists()


def test_a_folder_is_evaluated_under_its_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json", "--model", str(folder), "--format", "folder", "--out", "planned"]) == 0
    assert "softgap_plan.json" in capsys.readouterr().out
    line = ["evaluate", "planned", "--tasks", "loss", "--lengths", "64", "--json"]
    # The tokens of this model are bytes, and no sentence has fewer than 64.
    assert "no sentence fits into 64 tokens" in failure(line, capsys)
    Path("own.txt").write_text("A fox went out on a chilly night. " * 40)
    assert main([*line, "--text", "own.txt"]) == 0
    assert json.loads(capsys.readouterr().out)["label"].startswith("softgap_plan.json")

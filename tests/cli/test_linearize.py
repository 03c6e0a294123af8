"""`softgap linearize`: from a text file to a plan that a model runs under, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from softgap.cli import main
from softgap.linearize import apply, load_plan
from softgap.models import load_model
from support.cli_examples import failure
from support.model_examples import save_folder, tiny_llama

QUICK = ["--length", "64", "--tokens", "1024", "--budget", "9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", tiny_llama(max_position_embeddings=512))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(40))
    (tmp_path / "boats.txt").write_text(text, encoding="utf-8")
    return tmp_path


def test_a_plan_is_found_shown_drawn_and_applied(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["linearize", str(folder), "--text", "boats.txt", "--window", "8", "--picture", "plan.svg", *QUICK]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "in 8 of 8 heads. It frees 4 of 4 KV groups and 2 whole layers." in " ".join(shown.split())
    assert "The plan replaces softmax by " in shown
    assert "recall (first token of each answer)" in shown
    assert "recall (whole answers)" in shown
    assert "Recall rests on 96 lists (1,152 questions); the 95 % half-width of its change is 0.0" in shown
    assert "\n##\n##\n##\n##\n" in shown  # four rows of heads, two layers
    assert "heads without softmax" in (here / "plan.svg").read_text(encoding="utf-8")
    assert not (here / "plan.json.parts").exists()
    assert main(["report", ".", "--out", "plan.html"]) == 0
    page = (here / "plan.html").read_text(encoding="utf-8")
    assert "in 8 of 8 heads. It frees 4 of 4 KV groups and 2 whole layers." in page
    assert "Recall rests on 96 lists (1,152 questions); the 95 % half-width of its change is 0.0" in page
    assert "data:image/svg+xml" in page
    capsys.readouterr()
    model, tokenizer = load_model(str(folder))
    plan = load_plan("plan.json")
    assert plan.substitute.window == 8
    ids = tokenizer("Boat 3 left", return_tensors="pt")["input_ids"]
    with torch.no_grad(), apply(model, plan) as applied:
        both = [
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False, **settings)  # type: ignore[operator]
            for settings in ({}, {"past_key_values": applied.cache()})
        ]
    assert torch.equal(*both)


def test_json_is_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "linearize",
        str(folder),
        "--text",
        "boats.txt",
        "--by",
        "heads",
        "--mechanism",
        "uniform",
        "--no-repair",
    ]
    options = ["--score", "divergence", "--recall-budget", "0.9", "--out", "p.json", "--json"]
    assert main([*arguments, *QUICK, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(Path("p.json").read_text(encoding="utf-8"))
    assert found["recall"]["lists"] == found["recall"]["decided_on"] == 96
    assert 0 <= found["recall"]["half_width"] <= 0.02
    assert found["mechanism"]["name"] == "uniform"
    assert found["parameters"] is None
    assert (found["provenance"]["budget"], found["provenance"]["recall_budget"]) == (9, 0.9)


def test_bad_input_is_one_sentence(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["linearize", str(folder)]
    assert "a search needs text, got none" in failure(start, capsys)
    Path("short.txt").write_text("short", encoding="utf-8")
    assert "at least 2048 tokens" in failure([*start, "--text", "short.txt"], capsys)
    assert "must end in .json, got 'plan.txt'" in failure([*start, "--text", "boats.txt", "--out", "plan.txt"], capsys)
    assert "unknown mechanism 'elu2'" in failure([*start, "--text", "boats.txt", "--mechanism", "elu2", *QUICK], capsys)
    monkeypatch.setattr("softgap.linearize.search._Search.change", lambda self, heads: {"loss": 0.5, "recall": -0.4})
    assert "nothing meets the budget of 0.1 nats per token: the cheapest of the groups costs 0.5" in failure(
        [*start, "--text", "boats.txt", *QUICK[:4]], capsys
    )
    assert "nothing meets the recall budget of 0.2: the cheapest of the groups loses 0.4 of recall already" in failure(
        [*start, "--text", "boats.txt", *QUICK, "--recall-budget", "0.2"], capsys
    )
    assert "recall budget must be between 0 and 1" in failure(
        [*start, "--text", "boats.txt", *QUICK, "--recall-budget", "7"], capsys
    )
    Path("there.json").write_text("{}", encoding="utf-8")
    assert "already exists" in failure([*start, "--text", "boats.txt", "--out", "there.json"], capsys)
    Path("weights.safetensors").write_text("precious", encoding="utf-8")
    for extra in ([], ["--overwrite"]):
        said = failure([*start, "--text", "boats.txt", "--out", "weights.json", *extra], capsys)
        assert "'weights.safetensors' already exists, and the plan would write its parameters there" in said

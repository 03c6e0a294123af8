"""`softgap linearize`: from a text file to a plan that a model runs under, and what is refused on the way."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import softgap
from softgap.attention import resolve
from softgap.cli import main
from softgap.cli.linearize import _grid, parse_bytes
from softgap.linearize import Mixture, Plan, apply, load_plan
from softgap.linearize.baselines import Baselines
from softgap.linearize.plan import cache_bytes_at
from softgap.models import load_model
from softgap.models.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
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
    arguments = ["linearize", str(folder), "--text", "boats.txt", "--picture", "plan.svg", "--format", "svg", *QUICK]
    assert main([*arguments, "--window", "8"]) == 0
    shown = capsys.readouterr().out
    assert "in 8 of 8 heads. It frees 4 of 4 KV groups and 2 whole layers." in " ".join(shown.split())
    assert "The plan replaces softmax by " in shown
    assert "recall (first token of each answer)" in shown
    assert "recall (whole answers)" in shown
    asked = r"Recall rests on 96 lists \(1,152 questions\) across \d+ tokens of other text; the 95 % half-width"
    assert re.search(asked + r" of its change is 0\.0", " ".join(shown.split()))
    assert "\n##\n##\n##\n##\n" in shown  # four rows of heads, two layers
    assert "heads without softmax" in (here / "plan.svg").read_text(encoding="utf-8")
    assert "<svg" in (here / "plan-column.svg").read_text(encoding="utf-8")
    assert not (here / "plan.json.parts").exists()
    assert main(["report", ".", "--out", "plan.html"]) == 0
    page = (here / "plan.html").read_text(encoding="utf-8")
    assert "in 8 of 8 heads. It frees 4 of 4 KV groups and 2 whole layers." in page
    asked = r"Recall rests on 96 lists \(1,152 questions\) across \d+ tokens of other text; the 95 % half-width"
    assert re.search(asked + r" of its change is 0\.0", " ".join(page.split()))
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


def test_a_byte_budget_allocates_several_kinds(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["linearize", str(folder), "--text", "boats.txt", *QUICK[:4], "--picture", "plan.svg"]
    kinds = ["--mechanism", "window:w=2,sinks=1", "--mechanism", "elu1"]
    assert main([*arguments, *kinds, "--budget-bytes", "60%", "--context", "128"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    plan = load_plan("plan.json")
    own, original = (cache_bytes_at(plan.memory, 128, original=x) for x in (False, True))
    assert own <= 0.6 * original
    assert f"({own / original:.0%})" in words
    assert "At 128 tokens one sequence keeps" in words
    assert "only window" in words
    assert plan.provenance["budget_bytes"] == 0.6 * original
    assert (here / "plan.svg").is_file()
    assert main(["report", ".", "--out", "plan.html"]) == 0
    assert "At 128 tokens one sequence keeps" in (here / "plan.html").read_text(encoding="utf-8")


def test_the_map_has_a_letter_for_every_kind(folder: Path) -> None:
    model, _ = load_model(str(folder))
    heads = ((0, 0), (0, 1), (1, 0), (1, 1))
    mixture = Mixture([(heads[:2], resolve("window")), (heads[2:], resolve("elu1"))])
    plan = Plan("tiny", model_fingerprint(model), heads, ((0, 0), (1, 0)), (), mixture)
    assert _grid(plan, attention_layers(model)) == ["we", "we", "..", ".."]
    assert plan.sentence(8, 4).startswith(
        "The plan replaces softmax by window (2 heads), elu1 (2 heads) in 4 of 8 heads."
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("96M", (96e6, False)), ("1.5 GiB", (1.5 * 2**30, False)), ("512b", (512, False)), ("25%", (0.25, True))],
)
def test_bytes_are_read(text: str, expected: tuple[float, bool]) -> None:
    assert parse_bytes(text) == expected


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


def test_baselines_stand_beside_the_plan(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["linearize", str(folder), "--text", "boats.txt", "--no-correct", "--score", "divergence", *QUICK]
    assert main([*start, "--mechanism", "elu1+window:w=6,sinks=2,f=0.7"]) == 0
    shown = capsys.readouterr().out
    found = load_plan("plan.json").baselines
    assert found is not None
    words = " ".join(shown.split())
    for row in found.rows:
        assert row.name in words
    assert "window:w=8,sinks=4" in words
    assert f"{found.row('sinks + window').loss[64].value:+.3f} ±" in words
    assert "Not evaluated at 2,048 tokens: the model's context has 512 tokens." in words
    assert words.startswith(found.verdict() or "The plan replaces softmax by elu1+window:w=6,sinks=2,f=0.7 in 8 of 8")
    assert main(["report", ".", "--out", "plan.html"]) == 0
    assert "sinks + window (window:w=8,sinks=4)" in (here / "plan.html").read_text(encoding="utf-8")
    capsys.readouterr()
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert document["baselines"] == found.to_json()
    assert main([*start, "--mechanism", "elu1", "--no-baselines", "--out", "bare.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["baselines"] is None


def test_a_better_window_is_the_first_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "A sliding window costs less at the same memory: much."
    monkeypatch.setattr(Baselines, "verdict", lambda self: said)
    start = ["linearize", str(folder), "--text", "boats.txt", "--no-correct", "--score", "divergence", *QUICK]
    assert main([*start, "--mechanism", "elu1"]) == 0
    assert capsys.readouterr().out.startswith(
        "A sliding window costs less at the same memory: much.\nThe plan replaces"
    )


def test_windows_and_hybrids_are_mechanisms_like_any_other(
    tmp_path: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also with the parameters of a calibration: files of version 0.1 belong to the model of golden.py."""
    tests = Path(__file__).parents[1]
    golden = runpy.run_path(str(tests.parent / "experiments" / "golden.py"))
    golden["make_models"](tmp_path / "models")
    llama = str(tmp_path / "models" / "llama")
    hybrid = "fitted+window:w=6,sinks=2,f=0.7"
    named = f"{hybrid}@{tests / 'data' / 'v0.1' / 'calibration.safetensors'}"
    options = ["--no-correct", "--score", "divergence", "--no-baselines", *QUICK]
    for mechanism, out in ((named, "hybrid.json"), ("window:w=6,sinks=2", "window.json")):
        assert main(["linearize", llama, "--text", "boats.txt", "--mechanism", mechanism, "--out", out, *options]) == 0
    assert load_plan("hybrid.json").substitute.name == hybrid
    assert load_plan("window.json").substitute.name == "window:w=6,sinks=2"
    both = ["--mechanism", named, "--mechanism", "window:w=6,sinks=2", "--model", llama]
    assert main(["run", "Boat 3", "--max-new-tokens", "12", "--out", "run", *both]) == 0
    (here / "page.txt").write_text("Boat 3 left with 9 barrels of salt and came back.", encoding="utf-8")
    assert main(["read", "page.txt", "--out", "read", *both]) == 0
    capsys.readouterr()
    for study in ("run", "read"):
        (trajectories,) = softgap.open_study(study)
        assert trajectories.mechanisms == (hybrid, "window:w=6,sinks=2", "uniform")
        assert np.isfinite(trajectories.quantities["divergence"]).all()
    # The window sees the whole text as long as that is short.
    window = trajectories.select("window:w=6,sinks=2").divergence
    assert float(np.abs(window[..., :7]).max()) < 1e-5 < float(window[..., 7:].max())


def test_bad_input_is_one_sentence(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["linearize", str(folder)]
    assert "a search needs text, got none" in failure(start, capsys)
    Path("short.txt").write_text("short", encoding="utf-8")
    assert "at least 2048 tokens" in failure([*start, "--text", "short.txt"], capsys)
    assert "must end in .json, got 'plan.txt'" in failure([*start, "--text", "boats.txt", "--out", "plan.txt"], capsys)
    assert "unknown mechanism 'elu2'" in failure([*start, "--text", "boats.txt", "--mechanism", "elu2", *QUICK], capsys)
    monkeypatch.setattr(
        "softgap.linearize.candidates.CandidateCosts.change", lambda self, candidate: {"loss": 0.5, "recall": -0.4}
    )
    one = [*start, "--text", "boats.txt", "--mechanism", "elu1"]
    assert "nothing meets the budget of 0.1 nats per token: the cheapest of the groups costs 0.5" in failure(
        [*one, *QUICK[:4]], capsys
    )
    assert "nothing meets the recall budget of 0.2: the cheapest of the groups loses 0.4 of recall already" in failure(
        [*one, *QUICK, "--recall-budget", "0.2"], capsys
    )
    several = [*start, "--text", "boats.txt", *QUICK[:4]]
    assert "the cheapest allocation costs 0.5 already" in failure(several, capsys)
    assert "takes bytes (96M, 1.5GiB) or a share (25%), got 'half'" in failure(
        [*several, "--budget-bytes", "half"], capsys
    )
    assert "nothing meets the byte budget of 3: the least" in failure(
        [*several, "--budget-bytes", "3", "--mechanism", "elu1", "--mechanism", "window"], capsys
    )
    assert "needs several mechanisms" in failure([*one, *QUICK[:4], "--budget-bytes", "1k"], capsys)
    two = ["--mechanism", "elu1", "--mechanism", "decay", "--window", "8"]
    assert "--window needs one --mechanism" in failure([*several, *two], capsys)
    assert "recall budget must be between 0 and 1" in failure(
        [*start, "--text", "boats.txt", *QUICK, "--recall-budget", "7"], capsys
    )
    Path("there.json").write_text("{}", encoding="utf-8")
    assert "already exists" in failure([*start, "--text", "boats.txt", "--out", "there.json"], capsys)
    Path("weights.safetensors").write_text("precious", encoding="utf-8")
    for extra in ([], ["--overwrite"]):
        said = failure([*start, "--text", "boats.txt", "--out", "weights.json", *extra], capsys)
        assert "'weights.safetensors' already exists, and the plan would write its parameters there" in said


def test_a_recall_budget_is_given_or_turned_off_but_not_both(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--recall-budget", "0.1", "--no-recall-budget"]
    assert main(["linearize", str(folder), "--text", "boats.txt", *both]) == 2
    assert "--no-recall-budget does not limit recall, and --recall-budget 0.1 does" in capsys.readouterr().err

"""`softgap evaluate`: from a model and a plan to a table, a file and one JSON document."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from softgap.attention import resolve
from softgap.cli import main
from softgap.cli.evaluate import largest_window, parse_counts
from softgap.errors import ValueInputError
from softgap.evaluation import Evaluation
from softgap.evaluation.answers import loss_by_position
from softgap.linearize import Mixture, Plan, Substitute, load_plan
from softgap.models import load_model
from softgap.models.fingerprint import model_fingerprint
from support.cli_examples import failure, script, without_progress
from support.model_examples import attending_llama, save_folder

QUICK = ["--tasks", "recall,needle,loss", "--lengths", "512", "--pairs", "4", "--contexts", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", attending_llama(max_position_embeddings=1024))


@pytest.fixture(autouse=True)
def here(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    model, _ = load_model(str(folder))
    heads, groups = ((0, 0), (0, 1)), ((0, 0),)
    window = Substitute(resolve("window:w=32,sinks=2"))
    Plan(str(folder), model_fingerprint(model), heads, groups, (), window).save(tmp_path / "plan.json")
    return tmp_path


def test_a_plan_is_compared_with_the_original(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = ["--out", "found.json", "--format", "pdf"]
    assert main(["evaluate", str(folder), "--plan", "plan.json", *QUICK, *figure]) == 0
    assert (here / "found-column.pdf").read_bytes().startswith(b"%PDF")
    shown = " ".join(capsys.readouterr().out.split())
    assert "scores can be measured with" in shown
    assert "All distances above the window of 32 keys" in shown
    assert "recall, 4 pairs" in shown
    assert "not measurable with this model" in shown
    assert "the change is paired by context" in shown
    assert not (here / "found.json.parts").exists()
    found = Evaluation.load("found.json")
    assert (found.window, found.label.split()[0]) == (32, "plan.json")
    (row,) = found.select(metric="loss", distance=None)
    assert row.change is not None
    assert row.change.value != 0


def test_two_plans_are_compared(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = load_plan("plan.json")
    replace(plan, substitute=Substitute(resolve("window:w=48,sinks=2"))).save("other.json")
    arguments = ["evaluate", str(folder), "--plan", "plan.json", "--against", "other.json", *QUICK]
    assert main([*arguments, "--out", "found.json"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"Compared with other\.json \(\w+\), plan\.json \(\w+\) is equivalent within the margin in \d", shown
    )
    assert "original" not in shown
    found = Evaluation.load("found.json")
    assert (found.window, found.against.split()[0]) == (48, "other.json")


def test_the_script_prints_one_document(folder: Path, here: Path) -> None:
    mine = '{"prompt": "The capital of France is", "answer": "Paris"}'
    (here / "mine.jsonl").write_text(mine + "\n" + mine + "\n", encoding="utf-8")
    done = script("evaluate", str(folder), *QUICK, "--questions", "mine.jsonl", "--json", "--no-generation", cwd=here)
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    document = json.loads(done.stdout)
    assert {row["task"] for row in document["rows"]} == {"recall", "needle", "loss", "own"}
    assert not any(row["metric"].startswith("generated") for row in document["rows"])
    assert all(row["change"] is None for row in document["rows"])


def test_an_interrupted_command_resumes(
    folder: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(folder), *QUICK, "--out", "found.json"]
    scored: list[Any] = []

    def stop(*given: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("softgap.evaluation.sampling.loss_by_position", stop)
    assert main(arguments) == 130
    assert "run the same command again to resume" in capsys.readouterr().err
    monkeypatch.setattr("softgap.evaluation.sampling.loss_by_position", loss_by_position)
    monkeypatch.setattr("softgap.evaluation.sampling.score_answers", lambda *given: scored.append(given))
    assert main(arguments) == 0
    assert scored == [], "answers that were scored before the interruption are not scored again"
    assert {row.task for row in Evaluation.load("found.json").rows} == {"recall", "needle", "loss"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "recal"], "unknown task 'recal'; did you mean 'recall'?"),
        (["--lengths", "1k,x"], "--lengths takes whole numbers between commas, such as 512,1k, got '1k,x'"),
        (["--lengths", "4k"], "lengths must be a whole number from 64 to 1024, got 4096; the model's own context is"),
        (["--against", "plan.json"], "--against needs a plan to compare, got none; give one with --plan"),
        (["--pairs", "0"], "--pairs takes whole numbers between commas, such as 512,1k, got '0'"),
        (["--questions", "none.jsonl"], "cannot read 'none.jsonl': No such file or directory"),
        (["--plan", "none.json"], "none.json"),
        (["--out", "plan.json"], "'plan.json' already exists; choose another file, or replace it with --overwrite"),
    ],
)
def test_bad_input_is_one_sentence(
    folder: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in failure(["evaluate", str(folder), *arguments], capsys)


def test_a_plan_of_another_model_is_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is scored."""
    monkeypatch.setattr("softgap.evaluation.evaluate", None)
    other = save_folder(tmp_path_factory.mktemp("other") / "tiny", attending_llama(1, max_position_embeddings=512))
    capsys.readouterr()
    assert "the plan is for the model" in failure(["evaluate", str(other), "--plan", "plan.json", *QUICK], capsys)


def test_the_window_of_a_plan_is_its_largest() -> None:
    parts = [([(0, 0)], resolve("window:w=32,sinks=2")), ([(0, 1)], resolve("window:w=100,sinks=0"))]
    mixed = Plan("m", "f", ((0, 0), (0, 1)), (), (), Mixture([*parts, ([(1, 0)], resolve("elu1"))]))
    assert largest_window(mixed) == 100
    assert largest_window(Plan("m", "f", ((0, 0),), (), (), Substitute(resolve("elu1")))) == 0


def test_counts() -> None:
    assert parse_counts(" 512, 1K,8k", "--lengths") == [512, 1024, 8192]
    for wrong in ("", "1,", "-3", "1.5k", "k"):
        with pytest.raises(ValueInputError, match="--lengths takes whole numbers"):
            parse_counts(wrong, "--lengths")

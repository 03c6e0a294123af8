"""`softgap lab separation`: verdicts, files, training that resumes, one sentence for errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from softgap.cli import main
from support.cli_examples import failure, without_progress

SMALL = ["--d", "66", "--mechanism", "elu1", "--map", "d=18/66,b=0.2/0.5", "--draws", "6", "--map-draws", "3"]


@pytest.fixture(autouse=True)
def _no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


def test_verdicts_are_printed_and_saved_with_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    assert main(["lab", "separation", *SMALL, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert without_progress(printed.err) == ""
    for word in ("Separation", "holds", "Hoeffding", "n is below 10,1", f"saved {out}"):
        assert word in printed.out
    document = json.loads((out / "result.json").read_text())
    assert document["construction"]["d"] == 66
    assert [one["mechanism"] for one in document["trials"]] == ["softmax", "identity", "elu1"]
    assert [one["mechanism"] for one in document["maps"]] == ["softmax", "identity", "elu1"]
    assert document["trained"] is None
    assert ElementTree.parse(out / "figure.svg").getroot().tag.endswith("svg")
    assert sorted(path.name for path in out.iterdir()) == ["figure.svg", "result.json"]


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "separation", *SMALL, "--cross", "--seed", "5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["construction"]["cross"] is True
    assert document["settings"] == {"draws": 6, "map_draws": 3, "seed": 5}
    assert {claim["name"] for claim in document["claims"]} >= {"softmax separates", "linear fails", "normaliser"}


def test_training_is_kept_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found"
    arguments = ["lab", "separation", *SMALL, "--train", "--task", "recall-4", "--task", "recall-6", "--steps", "2"]
    arguments += ["--seeds", "2", "--out", str(out)]
    assert main(arguments) == 0
    cells = {path.name: path.read_bytes() for path in (out / "cells").iterdir()}
    assert len(cells) == 8
    document = json.loads((out / "result.json").read_text())
    assert [one["task"] for one in document["trained"]["scores"]] == ["recall-4", "recall-6"]
    assert {"recall", "a task for linear"} <= {claim["name"] for claim in document["claims"]}
    assert "trained: accuracy" in (out / "figure.svg").read_text()
    (out / "cells" / "recall-4_elu1_1.json").unlink()
    assert main([*arguments, "--json"]) == 0
    capsys.readouterr()
    after = {path.name: path.read_bytes() for path in (out / "cells").iterdir()}
    assert after.keys() == cells.keys()
    assert {name for name in cells if after[name] == cells[name]} >= set(cells) - {"recall-4_elu1_1.json"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--n", "100", "--d", "34"], "n must be (d - 2) t, got n = 100, d = 34, t = 3"),
        (["--b", "0.5", "--c", "0.6"], "b + c must be 1, got 0.5 + 0.6 = 1.1"),
        (["--mechanism", "fitted"], "mechanism 'fitted' needs the parameters query_weight"),
        (["--mechanism", "softmix"], "unknown mechanism 'softmix'; did you mean 'softmax'?"),
        (["--map", "d"], "a map has two axes, written like d,b or d=34/130,b=0.2/0.5, got 'd'; name two"),
        (["--map", "d,q"], "unknown axis of a map 'q'"),
        (["--draws", "0"], "draws must be a whole number from 1, got 0"),
        (["--train", "--task", "sorting"], "unknown task 'sorting'"),
        (["--train", "--mechanism", "decay"], "mechanism 'decay' cannot be trained here"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = (
        ["lab", "separation", "--d", "34", *arguments] if "--d" not in arguments else ["lab", "separation", *arguments]
    )
    assert failure([*given, "--out", str(tmp_path / "new")], capsys).startswith(sentence)
    assert not (tmp_path / "new").exists()


def test_break_conditions_by_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "separation", *SMALL, "--n", "100", "--c", "0.6", "--allow-breaks", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["construction"]["n"] == 100
    assert document["ablation"] == []

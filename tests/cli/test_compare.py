"""`softgap compare`: the verdict first, findings and figure saved, plans that decide everything."""

from __future__ import annotations

import html
import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from softgap.analysis import Preregistration, compare_study
from softgap.cli import main
from softgap.cli.compare import PreregistrationOptions
from support.cli_examples import contents, failure, script, without_progress
from support.stats_cases import planted
from support.study_examples import named, simulated_study

QUICK = ["--permutations", "99", "--refits", "19", "--feature", "mean", "--feature", "slope"]


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    x, labels = planted(2, 120, 30, {7: 2.5})
    return simulated_study(tmp_path / "s", x, named(labels), fields={"hard": [i % 3 for i in range(120)]})


def test_the_verdict_comes_first_through_the_console_script(study: Path) -> None:
    shown = script("compare", "s", "--stratum", "hard", "--first", "wrong", *QUICK, "--format", "svg", cwd=study.parent)
    assert (shown.returncode, without_progress(shown.stderr)) == (0, "")
    lines = shown.stdout.splitlines()
    assert re.match(r"(Separated|Not separated|Not enough data): ", lines[0])
    assert lines[1].startswith("exploratory: no plan was written down")
    assert lines[-1] == "saved s/comparisons/0001"
    assert "within hard" in shown.stdout
    result = json.loads((study / "comparisons/0001/result.json").read_text())
    assert result["verdict"]["sentence"] == lines[0]
    assert result["top"][0]["layer"] == 7 // 5
    assert result["top"][0]["g"]["low"] > 1
    assert (study / "comparisons/0001/figure.svg").read_text().startswith("<?xml")
    assert 'width="241.2pt"' in (study / "comparisons/0001/figure-column.svg").read_text()


def test_a_plan_decides_everything_and_its_hash_is_kept_first(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = 'features = ["mean"]\npermutations = 99\nrefits = 19\ndraws = 1\nmargin = 0.9\nmatch = []\n'
    Path("plan.toml").write_text(plan)
    assert failure(["compare", "s", "--plan", "plan.toml", "--margin", "0.4"], capsys) == (
        "a preregistration sets every option, but the command line also gives margin; write it into 'plan.toml'"
    )
    assert main(["compare", "s", "--plan", "plan.toml", "--json", "--out", "out"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["verdict"]["outcome"]) == ("planned", "separated")
    log = [json.loads(line) for line in (study / "comparisons/log.jsonl").read_text().splitlines()]
    assert [(entry["event"], entry["hash"]) for entry in log] == [
        ("plan", found["plan_hash"]),
        ("looked", found["plan_hash"]),
    ]
    assert json.loads(Path("out/result.json").read_text())["plan"]["margin"] == 0.9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("margin 0.5", r"the preregistration 'plan.toml' is not TOML \(.*\); write lines such as margin = 0.5"),
        ("marign = 0.5", r"unknown key of the preregistration 'plan.toml' 'marign'; did you mean 'margin'\?"),
        ('margin = "big"', "margin in the preregistration 'plan.toml' must be like 0.5, got 'big'; correct it"),
        ("orders = [9]", "order must be .*got 9.*"),
        ('features = ["meen"]', r"unknown feature 'meen'; did you mean 'mean'\?"),
    ],
)
def test_a_plan_that_cannot_be_used_is_refused_before_anything_is_read(
    study: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    Path("plan.toml").write_text(text)
    before = contents(study)
    assert re.fullmatch(sentence, failure(["compare", "s", "--plan", "plan.toml"], capsys))
    assert contents(study) == before


def test_no_study_and_no_groups(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["compare", "nowhere"], capsys) == "there is no study at 'nowhere'; check the path"
    assert failure(["compare", "s", "--by", "prompt"], capsys).startswith(
        "two groups are compared, got only 'q' in 'prompt'"
    )


def test_the_report_shows_the_comparison(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "s", *QUICK]) == 0
    sentence = capsys.readouterr().out.splitlines()[0]
    assert main(["report", "s", "--out", "s.html"]) == 0
    page = html.unescape(Path("s.html").read_text(encoding="utf-8"))
    assert sentence in page
    assert "Units with the largest effects, over all samples" in page
    assert "exploratory: no plan was written down" in page
    assert main(["report", "s/comparisons/0001", "--out", "alone.html"]) == 0
    assert sentence in html.unescape(Path("alone.html").read_text(encoding="utf-8"))


def test_a_comparison_shows_itself_in_a_notebook(study: Path) -> None:
    found = compare_study(str(study), Preregistration(features=("mean",), permutations=99, refits=19))
    assert repr(found) == f"<ComparisonFindings: {found.verdict.sentence}>"
    shown = found._repr_html_()
    assert shown is not None
    assert found.verdict.sentence.split(":")[0] in html.unescape(html.unescape(shown))


def test_options_are_fields_of_the_plan() -> None:
    options, plan = ({field.name for field in fields(kind)} for kind in (PreregistrationOptions, Preregistration))
    assert options <= plan
    given = PreregistrationOptions(features=["mean"], orders=[4], margin=0.3, collapse=True, match=[])
    assert given.preregistration(None) == Preregistration(features=("mean",), orders=(4,), margin=0.3, collapse=True)

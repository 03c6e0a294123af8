"""`softgap analyze` through the console script: what it shows, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from cli_examples import contents, failure, script
from softgap.analysis import analyze
from softgap.cli import main
from softgap.signal import simulate
from softgap.trajectories import open_study
from test_analysis import noise, run_of

pytestmark = pytest.mark.usefixtures("_no_colour")


@pytest.fixture
def _no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def study(tmp_path: Path) -> Path:
    series = noise(1, 300)
    series[0, 0] = simulate("logistic", 300, rng=np.random.default_rng(0))
    run_of(series).save(tmp_path / "study")
    return tmp_path / "study"


def test_a_study_is_summed_up_and_drawn(study: Path) -> None:
    before = contents(study)
    done = script("analyze", str(study), "--transform", "raw", "--order", "4", cwd=study.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in ("transform raw", "order 4", "1 sample of 300 steps", "heads below noise", "0.0", "logistic r=4"):
        assert part in done.stdout
    findings = json.loads((study / "analysis" / "findings.json").read_text())
    assert [0, 0] in findings["standing_out"]
    assert findings["settings"]["order"] == 4
    picture = ElementTree.parse(study / "analysis" / "plane.svg").getroot()
    assert picture.tag.endswith("svg")
    words = (study / "analysis" / "plane.svg").read_text()
    assert "permutation entropy" in words or len(words) > 10_000
    # What was measured is untouched, and still reads as a study.
    after = {name: content for name, content in contents(study).items() if not name.startswith("analysis")}
    assert after == before
    assert len(open_study(study)) == 1
    again = script("analyze", str(study), "--transform", "raw", "--order", "4", cwd=study.parent)
    assert again.returncode == 0
    assert json.loads((study / "analysis" / "findings.json").read_text()) == findings


def test_json_is_one_document_and_writes_nothing(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study)
    assert main(["analyze", str(study), "--json", "--segment", "late", "--eligibility", "40", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = analyze(open_study(study), segment="late", eligibility=40, seed=3)
    assert [head["entropy"] for head in document["heads"]] == [head.entropy for head in expected.heads]
    assert document["source"]["model"] == "tiny"
    assert contents(study) == before


def test_files_by_their_endings(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [study.parent / "new" / f"found.{ending}" for ending in ("png", "svg", "csv", "parquet", "json")]
    assert main(["analyze", str(study), *(word for name in names for word in ("--out", str(name)))]) == 0
    assert capsys.readouterr().out.count("saved ") == 5
    assert names[0].read_bytes().startswith(b"\x89PNG")
    frames = [pd.read_csv(names[2], keep_default_na=False), pd.read_parquet(names[3])]
    pd.testing.assert_frame_equal(frames[0], frames[1], check_dtype=False)
    assert len(frames[0]) == 6
    assert sorted(path.name for path in names[0].parent.iterdir()) == sorted(name.name for name in names)
    assert not (study / "analysis").exists()


def test_a_study_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_of(noise(1, 20)).save(tmp_path / "study")
    assert main(["analyze", str(tmp_path / "study"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert not any(head["eligible"] for head in document["heads"])
    assert document["heads"][0]["entropy"] is None
    assert main(["analyze", str(tmp_path / "study"), "--out", str(tmp_path / "found.csv")]) == 0
    assert "No head is eligible: 17 windows are fewer than the 64 asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--order", "9"], "order must be between 2 and 8, got 9; use a shorter pattern"),
        (["--delay", "0"], "delay must be a whole number from 1, got 0; 1 takes neighbouring steps"),
        (["--transform", "dif"], "unknown transform 'dif'"),
        (["--ties", "some"], "unknown ties policy 'some'"),
        (["--mechanism", "elu2"], "unknown mechanism of this study 'elu2'"),
        (["--out", "plane.pdf"], "--out must end in .png, .svg, .json, .csv, .parquet, got 'plane.pdf'"),
        (["--delay", "300"], "no sample holds one window of order 3 and delay 300"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(study)
    assert failure(["analyze", str(study), *arguments], capsys).startswith(sentence)
    assert contents(study) == before


def test_bad_studies_and_places(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = study.parent / "nowhere"
    assert failure(["analyze", str(nowhere)], capsys) == f"there is no study at '{nowhere}'; check the path"
    assert not nowhere.exists()
    (study.parent / "file").write_text("")
    blocked = study.parent / "file" / "plane.svg"
    assert main(["analyze", str(study), "--out", str(blocked)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert failure(["analyze", str(study), "--out", str(study)], capsys).startswith("--out must end in")

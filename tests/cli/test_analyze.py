"""`softgap analyze` through the console script: what it shows, what it writes, and what it refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from softgap.analysis import analyze
from softgap.cli import main
from softgap.cli.render.findings import show_findings
from softgap.signal import simulate
from softgap.trajectories import StudyWriter, open_study
from support.analysis_examples import noise, run_of
from support.cli_examples import contents, failure, script, without_progress

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
    assert without_progress(done.stderr) == ""
    for part in ("transform raw", "order 4", "1 sample with 300 steps", "1 head below noise", "0.0", "logistic r=4"):
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
    assert main(["analyze", str(study), "--transform", "raw", "--order", "4"]) == 0
    assert json.loads((study / "analysis" / "findings.json").read_text()) == findings


def test_json_is_one_document_and_writes_nothing(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study)
    assert main(["analyze", str(study), "--json", "--segment", "late", "--eligibility", "40", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    expected = analyze(open_study(study), segment="late", eligibility=40, seed=3)
    assert [head["entropy"] for head in document["heads"]] == [head.entropy for head in expected.heads]
    assert document["source"]["model"] == "tiny"
    assert contents(study) == before


def test_json_is_all_there_is_on_standard_output(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(study), "--json", "--out", str(study.parent / "heads.csv")]) == 0
    done = capsys.readouterr()
    assert without_progress(done.err) == ""
    assert done.out.startswith("{\n")
    assert len(json.loads(done.out)["heads"]) == 6
    assert (study.parent / "heads.csv").exists()


def test_a_file_that_cannot_be_written_leaves_no_document(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study.parent / "file").write_text("")
    blocked = study.parent / "file" / "plane.svg"
    assert failure(["analyze", str(study), "--json", "--out", str(blocked)], capsys).startswith(
        "files are written to a folder"
    )


def test_a_study_of_many_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [run_of(noise(seed, 5 + seed % 40), str(seed)) for seed in range(60)]
    with StudyWriter(tmp_path / "study", runs[0].manifest) as writer:
        for run in runs:
            writer.append([run])
    assert main(["analyze", str(tmp_path / "study"), "--transform", "residual"]) == 0
    shown = capsys.readouterr().out
    used = [run.n_steps for run in runs if run.n_steps >= 16]
    assert f"{len(used)} samples with {sum(used):,} steps in total; {60 - len(used)} more are too short" in shown
    document = json.loads((tmp_path / "study" / "analysis" / "findings.json").read_text())
    assert {head["windows"] for head in document["heads"]} == {sum(used) - 2 * len(used)}


def test_a_narrow_terminal_cuts_no_cell(study: Path) -> None:
    found = analyze(open_study(study), transform="raw")
    for width in (80, 120):
        page = io.StringIO()
        show_findings(Console(file=page, width=width), found)
        shown = page.getvalue()
        assert "…" not in shown
        assert max(map(len, shown.splitlines())) <= width
        assert ("complexity" in shown) == (width == 120)


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
    assert main(["analyze", str(tmp_path / "study")]) == 0
    shown = capsys.readouterr().out
    assert "No head is eligible: 17 windows are fewer than the 64 asked for" in shown
    assert [path.name for path in (tmp_path / "study" / "analysis").iterdir()] == ["findings.json"]
    picture = tmp_path / "plane.png"
    sentence = failure(["analyze", str(tmp_path / "study"), "--json", "--out", str(picture)], capsys)
    assert sentence.startswith("no head has enough windows for the complexity-entropy plane; 17 windows are fewer")


def test_without_matplotlib_only_the_picture_is_missing(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["analyze", str(study)]) == 0
    shown = capsys.readouterr().out
    assert "no picture: a figure needs matplotlib; install it with: pip install 'softgap[plot]'" in shown
    assert [path.name for path in (study / "analysis").iterdir()] == ["findings.json"]
    sentence = failure(["analyze", str(study), "--out", "plane.svg"], capsys)
    assert sentence.startswith("a figure needs matplotlib")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--order", "1"], "order must be between 2 and 8, got 1; use a longer pattern"),
        (["--order", "9"], "order must be between 2 and 8, got 9; use a shorter pattern"),
        (["--delay", "0"], "delay must be a whole number from 1, got 0; 1 takes neighbouring steps"),
        (["--transform", "dif"], "unknown transform 'dif'"),
        (["--ties", "some"], "unknown ties policy 'some'"),
        (["--segment", "middle"], "unknown segment 'middle'; did you mean 'mid'?"),
        (["--quantity", "norm"], "unknown quantity 'norm'"),
        (["--eligibility", "0"], "eligibility must be 'spread' or '2*order!' or a number of windows from 1, got 0"),
        (["--alpha", "5"], "alpha must be between 0 and 1, both excluded, got 5.0; 0.05 is usual"),
        (["--order", "three"], "invalid value for '--order'"),
        (["--mechanism", "elu2"], "unknown mechanism of this study 'elu2'"),
        (["--out", "plane.gif"], "--out must end in .pdf, .png, .svg, .json, .csv, .parquet, got 'plane.gif'"),
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
    empty = study.parent / "empty"
    with StudyWriter(empty, run_of(noise(1)).manifest):
        pass
    assert failure(["analyze", str(empty)], capsys) == (
        f"an analysis needs trajectories, got study '{empty}' without any; use `softgap run` or `softgap read` first"
    )
    (study.parent / "file").write_text("")
    blocked = study.parent / "file" / "plane.svg"
    assert main(["analyze", str(study), "--out", str(blocked)]) == 2
    assert "files are written to a folder, but" in capsys.readouterr().err
    assert failure(["analyze", str(study), "--out", str(study)], capsys).startswith("--out must end in")


def test_the_plane_for_a_paper(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(study), "--transform", "raw", "--format", "pdf"]) == 0
    drawn = study / "analysis" / "plane-column.pdf"
    assert f"saved {drawn}" in capsys.readouterr().out
    assert drawn.read_bytes().startswith(b"%PDF")
    assert main(["analyze", str(study), "--json", "--out", str(tmp_path / "heads.csv"), "--format", "svg"]) == 0
    assert 'width="241.2pt"' in (tmp_path / "heads-column.svg").read_text()

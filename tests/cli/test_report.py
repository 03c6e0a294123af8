"""`softgap report`: what it writes and says, and what it refuses in one sentence."""

from __future__ import annotations

import json
import shutil
import webbrowser
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from softgap.cli import main
from softgap.report import write_explorer
from softgap.trajectories import StudyWriter, open_study
from support.cli_examples import contents, failure, without_progress
from support.explorer_examples import labelled_runs, save_study, story


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return save_study(tmp_path / "study", [story(steps=12, prompt_steps=3)])


def test_the_last_line_is_the_path(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(study)
    assert main(["report", str(study)]) == 0
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ""
    assert captured.out.splitlines()[-1] == str(study / "report.html")
    assert "Report on 1 sample, " in captured.out
    page = (study / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    # What was measured is untouched, and a report is replaced by the next one.
    after = contents(study)
    assert after.pop("report.html")
    assert after == before
    assert len(open_study(study)) == 1
    assert main(["report", str(study)]) == 0
    assert (study / "report.html").read_text() == page


def test_json_is_one_document(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "look.html"
    assert main(["report", str(study), "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "study": str(study),
        "out": str(out),
        "bytes": out.stat().st_size,
        "samples": 1,
        "carried": 1,
    }
    assert not (study / "report.html").exists()


def test_samples_asked_for_are_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = save_study(tmp_path / "study", labelled_runs(4))
    assert main(["report", str(study), "--sample", "s2", "--sample", "s1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["carried"] == 2
    assert main(["report", str(study), "--sample", "s1"]) == 0
    assert "Report on 4 samples (1 of them token by token), " in capsys.readouterr().out
    assert failure(["report", str(study), "--sample", "s9"], capsys) == "unknown sample 's9'; did you mean 's3'?"


def test_folders_that_are_no_study(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["report", str(tmp_path / "no")], capsys).startswith(f"there is no study at '{tmp_path / 'no'}'")
    assert "is not a study: it has no manifest.json" in failure(["report", str(tmp_path)], capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_newer_format(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = json.loads((study / "manifest.json").read_text())
    (study / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    assert "has format version 99, but this softgap reads only up to 1" in failure(["report", str(study)], capsys)


def test_studies_with_nothing_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    StudyWriter(tmp_path / "begun", story().manifest)
    words = failure(["report", str(tmp_path / "begun")], capsys)
    assert words.startswith(f"a report needs trajectories, but the study at '{tmp_path / 'begun'}' has no sample; ")
    save_study(tmp_path / "empty", [story(steps=0, prompt_steps=4)])
    words = failure(["report", str(tmp_path / "empty")], capsys)
    assert words.startswith(f"a report needs steps, but no sample of the study at '{tmp_path / 'empty'}' has any;")
    assert not (tmp_path / "empty" / "report.html").exists()


def test_a_study_that_lost_its_trajectories(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (study / "trajectories" / "part-00000.parquet").unlink()
    assert "has samples/part-00000.parquet but no trajectories/part-00000.parquet" in failure(
        ["report", str(study)], capsys
    )


def test_samples_with_different_heads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = save_study(tmp_path / "study", [story(), story(sample_id="b", layers=3)])
    assert "must have the same heads and quantities, got 18 heads in sample 'b' and 24 in 'fox'" in failure(
        ["report", str(study)], capsys
    )


def test_other_files_are_not_replaced_unasked(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = tmp_path / "thesis.html"
    precious.write_text("<!doctype html><p>my thesis")
    words = failure(["report", str(study), "--out", str(precious)], capsys)
    assert words.startswith(f"'{precious}' exists and is not a softgap report; choose another file, or add --overw")
    assert precious.read_text() == "<!doctype html><p>my thesis"
    assert "is a folder; add a file name" in failure(["report", str(study), "--out", str(tmp_path)], capsys)
    assert main(["report", str(study), "--out", str(precious), "--overwrite"]) == 0
    assert "softgap explorer" in precious.read_text()


def test_a_place_that_cannot_be_written(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    words = failure(["report", str(study), "--out", str(tmp_path / "file" / "a.html")], capsys)
    assert words.startswith(f"files are written to a folder, but '{tmp_path / 'file'}' is a file; ")


def test_open_without_a_browser(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    words = failure(["report", str(study), "--open"], capsys)
    assert (
        words == "--open needs a browser, and none was found here (no display); leave --open out and open it yourself"
    )
    assert not (study / "report.html").exists()


def test_open_shows_the_file(study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake(webbrowser.BaseBrowser):
        def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:
            addresses.append(url)
            return len(addresses) == 1

    addresses: list[str] = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.get", Fake)
    assert main(["report", str(study), "--open"]) == 0
    assert addresses == [(study / "report.html").as_uri()]
    assert main(["report", str(study), "--open"]) == 2
    assert "the browser did not open" in capsys.readouterr().err


def test_charts_without_the_package(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("softgap.report.page.distribution", absent)
    assert failure(["report", str(study)], capsys) == (
        "a report needs D3 from the package mpld3; install it with: pip install 'softgap[report]'"
    )


def test_a_report_is_written_whole_or_not_at_all(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_explorer(study)
    before = contents(study)

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        write_explorer(study, overwrite=True)
    assert contents(study) == before


def test_two_studies_are_one_page_about_their_difference(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = study.parent / "other"
    shutil.copytree(study, other)
    assert main(["report", str(study), str(other), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["out"] == str(study / "difference-other.html")
    assert said["samples"] == said["carried"] == 2
    assert "other minus" in Path(said["out"]).read_text(encoding="utf-8")
    assert main(["report", str(study), str(other), "--sample", "0"]) == 2
    assert "--sample, --heads and --calibration are for the report on one study" in capsys.readouterr().err


def test_the_map_by_kind_for_a_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = story()
    kinds = {str(layer): "wSwhSf" for layer in run.layers}
    study = save_study(
        tmp_path / "study", [replace(run, manifest=replace(run.manifest, extra={"held_out": {"kinds": kinds}}))]
    )
    assert main(["report", str(study), "--format", "pdf"]) == 0
    assert (study / "kinds-column.pdf").read_bytes().startswith(b"%PDF")
    assert (study / "report.html").exists()
    assert f"Map by kind, for a paper: {study / 'kinds-column.pdf'}\n" in capsys.readouterr().out
    plain = save_study(tmp_path / "plain", [run])
    words = failure(["report", str(plain), "--format", "svg"], capsys)
    assert words.startswith(f"the figure of a study shows the kinds of its heads, which the study at '{plain}' does no")
    assert not (plain / "report.html").exists()
    assert failure(["report", str(study), str(plain), "--format", "pdf"], capsys).startswith(
        "--format draws the kinds of heads of one study, got two"
    )
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "result.json").write_text('{"lab": "focus", "claims": []}')
    assert "holds findings; give --format to the command that makes them" in failure(
        ["report", str(tmp_path / "lab"), "--format", "pdf"], capsys
    )

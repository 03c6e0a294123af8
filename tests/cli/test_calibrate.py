"""`softgap calibrate`: from a text file to a mechanism that run and read use, and what is refused on the way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from softgap.calibration import Calibration
from softgap.cli import main
from softgap.trajectories import load
from support.cli_examples import contents, failure, without_progress
from support.model_examples import attending_llama, save_folder

QUICK = ["--features", "4", "--steps", "3", "--positions", "128"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", attending_llama(max_position_embeddings=512))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    text = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))
    (place / "boats.txt").write_text(text, encoding="utf-8")
    return place


def test_a_calibrated_model_is_measured_against_its_fitted_map(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["read", "boats.txt", "--model", str(folder), "--out", "before"]) == 2  # longer than the context
    (here / "short.txt").write_text("Boat 1 left.", encoding="utf-8")
    assert main(["read", "short.txt", "--model", str(folder), "--out", "before"]) == 0
    assert main(["calibrate", str(folder), "--text", "boats.txt", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "Fitted 4 features to every head in 3 steps, on the given text and on text of many kinds" in shown
    assert "gap to profile closed by fitted" in shown
    assert "energy explained by uniform, median head" in shown
    assert "On held-out text the calibration closes" in shown
    assert "rank correlation" in shown
    assert main(["read", "short.txt", "--model", str(folder), "--out", "after", "--map", "both"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "share of the gap that the fitted map leaves, by head" in shown
    assert "On held-out text the calibration closes" in shown
    assert load("before").mechanisms == ("elu1", "uniform")
    assert load("after").mechanisms == ("elu1", "uniform", "fitted", "window:w=2,sinks=1")


def test_quick_calibrates_once_and_leaves_a_full_calibration_alone(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ["calibrate", str(folder), "--quick"]
    assert main([*quick, "--features", "4", "--steps", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(
        "Quick calibration: fitted 4 features to every head in 2 steps, on the text that comes with"
    )
    assert "The cheapest substitute that suffices" in shown
    assert "A quick calibration does not measure the stability of the labels" in shown
    (file,) = (here.parent / "calibrations").glob("*.safetensors")
    assert file.name.endswith(".quick.safetensors")
    (here / "short.txt").write_text("Boat 1 left.", encoding="utf-8")
    assert main(["read", "short.txt", "--model", str(folder), "--out", "quick"]) == 0
    assert "These labels come from a quick calibration" in " ".join(capsys.readouterr().out.split())
    before = file.read_bytes()
    assert main(quick) == 0
    assert "this model has a quick calibration, which stays as it is" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert main(["calibrate", str(folder), "--text", "boats.txt", *QUICK]) == 0
    (full,) = (here.parent / "calibrations").glob("*.safetensors")
    before = full.read_bytes()
    capsys.readouterr()
    assert main(quick) == 0
    assert "this model has a full calibration, which stays as it is" in capsys.readouterr().err
    assert full.read_bytes() == before


def test_json_is_one_document_and_the_file_is_where_it_says(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(folder), "--text", "boats.txt", *QUICK, "--out", "c.safetensors", "--json"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == ""
    assert "the model reads\n" in shown.err
    assert "fitted 0 of 2 layers\n" in shown.err
    found = json.loads(shown.out)
    assert found["path"] == "c.safetensors"
    assert found["recipe"]["features"] == 4
    assert found["held_out"]["tokens"] > 0
    assert sorted(contents(here)) == ["boats.txt", "c.safetensors"]
    (here / "short.txt").write_text("Boat 1 left.", encoding="utf-8")
    by_path = ["--mechanism", "fitted@c.safetensors", "--out", "short"]
    assert main(["read", "short.txt", "--model", str(folder), *by_path]) == 0
    assert load(str(here / "short")).mechanisms == ("fitted", "uniform")


def test_the_ladder_is_shown_and_a_quick_calibration_says_what_it_left_out(
    folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(folder), "--text", "boats.txt", *QUICK, "--out", "c.safetensors"]
    assert main(arguments) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "on the given text and on text of many kinds that the model generated." in shown
    assert "Share of the gap closed at equal memory" in shown
    assert re.search(r"windows with 0(, \d+)* sinks close -?0\.\d+.* of the gap", shown)
    assert re.search(r"The calibration takes \d+ sinks? ", shown)
    assert "Heads that keep their kind" in shown
    assert main([*arguments, "--overwrite", "--no-mix", "--no-stability"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "in 3 steps, on the given text." in shown
    assert "The stability of the kinds was not measured." in shown
    found = Calibration.load("c.safetensors")
    assert found.metadata["recipe"]["rows"]["generated"] == found.metadata["recipe"]["rows"]["moved"] == 0
    assert found.metadata["generated_lengths"] == []
    assert found.memory_ladder is not None
    assert [rung.keys for rung in found.memory_ladder.rungs] == [16, 32, 64, 128, 256]
    for rung in found.memory_ladder.rungs:
        for entry in (rung.window, rung.fitted, rung.hybrid):
            assert entry.keys_worth == pytest.approx(rung.keys, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "5", "--minutes", "1"], "give --steps or --minutes, not both, got 5 and 1; only --steps is "),
        (["--text", "none.txt"], "cannot read 'none.txt': No such file or directory; "),
        (
            ["--quick", "--minutes", "1"],
            "--quick fixes the time and the positions; leave --minutes and --positions out",
        ),
        (["--text", "boats.txt", "--out", "boats.txt"], "'boats.txt' already exists; choose another file, or "),
        (["--text", "boats.txt", "--features", "1"], "features must be from 2 to 8192, got 1; 128 is usual"),
        (["--text", "boats.txt", "--steps", "0"], "steps must be at least 1, got 0; 450 is usual"),
        (
            ["--text", "boats.txt", "--positions", "4096"],
            "positions must be at most the model's context of 512, got 4096",
        ),
        (["--text", "boats.txt", "--positions", "1"], "positions must be at least 128, got 1"),
        (
            ["--text", "boats.txt", "--minutes", "0"],
            "minutes must be a number above 0, got 0; leave it out for a number of steps",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    arguments: list[str], sentence: str, folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(here.parent)
    assert failure(["calibrate", str(folder), *arguments], capsys).startswith(sentence)
    assert contents(here.parent) == before

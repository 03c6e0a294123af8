"""--dry-run tells what a command would cost, as a table or as JSON, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softgap.cli import main
from softgap.cli.render.cost import duration
from support.cli_examples import contents, failure, without_progress
from support.model_examples import attending_llama, save_folder

COMMANDS = {
    "run": ["run", "Boat 1", "--model", "MODEL", "--max-new-tokens", "4", "--raw"],
    "read": ["read", "short.txt", "--model", "MODEL"],
    "samples": ["read", "samples.jsonl", "--model", "MODEL"],
    "study": ["study", "run", "samples.jsonl", "--model", "MODEL", "--raw"],
    "calibrate": ["calibrate", "MODEL", "--text", "boats.txt", "--positions", "128", "--features", "4", "--steps", "2"],
    "linearize": [
        "linearize",
        "MODEL",
        "--text",
        "boats.txt",
        "--length",
        "64",
        "--tokens",
        "512",
        "--mechanism",
        "elu1",
    ],
    "evaluate": ["evaluate", "MODEL", "--tasks", "recall", "--lengths", "256", "--pairs", "4", "--contexts", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("models") / "tiny", attending_llama(max_position_embeddings=512))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    text = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(90))
    (tmp_path / "boats.txt").write_text(text, encoding="utf-8")
    (tmp_path / "short.txt").write_text(text[:200], encoding="utf-8")
    rows = [{"prompt": f"Boat {n}", "completion": " left."} for n in range(3)]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", COMMANDS)
def test_a_dry_run_tells_time_memory_and_disk_and_writes_nothing(
    name: str, folder: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [str(folder) if part == "MODEL" else part for part in COMMANDS[name]]
    before = contents(here)
    capsys.readouterr()
    assert main([*line, "--dry-run", "--json"]) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == ""
    cost = json.loads(shown.out)
    assert cost["dry_run"]
    assert cost["seconds"] == pytest.approx(sum(cost["stages"].values()))
    assert min(cost["seconds"], cost["memory_bytes"], cost["disk_bytes"], cost["probe_seconds"]) > 0
    assert contents(here) == before


def test_a_dry_run_is_shown_as_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "short.txt", "--model", str(folder), "--dry-run"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Expected cost of softgap measure on this machine" in shown
    assert "at the peak. Disk: " in shown
    assert shown.endswith("Nothing was written.")


def test_a_dry_run_refuses_what_the_command_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["read", "boats.txt", "--model", str(folder), "--dry-run"]
    assert "512 tokens" in failure(line, capsys)


def test_durations_are_seconds_minutes_or_hours() -> None:
    assert [duration(x) for x in (0.34, 12.0, 89, 120, 7200)] == ["0.3 s", "12 s", "89 s", "2 min", "2.0 h"]

"""`softgap doctor`: one row per gate, and an exit code that says whether one failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from softgap.cli import main
from softgap.gates import Diagnosis, Gate
from softgap.gates.model import GATES
from softgap.progress import Progress
from support.cli_examples import Terminal, failure, loads_once, tiny_folder, without_progress

GATE_ROWS = (
    Gate("parity", "pass", 3.87e-07, 1e-4, "relative L2 of outputs"),
    Gate("live", "fail", 0.25, 1e-3, "largest difference [of steps]"),
    Gate("batch", "model", 0.5, 1e-3, "the model's own logits differ"),
    Gate("stability", "skip", None, None, "left out"),
)


def diagnosed(monkeypatch: pytest.MonkeyPatch, gates: tuple[Gate, ...]) -> list[Any]:
    """Have the doctor find this, and list what it was asked."""
    asked: list[Any] = []

    def doctor(model: Any, tokenizer: Any, *, gates: list[str], progress: Progress, **_: Any) -> Diagnosis:
        asked.append(gates)
        for name in gates:
            progress(f"gate {name}", 0.0)
        return Diagnosis("tiny", "sha", "float32", "sdpa", found)

    found = gates
    monkeypatch.setattr("softgap.gates.doctor", doctor)
    return asked


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    loads_once(monkeypatch)
    return str(tiny_folder(tmp_path / "tiny"))


def test_the_embedded_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gate", "parity", "--gate", "oracle", "--json"]) == 0
    shown = capsys.readouterr()
    assert without_progress(shown.err) == ""
    document = json.loads(shown.out)
    assert (document["model"], document["passed"]) == ("smollm2-135m", True)
    assert [gate["name"] for gate in document["gates"]] == ["parity", "oracle"]
    for gate in document["gates"]:
        assert gate["verdict"] == "pass"
        assert 0 < gate["measured"] < gate["threshold"]


def test_a_gate_that_fails_is_exit_code_1(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = diagnosed(monkeypatch, GATE_ROWS)
    assert main(["doctor", folder]) == 1
    assert asked == [list(GATES)]
    captured = capsys.readouterr()
    assert without_progress(captured.err) == ""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in captured.out.splitlines() if "│" in line]
    assert rows == [
        ["parity", "pass", "3.87e-07", "0.0001", "relative L2 of outputs"],
        ["live", "fail", "0.25", "0.001", "largest difference [of steps]"],
        ["batch", "model", "0.5", "0.001", "the model's own logits differ"],
        ["stability", "skip", "", "", "left out"],
    ]
    assert captured.out.endswith("\n1 passed, 1 failed, 1 undecided (the model itself varies), 1 skipped of 4 gates\n")
    assert main(["doctor", folder, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is False


def test_a_gate_that_cannot_judge_the_model_is_no_failure(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diagnosed(monkeypatch, (GATE_ROWS[0], *GATE_ROWS[2:]))
    assert main(["doctor", folder]) == 0


def test_a_terminal_names_the_gate_under_way(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = diagnosed(monkeypatch, GATE_ROWS[:1])
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert main(["doctor", folder, "--gate", "parity"]) == 0
    assert asked == [["parity"]]
    assert "gate parity" in terminal.getvalue()


def test_an_unknown_gate_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loads = loads_once(monkeypatch)
    assert failure(["doctor", "--gate", "paritee"], capsys) == "unknown gate 'paritee'; did you mean 'parity'?"
    assert loads == []


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(["doctor", "smollm-135m"], capsys).startswith("unknown model 'smollm-135m'; allowed are ")

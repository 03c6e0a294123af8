"""The fixed public names are there: importable, with a docstring; `test_docs.py` finds them in the reference."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

import softgap
from softgap.cli.app import app
from support.public_names import NAMES, resolve_name

REPOSITORY = Path(__file__).parents[1]
FIELDS = ["positions", "token_ids", "tokens", "logprob", "entropy", "prompt"]
COMMANDS = [
    "run",
    "read",
    "doctor",
    "calibrate",
    "analyze",
    "compare",
    "study",
    "lab",
    "linearize",
    "evaluate",
    "export",
    "import",
    "report",
    "serve",
    "mechanisms",
    "models",
]
COMMON = {"--model", "--mechanism", "--max-new-tokens", "--out", "--seed"}


def undocumented(module: ModuleType, where: str) -> list[str]:
    """Public functions and classes of a module, and of the modules among its names, that have no docstring."""
    missing = [] if inspect.getdoc(module) else [where]
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            missing += undocumented(value, f"{where}.{name}") if hasattr(value, "__all__") else []
        elif (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
            missing.append(f"{where}.{name}")
    return missing


@pytest.fixture(scope="module")
def cli_reference() -> str:
    """The generated page of the command line."""
    program = "import _reference as r; print(r.cli_page())"
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY / "docs", capture_output=True, text=True, check=True
    )
    return made.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_fixed_name_is_there_and_described(name: str) -> None:
    assert inspect.getdoc(resolve_name(name))


@pytest.mark.parametrize("field", FIELDS)
def test_a_run_has_its_fixed_fields(field: str) -> None:
    assert field in softgap.Trajectories.__dataclass_fields__
    described = inspect.getdoc(softgap.Trajectories) or ""
    assert re.search(rf"^.*\b{field}\b", described.partition("Attributes")[2], flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fixed_command_is_in_the_reference(command: str, cli_reference: str) -> None:
    assert re.search(rf"^## softgap {command}\b", cli_reference, flags=re.MULTILINE)


def test_run_takes_the_common_options() -> None:
    commands: Any = typer.main.get_command(app)
    options = {option for parameter in commands.commands["run"].params for option in parameter.opts}
    assert options >= COMMON


def test_every_public_name_is_described() -> None:
    assert undocumented(softgap, "softgap") == []


def test_names_without_a_docstring_are_found() -> None:
    module = ModuleType("planted", "Words.")
    module.__dict__.update(__all__=["f", "g"], f=lambda: None, g=lambda: None)
    assert undocumented(module, "planted") == ["planted.f", "planted.g"]

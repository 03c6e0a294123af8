"""The command line through its real entry point, the installed console script."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import softgap
from softgap.cli import main
from softgap.cli.app import app
from softgap.cli.main import _takes_model
from softgap.cli.render.output import write_json
from softgap.errors import ShapeError

SCRIPT = Path(sys.executable).with_name("softgap")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, check=False)


def failed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one sentence of a command that fails, in this process."""
    code = main(arguments)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("softgap: ")
    return code, captured.err.removeprefix("softgap: ").rstrip("\n")


def raise_from_the_registry(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def mechanisms() -> None:
        raise error

    monkeypatch.setattr("softgap.attention.mechanisms", mechanisms)


def test_version_is_that_of_the_package() -> None:
    shown = run("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"softgap {softgap.__version__}\n", "")


def command_names(command: Any, name: str = "") -> Iterator[str]:
    """A command, and those below it."""
    yield name
    for inner, below in getattr(command, "commands", {}).items():
        yield from command_names(below, f"{name} {inner}".strip())


@pytest.mark.parametrize("command", list(command_names(typer.main.get_command(app))))
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    assert f"Example: softgap {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "earlier", "present"),
    [
        ("compare s", "--plan x.toml", "preregistration"),
        ("compare s", "--plan=x.toml", "preregistration"),
        ("linearize", "--tune 3", "distil"),
        ("linearize", "--no-repair", "correct"),
    ],
)
def test_the_earlier_spelling_of_an_option_is_accepted_and_not_listed(
    command: str, earlier: str, present: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    parsed = typer.main.get_command(app).commands[name].make_context(name, [*arguments, *earlier.split()])  # type: ignore[attr-defined]
    assert parsed.params[present] == {"preregistration": "x.toml", "distil": 3, "correct": False}[present]
    assert main([name, "--help"]) == 0
    assert earlier.partition("=")[0].split()[0] not in capsys.readouterr().out.split()


def test_mechanisms_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for name, mechanism in softgap.mechanisms().items():
        assert f" {name} " in shown.out
        assert mechanism.formula.split()[0] in shown.out  # a long formula is folded
    assert "softmax([x," in shown.out  # brackets are not taken for markup
    assert all(text in shown.out for text in (" TAIL+window ", " all keys ", " 64 keys ", " nothing "))


def test_json_is_one_document_of_the_registry() -> None:
    shown = run("mechanisms", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    document = json.loads(shown.stdout)
    assert set(document) == {"dim", "mechanisms", "hybrid"}
    assert document["hybrid"]["name"] == "TAIL+window"
    assert document["hybrid"]["example"]["keys_worth"] == 96.5
    assert [row["name"] for row in document["mechanisms"]] == list(softgap.mechanisms())
    by_name = {row["name"]: row for row in document["mechanisms"]}
    assert by_name["elu1"]["features"] == 64
    assert by_name["hedgehog"]["features"] == 128
    assert by_name["top_k"]["forms"] == ["quadratic"]
    assert by_name["inline"]["signed"] is True
    worth = {name: (row["keys_worth"], row["keeps_all_keys"]) for name, row in by_name.items()}
    assert (worth["window"], worth["elu1"]) == ((64, False), (32.5, False))
    assert (worth["constant"], worth["softmax"], worth["profile"]) == ((0, False), (None, True), (None, True))
    assert by_name["profile"]["needs"] != []


def test_measured_json_holds_the_controls(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mechanisms", "--json", "--measure", "--seed", "3"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["synthetic_head"] == {"length": 256, "dim": 64, "seed": 3}
    rows = {row["mechanism"]: row for row in document["measurements"]}
    assert set(rows) == {name for name, mechanism in softgap.mechanisms().items() if not mechanism.missing}
    assert rows["softmax"]["from_softmax"] == pytest.approx(0, abs=1e-6)
    assert rows["uniform"]["from_uniform"] == pytest.approx(0, abs=1e-6)
    assert rows["softmax"]["from_uniform"] == pytest.approx(rows["uniform"]["from_softmax"], abs=1e-6)


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"rows": [{"a": math.nan, "b": 0.5}], "c": (math.inf, 1)})
    assert json.loads(capsys.readouterr().out) == {"rows": [{"a": None, "b": 0.5}], "c": [None, 1]}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["mechanism"],
            "no such command 'mechanism'; the commands are: analyze, calibrate, compare, doctor, evaluate, "
            "export, import, lab, linearize, ",
        ),
        (["--colour"], "no such option: --colour; given 'softgap --colour', see 'softgap --help'"),
        (["mechanisms", "--jsn"], "no such option: --jsn"),
        (["mechanisms", "--seed", "-1"], "invalid value for '--seed'"),
        (["mechanisms", "elu1"], "got unexpected extra argument"),
        (["run"], "missing argument 'prompt'; given 'softgap run', see 'softgap run --help'"),
        (["run", "fox " * 99, "--x"], "no such option: --x; given 'softgap run 'fox fox fox"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = failed(arguments, capsys)
    assert code == 2
    assert said.startswith(sentence)
    assert len(said) < 290


def test_a_wrong_command_line_through_the_console_script() -> None:
    shown = run("mechanism")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.startswith("softgap: no such command 'mechanism'; ")
    assert shown.stderr.count("\n") == 1


def test_a_softgap_error_is_its_own_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_from_the_registry(monkeypatch, ShapeError("order must be between 2 and 8,\n  got 9"))
    assert failed(["mechanisms"], capsys) == (2, "order must be between 2 and 8, got 9")


def test_a_defect_names_itself_and_the_way_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_from_the_registry(monkeypatch, ZeroDivisionError("division by zero"))
    code, sentence = failed(["mechanisms"], capsys)
    assert code == 70
    assert sentence.startswith("ZeroDivisionError: division by zero; ")
    assert "SOFTGAP_DEBUG=1" in sentence
    monkeypatch.setenv("SOFTGAP_DEBUG", "1")
    assert main(["mechanisms"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "takes"),
    [(["run", "Hello"], True), (["study", "run", "p.jsonl"], True), (["lab", "focus"], True), (["mechanisms"], False)],
)
def test_a_slow_start_is_told_by_commands_that_may_load_a_model(arguments: list[str], takes: bool) -> None:
    assert _takes_model(typer.main.get_command(app), arguments) == takes


def test_ctrl_c_is_one_sentence() -> None:
    program = """
import os, signal, sys
import softgap.attention
from softgap.cli import main
from softgap.cli.render.output import write_json
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with the signal ignored
softgap.attention.mechanisms = lambda: os.kill(os.getpid(), signal.SIGINT)
sys.exit(main(["mechanisms"]))
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout, shown.stderr) == (130, "", "softgap: interrupted\n")


# The package exports the function by the module's name.
MAIN = "import sys, importlib; main = importlib.import_module('softgap.cli.main')"


@pytest.mark.parametrize(
    "command",
    [
        [SCRIPT, "--help"],
        [SCRIPT, "mechanisms", "--json"],
        # So little that it is only flushed at the end.
        [sys.executable, "-c", f"{MAIN}; main._run = lambda _: print(1); sys.exit(main.main())"],
    ],
)
def test_a_closed_pipe_is_quiet(command: list[str]) -> None:
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        shown = subprocess.run(command, env=buffered, stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (141, "")

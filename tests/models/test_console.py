"""Progress is a bar on a terminal and plain lines elsewhere; loading is quiet, and settings are restored."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.utils
import pytest
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

from softgap import progress as progress_module
from softgap.errors import ModelError
from softgap.models.loading import load_model, quiet_transformers
from softgap.progress import bar_or_callback, in_command, show_progress, show_waiting, silent
from support import model_examples as examples
from support.cli_examples import script, without_progress


def settings() -> tuple[int, int, bool, bool]:
    bars = logging.is_progress_bar_enabled()
    return (
        logging.get_verbosity(),
        hub_logging.get_verbosity(),
        bars,
        huggingface_hub.utils.are_progress_bars_disabled(),
    )


def set_bars(on: bool) -> None:
    switch: Callable[[], None] = logging.enable_progress_bar if on else logging.disable_progress_bar
    switch()


@pytest.fixture
def restored() -> Iterator[None]:
    before = settings()
    yield
    logging.set_verbosity(before[0])
    hub_logging.set_verbosity(before[1])
    set_bars(before[2])


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("bars", [True, False])
def test_settings_are_restored_even_after_an_error(bars: bool) -> None:
    logging.set_verbosity_info()
    hub_logging.set_verbosity(hub_logging.DEBUG)
    set_bars(bars)
    before = settings()
    with contextlib.suppress(ModelError), quiet_transformers(downloads=True):
        assert settings() == (logging.ERROR, hub_logging.ERROR, False, not bars)
        raise ModelError("stop")
    assert settings() == before


def test_loading_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())
    capfd.readouterr()
    load_model(path)
    with pytest.raises(ModelError):
        load_model("org/absent")
    assert capfd.readouterr() == ("", "")


def test_a_bar_is_drawn_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for progress in (True, False):
        with bar_or_callback(progress) as report:
            report("reading", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with bar_or_callback(True) as report:
        assert capsys.readouterr().err == ""
        report("reading", 0.5)
        report("done", 1.0)
    captured = capsys.readouterr()
    assert "done" in captured.err
    assert "100%" in captured.err
    assert captured.out == ""


def test_in_a_command_python_functions_speak_to_a_log_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    path = examples.write_gguf(tmp_path / "tiny.gguf", examples.tiny_llama())
    with in_command(announce=True):
        load_model(path)
    assert stages(capsys.readouterr().err)[0] == f"loading {path}"
    load_model(path)
    assert capsys.readouterr().err == ""


def test_a_command_that_imports_for_long_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_STARTING", 0.01)
    written = threading.Event()
    lines: list[str] = []

    def write(line: str) -> None:
        lines.append(line)
        written.set()

    monkeypatch.setattr(progress_module, "_write_line", write)
    # On a slow machine torch comes later than the first look.
    there = iter([False, False, False, True])
    monkeypatch.setattr(progress_module, "_torch_is_there", lambda: next(there))
    with in_command(announce=True):
        assert written.wait(60)
    assert stages(f"{lines[0]}\n") == ["starting: importing torch"]
    monkeypatch.undo()
    monkeypatch.setattr(progress_module, "_STARTING", 0.01)
    monkeypatch.setattr(progress_module, "_torch_is_there", iter([False, *[True] * 99]).__next__)
    capsys.readouterr()
    with in_command(announce=True), show_progress("reading"):
        time.sleep(0.05)
    assert stages(capsys.readouterr().err) == ["reading"]
    monkeypatch.setattr(progress_module, "_write_line", write)
    for there_before, announce in ((True, True), (False, False)):
        seen = iter([there_before, True])
        monkeypatch.setattr(progress_module, "_torch_is_there", lambda seen=seen: next(seen))
        with in_command(announce=announce):
            time.sleep(0.05)
    assert len(lines) == 1


def stages(error: str) -> list[str]:
    """The stages that plain lines tell; every line is one of them."""
    assert without_progress(error) == ""
    return [line.partition("] ")[2] for line in error.splitlines()]


def test_every_stage_has_one_plain_line_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("reading") as report:
        for i in range(40):
            report(f"fitted {i} of 40 layers, {i / 40:.2f} of the gap closed", i / 40)
            report("comparing elu1", i / 40)
        report("comparing relu", 1.0)
    captured = capsys.readouterr()
    told = ["reading", "fitted 0 of 40 layers, 0.00 of the gap closed", "comparing elu1", "comparing relu"]
    assert stages(captured.err) == told
    assert re.match(r"\[  0 % 0:00:00\] reading\n", captured.err)
    assert captured.err.endswith("\n[100 % 0:00:00] comparing relu\n")
    assert captured.out == ""


def test_a_long_stage_is_told_again_and_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_module, "_SECONDS", 0.01)
    told = threading.Event()
    with show_progress() as report, monkeypatch.context() as patched:
        original, lines = progress_module._Lines._write, 0

        def counted(self: object) -> None:
            nonlocal lines
            original(self)  # type: ignore[arg-type]
            lines += 1
            if lines >= 4:
                told.set()

        patched.setattr(progress_module._Lines, "_write", counted)
        report("fitting layer 1", 0.25)
        assert told.wait(60)
    assert set(stages(capsys.readouterr().err)) == {"fitting layer 1"}


def test_waiting_tells_no_share(capsys: pytest.CaptureFixture[str]) -> None:
    with show_waiting("generating"):
        pass
    assert capsys.readouterr().err == "[0:00:00] generating\n"


def test_progress_survives_a_closed_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with show_progress("reading") as report:
        report("done", 1.0)


def test_a_bar_counts_items_and_their_rate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with show_progress("measuring", items=7, unit="samples") as report:
        for i in range(8):
            report("measuring", i / 7)
    shown = capsys.readouterr().err
    assert "7/7" in shown
    assert "samples/min" in shown


def test_silent_reports_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent("reading", 0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("command", "stage"),
    [
        ("lab position --tokens 64 --heads 8 --dim 8 --mechanism elu1", "drawing heads"),
        ("lab injectivity --keys 8 --dim 4 --starts 2 --mechanism elu1", "margins"),
    ],
)
def test_a_lab_tells_its_stages_to_a_log_file(tmp_path: Path, command: str, stage: str) -> None:
    shown = script(*command.split(), "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert stage in stages(shown.stderr)


def test_progress_needs_no_heavy_package_at_import() -> None:
    program = "import sys, softgap.progress; print(*{'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "\n"

"""Loading is quiet, and what was set before is set again afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.utils
import pytest
from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging

from softgap.errors import ModelError
from softgap.models.console import quiet_transformers, reporter
from softgap.models.loading import load_model
from support import model_examples as examples


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
        with reporter(progress) as report:
            report("reading", 0.5)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with reporter(True) as report:
        assert capsys.readouterr().err == ""
        report("reading", 0.5)
        report("done", 1.0)
    captured = capsys.readouterr()
    assert "done" in captured.err
    assert "100%" in captured.err
    assert captured.out == ""

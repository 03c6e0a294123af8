"""What the tests of the commands share: the console script, a command that fails, and what lies in a folder."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.cli import main
from softgap.models import load_model
from support.model_examples import save_folder, tiny_llama

SCRIPT = Path(sys.executable).with_name("softgap")
CONTEXT = 64


def script(
    *arguments: str, cwd: Path, text: str | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the installed console script, with more in its environment if asked."""
    env = {**os.environ, **(environment or {})}
    return subprocess.run(
        [SCRIPT, *arguments], cwd=cwd, input=text, capture_output=True, text=True, check=False, env=env
    )


def without_progress(error: str) -> str:
    """Standard error without the plain lines of progress, such as "[ 40 % 0:00:12] counting patterns"."""
    return re.sub(r"(?m)^\[(?:[ \d]{3} % )?\d+:\d\d:\d\d\] \S.*\n", "", error)


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The one sentence of a command that fails, in this process."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    error = without_progress(captured.err)
    assert error.count("\n") == 1
    assert error.startswith("softgap: ")
    return error.removeprefix("softgap: ").rstrip("\n")


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file below a folder with its bytes, and every folder."""
    found = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def tiny_folder(folder: Path) -> Path:
    """A model folder with two layers of four heads, a byte tokenizer and room for 64 tokens."""
    return save_folder(folder, tiny_llama(max_position_embeddings=CONTEXT))


def loads_once(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Keep loaded models, and list the names they were asked by."""
    asked: list[str | None] = []
    kept: dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]] = {}

    @functools.wraps(load_model)
    def load(name: str | None = None, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        asked.append(name)
        key = repr((name, options))  # a device map is a dictionary
        if key not in kept:
            kept[key] = load_model(name, **options)
        return kept[key]

    monkeypatch.setattr("softgap.models.load_model", load)
    return asked


def type_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    """Have these bytes on standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True

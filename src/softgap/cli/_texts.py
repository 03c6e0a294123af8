"""Texts as commands get them: from the command line, a file or standard input; plain or as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softgap.errors import ValueInputError

__all__ = ["Sample", "given_prompt", "given_text", "json_lines", "plain_text"]

_STANDARD_INPUT = "standard input"


@dataclass(frozen=True)
class Sample:
    """One line of a JSON lines file.

    Attributes
    ----------
    line
        Its number in the file, from 1, for messages.
    """

    line: int
    sample_id: str
    prompt: str
    completion: str
    label: str | None


def given_prompt(prompt: str) -> str:
    """The prompt itself, or for ``-`` what standard input holds, without the line's end that a shell adds."""
    text = _standard_input().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
    return _checked(text, "the prompt")


def given_text(file: str) -> tuple[str, str]:
    """A file's name for messages and its text as it stands; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT, _standard_input()
    try:
        content = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ValueInputError(f"cannot read '{file}': {reason}; give a text file, or - for standard input") from error
    return f"'{file}'", _decoded(content, f"'{file}'")


def plain_text(name: str, text: str) -> str:
    """The text, if it is one."""
    return _checked(text, name)


def json_lines(name: str, text: str) -> list[Sample]:
    """The samples of a JSON lines text, all of them checked before the first is used; blank lines are passed over.

    Each line is an object with the texts ``prompt`` and ``completion`` and optionally ``label`` and ``id``; an id left
    out is the number of the sample, from 0.
    """
    # JSON allows other line separators inside a text, so not splitlines.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    samples = [_sample(name, number, line, str(index)) for index, (number, line) in enumerate(lines)]
    if not samples:
        raise ValueInputError(f"{name} must hold at least one JSON line with prompt and completion, got none; add one")
    lines_of: dict[str, int] = {}
    for sample in samples:
        if sample.sample_id in lines_of:
            raise ValueInputError(
                f"{name}, line {sample.line}: every id must be different, got '{sample.sample_id}' again after line "
                f"{lines_of[sample.sample_id]}; rename one"
            )
        lines_of[sample.sample_id] = sample.line
    return samples


def _sample(name: str, number: int, line: str, default_id: str) -> Sample:
    where = f"{name}, line {number}"
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueInputError(
            f'{where}: not JSON ({error}); write one object per line, such as {{"prompt": "a", "completion": "b"}}'
        ) from error
    if not isinstance(entry, dict):
        raise ValueInputError(
            f"{where}: must be an object with prompt and completion, got {_short(entry)}; write one object per line"
        )
    for field in ("prompt", "completion"):
        if not isinstance(entry.get(field), str) or not entry[field]:
            raise ValueInputError(f"{where}: '{field}' must hold some text, got {_short(entry.get(field))}; add it")
    sample_id = entry.get("id", default_id)
    if isinstance(sample_id, bool) or not isinstance(sample_id, str | int) or sample_id == "":
        raise ValueInputError(f"{where}: 'id' must be text or a whole number, got {_short(sample_id)}; change it")
    label = entry.get("label")
    if not isinstance(label, str | None):
        raise ValueInputError(f"{where}: 'label' must be text, got {_short(label)}; write it in quotes")
    for field, value in entry.items():
        if isinstance(value, str):
            _encodable(value, f"{where}: '{field}'")
    _checked(entry["prompt"], f"{where}: 'prompt'")
    return Sample(number, str(sample_id), entry["prompt"], entry["completion"], label)


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"


def _standard_input() -> str:
    return _decoded(sys.stdin.buffer.read(), _STANDARD_INPUT)


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueInputError(
            f"{name} must be UTF-8 text, got the byte 0x{content[error.start]:02x} at {error.start}; convert it first"
        ) from error


def _checked(text: str, name: str) -> str:
    if not text.strip():
        raise ValueInputError(f"{name} must hold some text, got {_short(text)}; write something to read")
    return _encodable(text, name)


def _encodable(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueInputError(f"{name} must be valid UTF-8, got {_short(text[error.start])}; correct it") from error
    return text

"""Texts as commands get them: from the command line, a file or standard input."""

from __future__ import annotations

import sys

from softgap.errors import ValueInputError
from softgap.tasks.text_files import decoded, file_text, some_text

__all__ = ["given_prompt", "given_text", "plain_text"]

_STANDARD_INPUT = "standard input"


def given_prompt(prompt: str) -> str:
    """The prompt itself, or for ``-`` what standard input holds, without the line's end that a shell adds."""
    text = _standard_input().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
    return some_text(text, "the prompt")


def given_text(file: str) -> tuple[str, str]:
    """A file's name for messages and its text as it stands; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT, _standard_input()
    return f"'{file}'", file_text(file, ", or - for standard input")


def plain_text(name: str, text: str) -> str:
    """The text, if it is one."""
    return some_text(text, name)


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueInputError("standard input is closed, so that nothing can be read from it; give a file, or a pipe")
    return decoded(sys.stdin.buffer.read(), _STANDARD_INPUT)

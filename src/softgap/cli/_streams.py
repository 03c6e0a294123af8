"""Standard streams that a command can count on: open, and taking every character whatever their encoding."""

from __future__ import annotations

import io
import os
import sys

__all__ = ["abandon_output", "mended"]


def mended() -> None:
    """Give a closed stream a place to go, and write what an encoding does not know as an escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It also takes the free descriptor, into which the next file would else be opened and written over.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  open as long as we run
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def abandon_output() -> None:
    """Let what is left to write vanish: the interpreter flushes once more at its end, which must not fail loudly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

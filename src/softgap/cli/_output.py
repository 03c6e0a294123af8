"""What commands write: tables for people on a terminal, or one JSON document on standard output."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from rich.console import Console

__all__ = ["console", "finite", "warn", "write_json"]

# Wide enough for a table of formulas when the output goes to a file or a pipe, where no terminal says how wide it is.
_PIPE_WIDTH = 160


def console() -> Console:
    """The console on standard output."""
    # Formulas hold brackets and colons, which rich would otherwise read as markup and emoji.
    candidate = Console(markup=False, emoji=False, highlight=False)
    if not candidate.is_terminal:
        candidate.width = _PIPE_WIDTH
    return candidate


def write_json(document: dict[str, Any]) -> None:
    """Write one JSON document, and nothing else, to standard output; NaN and infinities become null."""
    # Escapes of JSON where the stream cannot hold every character: its own would make no JSON.
    plain = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(finite(document), indent=2, ensure_ascii=plain, allow_nan=False) + "\n")


def warn(sentence: str) -> None:
    """Say something on standard error that does not end the command."""
    sys.stderr.write(f"softgap: {sentence}\n")
    sys.stderr.flush()


def finite(value: Any) -> Any:
    """The same document with null for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""Output of commands: tables, one JSON document, warnings, and the browser."""

from __future__ import annotations

import json
import math
import os
import sys
import webbrowser
from pathlib import Path
from typing import Any

from rich.console import Console

from softgap.errors import UnsupportedError

__all__ = ["console", "find_browser", "finite", "open_address", "open_file", "warn", "write_json"]


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
    """Write a warning to standard error."""
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


_REMEDY = "leave --open out and open it yourself"


def find_browser() -> webbrowser.BaseBrowser:
    """The browser of the user."""
    # On Linux without a display, webbrowser would offer a text browser, which cannot show a report.
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    unseen = sys.platform.startswith("linux") and not any(os.environ.get(name) for name in displays)
    try:
        if unseen:
            raise webbrowser.Error("no display")
        return webbrowser.get()
    except webbrowser.Error as error:
        raise UnsupportedError(f"--open needs a browser, and none was found here ({error}); {_REMEDY}") from error


def open_file(browser: webbrowser.BaseBrowser, path: Path) -> None:
    """Open a file in the browser."""
    if not browser.open(path.absolute().as_uri()):
        raise UnsupportedError(f"the browser did not open '{path}', which is written; {_REMEDY}")


def open_address(browser: webbrowser.BaseBrowser, address: str) -> bool:
    """Open an address in the browser; return whether it worked."""
    return bool(browser.open(address))

"""The browser of this machine, if it has one."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from softgap.errors import UnsupportedError

__all__ = ["find_browser", "show", "visit"]

_REMEDY = "leave --open out and open it yourself"


def find_browser() -> webbrowser.BaseBrowser:
    """The browser that a person would see."""
    # On Linux without a display, webbrowser would offer a text browser, which cannot show a report.
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    unseen = sys.platform.startswith("linux") and not any(os.environ.get(name) for name in displays)
    try:
        if unseen:
            raise webbrowser.Error("no display")
        return webbrowser.get()
    except webbrowser.Error as error:
        raise UnsupportedError(f"--open needs a browser, and none was found here ({error}); {_REMEDY}") from error


def show(browser: webbrowser.BaseBrowser, path: Path) -> None:
    """Open a file in it."""
    if not browser.open(path.absolute().as_uri()):
        raise UnsupportedError(f"the browser did not open '{path}', which is written; {_REMEDY}")


def visit(browser: webbrowser.BaseBrowser, address: str) -> bool:
    """Open an address in it; whether that went well."""
    return bool(browser.open(address))

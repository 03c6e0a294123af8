"""A file that a long command ends with: refused at its beginning where it could not be written."""

from __future__ import annotations

import os
from pathlib import Path

from softgap.errors import StoreError

__all__ = ["check_new"]


def check_new(path: Path, overwrite: bool) -> None:
    """Refuse a folder, a file that is there unless it may be replaced, and a place that cannot be written to."""
    from softgap.report.files import check_place

    check_place(path)
    if os.path.lexists(path) and not overwrite:
        raise StoreError(f"'{path}' is there already; choose another file, or replace it with --overwrite")

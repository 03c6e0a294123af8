"""Files on disk that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softgap.errors import StoreError
from softgap.trajectories.folder import Folder

__all__ = ["check_place", "written_whole"]


def check_place(path: str | os.PathLike[str], what: str = "--out") -> None:
    """Refuse, before the work begins, a file that could not be written after it; nothing is left behind."""
    given = os.fspath(path)
    target = Path(given).expanduser()
    if not given or "\0" in given:
        raise StoreError(f"{what} must name a file, got {given!r}; give a file name")
    try:
        folder = target.is_dir()
    except OSError as error:
        raise StoreError(f"cannot write '{given}': {error.strerror or error}; choose another place") from error
    if folder:
        raise StoreError(f"{what} must name a file, but '{given}' is a folder; add a file name")
    Folder.at(target.parent).try_writing("files are")


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to: it takes the place of ``path`` when the block ends well, and is gone if it does not."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
    finally:
        if target.parent.is_dir():
            partial.unlink(missing_ok=True)

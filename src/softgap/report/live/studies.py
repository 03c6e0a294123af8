"""The folder of studies: what is in it, and nothing outside of it.

A name that a visitor sends is looked up among the names of the folder; it never becomes part of a path. Links are not
followed: a study that holds one is refused.
"""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

from softgap.errors import StoreError, unknown_name
from softgap.report.explorer import explorer_of
from softgap.report.live.limits import Limits
from softgap.trajectories import Study, Trajectories, open_study
from softgap.trajectories.folder import Folder
from softgap.trajectories.names import new_name

__all__ = ["Studies"]

_MARKS = ("manifest.json", "result.json")
_HELD_IN_MEMORY = 8 * 2**20


@dataclass(frozen=True, eq=False)
class Studies:
    """The studies in one folder.

    Attributes
    ----------
    folder
        Made when the first run is saved.
    """

    folder: Path
    limits: Limits
    _rendering: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, folder: Path, limits: Limits) -> Studies:
        """Check that a folder can hold studies."""
        if any((folder / mark).is_file() for mark in _MARKS):
            raise StoreError(f"'{folder}' is a study itself, and a folder of studies is needed; give '{folder.parent}'")
        try:
            Folder.at(folder).try_writing("runs are")
        except StoreError as error:
            raise StoreError(f"{error}, with --studies") from error
        return cls(folder.resolve(), limits)

    def names(self) -> list[str]:
        """The studies, the newest first."""
        try:
            found = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in self.folder.iterdir()
                if entry.is_dir() and not entry.is_symlink() and any((entry / mark).is_file() for mark in _MARKS)
            ]
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)[: self.limits.studies]]

    def new_name(self, words: str, taken: Container[str]) -> str:
        """A name that no study has."""
        return new_name(self.folder, words, taken)

    def save(self, name: str, run: Trajectories) -> Study:
        """Write a run into the folder."""
        run.save(self.folder / name)
        return open_study(self.folder / name)

    def html(self, name: str) -> str:
        """The report on a study."""
        folder = self._folder(name)
        # One at a time: a large study takes much memory.
        with self._rendering:
            return explorer_of(folder)

    def zipped(self, name: str) -> IO[bytes]:
        """A study as a ZIP file, at its beginning."""
        folder = self._folder(name)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        size = sum(path.stat().st_size for path in files)
        if size > self.limits.zip_bytes:
            raise StoreError(
                f"a study of at most {self.limits.zip_bytes / 1e9:.1f} GB can be downloaded, got {size / 1e9:.1f} GB; "
                "copy its folder instead"
            )
        # Parquet is compressed already.
        target: Any = SpooledTemporaryFile(max_size=_HELD_IN_MEMORY)  # noqa: SIM115  whoever sends it closes it
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for path in files:
                archive.write(path, f"{name}/{path.relative_to(folder).as_posix()}")
        target.seek(0)
        opened: IO[bytes] = target
        return opened

    def _folder(self, name: str) -> Path:
        known = self.names()
        if name not in known:
            raise unknown_name("study", name, known) if known else StoreError("there is no saved study yet")
        folder = self.folder / known[known.index(name)]
        if any(path.is_symlink() for path in folder.rglob("*")):
            raise StoreError(f"the study '{name}' holds a link to another place, which is not followed; copy it first")
        return folder

"""Resumable work: finished steps on disk, files that are written whole or not at all, and one writer at a time."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from softgap.errors import StoreError

__all__ = [
    "Checkpoints",
    "FileHold",
    "checkpoint_folder",
    "clear_finished",
    "is_partial",
    "last_step",
    "one_writer",
    "partial_name",
    "settings_key",
    "sync_folder",
    "write_whole",
    "written_whole",
]

_PARTIAL = ".partial"
# What a file is called until it is whole: hidden, with eight random digits; version 0.1 had none for some files.
_PARTIAL_NAME = re.compile(r"\.(?P<name>.+?)(\.[0-9a-f]{8})?\.partial")


def partial_name(name: str) -> str:
    """A fresh name beside a file, which the file has until it is whole; readers of folders pass over it."""
    return f".{name}.{uuid.uuid4().hex[:8]}{_PARTIAL}"


def is_partial(name: str, of: str | None = None) -> bool:
    """Whether a file's name is that of a half-written file of softgap, or of the file ``of``."""
    match = _PARTIAL_NAME.fullmatch(name)
    return match is not None and of in (None, match["name"])


def sync_folder(path: str | Path) -> None:
    """Have a rename or a deletion in a folder on disk: without it, a power cut could undo it."""
    if hasattr(os, "O_DIRECTORY"):  # elsewhere a folder cannot be opened
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class FileHold:
    """A lock on a file that only one process and one holder in it can have; a dead process holds none.

    The system gives up the lock of a process that ends, however it ends. The lock's file may then be left, and the next
    holder takes it over.

    Parameters
    ----------
    path
        Of the lock's own file; its folder must exist.
    patience
        Seconds to wait for another holder before ``TimeoutError``.
    """

    def __init__(self, path: str | Path, patience: float = 0.0) -> None:
        lock = FileLock(path, thread_local=False, is_singleton=False)
        try:
            lock.acquire(timeout=patience, poll_interval=0.02)
        except Timeout:
            raise TimeoutError(str(path)) from None
        self._end = weakref.finalize(self, _let_go, lock, Path(path), os.getpid())

    def release(self) -> None:
        """Delete the lock's file and give up the lock; a second time does nothing."""
        self._end()


def _let_go(lock: FileLock, path: Path, process: int) -> None:
    if process != os.getpid():  # a forked copy of the holder
        return
    try:
        with suppress(OSError):  # filelock notices that the file it locked has no name any more
            path.unlink()
    finally:
        lock.release(force=True)


_held = threading.local()


@contextmanager
def one_writer(target: str | Path, *, patience: float = 0.0) -> Iterator[None]:
    """Be the only writer of a file in the block, and clear what a killed writer left of it.

    Another block of the same thread inside this one shares its lock.
    """
    path = Path(target).absolute()
    mine: set[Path] = _held.__dict__.setdefault("paths", set())
    if path in mine:
        yield
        return
    hold, created = _hold_beside(path, patience)
    mine.add(path)
    try:
        for entry in path.parent.iterdir():
            if is_partial(entry.name, path.name):
                entry.unlink(missing_ok=True)
        yield
    finally:
        mine.discard(path)
        hold.release()
        for folder in created:
            with suppress(OSError):  # not empty: the file is there
                folder.rmdir()


def _hold_beside(path: Path, patience: float) -> tuple[FileHold, list[Path]]:
    """The lock of a file, beside it, and the folders that had to be created for it, innermost first."""
    created = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileHold(path.with_name(_lock_name(path)), patience), created
    except TimeoutError:
        raise StoreError(f"another process is writing '{path}'; wait until it ends, or choose another file") from None
    except OSError as error:
        for folder in created:
            with suppress(OSError):
                folder.rmdir()
        raise StoreError(f"cannot write '{path}': {error.strerror or error}; choose another path") from error


def _lock_name(path: Path) -> str:
    return f".{path.name}.lock"


# Seconds that a writer of one file waits for another: writing takes far less.
_PATIENCE = 20.0


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to: it takes the place of ``path`` when the block ends well, and is gone if it does not."""
    target = Path(path)
    with one_writer(target, patience=_PATIENCE), _renamed(target) as partial:
        yield partial


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    with _renamed(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def _renamed(target: Path) -> Iterator[Path]:
    """A fresh path beside a file that is renamed to it at the end, content and name on disk."""
    partial = target.with_name(partial_name(target.name))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            with partial.open("rb+") as stream:
                os.fsync(stream.fileno())
            partial.replace(target)
            sync_folder(target.parent)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another path") from error


def checkpoint_folder(target: Path) -> Path:
    """Where the finished steps of an unfinished file lie: beside it."""
    return target.with_name(f"{target.name}.parts")


# In the folder of finished steps: which file was there before the whole one took its place.
_REPLACED = "replaced"


@contextmanager
def last_step(target: Path) -> Iterator[None]:
    """Write the whole file in the block; at its end the finished steps are deleted.

    ``clear_finished`` deletes them after a kill between the two.
    """
    folder = checkpoint_folder(target)
    if folder.is_dir():
        write_whole(folder / _REPLACED, _identity(target))
    yield
    _delete_steps(folder)


def clear_finished(target: Path) -> None:
    """Delete what a killed writer left beside a file that is whole: its finished steps, half-written files, its lock.

    The finished steps of unfinished work stay.
    """
    if target.is_file() and target.with_name(_lock_name(target)).exists():
        with suppress(StoreError), one_writer(target):  # refused where the writer is alive
            pass
    folder = checkpoint_folder(target)
    try:
        finished = (folder / _REPLACED).read_text(encoding="utf-8") != _identity(target)
    except (OSError, ValueError):
        finished = folder.is_dir() and not any(folder.iterdir())
    if finished:
        _delete_steps(folder)


def _delete_steps(folder: Path) -> None:
    """Delete a folder of finished steps, last of all what tells that they are of no more use."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != _REPLACED:
                path.unlink()
        (folder / _REPLACED).unlink(missing_ok=True)
        folder.rmdir()


def _identity(path: Path) -> str:
    """What changes when another file takes a file's place; "" where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}"


def settings_key(settings: Mapping[str, Any]) -> str:
    """A hash of settings, by which steps that were made under others are told apart."""
    return _hash(_words(settings))[:32]


class Checkpoints:
    """Finished steps of unfinished work, found again only under the settings that they were made with.

    Parameters
    ----------
    folder
        Where they lie; None writes nothing, and every step is made anew.
    settings
        Everything that all steps depend on.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._settings = _words(settings)

    def find_or_make(self, step: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a step from its file; else it is made now and written. JSON must be able to hold both."""
        if self._folder is None:
            return make()
        path = self._path(self._folder, step)
        try:
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result
        except (OSError, ValueError, RecursionError):  # not there, or cut off by a crash: made again
            result = make()
        write_whole(path, json.dumps(result))
        return result

    def has(self, step: Any) -> bool:
        """Whether there is a file of the result of a step."""
        return self._folder is not None and self._path(self._folder, step).exists()

    def _path(self, folder: Path, step: Any) -> Path:
        return folder / f"{_hash(self._settings + json.dumps(step, default=str))[:24]}.json"


def _words(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

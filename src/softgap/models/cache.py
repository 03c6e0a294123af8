"""Converted copies of models in the user's cache; a copy is complete or absent.

A copy is built in a hidden folder beside its final place, under a file lock, and renamed when it has been verified.
Whoever is interrupted leaves only the hidden folder, which the next builder removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from softgap.errors import ModelError

__all__ = ["CopyRecord", "build_copy", "cache_dir", "copy_folder", "models_dir", "read_record"]

RECORD_NAME = "softgap.json"
# A new number here makes every copy be converted again.
_FORMAT = 2


@dataclass(frozen=True)
class CopyRecord:
    """What a converted copy was made from and what it consists of; written last, as ``softgap.json``."""

    source: str
    sha256: str
    parameters: int
    transformers: str
    files: dict[str, int]


def cache_dir() -> Path:
    """The folder softgap keeps its files in: ``$SOFTGAP_CACHE``, else ``softgap`` in the user's cache folder."""
    override = os.environ.get("SOFTGAP_CACHE")
    if override:
        return Path(override).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache").absolute() / "softgap"


def models_dir() -> Path:
    """The folder of the converted copies."""
    return cache_dir() / "models"


def copy_folder(label: str, sha256: str) -> Path:
    """Where the converted copy of a GGUF file with this hash is or would be."""
    return models_dir() / f"{label}-{sha256[:16]}-v{_FORMAT}"


def read_record(folder: Path) -> CopyRecord | None:
    """The record of a complete copy, or None if the folder is absent or a file in it has not its recorded size."""
    try:
        record = CopyRecord(**json.loads((folder / RECORD_NAME).read_text(encoding="utf-8")))
        complete = all((folder / name).stat().st_size == size for name, size in record.files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return record if complete else None


def build_copy(
    folder: Path,
    build: Callable[[Path], tuple[str, str, int, str]],
    waiting: Callable[[], None],
) -> CopyRecord:
    """Build a copy once, whoever asks first, and return its record.

    Parameters
    ----------
    folder
        Where the copy is to be.
    build
        Writes and verifies the files in the empty folder it is given and returns source, SHA-256 of the source,
        number of parameters and version of transformers.
    waiting
        Called once if another process is building the same copy.
    """
    with _explain_errors(folder), _lock(folder, waiting):
        record = read_record(folder)
        if record is not None:
            return record
        _remove_leftovers(folder)
        staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(folder), dir=folder.parent))
        try:
            source, sha256, parameters, version = build(staging)
            files = {path.name: path.stat().st_size for path in sorted(staging.iterdir())}
            record = CopyRecord(source, sha256, parameters, version, files)
            (staging / RECORD_NAME).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
            _publish(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return record


def _staging_prefix(folder: Path) -> str:
    return f".{folder.name}.part-"


def _remove_leftovers(folder: Path) -> None:
    """Remove what interrupted builders left; safe because the lock says that none of them lives."""
    for leftover in folder.parent.glob(f"{_staging_prefix(folder)}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _publish(staging: Path, folder: Path) -> None:
    """Flush the files to disk and rename; a damaged copy in the way is set aside first."""
    for path in staging.iterdir():
        with path.open("rb+") as stream:
            os.fsync(stream.fileno())
        path.chmod(0o644)
    staging.chmod(0o755)
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=_staging_prefix(folder), dir=folder.parent))
        folder.rename(aside / folder.name)
        staging.rename(folder)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        staging.rename(folder)


@contextlib.contextmanager
def _lock(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _explain_errors(folder: Path) -> Iterator[None]:
    """Turn what a file system refuses into one sentence."""
    remedy = "set SOFTGAP_CACHE to a folder with room that you may write to"
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            message = f"the disk is full, no room for the converted model in '{folder.parent}'; free space or {remedy}"
        else:
            reason = error.strerror or str(error)
            message = f"cannot write the converted model to '{folder.parent}' ({reason}); {remedy}"
        raise ModelError(message) from None

"""Locks of a folder, so that a study has one writer at a time: a file lock on a disk, a lease in an object store.

An object store has no locks and no operation that only one of two writers can win. There every writer first writes a
claim of its own and then lists the others'. Of two writers at least the one whose claim came second sees the other's
and gives up; both may, but never do both go on. This needs a store that lists what was written before, as S3 and
Google's do. A claim expires unless its owner renews it, and that of a dead process of this machine counts for nothing.

An owner that was suspended may wake up after its lease has expired. So a folder that is locked checks the lease right
before every file gets its name (``FolderLock.folder``): not only that nobody else holds one, but that its own has some
time left. What remains is a process that is suspended longer than that time inside the store's own rename.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import psutil

from softgap.checkpoints import FileHold
from softgap.errors import StoreError

if TYPE_CHECKING:
    from softgap.trajectories.folder import Folder

__all__ = ["LOCK", "FolderLock", "is_lock", "lease_fence", "locked"]

LOCK = "writer"
_NAME = re.compile(r"\.[\w-]+\.(lock|[0-9a-f]{12}\.lease)")
_LEASE = timedelta(seconds=120)
_RENEWALS = 4
# An owner gives up when this part of its lease is left: clocks differ, and a rename takes time.
_MARGIN = 1 / 8
# How often a folder that another writer is just taking away is created again.
_ATTEMPTS = 5


def is_lock(name: str) -> bool:
    """Whether a file in a folder is a lock or a lease of softgap."""
    return _NAME.fullmatch(name) is not None


class FolderLock:
    """A lock of a folder that exists, or is created.

    Parameters
    ----------
    folder
        What is locked.
    name
        Several parts of a study, with a name each, are locked apart.
    patience
        Seconds to wait for another holder.

    Raises
    ------
    StoreError
        If another writer holds the lock.

    Attributes
    ----------
    created
        Full paths of folders that had to be created, innermost first.
    folder
        The folder; where it is locked by a lease, its files get their names only while that is held.
    lease
        The name of the lease's file, by which another process can check it; None for a file lock.
    """

    def __init__(self, folder: Folder, name: str = LOCK, *, patience: float = 0.0) -> None:
        self._folder, self._name = folder, name
        self.created: list[str] = []
        self._released = False
        self._hold: FileHold | _Lease = self._file_hold(patience) if folder.is_local else self._lease(patience)
        lease = self._hold if isinstance(self._hold, _Lease) else None
        self.lease = None if lease is None else lease.file
        self.folder = folder if lease is None else folder.fenced(lease.check)

    def check(self) -> None:
        """Refuse to go on without the lock: once it is released, or where a lease was lost."""
        if self._released:
            raise StoreError(
                f"this writer of '{self._folder.address}' has ended and let others go on; open another to write more"
            )
        if isinstance(self._hold, _Lease):
            self._hold.check()

    def release(self) -> None:
        """Let other writers go on; a second time does nothing."""
        self._released = True
        self._hold.release()

    def _file_hold(self, patience: float) -> FileHold:
        for _ in range(_ATTEMPTS):
            self.created = [*self._folder.create(), *self.created]
            try:
                return FileHold(self._folder.path(f".{self._name}.lock"), patience)
            except FileNotFoundError:
                continue
            except TimeoutError:
                raise _held_error(self._folder) from None
            except OSError as error:
                self._folder.discard_empty(self.created)
                self._folder.refuse(error)
        raise _held_error(self._folder)

    def _lease(self, patience: float) -> _Lease:
        self.created = self._folder.create()
        deadline = time.monotonic() + patience
        while True:
            try:
                return _Lease(self._folder, self._name)
            except StoreError:
                if time.monotonic() >= deadline:
                    self._folder.discard_empty(self.created)
                    raise
            time.sleep(0.1 + 0.4 * int.from_bytes(os.urandom(1), "big") / 255)  # two that wait must not stay in step


@contextmanager
def locked(folder: Folder, name: str = LOCK, *, patience: float = 0.0) -> Iterator[FolderLock]:
    """Hold the lock of a folder for the block; a folder that was created for it and is empty is removed."""
    lock = FolderLock(folder, name, patience=patience)
    try:
        yield lock
    finally:
        lock.release()
        folder.discard_empty(lock.created)


def _held_error(folder: Folder, owner: str = "") -> StoreError:
    return StoreError(
        f"another process{owner} is writing to '{folder.address}'; wait until it ends, or choose another folder"
    )


@dataclass(frozen=True)
class _Claim:
    """Who claims a folder, and until when."""

    owner: str
    host: str
    process: int
    started: float
    expires: str
    state: Literal["asking", "holding"] = "asking"

    @property
    def over(self) -> bool:
        """Whether it has expired, or is of a process of this machine that has ended."""
        if self.host == socket.gethostname() and not _runs(self.process, self.started):
            return True
        return datetime.fromisoformat(self.expires) < _now()


def _now() -> datetime:
    return datetime.now(UTC)


def _is_late(expires: datetime) -> bool:
    """Whether too little is left of one's own lease to write anything."""
    return _now() >= expires - _MARGIN * _LEASE


def _runs(process: int, started: float) -> bool:
    try:
        return abs(psutil.Process(process).create_time() - started) < 1.0
    except psutil.Error:
        return False


class _Lease:
    """A claim that no other writer has, renewed by a thread until it is released."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._prefix = folder, f".{name}."
        self._owner = uuid.uuid4().hex[:12]
        self.file = f"{self._prefix}{self._owner}.lease"
        self._until = _now()
        self._lock, self._ended = threading.Lock(), threading.Event()
        try:
            self._write("asking")
            others = [claim for entry, claim in _claims(folder, self.file) if entry != self.file]
            if others:
                owner = f" (process {others[0].process} on {others[0].host}, until {others[0].expires} unless renewed)"
                raise _held_error(folder, owner)
            self._write("holding")
        except BaseException:
            folder.discard(self.file)
            raise
        thread = threading.Thread(target=_renew, args=(weakref.ref(self), self._ended), daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _end_lease, folder, self.file, self._ended, os.getpid())

    def check(self) -> None:
        """Refuse to go on where the claim is gone or about to expire, or another writer holds one too."""
        if _is_late(self._until):
            raise _lost_error(self._folder)
        _check_lease(self._folder, self.file)

    def release(self) -> None:
        """Take the claim back; no renewal that is under way may write it again."""
        with self._lock:
            self._end()

    def renew(self) -> None:
        """Put off the end of the claim, unless it is gone or over already: then another writer may be taking over."""
        with self._lock, suppress(OSError):
            if not self._ended.is_set() and not _is_late(self._until) and self._folder.kind(self.file) == "file":
                self._write("holding")

    def _write(self, state: Literal["asking", "holding"]) -> None:
        process = psutil.Process()
        until = (_now() + _LEASE).replace(microsecond=0)
        claim = _Claim(self._owner, socket.gethostname(), process.pid, process.create_time(), until.isoformat(), state)
        self._folder.write(self.file, json.dumps(claim.__dict__).encode())
        self._until = until


def _claims(folder: Folder, own: str) -> list[tuple[str, _Claim]]:
    """The claims that count beside an own one, by file; those of others that are over are deleted."""
    found = []
    prefix = own[: -len("0" * 12 + ".lease")]
    for entry in folder.names():
        if not (is_lock(entry) and entry.startswith(prefix) and entry.endswith(".lease")):
            continue
        try:
            claim = _Claim(**json.loads(folder.read(entry)))
            over = claim.over
        except StoreError:  # deleted meanwhile
            if folder.kind(entry) == "absent":
                continue
            raise
        except (ValueError, TypeError) as error:
            raise StoreError(
                f"{entry} in '{folder.address}' is no lease of softgap ({error}); delete it if no other process "
                "writes there"
            ) from error
        if over and entry != own:
            folder.discard(entry)
        else:
            found.append((entry, claim))
    return found


def _check_lease(folder: Folder, file: str) -> None:
    """Refuse to go on unless this lease is there and the only one that is held."""
    if {entry for entry, claim in _claims(folder, file) if claim.state == "holding"} != {file}:
        raise _lost_error(folder)


def _lost_error(folder: Folder) -> StoreError:
    return StoreError(
        f"this process lost its lease on '{folder.address}', since it did not renew it in time; make sure that no "
        "other process writes there, then run the same command again"
    )


def lease_fence(folder: Folder, file: str | None) -> Folder:
    """A folder for a process that works for the holder of a lease: its files get names only while that is held."""
    if file is None:
        return folder

    def check() -> None:
        own = [claim for entry, claim in _claims(folder, file) if entry == file]
        if not own or _is_late(datetime.fromisoformat(own[0].expires)):
            raise _lost_error(folder)
        _check_lease(folder, file)

    return folder.fenced(check)


def _renew(lease: weakref.ref[Any], ended: threading.Event) -> None:
    while not ended.wait(_LEASE.total_seconds() / _RENEWALS):
        held = lease()
        if held is None:
            return
        held.renew()
        del held


def _end_lease(folder: Folder, file: str, ended: threading.Event, process: int) -> None:
    if process == os.getpid():
        ended.set()
        folder.discard(file)

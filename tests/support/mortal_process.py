"""A process that dies at its n-th change of a folder, for tests of what a kill leaves behind."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from softgap.models import tensor_files
from softgap.trajectories.folder import Folder

__all__ = ["Killed", "dies_at"]

_CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
_OF_FILESYSTEMS = {"create_dir", "open_output_stream", "move", "delete_file", "delete_dir"}


class Killed(BaseException):
    """Stands for the end of the process."""


class _Life:
    """Changes that are left, of files below a folder; after the last nothing changes, so that nothing is cleared up."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.left = 0

    def change(self, path: Any) -> bool:
        """Take note of a change; raise if the process is dead. Whether it dies of this one."""
        if self.root is None or not os.path.abspath(os.fsdecode(path)).startswith(self.root):  # noqa: PTH100
            return False
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self.left == 0

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of ``sys.addaudithook``: what Python itself changes."""
        if self.root is None:
            return
        writes = event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if (writes or event in _CHANGES) and self.change(arguments[0]):
            raise Killed


_life = _Life()
_hooked: list[bool] = []


class _MortalFilesystem:
    """A filesystem of pyarrow, whose changes no audit hook sees; a file that is written at the end stays half."""

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.filesystem, name)
        if name not in _OF_FILESYSTEMS:
            return method

        def change(*arguments: Any, **options: Any) -> Any:
            if _life.change(arguments[0]):
                if name == "open_output_stream":
                    with method(*arguments, **options) as sink:
                        sink.write(b"half a file")
                raise Killed
            return method(*arguments, **options)

        return change


def _let_go_of_locks(root: str) -> None:
    """The system takes the locks of a process that ends; here its open files may live on in exceptions and threads."""
    for number in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").exists() else ():
        with suppress(OSError):
            if number.readlink().is_relative_to(root) and number.readlink().suffix == ".lock":
                fcntl.flock(int(number.name), fcntl.LOCK_UN)


@contextmanager
def dies_at(n: int, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Let this process die at its n-th change below ``root``, which is not made; the list says in the end if it did."""
    if not _hooked:  # an audit hook stays for good
        sys.addaudithook(_life.hook)
        _hooked.append(True)
    original, save_file = Folder.at, vars(tensor_files)["save_file"]

    def save_half(tensors: Any, path: Any, **options: Any) -> None:
        if _life.change(path):
            _life.root, root_before = None, _life.root
            Path(path).write_bytes(b"half a file")
            _life.root, _life.left = root_before, 0
            raise Killed
        save_file(tensors, path, **options)

    def read_part(path: str, *, filesystem: Any, **options: Any) -> Any:
        return parquet_file(path, filesystem=filesystem.filesystem, **options)  # pyarrow takes no other

    parquet_file = pq.ParquetFile
    died: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(
            Folder, "at", lambda path: replace(f := original(path), filesystem=_MortalFilesystem(f.filesystem))
        )
        patch.setattr(tensor_files, "save_file", save_half)
        patch.setattr(pq, "ParquetFile", read_part)
        _life.root, _life.left = str(root), n
        try:
            yield died
        except Killed:
            died.append(True)
        finally:
            _life.root = None
            _let_go_of_locks(str(root))

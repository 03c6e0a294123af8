"""The folder of a study, local or remote, and files beside it, with atomic writes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
from pyarrow import fs

from softgap.checkpoints import is_partial, partial_name, sync_folder
from softgap.errors import StoreError
from softgap.trajectories.locks import is_lock, locked

__all__ = ["Folder", "add_line", "check_output_file", "json_lines", "new_name", "read_lines", "slug"]


# As much as the first files of a study take: a full disk may still hold a few bytes.
_TRIAL_BYTES = 65536
_TRIAL = "softgap-trial"
_TRIAL_PATIENCE = 20.0


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


_SECRET = re.compile(_URI.pattern + "[^/@]*:[^/@]*@")


def _no_fence() -> None:
    """Let everybody through."""


@dataclass(frozen=True)
class Folder:
    """A folder of a pyarrow filesystem.

    Attributes
    ----------
    filesystem : pyarrow.fs.FileSystem
    root : str
        Path inside the filesystem.
    address : str
        The path or URI as the user wrote it, for messages.
    fence : callable
        Called right before a file gets its name or a file is deleted; it raises where another writer may be there.
    """

    filesystem: Any
    root: str
    address: str
    fence: Callable[[], None] = field(default=_no_fence, repr=False, compare=False)

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Folder:
        """The folder at a local path or at any URI that pyarrow opens; it need not exist."""
        address = os.fspath(path)
        if not address or "\0" in address:
            raise StoreError(
                f"the path of a study must be a folder or a URI, got {address!r}; give one such as runs/fox"
            )
        if not _URI.match(address):
            return cls(fs.LocalFileSystem(), _absolute(address), address)
        if _SECRET.match(address):
            raise StoreError(
                "the URI of a study must not hold a password, since a study keeps the command that made it, got one "
                f"for '{address.rpartition('@')[2]}'; put it where tools of that store look, such as "
                "AWS_SECRET_ACCESS_KEY"
            )
        try:
            filesystem, root = fs.FileSystem.from_uri(address)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise StoreError(
                f"cannot open '{address}' ({_first_line(error)}); give a local folder or a URI that pyarrow opens, "
                "such as file:///tmp/fox or s3://bucket/fox"
            ) from error
        return cls(filesystem, root.rstrip("/") or root, address)

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine, or one that is mounted like it."""
        return bool(self.filesystem.type_name == "local")

    def below(self, name: str) -> Folder:
        """A subfolder, which need not exist; the options of a URI stay behind it."""
        path, mark, options = self.address.partition("?") if _URI.match(self.address) else (self.address, "", "")
        return Folder(self.filesystem, self.path(name), f"{path.rstrip('/')}/{name}{mark}{options}", self.fence)

    def fenced(self, fence: Callable[[], None]) -> Folder:
        """The same folder with a check right before each of its files gets its name."""
        return replace(self, fence=fence)

    @property
    def passes(self) -> bool:
        """Whether the fence lets this writer through."""
        try:
            self.fence()
        except StoreError:
            return False
        return True

    def path(self, name: str) -> str:
        """Full path of a file of this folder."""
        return posixpath.join(self.root, name) if name else self.root

    def kind(self, name: str = "") -> str:
        """``"absent"``, ``"file"`` or ``"folder"``."""
        info = self._info(self.path(name))
        return {fs.FileType.NotFound: "absent", fs.FileType.Directory: "folder"}.get(info.type, "file")

    def names(self, name: str = "") -> list[str]:
        """Sorted names of what is in a subfolder; empty if it is absent."""
        selector = fs.FileSelector(self.path(name), allow_not_found=True)
        try:
            return sorted(info.base_name for info in self.filesystem.get_file_info(selector))
        except OSError as error:
            raise StoreError(f"cannot list '{self.path(name)}': {_reason(error)}") from error

    def other_names(self, own: Container[str] = ()) -> list[str]:
        """Names of what is here, without locks, half-written files, and subfolders of ``own`` that hold nothing else.

        These are what a writer leaves that was killed before it had written anything.
        """
        return [
            name
            for name in self.names()
            if not is_lock(name) and not is_partial(name) and not (name in own and self.below(name).is_empty())
        ]

    def is_empty(self) -> bool:
        """Whether it is a folder that holds nothing but what a killed writer leaves."""
        return self.kind() == "folder" and not self.other_names()

    def parts(self, name: str) -> dict[int, str]:
        """Batch number and path of the published parts in a subfolder, in order."""
        matches = [(re.fullmatch(r"part-(\d+)\.parquet", entry), entry) for entry in self.names(name)]
        return dict(sorted((int(match[1]), f"{name}/{entry}") for match, entry in matches if match))

    def read(self, name: str) -> bytes:
        """All of a small file."""
        try:
            with self.filesystem.open_input_stream(self.path(name)) as stream:
                return bytes(stream.read())
        except OSError as error:
            raise StoreError(f"cannot read '{self.path(name)}': {_reason(error)}") from error

    def digest(self, name: str) -> str:
        """SHA-256 of a small file, in hexadecimal digits."""
        return hashlib.sha256(self.read(name)).hexdigest()

    def refuse_links(self) -> None:
        """Refuse a folder with a symbolic link in it: what it points to is not part of the study."""
        if not self.is_local:
            return
        link = next((path for path in Path(self.root).rglob("*") if path.is_symlink()), None)
        if link is not None:
            raise StoreError(
                f"'{self.address}' contains the symbolic link '{link.relative_to(self.root)}', which softgap does not "
                "follow; put a copy of the file in its place"
            )

    def create(self, name: str = "") -> list[str]:
        """Create the folder or a subfolder; return the full paths that did not exist, innermost first."""
        path, missing = self.path(name), []
        try:
            while path and self._info(path).type == fs.FileType.NotFound:
                missing.append(path)
                path = posixpath.dirname(path)
            self.filesystem.create_dir(self.path(name), recursive=True)
        except OSError as error:
            self.discard_empty(missing)
            self.refuse(error)
        return missing

    def stage(self, name: str, write: Callable[[Any], None]) -> str:
        """Write a file under a temporary name, which no reader takes for a part, and return that name.

        Whatever goes wrong, nothing is left behind.
        """
        temporary = self.temporary(name)
        try:
            with self.filesystem.open_output_stream(self.path(temporary)) as sink:
                write(sink)
            self._sync(temporary)
        except OSError as error:
            self.discard(temporary)
            self.refuse(error)
        except BaseException:
            self.discard(temporary)
            raise
        return temporary

    def publish(self, temporary: str, name: str) -> None:
        """Give a staged file its name, on disk when this returns."""
        self.fence()
        try:
            self.filesystem.move(self.path(temporary), self.path(name))
            if self.is_local:
                sync_folder(posixpath.dirname(self.path(name)))
        except OSError as error:
            self.refuse(error)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file under its name; in an object store that is one step."""
        try:
            with self.filesystem.open_output_stream(self.path(name)) as sink:
                sink.write(content)
        except OSError as error:
            self.refuse(error)

    def replace(self, name: str, content: bytes) -> None:
        """Write a small file in one step."""
        temporary = self.stage(name, lambda sink: sink.write(content))
        try:
            self.publish(temporary, name)
        except BaseException:
            self.discard(temporary)
            raise

    def try_writing(self, subject: str = "a study is") -> None:
        """Refuse a folder that cannot be written to, by writing to it; it is left as it was."""
        if self.kind() == "file":
            raise StoreError(f"{subject} written to a folder, but '{self.address}' is a file; choose another path")
        with locked(self, _TRIAL, patience=_TRIAL_PATIENCE):
            self.discard_partial("", _TRIAL)
            self.discard(self.stage(_TRIAL, lambda sink: sink.write(bytes(_TRIAL_BYTES))))

    def delete(self, name: str) -> None:
        """Delete a file."""
        self.fence()
        try:
            self.filesystem.delete_file(self.path(name))
        except OSError as error:
            self.refuse(error)

    def discard(self, name: str) -> None:
        """Delete a file if it is there, silently: for clearing up while another error is on its way."""
        with suppress(OSError):
            self.filesystem.delete_file(self.path(name))

    def discard_empty(self, paths: list[str]) -> None:
        """Delete those of these folders (full paths, innermost first) that are empty, silently."""
        for path in paths:
            with suppress(OSError):
                if not self.filesystem.get_file_info(fs.FileSelector(path)):
                    self.filesystem.delete_dir(path)

    def discard_partial(self, name: str, *files: str) -> None:
        """Delete what a killed writer left half-written in a subfolder, of these files only or of all."""
        for entry in self.names(name):
            if any(is_partial(entry, file) for file in files or (None,)):
                self.discard(posixpath.join(name, entry))

    def temporary(self, name: str) -> str:
        """A fresh name beside ``name`` that DuckDB's *.parquet and pyarrow's datasets both pass over."""
        parent, base = posixpath.split(name)
        return posixpath.join(parent, partial_name(base))

    def refuse(self, error: OSError) -> NoReturn:
        """Raise the StoreError for a failure to write."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free some space or choose another disk" if full else "choose a folder you may write to"
        raise StoreError(f"cannot write to '{self.address}': {_reason(error)}; {remedy}") from error

    def _info(self, path: str) -> Any:
        try:
            return self.filesystem.get_file_info(path)
        except OSError as error:
            raise StoreError(f"cannot look at '{self.address}': {_reason(error)}; check the path") from error

    def _sync(self, name: str) -> None:
        """Have the content on disk before the name, or a power cut could leave a named part without content."""
        if self.is_local:
            descriptor = os.open(self.path(name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _absolute(address: str) -> str:
    try:
        return Path(address).expanduser().absolute().as_posix()
    except RuntimeError as error:
        raise StoreError(f"cannot find the home folder in '{address}' ({error}); write the path in full") from error


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file of a study; none if there is no such file."""
    if folder.kind(name) == "absent":
        return []
    try:
        entries = [json.loads(line) for line in folder.read(name).decode().split("\n") if line.strip()]
        if not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("a line is no object")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} in '{folder.address}' is damaged ({error}); restore this file from a copy") from error
    return entries


def add_line(folder: Folder, name: str, entry: Mapping[str, Any]) -> None:
    """Add one object to a JSON lines file of a study; object stores know no other way than to write it anew.

    Whoever calls this holds a lock, or two that add at once would lose a line.
    """
    folder.replace(name, json_lines([*read_lines(folder, name), entry]))


def json_lines(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Objects as the bytes of a JSON lines file."""
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()


_LONGEST = 31


def slug(text: str) -> str:
    """The first words of a text as part of a folder's name."""
    words = re.findall(r"\w+", text.lower())
    name = ""
    for word in words:
        if name and len(name) + len(word) > _LONGEST:
            break
        name = f"{name}-{word}" if name else word[: _LONGEST + 1]
    return name or "run"


def new_name(parent: Path, words: str, reserved: Container[str] = ()) -> str:
    """The name of a new folder in ``parent``, made of some words and the time; not one of ``reserved``."""
    base = f"{words}-{datetime.now():%Y%m%d-%H%M%S}"
    name, number = base, 2
    while name in reserved or (parent / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name


def check_output_file(path: str | os.PathLike[str], option: str = "--out") -> None:
    """Refuse, before the work begins, a file that could not be written after it; nothing is left behind."""
    name = os.fspath(path)
    target = Path(name).expanduser()
    if not name or "\0" in name:
        raise StoreError(f"{option} must name a file, got {name!r}; give a file name")
    try:
        folder = target.is_dir()
    except OSError as error:
        raise StoreError(f"cannot write '{name}': {error.strerror or error}; choose another path") from error
    if folder:
        raise StoreError(f"{option} must name a file, but '{name}' is a folder; add a file name")
    Folder.at(target.parent).try_writing("files are")

"""Read a study, sample by sample, or the single run that it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from softgap.errors import SoftgapError, StoreError, unknown_name
from softgap.trajectories import tables
from softgap.trajectories.anatomy import ANATOMY, Anatomy, read_anatomy
from softgap.trajectories.folder import Folder
from softgap.trajectories.manifest import Manifest, seal_of
from softgap.trajectories.run import Trajectories

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["FORMAT", "FORMAT_VERSION", "Study", "accept_edited", "load", "open_study", "read_manifest", "refuse_edited"]

FORMAT = "softgap-study"
FORMAT_VERSION = 1


@dataclass(frozen=True, eq=False)
class Study:
    """A study on disk. Iterating reads one sample at a time; nothing but the sample names is held.

    Attributes
    ----------
    path : str
        As it was given.
    manifest : Manifest
        Where all its measurements came from.
    state : str
        ``"running"`` until its writer has finished, then ``"finished"``.
    ids : tuple of str
        Names of the samples, in the order they were written.
    """

    path: str
    manifest: Manifest = field(repr=False)
    state: str
    ids: tuple[str, ...]
    _folder: Folder = field(repr=False)
    _batches: dict[int, tuple[str, ...]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Trajectories]:
        for batch, ids in self._batches.items():
            part = _Batch(self._folder, batch, ids)
            for row in range(len(ids)):
                yield part.run(row, self.manifest)

    def sample(self, sample_id: str) -> Trajectories:
        """The run with this name."""
        for batch, ids in self._batches.items():
            if sample_id in ids:
                return _Batch(self._folder, batch, ids).run(ids.index(sample_id), self.manifest)
        raise unknown_name("sample", sample_id, self.ids)

    @property
    def has_anatomy(self) -> bool:
        """Whether the keys of some heads are stored for some samples."""
        return bool(self._folder.parts("anatomy"))

    def anatomy(self, sample_id: str) -> tuple[Anatomy, ...]:
        """Where the heads look whose anatomy is stored for this sample; empty where none is."""
        batch = next((batch for batch, ids in self._batches.items() if sample_id in ids), None)
        if batch is None:
            raise unknown_name("sample", sample_id, self.ids)
        name = f"anatomy/{part_name(batch)}"
        if self._folder.kind(name) != "file":
            return ()
        try:
            return tuple(read_anatomy(_open(self._folder, name, ANATOMY), lambda stored: stored == sample_id))
        except (OSError, ValueError, TypeError, LookupError, SoftgapError, pa.ArrowException) as error:
            if isinstance(error, StoreError):
                raise
            raise damaged_part_error(self._folder, name, error) from error

    def samples(self) -> pd.DataFrame:
        """The samples table (texts, labels, tokens), without the trajectories."""
        files = [f"samples/{part_name(batch)}" for batch in self._batches]
        batches = [read_samples(self._folder, name) for name in files]
        frame: pd.DataFrame = pa.concat_tables([tables.SAMPLES.empty_table(), *batches]).to_pandas()
        return frame


class _Batch:
    """The two files of one batch, opened once."""

    def __init__(self, folder: Folder, batch: int, ids: tuple[str, ...]) -> None:
        self.folder = folder
        self.name = f"trajectories/{part_name(batch)}"
        self.samples = read_samples(folder, f"samples/{part_name(batch)}")
        self.file = _open(folder, self.name, tables.TRAJECTORIES)
        if self.file.num_row_groups != len(ids):
            raise damaged_part_error(
                folder, self.name, f"it holds {self.file.num_row_groups} samples instead of {len(ids)}"
            )

    def run(self, row: int, manifest: Manifest) -> Trajectories:
        sample = self.samples.slice(row, 1).to_pylist()[0]
        try:
            return tables.decode(sample, self.file.read_row_group(row), manifest)
        except (OSError, ValueError, TypeError, LookupError, SoftgapError, pa.ArrowException) as error:
            raise damaged_part_error(self.folder, self.name, error) from error


def load(path: str | os.PathLike[str]) -> Trajectories:
    """Load the run saved at ``path``.

    Parameters
    ----------
    path
        A folder, or a URI that pyarrow's filesystems open.

    Returns
    -------
    Trajectories
        The only run of that study.

    Raises
    ------
    StoreError
        If there is no readable study, or one that does not hold exactly one sample.

    Examples
    --------
    ``runs/fox`` is a folder that ``softgap run "A fox went out." --out runs/fox`` wrote:

    >>> import softgap
    >>> run = softgap.load("runs/fox")
    >>> run.n_steps == len(run.tokens)
    True
    """
    study = open_study(path)
    if len(study) != 1:
        raise StoreError(
            f"load reads a study of one sample, but '{study.path}' holds {len(study)}; use open_study and its samples"
        )
    return next(iter(study))


def open_study(path: str | os.PathLike[str]) -> Study:
    """Open the study at ``path``. Only its manifest and the names of its samples are read.

    Parameters
    ----------
    path
        A folder, or a URI that pyarrow's filesystems open.

    Returns
    -------
    Study
        A lazy collection: iterate over it, or take a sample by its id.

    Raises
    ------
    StoreError
        If there is no readable study.

    Examples
    --------
    ``runs/counts`` is a folder that ``softgap study run`` wrote:

    >>> import softgap
    >>> study = softgap.open_study("runs/counts")
    >>> len(study), "count-3" in study.ids
    (16, True)
    >>> [run.n_steps for run in study][:3]
    [8, 8, 8]
    """
    folder = Folder.at(path)
    manifest, state = read_manifest(folder)
    batches = read_ids(folder)
    ids = tuple(sample_id for batch in batches.values() for sample_id in batch)
    return Study(folder.address, manifest, state, ids, folder, batches)


def part_name(batch: int) -> str:
    """File name of the parts of a batch."""
    return f"part-{batch:05d}.parquet"


def read_ids(folder: Folder) -> dict[int, tuple[str, ...]]:
    """Names of the samples in each published batch; a batch is published when its samples part is there."""
    batches: dict[int, tuple[str, ...]] = {}
    known: set[str] = set()
    trajectories = folder.parts("trajectories")
    for batch, name in folder.parts("samples").items():
        ids = tuple(read_part(folder, name)["sample_id"].to_pylist())
        if batch not in trajectories:
            raise StoreError(
                f"'{folder.address}' has {name} but no trajectories/{part_name(batch)}; restore that file from a copy, "
                "or measure again into a new folder"
            )
        if known.intersection(ids) or len(set(ids)) != len(ids):
            raise damaged_part_error(folder, name, "a sample_id occurs twice")
        known.update(ids)
        batches[batch] = ids
    return batches


def read_part(folder: Folder, name: str) -> pa.Table:
    """The names of the samples in a samples part."""
    return _read(folder, name, lambda file: file.read(columns=["sample_id"]))


def read_samples(folder: Folder, name: str) -> pa.Table:
    """A samples part."""
    return _read(folder, name, lambda file: file.read())


_accepted: ContextVar[list[str] | None] = ContextVar("accepted", default=None)


@contextmanager
def accept_edited() -> Iterator[list[str]]:
    """Read studies in the block although somebody edited them.

    Yields
    ------
    list of str
        What would have been refused, one sentence each; it is filled while studies are read.

    Examples
    --------
    >>> import softgap
    >>> from softgap.trajectories.reader import accept_edited
    >>> with accept_edited() as overridden:
    ...     study = softgap.open_study("runs/counts")
    >>> overridden
    []
    """
    sentences: list[str] = []
    token = _accepted.set(sentences)
    try:
        yield sentences
    finally:
        _accepted.reset(token)


def refuse_edited(folder: Folder, name: str) -> None:
    """Refuse a file of a study that is not what softgap wrote; in a block of ``accept_edited`` only note it."""
    sentence = f"{name} in '{folder.address}' was edited after softgap wrote it: it does not match its hash"
    accepted = _accepted.get()
    if accepted is None:
        raise StoreError(f"{sentence}; restore the file from a copy, or read it as it is with --force")
    if sentence not in accepted:
        accepted.append(sentence)


def read_manifest(folder: Folder) -> tuple[Manifest, str]:
    """The manifest and the state of the study in a folder, which no link leads out of and nobody has edited."""
    kind = folder.kind()
    if kind == "absent":
        raise StoreError(f"there is no study at '{folder.address}'; check the path")
    if kind == "file":
        raise StoreError(
            f"a study is a folder, but '{folder.address}' is a file; give the folder that holds manifest.json"
        )
    if folder.kind("manifest.json") != "file":
        parts = {"samples", "trajectories"}.intersection(folder.names())
        remedy = "restore the file from a copy" if parts else "give a folder that softgap has written"
        raise StoreError(f"'{folder.address}' is not a study: it has no manifest.json; {remedy}")
    folder.refuse_links()
    return _parse_manifest(folder, folder.read("manifest.json"))


def _parse_manifest(folder: Folder, content: bytes) -> tuple[Manifest, str]:
    where = f"manifest.json in '{folder.address}'"
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{where} is not JSON ({error}); restore the file from a copy") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        format_name = document.get("format") if isinstance(document, dict) else document
        raise StoreError(
            f"{where} must have the format '{FORMAT}', got {format_name!r}; give a folder that softgap has written"
        )
    version = document.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise StoreError(f"{where} must have a format_version from 1, got {version!r}; restore the file from a copy")
    if version > FORMAT_VERSION:
        raise StoreError(
            f"'{folder.address}' has format version {version}, but this softgap reads only up to {FORMAT_VERSION}; "
            "upgrade softgap"
        )
    try:
        manifest = Manifest.from_json(document)
    except SoftgapError as error:
        raise StoreError(f"{where} cannot be understood: {error}; restore the file from a copy") from error
    _check_hashes(folder, document)
    return manifest, str(document.get("state"))


def _check_hashes(folder: Folder, document: dict[str, Any]) -> None:
    """Refuse a manifest or prompts that were edited; those of version 0.1 have no hash."""
    if "hash" not in document:
        return
    files = document.get("files")
    if document["hash"] != seal_of(document) or not isinstance(files, dict):
        refuse_edited(folder, "manifest.json")
        return
    for name, digest in files.items():
        if folder.kind(name) != "file":
            raise StoreError(f"'{folder.address}' has no {name}, which its manifest names; restore it from a copy")
        if folder.digest(name) != digest:
            refuse_edited(folder, name)


def damaged_part_error(folder: Folder, name: str, detail: object) -> StoreError:
    """The error for a part that cannot be read."""
    line = (str(detail).strip() or type(detail).__name__).splitlines()[0]
    return StoreError(
        f"{name} in '{folder.address}' is damaged or cut short ({line}); restore this file from a copy, or measure "
        "again into a new folder"
    )


def _open(folder: Folder, name: str, schema: pa.Schema) -> Any:
    try:
        file = pq.ParquetFile(folder.path(name), filesystem=folder.filesystem, page_checksum_verification=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged_part_error(folder, name, error) from error
    missing = [column for column in schema.names if column not in file.schema_arrow.names]
    if missing:
        raise damaged_part_error(folder, name, f"it has no column '{missing[0]}'")
    for column in schema:
        stored = file.schema_arrow.field(column.name).type
        if stored != column.type:
            raise damaged_part_error(folder, name, f"column '{column.name}' holds {stored} and not {column.type}")
    return file


def _read(folder: Folder, name: str, read: Any) -> pa.Table:
    file = _open(folder, name, tables.SAMPLES)
    try:
        return read(file)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged_part_error(folder, name, error) from error

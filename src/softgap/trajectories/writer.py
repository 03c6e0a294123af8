"""Write a study batch by batch, so that a reader only ever sees whole batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from softgap.deprecation import DeprecatedAttribute
from softgap.errors import StoreError, ValueInputError
from softgap.inputs import refuse_string
from softgap.trajectories import tables
from softgap.trajectories.anatomy import Anatomy, write_anatomy
from softgap.trajectories.folder import Folder, add_line
from softgap.trajectories.locks import FolderLock, locked
from softgap.trajectories.manifest import Manifest, seal_of
from softgap.trajectories.reader import (
    FORMAT,
    FORMAT_VERSION,
    accept_edited,
    open_study,
    part_name,
    read_ids,
    read_manifest,
    read_part,
    read_samples,
)
from softgap.trajectories.run import Trajectories

__all__ = [
    "LABELS",
    "LabelCounts",
    "StudyWriter",
    "check_new_study",
    "check_target",
    "label_study",
    "publish_batch",
    "published_ids",
    "relabel",
    "save",
]


KINDS = ("samples", "trajectories")
# Parts that a study may have besides: old readers do not look for them.
_OPTIONAL = ("anatomy",)
LABELS = "labels.jsonl"
# What a writer may leave in the study's own folder, half-written, when it is killed.
_FILES = ("manifest.json", "prompts.jsonl", LABELS)
# Files that the manifest holds a hash of.
_SEALED = ("prompts.jsonl",)
# What a study without a sample may consist of.
_FIRST = ("manifest.json", "prompts.jsonl", "failures", *KINDS)


def publish_batch(
    folder: Folder, number: int, runs: Sequence[Trajectories], *, before: Callable[[], None] = lambda: None
) -> None:
    """Stage both parts, call ``before``, then publish them: trajectories first, since readers go by the samples."""
    samples, trajectories = (f"{kind}/{part_name(number)}" for kind in KINDS)
    staged: list[str] = []
    published = False
    try:
        staged.append(folder.stage(trajectories, lambda sink: tables.write_trajectories(sink, runs)))
        staged.append(folder.stage(samples, lambda sink: tables.write_samples(sink, runs)))
        before()
        folder.publish(staged[0], trajectories)
        published = True
        folder.publish(staged[1], samples)
    except BaseException as error:
        for name in staged:
            folder.discard(name)
        # An interrupt can also arrive just after a rename; where publishing failed or the lease was lost, the part that
        # is there is of a writer who took over. And just after the last rename: then the batch is published and stays.
        ours = published or not isinstance(error, Exception)
        if ours and folder.passes and folder.kind(samples) == "absent":
            folder.discard(trajectories)
        raise


def published_ids(folder: Folder, number: int) -> tuple[str, ...] | None:
    """Names of the samples of a batch, or None where it is not published."""
    name = f"samples/{part_name(number)}"
    return None if folder.kind(name) == "absent" else tuple(read_part(folder, name)["sample_id"].to_pylist())


def relabel(folder: Folder, labels: dict[str, str | None]) -> int:
    """Give samples other labels and return how many changed; all parts are staged before the first is replaced."""
    staged: list[tuple[str, str]] = []
    changed = 0
    try:
        for name in folder.parts("samples").values():
            table = read_samples(folder, name)
            old = table["label"].to_pylist()
            new = [labels.get(i, label) for i, label in zip(table["sample_id"].to_pylist(), old, strict=True)]
            if new == old:
                continue
            changed += sum(a != b for a, b in zip(new, old, strict=True))
            place = table.schema.get_field_index("label")
            replaced = table.set_column(place, "label", pa.array(new, pa.string()))
            staged.append((folder.stage(name, partial(_write_to, replaced)), name))
        while staged:
            folder.publish(*staged[0])
            staged.pop(0)
    finally:
        for temporary, _ in staged:
            folder.discard(temporary)
    return changed


@dataclass(frozen=True)
class LabelCounts:
    """How many labels were read, how many of them are new, and how many samples have no label now."""

    labels: int
    new: int
    unlabelled: int
    given = DeprecatedAttribute("labels")
    changed = DeprecatedAttribute("new")
    without = DeprecatedAttribute("unlabelled")

    def to_json(self) -> dict[str, int]:
        """The counts, under the names that ``softgap study label --json`` prints."""
        return {"given": self.labels, "changed": self.new, "without": self.unlabelled}


def label_study(path: str, labels: Mapping[str, str | None], *, source: str = "") -> LabelCounts:
    """Give samples of a study other labels; None takes a label away. The study's log keeps what was done."""
    folder = Folder.at(path)
    open_study(path)  # before the lock: what is no study gets none
    with locked(folder) as lock:
        return _label(lock.folder, labels, source)


def _label(folder: Folder, labels: Mapping[str, str | None], source: str) -> LabelCounts:
    study = open_study(folder.address)
    unknown = [sample_id for sample_id in labels if sample_id not in set(study.ids)]
    if unknown:
        raise ValueInputError(
            f"labels must be for samples of '{folder.address}', got '{unknown[0]}' ({len(unknown)} such ids); its "
            f"samples are {', '.join(study.ids[:3])}, ...; remove the other ids"
        )
    folder.discard_partial("", LABELS)
    for kind in KINDS:
        folder.discard_partial(kind)
    changed = relabel(folder, dict(labels))
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "source": source, "given": len(labels)}
    add_line(folder, LABELS, {**entry, "changed": changed})
    unlabelled = int(study.samples()["label"].isna().sum())
    return LabelCounts(len(labels), changed, unlabelled)


def _write_to(table: pa.Table, sink: Any) -> None:
    tables.write_table(sink, table)


class StudyWriter:
    """Writes a study to a folder or URI.

    As a context manager it finishes the study at the end of the block. If the block fails before the first batch is
    written, what the writer created is removed again; after that, the batches written stay readable and the study
    stays ``"running"``. A folder has one writer at a time: from its creation to ``finish``, to the end of its block or
    to the end of its process it holds the folder's lock, and another is refused.

    Parameters
    ----------
    path : str or path
        A new or empty folder, or a URI.
    manifest : Manifest
        Of the whole study.
    overwrite : bool
        Replace the study that is there, if it asks the same question (model, mechanisms, inputs, options, seed,
        dtype, dropped sinks). The old one stays until the first new batch is fully on disk.
    resume : bool
        Continue the study that is there, if it is the same down to versions and threads; start it if there is none.

    Raises
    ------
    StoreError
        If the folder holds anything else, or cannot be written to. Nothing is changed then.
    """

    def __init__(
        self, path: str | os.PathLike[str], manifest: Manifest, *, overwrite: bool = False, resume: bool = False
    ) -> None:
        if overwrite and resume:
            raise ValueInputError("overwrite and resume exclude each other, got both; choose one")
        self._folder = Folder.at(path)
        self._ids: dict[int, tuple[str, ...]] = {}
        self._created: list[str] = []
        self._manifest = replace(manifest, started=manifest.started or _now())
        check_target(self._folder, manifest, overwrite=overwrite, resume=resume)  # what is refused gets no lock
        self._lock = FolderLock(self._folder)
        self._created = self._lock.created
        self._folder = self._lock.folder
        try:
            holds_study = check_target(self._folder, manifest, overwrite=overwrite, resume=resume)
            self._fresh = not holds_study
            self._replaces = holds_study and overwrite
            self._folder.discard_partial("", *_FILES)
            if holds_study and resume:
                self._take_over()
            elif self._replaces:
                for kind in KINDS:
                    self._folder.discard_partial(kind)
            else:
                self._start()
        except BaseException:
            self._release()
            raise

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of the batches that are written, also by the study that was resumed."""
        return tuple(sorted(self._ids))

    @property
    def ids(self) -> dict[int, tuple[str, ...]]:
        """Names of the samples of every batch that is written."""
        return dict(self._ids)

    def append(self, runs: Sequence[Trajectories], *, batch: int | None = None) -> int:
        """Write one batch of runs, visible together or not at all, and return its number.

        Parameters
        ----------
        runs : sequence of Trajectories
            They get the study's manifest; their own is not kept.
        batch : int, optional
            Its number in the study's plan; by default the one after the last.
        """
        number = max(self._ids, default=-1) + 1 if batch is None else batch
        self._check(runs, number)
        try:
            publish_batch(self._folder, number, runs, before=self._prepare)
        finally:
            # A process that was suspended in between may have lost its lease, and its half-written parts with it.
            self._lock.check()
        self._ids[number] = tuple(run.sample_id for run in runs)
        return number

    @property
    def folder(self) -> Folder:
        """The study's folder, in which files get their names only while this writer holds its lock."""
        return self._folder

    @property
    def lease(self) -> str | None:
        """The file of this writer's lease in an object store, for processes that work for it; None on a disk."""
        return self._lock.lease

    def sample(self, sample_id: str) -> Trajectories:
        """A run that is written."""
        return open_study(self._folder.address).sample(sample_id)

    def append_anatomy(self, heads: Sequence[Anatomy], *, batch: int) -> None:
        """Store where some heads look in the samples of a batch that is written.

        Parameters
        ----------
        heads : sequence of Anatomy
            Of samples of that batch.
        batch : int
            Its number.
        """
        unknown = {entry.sample_id for entry in heads} - set(self._ids.get(batch, ()))
        if unknown:
            raise ValueInputError(
                f"the anatomy of a batch belongs to its samples {list(self._ids.get(batch, ()))}, got {sorted(unknown)}"
            )
        self._prepare()
        self._folder.create("anatomy")
        name = f"anatomy/{part_name(batch)}"
        samples = [[entry for entry in heads if entry.sample_id == sample] for sample in self._ids[batch]]
        temporary = self._folder.stage(name, lambda sink: write_anatomy(sink, samples))
        try:
            self._folder.publish(temporary, name)
        except BaseException:
            self._folder.discard(temporary)
            raise

    def adopt(self, batch: int, ids: Sequence[str]) -> None:
        """Take note of a batch that another process has published in this study's folder."""
        refuse_string("ids", ids, "the names of its samples")
        self._lock.check()
        self._ids[batch] = tuple(ids)

    def seal(self) -> None:
        """Note the hashes of files that were written beside the batches, such as the prompts."""
        self._lock.check()
        self._write_manifest("running")

    def finish(self) -> None:
        """Mark the study as finished, and let other writers go on."""
        self._prepare()
        self._write_manifest("finished")
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.finish()
            elif self._fresh and not self._ids:
                self._withdraw()
        finally:
            self._release()

    def _release(self) -> None:
        """Let other writers go on; folders that were created for nothing are removed, unless they are another's now."""
        ours = self._folder.passes
        if ours:
            self._folder.discard_empty(self._created)
        self._lock.release()
        if ours:  # the study's folder, which held the lock
            self._folder.discard_empty(self._lock.created)

    def _prepare(self) -> None:
        """Right before something is published: the lock is still ours, and an old study gone."""
        self._lock.check()
        self._replace_old()

    def _start(self) -> None:
        try:
            for kind in KINDS:
                if self._folder.kind(kind) == "folder":
                    self._clear(kind)
                    self._created = [self._folder.path(kind), *self._created]
                self._created = [*self._folder.create(kind), *self._created]
            self._write_manifest("running")
        except BaseException:
            self._withdraw()
            raise

    def _withdraw(self) -> None:
        if self._folder.passes:  # else all of it is of the writer who took over
            self._folder.discard("manifest.json")
            self._folder.discard_empty(self._created)

    def _take_over(self) -> None:
        stored, _ = read_manifest(self._folder)
        self._manifest = replace(stored, finished=None)
        self._ids = read_ids(self._folder)
        for kind in KINDS:
            self._folder.create(kind)
            self._clear(kind)
        for kind in _OPTIONAL:
            self._clear(kind)
        self._write_manifest("running")

    def _clear(self, kind: str) -> None:
        """Delete what a killed writer left: half-written parts, and trajectories whose samples were not published."""
        self._folder.discard_partial(kind)
        for number, name in self._folder.parts(kind).items():
            if number not in self._ids:
                self._folder.delete(name)

    def _replace_old(self) -> None:
        if self._replaces:
            # Samples first: without them a reader sees an empty study, never old samples with new trajectories.
            for kind in (*KINDS, *_OPTIONAL):
                for name in self._folder.parts(kind).values():
                    self._folder.delete(name)
            self._write_manifest("running")
            self._replaces = False

    def _check(self, runs: Sequence[Trajectories], number: int) -> None:
        if number < 0 or number in self._ids:
            raise ValueInputError(
                f"a batch is written once, under a number from 0 that is not in {list(self._ids)}, got {number}"
            )
        known = {sample_id for ids in self._ids.values() for sample_id in ids}
        for run in runs:
            _check_whole(run)
            if run.sample_id in known:
                raise ValueInputError(f"sample_id must be unique in a study, got '{run.sample_id}' twice; rename one")
            known.add(run.sample_id)
            mechanisms = tuple(self._manifest.mechanisms)
            if mechanisms and run.mechanisms != mechanisms:
                raise ValueInputError(
                    f"the runs of a study must have the mechanisms of its manifest, {list(mechanisms)}, "
                    f"got {list(run.mechanisms)} in sample '{run.sample_id}'"
                )

    def _write_manifest(self, state: str) -> None:
        if state == "finished" and self._manifest.finished is None:
            self._manifest = replace(self._manifest, finished=_now())
        document: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "state": state,
            **self._manifest.to_json(),
            "files": {name: self._folder.digest(name) for name in _SEALED if self._folder.kind(name) == "file"},
        }
        document["hash"] = seal_of(document)
        self._folder.replace("manifest.json", json.dumps(document, indent=2, ensure_ascii=False).encode())


def save(run: Trajectories, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write one run as a study of one sample.

    Parameters
    ----------
    run : Trajectories
        With its prompt, if it has one.
    path : str or path
        A new or empty folder, or a URI.
    overwrite : bool
        Replace the study that is there, if it asks the same question; see ``StudyWriter``.
    """
    _check_whole(run)
    with StudyWriter(path, run.manifest, overwrite=overwrite) as writer:
        writer.append([run])


def _check_whole(run: Trajectories) -> None:
    if run.part != "completion":
        raise ValueInputError(
            f"a prompt is saved with its run, got the prompt of sample '{run.sample_id}' alone; save the run itself"
        )


def check_target(folder: Folder, manifest: Manifest, *, overwrite: bool, resume: bool) -> bool:
    """Whether the folder holds a study that may be written to; False if it is new or empty; else the error.

    Empty is also what a writer leaves that was killed before it had written a sample.
    """
    kind = folder.kind()
    if kind == "file":
        raise StoreError(f"a study is written to a folder, but '{folder.address}' is a file; choose another path")
    if kind == "absent" or not folder.other_names(_FIRST):
        return False
    if folder.kind("manifest.json") == "absent":
        raise _other_files(folder)
    # What is replaced may have been edited.
    with accept_edited() if overwrite else nullcontext():
        stored, _ = read_manifest(folder)
    differences = manifest.differences(stored, question_only=not resume)
    if differences:
        name = differences[0]
        raise StoreError(
            f"'{folder.address}' already holds a different study (its {name} is {stored.to_json()[name]!r}, "
            f"this one's {manifest.to_json()[name]!r}); choose another folder"
        )
    if not (overwrite or resume):
        if _is_unbegun(folder):
            return False
        raise StoreError(
            f"'{folder.address}' already holds this study; choose another folder, or set overwrite to replace it"
        )
    return True


def check_new_study(folder: Folder) -> None:
    """Refuse a folder that could take no study: for commands, before they load a model."""
    if folder.kind("manifest.json") == "absent":
        if folder.kind() == "folder" and folder.other_names(_FIRST):
            raise _other_files(folder)
        folder.try_writing()
    with locked(folder):
        pass


def _is_unbegun(folder: Folder) -> bool:
    """Whether a folder holds a study whose writer was killed before its first sample: nothing in it can be lost."""
    _, state = read_manifest(folder)
    first = ("prompts.jsonl", "failures", *KINDS)
    others = set(folder.other_names(KINDS)) - {"manifest.json", *first}
    return state == "running" and not others and not folder.parts("samples")


def _other_files(folder: Folder) -> StoreError:
    return StoreError(
        f"a study is written to a new or empty folder, but '{folder.address}' holds other files "
        f"({', '.join(folder.other_names(_FIRST)[:3])}); choose another folder"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

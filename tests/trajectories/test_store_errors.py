"""Every study that cannot be read, and every folder that cannot be written to, is named in one sentence."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from softgap.errors import StoreError, ValueInputError
from softgap.trajectories import StudyWriter, load, open_study
from softgap.trajectories.folder import Folder
from support.disk_examples import largest_file
from support.trajectory_examples import MANIFEST, example_run


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, to see that nothing changed."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    example_run(prompt_steps=3).save(tmp_path / "fox")
    return tmp_path / "fox"


def edit_manifest(study: Path, **changes: Any) -> None:
    path = study / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", r"^there is no study at '.*/absent'; check the path$"),
        ("file", r"^a study is a folder, but '.*/file' is a file; give the folder that holds manifest.json$"),
        ("empty", r"^'.*/empty' is not a study: it has no manifest.json; give a folder that softgap has written$"),
    ],
)
def test_what_is_no_study(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match=message):
        load(tmp_path / path)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", r"^the path of a study must be a folder or a URI, got ''; give one such as runs/fox$"),
        ("a\0b", r"^the path of a study must be a folder or a URI, got 'a\\x00b'; give one such as runs/fox$"),
        ("nowhere://x", r"^cannot open 'nowhere://x' \(.*nowhere.*\); give a local folder or a URI that pyarrow opens"),
        ("file://x", r"^cannot open 'file://x' \(.*relative.*\); give a local folder or a URI that pyarrow opens"),
        ("~nobody-here/x", r"^cannot find the home folder in '~nobody-here/x' .*; write the path in full$"),
    ],
)
def test_what_is_no_path(path: str, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        load(path)
    with pytest.raises(StoreError, match=message):
        example_run().save(path)


def test_several_samples_are_not_one_run(tmp_path: Path) -> None:
    with StudyWriter(tmp_path / "study", MANIFEST) as writer:
        writer.append([example_run(sample_id="a"), example_run(sample_id="b")])
    with pytest.raises(StoreError, match=r"^load reads a study of one sample, but '.*' holds 2; use open_study"):
        load(tmp_path / "study")


def test_a_missing_manifest(saved: Path) -> None:
    (saved / "manifest.json").unlink()
    with pytest.raises(StoreError, match=r"^'.*/fox' is not a study: it has no manifest.json; restore the file from a"):
        load(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", r"^manifest.json in '.*/fox' is not JSON \(.*\); restore the file from a copy$"),
        (b"\xff\xfe\xfa", r"^manifest.json in '.*/fox' is not JSON"),
        (b"[1]", r"^manifest.json in '.*/fox' must have the format 'softgap-study', got \[1\]; give a folder"),
        (b'{"format": "other"}', "must have the format 'softgap-study', got 'other'"),
    ],
)
def test_a_manifest_that_is_none(saved: Path, content: bytes, message: str) -> None:
    (saved / "manifest.json").write_bytes(content)
    before = snapshot(saved)
    with pytest.raises(StoreError, match=message):
        load(saved)
    with pytest.raises(StoreError, match=message):
        example_run().save(saved, overwrite=True)
    assert snapshot(saved) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format_version": 2},
            r"^'.*/fox' has format version 2, but this softgap reads only up to 1; upgrade softgap$",
        ),
        ({"format_version": "1"}, r"must have a format_version from 1, got '1'; restore the file from a copy$"),
        ({"format_version": 0}, "must have a format_version from 1, got 0"),
        ({"seed": "x"}, "manifest.json in '.*/fox' cannot be understood: manifest field 'seed' must be a whole number"),
    ],
)
def test_a_manifest_that_does_not_fit(saved: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(saved, **changes)
    before = snapshot(saved)
    for use in (open_study, lambda path: StudyWriter(path, MANIFEST, overwrite=True)):
        with pytest.raises(StoreError, match=message):
            use(saved)
    assert snapshot(saved) == before


@pytest.mark.parametrize("kind", ["samples", "trajectories"])
@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"", lambda content: b"x" * 500]
)
def test_a_damaged_part_is_named(saved: Path, kind: str, damage: Callable[[bytes], bytes]) -> None:
    part = saved / kind / "part-00000.parquet"
    part.write_bytes(damage(part.read_bytes()))
    message = (
        rf"^{kind}/part-00000.parquet in '.*/fox' is damaged or cut short \(.*\); restore this file from a copy, or"
    )
    with pytest.raises(StoreError, match=message):
        load(saved)


def test_one_wrong_byte_is_found(tmp_path: Path) -> None:
    example_run(steps=500, missing=0.0).save(tmp_path / "fox")
    part = tmp_path / "fox" / "trajectories" / "part-00000.parquet"
    group = pq.ParquetFile(part).metadata.row_group(0)
    (column,) = (column for i in range(9) if (column := group.column(i)).path_in_schema == "divergence.list.element")
    content = bytearray(part.read_bytes())
    # Random mantissas do not compress, so that only the checksum can tell.
    content[column.data_page_offset + column.total_compressed_size // 3] ^= 0xFF
    part.write_bytes(content)
    with pytest.raises(StoreError, match=r"^trajectories/part-00000.parquet in .* is damaged .*\(.*CRC checksum"):
        load(tmp_path / "fox")


def rewrite(part: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(part)), part)


def shorter(table: pa.Table) -> pa.Table:
    lists = [values[:-1] if row == 4 else values for row, values in enumerate(table["divergence"].to_pylist())]
    index = table.schema.get_field_index("divergence")
    return table.set_column(index, table.schema.field(index), pa.array(lists, pa.list_(pa.float32())))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["kv_group"]), "it has no column 'kv_group'"),
        (
            lambda table: table.set_column(0, "sample_id", pa.array([b"fox"] * table.num_rows)),
            "column 'sample_id' holds binary and not string",
        ),
        (lambda table: table.slice(1), "it lacks or repeats heads of sample 'fox'"),
        (lambda table: pa.concat_tables([table, table.slice(0, 1)]), "it lacks or repeats heads of sample 'fox'"),
        (
            lambda table: table.filter(pa.compute.equal(table["part"], "prompt")),
            "it has no rows of the completion of sample",
        ),
        (shorter, "its lists are not all of length"),
        (
            lambda table: table.set_column(0, "sample_id", pa.array(["cat"] * table.num_rows)),
            "its rows do not belong to sample 'fox'",
        ),
    ],
)
def test_a_part_with_other_content_is_named(saved: Path, change: Callable[[pa.Table], pa.Table], message: str) -> None:
    rewrite(saved / "trajectories" / "part-00000.parquet", change)
    with pytest.raises(StoreError, match=rf"^trajectories/part-00000.parquet in .* is damaged .*\({message}"):
        load(saved)


def test_a_part_with_more_samples_is_named(saved: Path) -> None:
    part = saved / "trajectories" / "part-00000.parquet"
    table = pq.read_table(part)
    pq.write_table(table, part, row_group_size=table.num_rows // 2)
    with pytest.raises(StoreError, match=r"trajectories/part-00000.parquet in .* \(it holds 2 samples instead of 1\)"):
        load(saved)


def test_a_missing_part_is_named(saved: Path) -> None:
    (saved / "trajectories" / "part-00000.parquet").unlink()
    with pytest.raises(
        StoreError, match=r"has samples/part-00000.parquet but no trajectories/part-00000.parquet; resto"
    ):
        load(saved)


def test_a_sample_that_occurs_twice_is_named(saved: Path) -> None:
    for kind in ("samples", "trajectories"):
        (saved / kind / "part-00001.parquet").write_bytes((saved / kind / "part-00000.parquet").read_bytes())
    with pytest.raises(StoreError, match=r"samples/part-00001.parquet in .* \(a sample_id occurs twice\)"):
        open_study(saved)


def test_an_existing_study_is_kept_unless_told(saved: Path) -> None:
    before = snapshot(saved)
    message = r"^'.*/fox' already holds this study; choose another folder, or set overwrite to replace it$"
    with pytest.raises(StoreError, match=message):
        example_run(seed=5).save(saved)
    assert snapshot(saved) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_different_study_is_kept_whatever_was_told(saved: Path, overwrite: bool) -> None:
    before = snapshot(saved)
    other = replace(MANIFEST, seed=8)
    with pytest.raises(
        StoreError,
        match=r"^'.*/fox' already holds a different study \(its seed is 7, this one's 8\); choose another folder$",
    ):
        example_run(manifest=other).save(saved, overwrite=overwrite)
    assert snapshot(saved) == before


def test_other_files_are_kept_whatever_was_told(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    before = snapshot(tmp_path)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(
            StoreError,
            match=r"^a study is written to a new or empty folder, but '.*' holds other files \(thesis.tex\); choose",
        ):
            StudyWriter(tmp_path, MANIFEST, **options)
    assert snapshot(tmp_path) == before


def test_overwrite_and_resume_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueInputError, match="overwrite and resume exclude each other, got both; choose one"):
        StudyWriter(tmp_path, MANIFEST, overwrite=True, resume=True)


def test_a_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    before = snapshot(tmp_path)
    with pytest.raises(
        StoreError, match=r"^a study is written to a folder, but '.*/file' is a file; choose another path"
    ):
        example_run().save(tmp_path / "file")
    with pytest.raises(
        StoreError, match=r"^cannot write to '.*/file/a/b': Not a directory; choose a folder you may write to$"
    ):
        example_run().save(tmp_path / "file" / "a" / "b")
    assert snapshot(tmp_path) == before


class ReadOnlyFilesystem:
    """A filesystem that denies one kind of change; the tests may run as root, whom no permission stops."""

    def __init__(self, filesystem: Any, denied: str) -> None:
        self.filesystem = filesystem
        self.denied = denied

    def __getattr__(self, name: str) -> Any:
        if name == self.denied:
            return self.deny
        return getattr(self.filesystem, name)

    def deny(self, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize("denied", ["create_dir", "open_output_stream", "move"])
def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str) -> None:
    local = Folder.at(tmp_path).filesystem
    monkeypatch.setattr(Folder, "at", lambda path: Folder(ReadOnlyFilesystem(local, denied), str(path), str(path)))
    with pytest.raises(
        StoreError, match=r"^cannot write to '.*/locked/fox': Permission denied; choose a folder you may write to$"
    ):
        example_run().save(tmp_path / "locked" / "fox")
    assert list(tmp_path.iterdir()) == []


def test_folders_created_in_vain_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Grudging(ReadOnlyFilesystem):
        def deny(self, path: str, **_: Any) -> None:
            Path(path).parent.mkdir(parents=True)
            super().deny()

    local = Folder.at(tmp_path).filesystem
    monkeypatch.setattr(Folder, "at", lambda path: Folder(Grudging(local, "create_dir"), str(path), str(path)))
    with pytest.raises(StoreError, match=r"^cannot write to '.*/runs/today/fox': Permission denied"):
        example_run().save(tmp_path / "runs" / "today" / "fox")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/sys/kernel").exists(), reason="/sys is Linux only")
def test_a_folder_that_the_system_refuses() -> None:
    with pytest.raises(StoreError, match=r"^cannot write to '/sys/softgap': .*; choose a folder you may write to$"):
        example_run().save("/sys/softgap")


def to_full_disk(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """From now on, temporary files of this kind lie on /dev/full, where every write fails as on a full disk."""
    original = Folder.temporary

    def linked(self: Folder, name: str) -> str:
        temporary = original(self, name)
        if name.startswith(kind):
            Path(self.path(temporary)).symlink_to("/dev/full")
        return temporary

    monkeypatch.setattr(Folder, "temporary", linked)


FULL = r"^cannot write to '.*': No space left on device; free some space or choose another disk$"
needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux only")


@needs_full_disk
@pytest.mark.parametrize("kind", ["manifest", "trajectories", "samples"])
@pytest.mark.parametrize("existing", [True, False])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, existing: bool) -> None:
    if existing:
        (tmp_path / "runs" / "fox").mkdir(parents=True)
    before = snapshot(tmp_path)
    to_full_disk(monkeypatch, kind)
    with pytest.raises(StoreError, match=FULL):
        example_run().save(tmp_path / "runs" / "fox")
    assert snapshot(tmp_path) == before


@needs_full_disk
@pytest.mark.parametrize("kind", ["trajectories", "samples"])
def test_a_full_disk_keeps_the_study_it_would_have_replaced(
    saved: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    before = snapshot(saved)
    to_full_disk(monkeypatch, kind)
    with pytest.raises(StoreError, match=FULL):
        example_run(seed=5).save(saved, overwrite=True)
    assert snapshot(saved) == before


@needs_full_disk
@pytest.mark.parametrize("kind", ["trajectories", "samples"])
def test_a_full_disk_keeps_the_batches_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    study = tmp_path / "study"
    writer = StudyWriter(study, MANIFEST)
    writer.append([example_run(sample_id="a")])
    before = snapshot(tmp_path)
    to_full_disk(monkeypatch, kind)
    with pytest.raises(StoreError, match=FULL), writer:
        writer.append([example_run(sample_id="b")])
    del before[str(study / ".writer.lock")]
    assert snapshot(tmp_path) == before
    opened = open_study(study)
    assert (opened.ids, opened.state) == (("a",), "running")
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"^this writer of '.*/study' has ended and let others go on; open another to"):
        writer.append([example_run(sample_id="b")])
    with StudyWriter(study, MANIFEST, resume=True) as writer:
        writer.append([example_run(sample_id="b")])
    assert open_study(study).ids == ("a", "b")


def test_a_disk_that_fills_up_within_a_part_leaves_nothing(tmp_path: Path) -> None:
    run = example_run(steps=2000)
    assert run.divergence.nbytes > 50_000
    message = r"^cannot write to '.*/fox': File too large; free some space or choose another disk$"
    with largest_file(50_000), pytest.raises(StoreError, match=message):
        run.save(tmp_path / "fox")
    assert list(tmp_path.iterdir()) == []
    run.save(tmp_path / "fox")
    np.testing.assert_array_equal(load(tmp_path / "fox").divergence, run.divergence)

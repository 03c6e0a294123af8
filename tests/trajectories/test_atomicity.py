"""A reader sees whole batches only, wherever the writer is cut off, and a resumed study ends as an unbroken one."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from softgap.errors import StoreError
from softgap.trajectories import Manifest, Study, StudyWriter, Trajectories, load, open_study, save
from softgap.trajectories.folder import Folder
from support.trajectory_examples import MANIFEST, example_run

BATCHES = [
    [example_run(sample_id="a", seed=1, prompt_steps=2), example_run(sample_id="b", seed=2)],
    [example_run(sample_id="c", seed=3)],
]


class Killed(BaseException):
    """Stands for the end of the process."""


class MortalFilesystem:
    """A filesystem on which the process dies at the n-th change; nothing changes after that, so no clearing up."""

    def __init__(self, filesystem: Any, changes: int) -> None:
        self.filesystem = filesystem
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.filesystem, name)
        if name not in {"create_dir", "open_output_stream", "move", "delete_file", "delete_dir"}:
            return method

        def change(*arguments: Any, **options: Any) -> Any:
            self.changes -= 1
            if self.changes == 0 and name == "open_output_stream":
                with method(*arguments, **options) as sink:
                    sink.write(b"PAR1 half a part")
            if self.changes <= 0:
                raise Killed
            return method(*arguments, **options)

        return change


def write(path: Path, manifest: Manifest = MANIFEST, **options: Any) -> None:
    """The study of BATCHES, as a runner would write or resume it."""
    with StudyWriter(path, manifest, **options) as writer:
        for number, runs in enumerate(BATCHES):
            if number not in writer.batches:
                writer.append(runs, batch=number)


def write_until(path: Path, changes: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Write the study on a filesystem that dies; whether it died."""
    original = Folder.at
    with monkeypatch.context() as patch:
        patch.setattr(
            Folder, "at", lambda p: replace(f := original(p), filesystem=MortalFilesystem(f.filesystem, changes))
        )
        try:
            write(path, **options)
        except Killed:
            return True
    return False


def assert_whole_batches(study: Study, batches: list[list[Trajectories]] = BATCHES) -> int:
    """Check that a study holds the first few batches, whole and right; return how many."""
    runs = list(study)
    for count in range(len(batches) + 1):
        expected = [run for batch in batches[:count] for run in batch]
        if study.ids == tuple(run.sample_id for run in expected):
            assert all(run.equals(other) for run, other in zip(runs, expected, strict=True))
            return count
    raise AssertionError(f"half a batch: {study.ids}")


def data(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*.parquet")}


def leftovers(path: Path) -> list[str]:
    return [file.name for file in path.rglob("*") if file.is_file() and file.name.startswith(".")]


def test_a_writer_cut_off_anywhere_leaves_whole_batches_and_can_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "unbroken")
    seen = []
    changes = 1
    while write_until(path := tmp_path / f"cut-{changes}", changes, monkeypatch):
        if (path / "manifest.json").exists():
            study = open_study(path)
            assert study.state == "running"
            seen.append(assert_whole_batches(study))
            write(path, resume=True)
            assert data(path) == data(tmp_path / "unbroken")
            assert leftovers(path) == []
            assert open_study(path).state == "finished"
        changes += 1
    # 3 folders, the manifest (2 changes), two batches (4 each), the manifest (2)
    assert changes - 1 == 15
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2}


def test_replacing_cut_off_anywhere_never_mixes_old_and_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = [[replace(run, label="old") for run in batch] for batch in BATCHES]
    changes, seen = 1, set()
    while True:
        path = tmp_path / f"cut-{changes}"
        with StudyWriter(path, MANIFEST) as writer:
            for runs in old:
                writer.append(runs)
        died = write_until(path, changes, monkeypatch, overwrite=True)
        study = open_study(path)
        label = "/".join({str(run.label) for run in study})
        seen.add(label)
        if label == "old":
            # Deleting an old study is several changes: its batches vanish whole.
            expected = {run.sample_id: run for batch in old for run in batch}
            assert study.ids in {("a", "b", "c"), ("c",)}
            assert all(run.equals(expected[run.sample_id]) for run in study)
        else:
            assert_whole_batches(study)
        if not died:
            break
        changes += 1
    assert seen == {"old", "animal", ""}
    assert study.state == "finished"


KILLED_BETWEEN_THE_RENAMES = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from softgap.trajectories import StudyWriter
from softgap.trajectories.folder import Folder
from support.trajectory_examples import MANIFEST, example_run
writer = StudyWriter(sys.argv[1], MANIFEST)
writer.append([example_run(sample_id="a", seed=1)])
original = Folder.publish
def publish(self, temporary, name):
    original(self, temporary, name)
    os.kill(os.getpid(), signal.SIGKILL)
Folder.publish = publish
writer.append([example_run(sample_id="b", seed=2)])
"""


def test_a_process_killed_between_the_renames(tmp_path: Path) -> None:
    path = tmp_path / "study"
    arguments = [sys.executable, "-c", KILLED_BETWEEN_THE_RENAMES, str(path), str(Path(__file__).parents[1])]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (path / "trajectories" / "part-00001.parquet").exists()
    assert not (path / "samples" / "part-00001.parquet").exists()
    study = open_study(path)
    assert (study.ids, study.state) == (("a",), "running")
    assert next(iter(study)).equals(example_run(sample_id="a", seed=1))
    assert StudyWriter(path, MANIFEST, resume=True).batches == (0,)
    assert not (path / "trajectories" / "part-00001.parquet").exists()
    assert leftovers(path) == []


def test_an_interrupt_between_the_renames_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    writer.append(BATCHES[0])
    before = data(path)
    original = Folder.publish

    def publish(self: Folder, temporary: str, name: str) -> None:
        original(self, temporary, name)
        raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "publish", publish)
    with pytest.raises(KeyboardInterrupt), writer:
        writer.append(BATCHES[1])
    assert data(path) == before
    assert leftovers(path) == []
    assert open_study(path).ids == ("a", "b")


def test_an_interrupt_after_the_last_rename_leaves_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    original = Folder.publish

    def publish(self: Folder, temporary: str, name: str) -> None:
        original(self, temporary, name)
        if name.startswith("samples"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "publish", publish)
    with pytest.raises(KeyboardInterrupt):
        writer.append(BATCHES[0])
    assert assert_whole_batches(open_study(path)) == 1


@pytest.mark.parametrize("existing", [True, False])
def test_a_block_that_fails_before_the_first_batch_leaves_nothing(tmp_path: Path, existing: bool) -> None:
    path = tmp_path / "runs" / "study"
    if existing:
        path.mkdir(parents=True)
    writer = StudyWriter(path, MANIFEST)
    assert open_study(path).state == "running"
    with pytest.raises(RuntimeError), writer:
        raise RuntimeError
    assert list(tmp_path.rglob("*")) == ([tmp_path / "runs", path] if existing else [])


def test_a_block_that_fails_later_leaves_what_was_finished(tmp_path: Path) -> None:
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    writer.append(BATCHES[0])
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt
    study = open_study(path)
    assert (assert_whole_batches(study), study.state) == (1, "running")


def test_resuming_a_finished_study_changes_no_data(tmp_path: Path) -> None:
    path = tmp_path / "study"
    write(path, resume=True)
    before = data(path)
    started = open_study(path).manifest.started
    write(path, replace(MANIFEST, command="again", started="2030-01-01T00:00:00+00:00"), resume=True)
    assert data(path) == before
    assert open_study(path).manifest.started == started
    assert open_study(path).manifest.command == "softgap run"


@pytest.mark.parametrize(("name", "given"), [("versions", {"torch": "9"}), ("threads", 5), ("seed", 9)])
def test_resuming_under_other_conditions_is_refused(tmp_path: Path, name: str, given: Any) -> None:
    path = tmp_path / "study"
    write(path)
    before = data(path)
    with pytest.raises(
        StoreError, match=rf"already holds a different study \(its {name} is .*, this one's .*\); choose"
    ):
        write(path, replace(MANIFEST, **{name: given}), resume=True)
    assert data(path) == before


def test_overwriting_on_another_machine_is_the_same_question(tmp_path: Path) -> None:
    save(example_run(seed=1, prompt_steps=2), tmp_path / "fox")
    run = example_run(seed=2, manifest=replace(MANIFEST, threads=5, versions={"torch": "9"}))
    save(run, tmp_path / "fox", overwrite=True)
    assert load(tmp_path / "fox").equals(run)
    assert leftovers(tmp_path) == []


def test_overwriting_removes_the_batches_it_does_not_write(tmp_path: Path) -> None:
    write(tmp_path / "study")
    run = example_run(sample_id="new")
    with StudyWriter(tmp_path / "study", MANIFEST, overwrite=True) as writer:
        writer.append([run])
    assert open_study(tmp_path / "study").ids == ("new",)
    assert len(data(tmp_path / "study")) == 2


def test_an_overwriting_block_that_fails_keeps_the_old_study(tmp_path: Path) -> None:
    path = tmp_path / "study"
    write(path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(RuntimeError), StudyWriter(path, MANIFEST, overwrite=True):
        raise RuntimeError
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_half_a_part_is_hidden_from_other_readers(tmp_path: Path) -> None:
    import pandas as pd

    path = tmp_path / "study"
    write(path)
    whole = pd.read_parquet(path / "trajectories")
    temporary = path / Folder.at(path).temporary("trajectories/part-00002.parquet")
    temporary.write_bytes(b"PAR1 half a part")
    assert not list(path.glob("trajectories/*2*.parquet"))
    pd.testing.assert_frame_equal(pd.read_parquet(path / "trajectories"), whole)
    assert assert_whole_batches(open_study(path)) == 2

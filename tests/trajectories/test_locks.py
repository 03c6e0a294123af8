"""A study has one writer at a time, on a disk and in an object store, and a dead process is none."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from softgap.analysis.preregistration import ComparisonLog
from softgap.errors import StoreError
from softgap.trajectories import Manifest, StudyWriter, locks, open_study
from softgap.trajectories.folder import Folder
from softgap.trajectories.locks import FolderLock, is_lock, lease_fence, locked
from softgap.trajectories.writer import label_study, publish_batch
from support.trajectory_examples import MANIFEST, example_run

BATCHES = [[example_run(sample_id=name, seed=seed)] for seed, name in enumerate("abc")]
REFUSED = r"^another process.* is writing to '.*'; wait until it ends, or choose another folder$"
CHANGES = {"create_dir", "open_output_stream", "move", "delete_file", "delete_dir"}


class WatchedFilesystem:
    """A filesystem that calls a function before each change; as ``type_name`` says, one without file locks."""

    def __init__(self, filesystem: Any, type_name: str, before: Callable[[], None] = lambda: None) -> None:
        self.filesystem, self.type_name, self.before = filesystem, type_name, before

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.filesystem, name)
        if name not in CHANGES:
            return method

        def change(*arguments: Any, **options: Any) -> Any:
            self.before()
            return method(*arguments, **options)

        return change


@pytest.fixture(params=["local", "store"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether folders have file locks or leases."""
    original, kind = Folder.at, str(request.param)
    monkeypatch.setattr(
        Folder, "at", lambda path: replace(f := original(path), filesystem=WatchedFilesystem(f.filesystem, kind))
    )
    monkeypatch.setattr("softgap.trajectories.reader.pq.ParquetFile", _parquet_file)
    return kind


def _parquet_file(path: str, *, filesystem: Any, page_checksum_verification: bool) -> Any:
    from pyarrow.parquet.core import ParquetFile

    inner = getattr(filesystem, "filesystem", filesystem)
    return ParquetFile(path, filesystem=inner, page_checksum_verification=page_checksum_verification)


def write(path: Path, manifest: Manifest = MANIFEST) -> None:
    """The study of BATCHES, begun or resumed."""
    with StudyWriter(path, manifest, resume=True) as writer:
        for number, runs in enumerate(BATCHES):
            if number not in writer.batches:
                writer.append(runs, batch=number)


def outcome(path: Path) -> str:
    """Whether the study could be written, or why not."""
    try:
        write(path)
    except StoreError as error:
        return "refused" if "is writing to" in str(error) else str(error)
    return "wrote"


def data(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*.parquet")}


def hidden(path: Path) -> list[str]:
    return [file.name for file in path.rglob(".*")]


def test_a_second_writer_is_refused_until_the_first_has_ended(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    writer.append(BATCHES[0])
    for attempt in (
        lambda: StudyWriter(path, MANIFEST, resume=True),
        lambda: StudyWriter(path, MANIFEST, overwrite=True),
        lambda: label_study(str(path), {"a": "x"}),
    ):
        with pytest.raises(StoreError, match=REFUSED):
            attempt()
    writer.append(BATCHES[1])
    writer.finish()
    assert hidden(path) == []
    assert label_study(str(path), {"a": "x"}).new == 1
    with pytest.raises(StoreError, match=r"has ended and let others go on; open another to write more$"):
        writer.append(BATCHES[2])


def test_two_writers_interleaved_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The second comes before the n-th change of the first: one of them is refused, and nothing is lost or mixed."""
    write(tmp_path / "unbroken")
    original, outcomes = Folder.at, []
    for n in range(1, 200):
        path = tmp_path / f"two-{n}"
        left: list[int] = [n]
        second: list[str] = []

        def before(path: Path = path, left: list[int] = left, second: list[str] = second) -> None:
            left[0] -= 1
            if left[0] == 0:
                second.append(outcome(path))

        def at(address: Any, before: Callable[[], None] = before) -> Folder:
            folder = original(address)
            return replace(folder, filesystem=WatchedFilesystem(folder.filesystem.filesystem, kind, before))

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "at", at)
            first = outcome(path)
        if not second:
            break
        if {first, second[0]} == {"refused"}:  # both claimed at once, which leases allow
            assert kind == "store"
            write(path)
        assert {first, second[0]} <= {"wrote", "refused"}
        assert data(path) == data(tmp_path / "unbroken"), n
        assert open_study(path).state == "finished"
        assert hidden(path) == []
        outcomes.append((first, second[0]))
    assert ("wrote", "refused") in outcomes
    assert len(outcomes) > 15


HOLDS_AND_DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from softgap.trajectories import StudyWriter
from support.trajectory_examples import MANIFEST, example_run
writer = StudyWriter(sys.argv[1], MANIFEST)
writer.append([example_run(sample_id="a", seed=0)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_holds_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "study"
    arguments = [sys.executable, "-c", HOLDS_AND_DIES, str(path), str(Path(__file__).parents[1])]
    ended = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert hidden(path) == [".writer.lock"]
    write(path)
    assert open_study(path).ids == ("a", "b", "c")
    assert hidden(path) == []


def claim(**changes: Any) -> bytes:
    """The file of a lease of another machine."""
    expires = (datetime.now(UTC) + timedelta(minutes=1)).isoformat()
    fields = {"owner": "x", "host": "elsewhere", "process": 12, "started": 0.0, "expires": expires, "state": "holding"}
    return json.dumps({**fields, **changes}).encode()


LEASE = f".writer.{'0' * 12}.lease"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """A folder that has leases."""
    folder = Folder.at(tmp_path)
    return replace(folder, filesystem=WatchedFilesystem(folder.filesystem, "store"))


def test_a_lease_of_another_machine_counts_until_it_expires(store: Folder) -> None:
    store.write(LEASE, claim())
    with pytest.raises(StoreError, match=r"another process \(process 12 on elsewhere, until 20.* unless renewed\) is "):
        FolderLock(store)
    assert store.names() == [LEASE]
    store.write(LEASE, claim(expires=(datetime.now(UTC) - timedelta(seconds=1)).isoformat()))
    with locked(store):
        assert LEASE not in store.names()
    assert store.names() == []


def test_a_lease_of_a_dead_process_of_this_machine_counts_for_nothing(store: Folder) -> None:
    store.write(LEASE, claim(host=socket.gethostname(), process=os.getpid(), started=1.0))
    with locked(store):
        assert LEASE not in store.names()


def test_of_two_that_ask_at_once_none_goes_on(store: Folder) -> None:
    store.write(LEASE, claim(state="asking"))
    with pytest.raises(StoreError, match=REFUSED):
        FolderLock(store)


def test_one_who_asks_does_not_disturb_the_holder(store: Folder) -> None:
    with locked(store) as lock:
        store.write(LEASE, claim(state="asking"))
        lock.check()
        store.write(LEASE, claim())
        with pytest.raises(
            StoreError, match=r"^this process lost its lease on '.*', since it did not renew it in time"
        ):
            lock.check()


def test_a_writer_that_was_suspended_before_it_published_says_so_and_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer of the same study takes over meanwhile; both compute the same bytes."""
    original = Folder.at
    monkeypatch.setattr(
        Folder, "at", lambda path: replace(f := original(path), filesystem=WatchedFilesystem(f.filesystem, "store"))
    )
    monkeypatch.setattr("softgap.trajectories.reader.pq.ParquetFile", _parquet_file)
    whole = tmp_path / "whole"
    write(whole)
    path = tmp_path / "study"
    slow = StudyWriter(path, MANIFEST, resume=True)
    publish = Folder.publish

    def suspended(folder: Folder, staged: str, name: str) -> None:
        monkeypatch.setattr(Folder, "publish", publish)
        for lease in path.glob(".writer.*.lease"):  # it expires
            lease.unlink()
        taken = StudyWriter(path, MANIFEST, resume=True)
        taken.append(BATCHES[0])
        still_there.append(taken)
        publish(folder, staged, name)

    still_there: list[StudyWriter] = []
    monkeypatch.setattr(Folder, "publish", suspended)
    with pytest.raises(StoreError, match=r"lost its lease on '.*', since it did not renew it in time"):
        slow.append(BATCHES[0])
    (taken,) = still_there
    taken.append(BATCHES[1])
    taken.append(BATCHES[2])
    taken.finish()
    assert data(path) == data(whole)
    assert open_study(path).state == "finished"


LOST = r"^this process lost its lease on '.*', since it did not renew it in time; make sure that no other process"


class Clock:
    """The clock that leases go by; it stands still until it is moved."""

    def __init__(self) -> None:
        self.time = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.time

    def move(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A frozen clock, and folders that have leases."""
    frozen, original = Clock(), Folder.at
    monkeypatch.setattr(locks, "_now", frozen)
    monkeypatch.setattr(
        Folder, "at", lambda path: replace(f := original(path), filesystem=WatchedFilesystem(f.filesystem, "store"))
    )
    monkeypatch.setattr("softgap.trajectories.reader.pq.ParquetFile", _parquet_file)
    return frozen


def names(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


def test_nothing_is_published_after_the_lease_has_expired(tmp_path: Path, clock: Clock) -> None:
    """Nobody else has come yet, and the file of the lease is still there."""
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    writer.append(BATCHES[0])
    clock.move(100)
    writer.append(BATCHES[1])  # in time
    before = names(path)
    clock.move(10)
    for attempt in (lambda: writer.append(BATCHES[2]), writer.seal, writer.finish):
        with pytest.raises(StoreError, match=LOST):
            attempt()
        assert names(path) == before
    assert open_study(path).state == "running"


def append_all(writer: StudyWriter) -> None:
    for runs in BATCHES:
        writer.append(runs)


@pytest.mark.parametrize("changes", range(1, 7))
def test_a_writer_that_sleeps_before_any_change_publishes_nothing_after_another_took_over(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, changes: int
) -> None:
    """It sleeps right before a file gets its name, wakes up at any time later, and deletes nothing either."""
    write(tmp_path / "whole")
    path = tmp_path / "study"
    first = StudyWriter(path, MANIFEST, resume=True)
    left, taken, seen = [changes], [], []
    publish = Folder.publish

    def sleeps(folder: Folder, staged: str, name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            clock.move(121)
            taken.append(StudyWriter(path, MANIFEST, resume=True))
            for number in set(range(2)) - set(taken[0].batches):
                taken[0].append(BATCHES[number], batch=number)
            seen.append(data(path))
        publish(folder, staged, name)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "publish", sleeps)
        with pytest.raises(StoreError, match=LOST):
            append_all(first)
    assert data(path) == seen[0]
    taken[0].append(BATCHES[2])
    taken[0].finish()
    assert data(path) == data(tmp_path / "whole")
    assert open_study(path).state == "finished"
    assert hidden(path) == []


def test_labels_and_the_log_are_not_written_without_a_lease(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "study"
    write(path)
    before, stage = data(path), Folder.stage

    def sleeps(folder: Folder, name: str, content: Any) -> str:
        staged = stage(folder, name, content)
        clock.move(121)
        return staged

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "stage", sleeps)
        with pytest.raises(StoreError, match=LOST):
            label_study(str(path), {"a": "x"})
        with pytest.raises(StoreError, match=LOST):
            ComparisonLog(Folder.at(path)).add("looked", hash="0")
    assert data(path) == before
    assert not {"labels.jsonl", "comparisons/log.jsonl"} & set(names(path))
    assert hidden(path) == []


def test_a_writer_that_lost_a_fresh_study_leaves_that_of_the_next(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "study"
    first = StudyWriter(path, MANIFEST)
    clock.move(121)
    taken = StudyWriter(path, MANIFEST, resume=True)
    with pytest.raises(StoreError, match=LOST), first:
        append_all(first)
    assert (path / "manifest.json").is_file()
    taken.append(BATCHES[0])
    taken.finish()
    assert open_study(path).ids == ("a",)


def test_an_expired_lease_is_not_renewed(store: Folder, clock: Clock) -> None:
    with locked(store) as lock:
        (own,) = store.names()
        before = store.read(own)
        clock.move(60)
        lock._hold.renew()  # type: ignore[union-attr]
        assert store.read(own) > before
        clock.move(120)
        late = store.read(own)
        lock._hold.renew()  # type: ignore[union-attr]
        assert store.read(own) == late
        with pytest.raises(StoreError, match=LOST):
            lock.check()


def test_who_works_for_a_writer_publishes_only_while_it_has_its_lease(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    worker = lease_fence(Folder.at(path), writer.lease)
    publish_batch(worker, 0, BATCHES[0])
    assert open_study(path).ids == ("a",)
    clock.move(110)
    with pytest.raises(StoreError, match=LOST):
        publish_batch(worker, 1, BATCHES[1])
    clock.move(20)
    taken = StudyWriter(path, MANIFEST, resume=True)
    with pytest.raises(StoreError, match=LOST):
        publish_batch(worker, 1, BATCHES[1])
    taken.append(BATCHES[1], batch=1)
    assert open_study(path).ids == ("a", "b")
    on_disk = Folder.at(path)
    assert lease_fence(on_disk, None) is on_disk


def test_a_writer_that_wakes_up_deletes_no_part_of_another(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took over has published the trajectories of a batch, and not yet its samples."""
    path = tmp_path / "study"
    writer = StudyWriter(path, MANIFEST)
    theirs, publish = path / "trajectories" / "part-00000.parquet", Folder.publish

    def sleeps(folder: Folder, staged: str, name: str) -> None:
        if name.startswith("samples"):
            clock.move(121)
            theirs.write_bytes(b"theirs")
        publish(folder, staged, name)

    monkeypatch.setattr(Folder, "publish", sleeps)
    with pytest.raises(StoreError, match=LOST):
        writer.append(BATCHES[0])
    assert theirs.read_bytes() == b"theirs"


def test_a_lost_lease_is_not_written_again(store: Folder) -> None:
    lock = FolderLock(store)
    (own,) = store.names()
    before = store.read(own)
    lock._hold.renew()  # type: ignore[union-attr]
    assert json.loads(store.read(own))["owner"] == json.loads(before)["owner"]
    store.delete(own)
    lock._hold.renew()  # type: ignore[union-attr]
    assert store.names() == []
    with pytest.raises(StoreError, match="lost its lease"):
        lock.check()


def test_a_lease_is_renewed_while_it_is_held(store: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LEASE", timedelta(seconds=2))
    with locked(store) as lock:
        (own,) = store.names()
        first = json.loads(store.read(own))["expires"]
        deadline, last = datetime.now(UTC) + timedelta(seconds=20), first
        while last == first and datetime.now(UTC) < deadline:
            lock._hold._ended.wait(0.2)  # type: ignore[union-attr]
            # A local folder that stands for an object store is empty for a moment while it is written.
            text = store.read(own)
            last = json.loads(text)["expires"] if text else last
        assert last > first


def test_a_file_that_is_no_lease_is_named(store: Folder) -> None:
    store.write(LEASE, b"[]")
    with pytest.raises(StoreError, match=rf"^{LEASE} in '.*' is no lease of softgap .*; delete it if no other process"):
        FolderLock(store)


def test_names_of_locks() -> None:
    assert is_lock(".writer.lock")
    assert is_lock(LEASE)
    assert not any(map(is_lock, ("writer.lock", ".lock", ".a.lease", "a.json")))


def test_overwriting_clears_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "study"
    write(path)
    folder = Folder.at(path)
    for name in ("samples/part-00000.parquet", "trajectories/part-00000.parquet", "manifest.json"):
        (path / folder.temporary(name)).write_bytes(b"half")
    with StudyWriter(path, MANIFEST, overwrite=True) as writer:
        writer.append(BATCHES[0])
    assert hidden(path) == []
    assert open_study(path).ids == ("a",)


def test_a_publication_that_fails_deletes_no_part_of_another_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took over has published the trajectories, and not yet the samples."""
    folder = Folder.at(tmp_path)
    for kind in ("samples", "trajectories"):
        folder.create(kind)
    theirs = tmp_path / "trajectories" / "part-00000.parquet"
    theirs.write_bytes(b"theirs")

    def gone(self: Folder, staged: str, name: str) -> None:
        raise StoreError("the staged part is gone")

    monkeypatch.setattr(Folder, "publish", gone)
    with pytest.raises(StoreError, match="is gone"):
        publish_batch(folder, 0, BATCHES[0])
    assert theirs.read_bytes() == b"theirs"
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["part-00000.parquet"]

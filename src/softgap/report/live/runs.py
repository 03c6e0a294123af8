"""The runs of the live server: a queue, one worker, and the folder of studies."""

from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Literal

from softgap.errors import SoftgapError, StoreError, UnsupportedError, unknown_name
from softgap.report.explorer import explorer_of
from softgap.report.live.requests import Limits, RunRequest
from softgap.report.live.writer import Writer
from softgap.report.page import render
from softgap.report.pair import pair_names, pair_payload
from softgap.trajectories import Study, open_study
from softgap.trajectories.folder import Folder, new_name, slug

__all__ = ["LiveRun", "Queue", "Studies", "TooManyError"]


_MARKS = ("manifest.json", "result.json")


_HELD_IN_MEMORY = 8 * 2**20


@dataclass(frozen=True, eq=False)
class Studies:
    """The studies in one folder.

    Attributes
    ----------
    folder
        Made when the first run is saved.
    """

    folder: Path
    limits: Limits
    _rendering: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, folder: Path, limits: Limits) -> Studies:
        """Check that a folder can hold studies."""
        if any((folder / mark).is_file() for mark in _MARKS):
            raise StoreError(
                f"--studies must be a folder of studies, but '{folder}' is a study; give '{folder.parent}'"
            )
        try:
            Folder.at(folder).try_writing("runs are")
        except StoreError as error:
            raise StoreError(f"{error}, with --studies") from error
        return cls(folder.resolve(), limits)

    def names(self) -> list[str]:
        """The studies, the newest first."""
        try:
            dated_names = [
                (entry.stat(follow_symlinks=False).st_mtime, entry.name)
                for entry in self.folder.iterdir()
                if entry.is_dir() and not entry.is_symlink() and any((entry / mark).is_file() for mark in _MARKS)
            ]
        except OSError:
            return []
        return [name for _, name in sorted(dated_names, reverse=True)[: self.limits.studies]]

    def new_name(self, words: str, reserved: Container[str]) -> str:
        """A name that no study has."""
        return new_name(self.folder, words, reserved)

    def html(self, name: str) -> str:
        """The report on a study."""
        folder = self._folder(name)
        # One at a time: a large study takes much memory.
        with self._rendering:
            return explorer_of(folder)

    def difference(self, first: str, second: str) -> str:
        """The page on two studies, second minus first."""
        studies = self.opened(first), self.opened(second)
        with self._rendering:
            return render(pair_payload(*studies, pair_names(first, second)))

    def opened(self, name: str) -> Study:
        """A study, to read more of it."""
        return open_study(self._folder(name))

    def zipped(self, name: str) -> IO[bytes]:
        """A study as a ZIP file, at its beginning."""
        folder = self._folder(name)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
        size = sum(path.stat().st_size for path in files)
        if size > self.limits.zip_bytes:
            raise StoreError(
                f"a download may have at most {self.limits.zip_bytes / 1e9:.1f} GB, got {size / 1e9:.1f} GB; "
                "copy its folder instead"
            )
        # Parquet is compressed already.
        target: Any = SpooledTemporaryFile(max_size=_HELD_IN_MEMORY)  # noqa: SIM115  whoever sends it closes it
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
            for path in files:
                archive.write(path, f"{name}/{path.relative_to(folder).as_posix()}")
        target.seek(0)
        opened: IO[bytes] = target
        return opened

    def _folder(self, name: str) -> Path:
        known = self.names()
        if name not in known:
            raise unknown_name("study", name, known) if known else StoreError("there is no saved study yet")
        folder = self.folder / known[known.index(name)]
        if any(path.is_symlink() for path in folder.rglob("*")):
            raise StoreError(
                f"the study '{name}' contains a symbolic link, which softgap does not follow; copy the files first"
            )
        return folder


State = Literal["waiting", "running", "finishing", "finished", "stopped", "failed"]


OVER = ("finished", "stopped", "failed")


class TooManyError(UnsupportedError):
    """The queue is full."""


@dataclass(frozen=True)
class Event:
    """Something that happened in a run; ``data`` is JSON on one line."""

    number: int
    kind: str
    data: str


@dataclass(eq=False)
class LiveRun:
    """One generation, from the queue to the folder of studies.

    Attributes
    ----------
    run_id
        Also the name of its study.
    steps
        Tokens so far.
    reason
        What went wrong, for people.
    saved
        Whether the study is in the folder.
    """

    run_id: str
    request: RunRequest
    state: State = "waiting"
    steps: int = 0
    reason: str = ""
    saved: bool = False
    asked_to_stop: bool = False
    events: list[Event] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As a list of runs shows it."""
        return {
            "id": self.run_id,
            "state": self.state,
            "steps": self.steps,
            "reason": self.reason,
            "saved": self.saved,
            **self.request.to_json(),
        }


class Queue:
    """All runs, the oldest first, and the thread that works them off one by one."""

    def __init__(self, writer: Writer, studies: Studies, limits: Limits, changed: Callable[[], None]) -> None:
        self._writer = writer
        self._studies = studies
        self._limits = limits
        self._changed = changed
        self._runs: dict[str, LiveRun] = {}
        self._number = 0
        self._version = 0
        self._closing = False
        self._lock = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="softgap-writer", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self, seconds: float = 20.0) -> None:
        """Stop the run under way, keep what it has, and let no other begin."""
        with self._lock:
            self._closing = True
            for run in self._runs.values():
                run.asked_to_stop = True
            self._lock.notify_all()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def add(self, requests: Sequence[RunRequest]) -> list[str]:
        """Put runs at the end of the queue, all of them or none; their names."""
        with self._lock:
            waiting = sum(run.state == "waiting" for run in self._runs.values())
            if waiting + len(requests) > self._limits.queue:
                raise TooManyError(
                    f"at most {self._limits.queue} runs may wait, and {waiting} do; wait for a run to end, or stop one"
                )
            added = []
            for request in requests:
                run = LiveRun(self._studies.new_name(slug(request.prompt), self._runs), request)
                self._runs[run.run_id] = run
                added.append(run.run_id)
            self._forget()
            self._lock.notify_all()
        self._note()
        return added

    def stop(self, run_id: str) -> None:
        """End a run after its present token, or take it out of the queue."""
        with self._lock:
            run = self.run(run_id)
            run.asked_to_stop = True
            if run.state == "waiting":
                self._end(run, "stopped", {})
        self._note()

    def run(self, run_id: str) -> LiveRun:
        """The run of this name."""
        live_run = self._runs.get(run_id)
        if live_run is None:
            raise unknown_name("run", run_id, self._runs)
        return live_run

    def snapshot(self) -> tuple[int, list[dict[str, Any]]]:
        """A number that changes with the list of runs, and the list."""
        with self._lock:
            return self._version, [run.to_json() for run in self._runs.values()]

    def events(self, run_ids: Iterable[str], after: int) -> list[tuple[str, Event]]:
        """What happened in some runs after the event of a number, in order."""
        with self._lock:
            runs = [self._runs[run_id] for run_id in dict.fromkeys(run_ids) if run_id in self._runs]
            events = [(run.run_id, event) for run in runs for event in _events_after(run.events, after)]
        return sorted(events, key=lambda pair: pair[1].number)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or self._next() is not None)
                run = self._next()
                if self._closing or run is None:
                    return
                run.state = "running"
            self._note()
            try:
                self._write(run)
            except SoftgapError as error:
                self._end(run, "failed", {}, str(error))
            except Exception as error:  # whatever happens in one run, the server goes on
                self._end(run, "failed", {}, f"{type(error).__name__}: {error}; this is a bug in softgap")
            self._note()

    def _write(self, run: LiveRun) -> None:
        def tell(kind: str, values: Mapping[str, Any]) -> None:
            with self._lock:
                run.steps += kind == "step"
                self._add(run, kind, values)
            self._note()

        folder = self._studies.folder / run.run_id
        written = self._writer.write(run.request, folder, tell, lambda: run.asked_to_stop)
        with self._lock:
            run.state, run.saved = "finishing", written.saved
        self._note()
        early = run.asked_to_stop and written.steps < run.request.max_new_tokens
        self._end(run, "stopped" if early else "finished", written.at_end(not self._closing))

    def _end(self, run: LiveRun, state: State, values: Mapping[str, Any], reason: str = "") -> None:
        with self._lock:
            run.state, run.reason = state, reason
            self._add(run, "end", {"state": state, "reason": reason, "saved": run.saved, **values})

    def _add(self, run: LiveRun, kind: str, values: Mapping[str, Any]) -> None:
        self._number += 1
        data = json.dumps({"run": run.run_id, **values}, allow_nan=False, separators=(",", ":"))
        run.events.append(Event(self._number, kind, data))

    def _next(self) -> LiveRun | None:
        return next((run for run in self._runs.values() if run.state == "waiting"), None)

    def _forget(self) -> None:
        """Let go of the oldest runs that are over."""
        over = [run.run_id for run in self._runs.values() if run.state in OVER]
        for run_id in over[: max(0, len(self._runs) - self._limits.runs)]:
            del self._runs[run_id]

    def _note(self) -> None:
        with self._lock:
            self._version += 1
        self._changed()


def _events_after(events: Sequence[Event], after: int) -> Sequence[Event]:
    if not events or events[-1].number <= after:
        return ()
    return [event for event in events if event.number > after]

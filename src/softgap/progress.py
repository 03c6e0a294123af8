"""Progress of long work: the type of its callbacks, and how a terminal or a log file shows it."""

from __future__ import annotations

import contextlib
import contextvars
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import ProgressColumn

__all__ = [
    "Progress",
    "bar_or_callback",
    "in_command",
    "partial_progress",
    "show_progress",
    "show_waiting",
    "silent",
]

Progress = Callable[[str, float], None]
"""Called with the stage in words and the share of the work that is done, from 0 to 1."""

_SECONDS = 30.0
"""The longest time between two plain lines."""

_STARTING, _LOOKING = 1.0, 0.1
"""Seconds after which a command that still imports says that it starts, and between looks at what it imports."""

_SPOKEN = threading.Event()
"""Set once the running command has shown anything."""

_COMMAND: contextvars.ContextVar[bool] = contextvars.ContextVar("softgap_command", default=False)


def silent(stage: str, share: float) -> None:
    """Report nothing."""


def partial_progress(progress: Progress, start: float, stop: float) -> Progress:
    """Progress of a part of the work, from one share of the whole to another."""
    return lambda stage, share: progress(stage, start + (stop - start) * share)


@contextlib.contextmanager
def show_progress(stage: str = "", *, items: int | None = None, unit: str = "") -> Iterator[Progress]:
    """Show progress on standard error while the block runs: a bar on a terminal, plain lines elsewhere.

    Parameters
    ----------
    stage
        What runs first; without it nothing is shown before the first report.
    items
        How many items the work consists of. The bar then counts them, instead of percent.
    unit
        What an item is called. The bar then shows how many are done per minute, and the time that is left.

    Yields
    ------
    Progress
        Reports a stage and the share of the whole that is done.
    """
    console = _terminal()
    if console is None:
        with _lines(stage, shares=True) as report:
            yield report
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TimeRemainingColumn

    columns: list[ProgressColumn] = [BarColumn(), TaskProgressColumn() if items is None else MofNCompleteColumn()]
    if unit:
        columns += [_rate_column(unit), TimeRemainingColumn()]
    total = 100 if items is None else items
    with _bar(console, stage, columns, total) as update:
        yield lambda now, share: update(now, round(total * share))


@contextlib.contextmanager
def show_waiting(stage: str) -> Iterator[None]:
    """Show on standard error that a stage runs and for how long: a spinner on a terminal, plain lines elsewhere."""
    console = _terminal()
    with _lines(stage, shares=False) if console is None else _bar(console, stage, [], None):
        yield


@contextlib.contextmanager
def in_command(*, announce: bool) -> Iterator[None]:
    """A command runs in this block: its log file hears of what Python functions do.

    With ``announce`` it also hears of a slow start.
    """
    before = _COMMAND.set(True)
    _SPOKEN.clear()
    # torch takes seconds to import, and nothing else can be said before.
    if announce and not _torch_is_there():
        threading.Thread(target=_announce_start, daemon=True).start()
    try:
        yield
    finally:
        _SPOKEN.set()
        _COMMAND.reset(before)


def _announce_start() -> None:
    """Say, and every 30 seconds again, that torch is being imported, until the command says something or ends."""
    started, wait = time.monotonic(), _STARTING
    # On a slow machine even the first import may come later than the first look.
    while not _SPOKEN.wait(wait):
        wait = _LOOKING
        if _torch_is_there():
            _write_line(f"[{timedelta(seconds=int(time.monotonic() - started))}] starting: importing torch")
            wait = _SECONDS


def _torch_is_there() -> bool:
    """Whether somebody has begun to import it."""
    return "torch" in sys.modules


@contextlib.contextmanager
def bar_or_callback(progress: Progress | bool) -> Iterator[Progress]:
    """The given callback; for True a bar on standard error if that is a terminal; for False nothing.

    This serves Python functions, which leave a log file alone unless they run in a command.
    """
    if callable(progress):
        yield progress
    elif progress and (_COMMAND.get() or _terminal() is not None):
        with show_progress() as report:
            yield report
    else:
        yield silent


def _terminal() -> Console | None:
    """The console on standard error if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    return console if console.is_terminal else None


@contextlib.contextmanager
def _bar(
    console: Console, stage: str, columns: list[ProgressColumn], total: int | None
) -> Iterator[Callable[[str, int], None]]:
    """A spinner, the stage, these columns and the time elapsed; yields an update of the stage and of what is done."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # Few refreshes: each one takes the interpreter from the model for a moment.
    every = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *columns, TimeElapsedColumn())
    bar: Bar = Progress(*every, console=console, transient=True, refresh_per_second=4)
    task = bar.add_task(stage, total=total)
    with contextlib.ExitStack() as stack:

        def update(now: str, done: int) -> None:
            if not bar.live.is_started:
                _SPOKEN.set()
                stack.enter_context(bar)
            bar.update(task, description=now, completed=done)

        if stage:
            _SPOKEN.set()
            stack.enter_context(bar)
        yield update


def _rate_column(unit: str) -> ProgressColumn:
    """How many items a minute were done of late."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{60 * speed:.1f} {unit}/min")

    return Rate()


@contextlib.contextmanager
def _lines(stage: str, *, shares: bool) -> Iterator[Progress]:
    """Plain lines on standard error: one for every new stage, and one at least every 30 seconds."""
    lines = _Lines(shares)
    if stage:
        lines.report(stage, 0.0)
    thread = threading.Thread(target=lines.repeat, daemon=True)
    thread.start()
    try:
        yield lines.report
    finally:
        lines.ended.set()
        thread.join()


class _Lines:
    """The latest stage and share, and the stages that have had their line."""

    def __init__(self, shares: bool) -> None:
        self.ended = threading.Event()
        self._shares = shares
        self._start = self._written = time.monotonic()
        self._latest = ("", 0.0)
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def report(self, stage: str, share: float) -> None:
        """Note the stage; a new one is written. Counts and measurements in its words make no new stage."""
        name = re.sub(r"\b[\d.,]*\d\b", "#", stage)
        with self._lock:
            self._latest = (stage, share)
            if name not in self._known:
                self._known.add(name)
                self._write()

    def repeat(self) -> None:
        """Write the latest stage whenever nothing was written for 30 seconds, until the work has ended."""
        while not self.ended.wait(max(0.0, self._written + _SECONDS - time.monotonic())):
            with self._lock:
                if time.monotonic() - self._written >= _SECONDS:
                    self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        stage, share = self._latest
        if not stage:
            return
        _SPOKEN.set()
        done = f"{100 * share:3.0f} % " if self._shares else ""
        elapsed = timedelta(seconds=int(self._written - self._start))
        _write_line(f"[{done}{elapsed}] {stage}")


def _write_line(line: str) -> None:
    # Work goes on where standard error is closed or full.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

"""What a person sees on standard error while a command works; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import TimeElapsedColumn as Elapsed
from rich.text import Text

__all__ = ["waiting", "waiting_share"]


@contextmanager
def waiting(stage: str, total: int | None = None, *, rate: str = "") -> Iterator[Callable[[str, int], None]]:
    """A spinner with the time elapsed, or a bar if there is a total, while the block runs.

    ``rate`` names what is counted: then it is shown how many a minute there are, and the time that is left. Yields a
    function that shows another stage and how many of the total are done.
    """
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        yield _silent
        return
    counted: list[ProgressColumn] = [] if total is None else [BarColumn(), MofNCompleteColumn()]
    if rate:
        counted += [_Rate(rate), TimeRemainingColumn()]
    # Few refreshes: each one takes the interpreter from the model for a moment.
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, Elapsed())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(stage, total=total)

        def show(stage: str, done: int) -> None:
            progress.update(task, description=stage, completed=done)

        yield show


@contextmanager
def waiting_share(stage: str) -> Iterator[Callable[[str, float], None]]:
    """A bar while the block runs; yields a function that shows another stage and the share of all that is done."""
    with waiting(stage, 100) as show:
        yield lambda now, share: show(now, int(100 * share))


class _Rate(ProgressColumn):
    """How many a minute, as of late."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def render(self, task: Task) -> Text:
        """The rate as words."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{60 * speed:.1f} {self._name}/min")


def _silent(stage: str, done: int) -> None:
    """Show nothing."""

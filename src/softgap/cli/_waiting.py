"""What a person sees on standard error while a command works; nothing where that is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

__all__ = ["waiting"]


@contextmanager
def waiting(stage: str, total: int | None = None) -> Iterator[Callable[[str, int], None]]:
    """A spinner with the time elapsed, or a bar if there is a total, while the block runs.

    Yields a function that shows another stage and how many of the total are done.
    """
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        yield _silent
        return
    counted: list[ProgressColumn] = [] if total is None else [BarColumn(), MofNCompleteColumn()]
    # Few refreshes: each one takes the interpreter from the model for a moment.
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *counted, Elapsed())
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(stage, total=total)

        def show(stage: str, done: int) -> None:
            progress.update(task, description=stage, completed=done)

        yield show


def _silent(stage: str, done: int) -> None:
    """Show nothing."""

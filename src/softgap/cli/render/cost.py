"""The cost of a command before it starts, for --dry-run: probed on the model, and shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.table import Table

from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.costs import Cost, Probe
    from softgap.models.loading import Loaded

__all__ = ["present_cost"]


def present_cost(
    load: Callable[[], Loaded], estimate: Callable[[Loaded, Probe], Cost], *, as_json: bool, out: str | None = None
) -> None:
    """Load the model, time short pieces of the work, and print what all of it would cost."""
    from softgap.costs import Probe
    from softgap.models.loading import quiet_transformers
    from softgap.progress import show_waiting

    loaded = load()
    with show_waiting("timing short pieces of the work"), quiet_transformers(downloads=False):
        cost = estimate(loaded, Probe(loaded[0]))
    if as_json:
        output.write_json({"dry_run": True, **({} if out is None else {"out": out}), **cost.to_json()})
        return
    console = output.console()
    table = Table(title=f"Expected cost of softgap {cost.command} on this machine", title_justify="left")
    table.add_column("stage")
    table.add_column("time", justify="right")
    for name, seconds in cost.stages.items():
        table.add_row(name, duration(seconds))
    table.add_row("all", duration(cost.seconds), style="bold")
    console.print(table)
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in cost.counts.items() if count)
    console.print(f"Work: {counts}.", soft_wrap=True)
    scratch = f", and {_size(cost.scratch_bytes)} of temporary files" if cost.scratch_bytes else ""
    console.print(
        f"Memory: {_size(cost.memory_bytes)} at the peak. Disk: {_size(cost.disk_bytes)}{scratch}.", soft_wrap=True
    )
    if cost.note:
        console.print(f"{cost.note[:1].upper()}{cost.note[1:]}.", soft_wrap=True)
    console.print(f"The timings took {duration(cost.probe_seconds)}. Nothing was written.")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:,.1f} MB"

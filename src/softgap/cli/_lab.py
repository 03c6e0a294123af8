"""The outcome of a lab: a verdict for each claim, its figure, and both on disk with --out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli import _output
from softgap.errors import StoreError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory import Claim

__all__ = ["LabOut", "LabResult", "present_lab"]

_STYLES = {"holds": "green", "holds only when": "yellow", "does not hold": "red", "not decided": "dim"}

LabOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder for result.json and figure.svg; nothing is saved without it.", show_default=False),
]


class LabResult(Protocol):
    """What every lab returns."""

    @property
    def claims(self) -> Sequence[Claim]:
        """Its verdicts."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values, the settings included."""
        ...


def present_lab(result: LabResult, draw: Callable[[], Figure], *, title: str, out: str | None, as_json: bool) -> None:
    """Print the verdicts, or the result as JSON; save result and figure where a folder was given."""
    if as_json:
        _output.write_json(result.to_json())
    else:
        _show(_output.console(), result.claims, title)
    if out is not None:
        _save(result, draw, Path(out))
        if not as_json:
            _output.console().print(f"saved {out}", soft_wrap=True)


def _show(console: Console, claims: Sequence[Claim], title: str) -> None:
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("claim", overflow="fold", ratio=3)
    table.add_column("verdict", overflow="fold", ratio=2)
    table.add_column("numbers", overflow="fold", ratio=3)
    for claim in claims:
        verdict = Text(claim.verdict, _STYLES[claim.verdict])
        if claim.condition:
            verdict.append(f" {claim.condition}" if claim.verdict == "holds only when" else f" ({claim.condition})", "")
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in claim.numbers.items())
        table.add_row(f"{claim.statement} [{claim.source}]", verdict, numbers)
    console.print(table)


def _save(result: LabResult, draw: Callable[[], Figure], folder: Path) -> None:
    from softgap.report import save_figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / ".result.json.partial"
        partial.write_text(json.dumps(_output.finite(result.to_json()), indent=2, allow_nan=False) + "\n")
        partial.replace(folder / "result.json")
    except OSError as error:
        raise StoreError(f"cannot write to '{folder}': {error.strerror or error}; choose another folder") from error
    save_figure(draw(), folder / "figure.svg")

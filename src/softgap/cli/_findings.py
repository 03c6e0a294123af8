"""The outcome of `analyze`: a summary for people, and the files it is saved in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli._colour import colourful
from softgap.cli._heatmap import heat_map
from softgap.cli._output import finite
from softgap.errors import UnsupportedError, ValueInputError
from softgap.report import PICTURES, require_matplotlib, save_plane, written_whole
from softgap.report.files import check_place

if TYPE_CHECKING:
    from softgap.analysis import Findings, HeadFinding

__all__ = ["check_files", "default_files", "save_findings", "saved", "show_findings"]

_TABLES = (".json", ".csv", ".parquet")
_LISTED = 5
# Columns from which all cells of a head fit on a line.
_WIDE = 110
_WIDE_ONLY = ("slope / 100", "complexity", "ties")
_NEAREST = "nearest system"


def default_files(study: str, findings: Findings) -> list[str]:
    """Where findings go if nobody says: into the study's own folder; nowhere for a study behind a URI.

    The picture only where there is something to draw.
    """
    names = ("findings.json", "plane.svg") if findings.eligible else ("findings.json",)
    return [] if "://" in study else [str(Path(study) / "analysis" / name) for name in names]


def check_files(files: Sequence[str]) -> None:
    """Refuse what nothing can be written as, before the work begins."""
    for name in files:
        if Path(name).suffix.lower() not in (*PICTURES, *_TABLES):
            raise ValueInputError(
                f"--out must end in {', '.join((*PICTURES, *_TABLES))}, got '{name}'; choose one of them"
            )
        check_place(name)
        if Path(name).suffix.lower() in PICTURES:
            require_matplotlib()


def saved(findings: Findings, files: Sequence[str]) -> Iterator[str]:
    """Write the files, and say of each that it is there."""
    for name in files:
        try:
            save_findings(findings, name)
        except UnsupportedError as error:  # no matplotlib, and nobody asked for a picture: check_files would know
            yield f"no picture: {error}"
        else:
            yield f"saved {name}"


def save_findings(findings: Findings, name: str) -> None:
    """Write the picture or the findings, by the ending of the name; whole or not at all."""
    ending = Path(name).suffix.lower()
    if ending in PICTURES:
        save_plane(findings, name)
        return
    with written_whole(name) as partial:
        if ending == ".json":
            partial.write_text(json.dumps(finite(findings.to_json()), indent=2, allow_nan=False) + "\n")
        elif ending == ".csv":
            findings.to_frame().to_csv(partial, index=False)
        else:
            findings.to_frame().to_parquet(partial, index=False)


def show_findings(console: Console, findings: Findings) -> None:
    """Print what a person wants to know of a study's dynamics."""
    settings, eligible = findings.settings, findings.eligible
    console.print(
        Text(
            f"{settings['quantity']} from {settings['mechanism']} · transform {settings['transform']} · order "
            f"{settings['order']} · delay {settings['delay']} · segment {settings['segment']}",
            "bold",
        )
    )
    skipped = f"; {findings.skipped:,} more are too short" if findings.skipped else ""
    counted = "1 sample" if findings.samples == 1 else f"{findings.samples:,} samples"
    of = "" if findings.samples == 1 else " in all"
    console.print(f"{counted} of {findings.steps:,} steps{of}{skipped}")
    if not eligible:
        console.print(Text(f"No head is eligible: {findings.heads[0].reason}.", "yellow"))
        return
    _show_overview(console, findings)
    _show_map(console, findings)
    _show_heads(console, findings)


def _show_overview(console: Console, findings: Findings) -> None:
    eligible, out = findings.eligible, findings.standing_out()
    below, above = sum(head.z < 0 for head in out), sum(head.z > 0 for head in out)
    entropy = np.array([head.entropy for head in eligible])
    console.print(
        f"permutation entropy {np.median(entropy):.4f} in the median of {_heads(len(eligible))} "
        f"({entropy.min():.4f} to {entropy.max():.4f}); white noise of these lengths {findings.noise_entropy:.4f} "
        f"± {findings.noise_deviation:.4f} ({findings.null_samples:,} simulations)"
    )
    others = len(findings.heads) - len(eligible)
    console.print(
        f"{_heads(below)} below noise and {above} above it, at a false discovery rate of {findings.alpha:g}"
        + (f"; {_heads(others)} not eligible" if others else "")
    )
    if findings.least_q > findings.alpha:
        console.print(
            f"so many simulations cannot tell a single head from chance (its q is {findings.least_q:.2g} at best); "
            "several together they can",
            style="yellow",
        )
    near = Counter(head.nearest for head in eligible).most_common(_LISTED)
    console.print("nearest known systems: " + ", ".join(f"{name} ({_heads(count)})" for name, count in near))


def _heads(count: int) -> str:
    return "1 head" if count == 1 else f"{count} heads"


def _show_map(console: Console, findings: Findings) -> None:
    layers = tuple(dict.fromkeys(head.layer for head in findings.heads))
    values = np.full((len(layers), 1 + max(head.head for head in findings.heads)), np.nan)
    entropy = np.array([head.entropy for head in findings.heads])
    low, high = np.nanmin(entropy), np.nanmax(entropy)
    for head in findings.heads:
        values[layers.index(head.layer), head.head] = (head.entropy - low) / max(high - low, 1e-12)
    picture, meaning = heat_map(values, layers, width=console.width, colour=colourful(console))
    console.print()
    console.print(f"permutation entropy, layers across and heads down; 0 is {low:.4f} and 1 is {high:.4f}")
    console.print(picture)
    if meaning:
        console.print(Text(meaning, "dim"))


def _show_heads(console: Console, findings: Findings) -> None:
    out = findings.standing_out()
    chosen = [*out[:_LISTED], *(head for head in out[-_LISTED:] if head not in out[:_LISTED])]
    title = "Heads that stand out most" if out else "No head stands out from noise; the most extreme ones"
    if not out:
        ranked = sorted(findings.eligible, key=lambda head: head.z)
        chosen = [*ranked[:2], *ranked[-2:]] if len(ranked) > 3 else ranked
    quantity = str(findings.settings["quantity"])
    rows = [_cells(head, quantity, wide=console.width >= _WIDE) for head in chosen]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == _NEAREST else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print()
    console.print(table)


def _cells(head: HeadFinding, quantity: str, *, wide: bool) -> dict[str, str]:
    """The cells of a head by their headings; those that a narrow terminal has no room for are in the files."""
    nearest = f"{head.nearest} ({head.distance:.3f})" if wide else head.nearest
    cells = {
        "head": f"{head.layer}.{head.head}",
        quantity: f"{head.mean:.3f} ± {head.spread:.3f}",
        "slope / 100": f"{head.slope:+.4f}",
        "entropy": f"{head.entropy:.4f}",
        "95 % interval": f"{head.low:.4f} to {head.high:.4f}",
        "z": f"{head.z:+.1f}",
        "q": f"{head.q:.2g}",
        "complexity": f"{head.complexity:.4f}",
        "ties": f"{head.tie_rate:.1%}",
        _NEAREST: nearest,
    }
    return {heading: cell for heading, cell in cells.items() if wide or heading not in _WIDE_ONLY}

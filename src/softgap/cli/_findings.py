"""The outcome of `analyze`: a summary for people, and the files it is saved in."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli._colour import colourful
from softgap.cli._heatmap import heat_map
from softgap.cli._output import finite
from softgap.errors import StoreError, ValueInputError
from softgap.report import PICTURES

if TYPE_CHECKING:
    from softgap.analysis import Findings, HeadFinding

__all__ = ["check_files", "default_files", "save_findings", "show_findings"]

_TABLES = (".json", ".csv", ".parquet")
_LISTED = 5


def default_files(study: str) -> list[str]:
    """Where findings go if nobody says: into the study's own folder; nowhere for a study behind a URI."""
    return [] if "://" in study else [str(Path(study) / "analysis" / name) for name in ("findings.json", "plane.svg")]


def check_files(files: Sequence[str]) -> None:
    """Refuse endings that nothing can be written as, before the work begins."""
    for name in files:
        if Path(name).suffix.lower() not in (*PICTURES, *_TABLES):
            raise ValueInputError(
                f"--out must end in {', '.join((*PICTURES, *_TABLES))}, got '{name}'; choose one of them"
            )
        if Path(name).is_dir():
            raise ValueInputError(f"--out must name a file, but '{name}' is a folder; add a file name")


def save_findings(findings: Findings, name: str) -> None:
    """Write the picture or the findings, by the ending of the name; whole or not at all."""
    path = Path(name)
    if path.suffix.lower() in PICTURES:
        from softgap.report import save_plane

        save_plane(findings, path)
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix.lower() == ".json":
            partial.write_text(json.dumps(finite(findings.to_json()), indent=2, allow_nan=False) + "\n")
        elif path.suffix.lower() == ".csv":
            findings.to_frame().to_csv(partial, index=False)
        else:
            findings.to_frame().to_parquet(partial, index=False)
        partial.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write '{path}': {error.strerror or error}; choose another place") from error
    finally:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)


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
    skipped = f", {findings.skipped} too short for one window" if findings.skipped else ""
    counted = "1 sample" if findings.samples == 1 else f"{findings.samples} samples"
    console.print(f"{counted} of {findings.steps} steps in all{skipped}")
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
        f"permutation entropy {np.median(entropy):.4f} in the median of {len(eligible)} heads "
        f"({entropy.min():.4f} to {entropy.max():.4f}); white noise of these lengths {findings.noise_entropy:.4f} "
        f"± {findings.noise_deviation:.4f} ({findings.null_samples} simulations)"
    )
    console.print(
        f"{below} heads below noise and {above} above it, at a false discovery rate of {findings.alpha:g}"
        + (f"; {len(findings.heads) - len(eligible)} heads not eligible" if len(eligible) < len(findings.heads) else "")
    )
    near = Counter(head.nearest for head in eligible).most_common(_LISTED)
    console.print("nearest known systems: " + ", ".join(f"{name} ({count} heads)" for name, count in near))


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
    table = Table(title=title, title_justify="left")
    for heading in ("head", "divergence", "slope / 100", "entropy", "95 % interval", "z", "q", "complexity", "ties"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("nearest system", no_wrap=True)
    for head in chosen:
        table.add_row(*_cells(head))
    console.print(table)


def _cells(head: HeadFinding) -> tuple[str, ...]:
    return (
        f"{head.layer}.{head.head}",
        f"{head.mean:.3f} ± {head.spread:.3f}",
        f"{head.slope:+.4f}",
        f"{head.entropy:.4f}",
        f"{head.low:.4f} to {head.high:.4f}",
        f"{head.z:+.1f}",
        f"{head.q:.2g}",
        f"{head.complexity:.4f}",
        f"{head.tie_rate:.1%}",
        f"{head.nearest} ({head.distance:.3f})",
    )

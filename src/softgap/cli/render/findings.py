"""The outcome of `analyze` and `compare` on the terminal and on disk."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli.render.output import finite, has_colour, heat_map
from softgap.errors import UnsupportedError, ValueInputError
from softgap.report import PICTURES, draw_plane, require_matplotlib, save_plane, written_whole
from softgap.trajectories.folder import Folder, check_output_file
from softgap.trajectories.locks import locked

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings, Findings, HeadFinding

__all__ = [
    "check_files",
    "default_files",
    "save_column",
    "save_comparison",
    "save_files",
    "save_findings",
    "show_comparison",
    "show_findings",
]


_TABLES = (".json", ".csv", ".parquet")


_LISTED = 5


# Columns from which all cells of a head fit on a line.
_WIDE = 110


_WIDE_ONLY = ("slope / 100", "complexity", "ties")


_NEAREST = "nearest system"


def default_files(study: str, findings: Findings) -> list[str]:
    """Where findings are saved by default: in the folder of the study, and nowhere for a study behind a URI.

    The figure is included only if a head is eligible.
    """
    names = ("findings.json", "plane.svg") if findings.eligible else ("findings.json",)
    return [] if "://" in study else [str(Path(study) / "analysis" / name) for name in names]


def check_files(files: Sequence[str]) -> None:
    """Refuse files that cannot be written, before the work begins."""
    for name in files:
        if Path(name).suffix.lower() not in (*PICTURES, *_TABLES):
            raise ValueInputError(
                f"--out must end in {', '.join((*PICTURES, *_TABLES))}, got '{name}'; choose one of them"
            )
        check_output_file(name)
        if Path(name).suffix.lower() in PICTURES:
            require_matplotlib()


def save_column(findings: Findings, beside: str, form: str) -> Path:
    """Draw the plane for a paper, as NAME-column.pdf or .svg beside a file called NAME."""
    from softgap.report.figures import column_file

    return column_file(draw_plane(findings, column=True), beside, form)


def save_files(findings: Findings, files: Sequence[str]) -> Iterator[str]:
    """Write the files; yield a line about each."""
    for name in files:
        try:
            save_findings(findings, name)
        except (
            UnsupportedError
        ) as error:  # matplotlib is missing, and the figure was not asked for: check_files would have refused it
            yield f"no picture: {error}"
        else:
            yield f"saved {name}"


def save_findings(findings: Findings, name: str) -> None:
    """Write the figure or the findings, by the suffix of the name; the file is complete or absent."""
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
    """Print the dynamics of a study."""
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
    total = "" if findings.samples == 1 else " in total"
    console.print(f"{counted} with {findings.steps:,} steps{total}{skipped}")
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
        f"Median permutation entropy of {_heads(len(eligible))}: {np.median(entropy):.4f} "
        f"({entropy.min():.4f} to {entropy.max():.4f}). White noise of the same lengths: {findings.noise_entropy:.4f} "
        f"± {findings.noise_deviation:.4f} ({findings.null_samples:,} simulations)."
    )
    others = len(findings.heads) - len(eligible)
    console.print(
        f"At a false discovery rate of {findings.alpha:g}, {_heads(below)} below noise and {above} above it"
        + (f"; {_heads(others)} not eligible." if others else ".")
    )
    if findings.least_q > findings.alpha:
        console.print(
            f"With {findings.null_samples:,} simulations a single head cannot differ from noise (its q is at least "
            f"{findings.least_q:.2g}); several heads together can.",
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
    picture, meaning = heat_map(values, layers, width=console.width, colour=has_colour(console))
    console.print()
    of = f"permutation entropy of the divergence from {findings.settings['mechanism']}"
    console.print(f"{of}, by head (rows) and layer (columns); 0 is {low:.4f} and 1 is {high:.4f}")
    console.print(picture)
    if meaning:
        console.print(Text(meaning, "dim"))


def _show_heads(console: Console, findings: Findings) -> None:
    out = findings.standing_out()
    listed = [*out[:_LISTED], *(head for head in out[-_LISTED:] if head not in out[:_LISTED])]
    title = "Heads that differ most from noise" if out else "No head differs from noise; the most extreme heads"
    if not out:
        ranked = sorted(findings.eligible, key=lambda head: head.z)
        listed = [*ranked[:2], *ranked[-2:]] if len(ranked) > 3 else ranked
    quantity = str(findings.settings["quantity"])
    rows = [_cells(head, quantity, wide=console.width >= _WIDE) for head in listed]
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in rows[0]:
        table.add_column(heading, justify="left" if heading == _NEAREST else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print()
    console.print(table)


def _cells(head: HeadFinding, quantity: str, *, wide: bool) -> dict[str, str]:
    """The cells of a head by heading; a narrow terminal shows fewer of them than the files hold."""
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


_STYLES = {"separated": "bold green", "not separated": "bold", "not enough data": "bold yellow"}


# Seconds to wait for another comparison of the same study that is being saved.
_PATIENCE = 20.0


def save_comparison(findings: ComparisonFindings, study: str, out: str | None, form: str | None = None) -> list[str]:
    """Write result.json, figure.svg and findings.json, and return lines that say where.

    A study numbers its comparisons. With a format, the figure is written for a paper, too.
    """
    if out is not None:
        return _write_comparison(findings, Folder.at(out), form)
    comparisons = Folder.at(study).below("comparisons")
    with locked(comparisons, patience=_PATIENCE) as lock:  # or two comparisons take one number
        comparisons = lock.folder
        numbered = sorted(int(name) for name in comparisons.names() if name.isdecimal())
        last = numbered[-1] if numbered else 0
        if last:
            _clear_killed(comparisons.below(f"{last:04d}"))
        # A comparison that was killed before its result was written leaves its number to the next.
        killed = last > 0 and comparisons.below(f"{last:04d}").kind("result.json") == "absent"
        return _write_comparison(findings, comparisons.below(f"{last if killed else last + 1:04d}"), form)


def _clear_killed(folder: Folder) -> None:
    """Delete what a killed comparison left half-written."""
    names = ("result.json", "figure.svg", "findings.json", *(f"figure-column{ending}" for ending in PICTURES))
    folder.discard_partial("", *names)


def _write_comparison(findings: ComparisonFindings, folder: Folder, form: str | None) -> list[str]:
    from softgap.report.documents import comparison_document, document_values

    folder.create()
    _clear_killed(folder)
    content = json.dumps(finite(findings.to_json()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    folder.replace("result.json", content.encode())
    lines, picture = [f"saved {folder.address}"], None
    try:
        picture = _comparison_picture(findings)
        folder.replace("figure.svg", picture)
        if form is not None:
            folder.replace(f"figure-column.{form}", _comparison_picture(findings, form))
    except UnsupportedError as error:
        lines.append(f"no picture: {error}")
    document = document_values(comparison_document(findings, picture))
    folder.replace("findings.json", (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())
    return lines


def _comparison_picture(findings: ComparisonFindings, form: str | None = None) -> bytes:
    """The figure as SVG, or for a paper in this format."""
    from softgap.report.figures import draw_comparison, figure_bytes, one_column

    figure = draw_comparison(findings)
    return figure_bytes(figure, ".svg") if form is None else figure_bytes(one_column(figure), f".{form}", outlines=True)


def show_comparison(console: Console, findings: ComparisonFindings) -> None:
    """Print the verdict and the numbers behind it."""
    document = findings.to_json()
    console.print(Text(findings.verdict.sentence, _STYLES[findings.verdict.outcome]), soft_wrap=True)
    if findings.verdict.caution:
        console.print(findings.verdict.caution, soft_wrap=True)
    console.print(f"{findings.status}; the study's log has {len(findings.log_entries)} entries", soft_wrap=True)
    _show_family(console, document)
    console.print(_steps(findings))
    for name, reason in findings.impossible.items():
        console.print(f"{name}: not computed, {reason}", style="yellow", soft_wrap=True)
    console.print(findings.equivalence_sentence, soft_wrap=True)
    unequal = document["family"]["unequal_spread"]
    if unequal:
        console.print(
            f"The groups differ in spread in {unequal:,} units. A plain permutation test would give smaller p-values "
            "there.",
            soft_wrap=True,
        )
    console.print(_units(document))
    _show_baselines(console, document)
    _show_labels(console, document)


def _show_family(console: Console, document: dict[str, Any]) -> None:
    family, (first, second), sizes = document["family"], document["groups"], document["sizes"]
    left = ", ".join(f"{count:,} {why}" for why, count in document["left_out"].items() if count)
    console.print(
        f"{first} ({sizes[0]:,}) minus {second} ({sizes[1]:,}); permutations: {document['exchange']}"
        + (f"; excluded: {left}" if left else ""),
        soft_wrap=True,
    )
    console.print(
        f"{family['units']:,} units: {len(family['modes'])} features of {family['heads']:,} "
        f"{'KV heads' if family['collapsed'] else 'heads'}"
        + (f"; {family['all_equal']:,} more are constant" if family["all_equal"] else ""),
        soft_wrap=True,
    )
    for name, reason in list(family["skipped"].items())[:_LISTED]:
        console.print(f"not tested: {name}: {reason}", style="dim", soft_wrap=True)


def _steps(findings: ComparisonFindings) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("comparison", "convincing", "p, any", "p, max-T", "units", "detectable", "upper bound"):
        table.add_column(heading, justify="left" if heading == "comparison" else "right", no_wrap=True)
    comparisons = {"all samples": findings.comparison, **findings.controls}
    for step in findings.verdict.steps:
        done = comparisons[step.name]
        table.add_row(
            step.name,
            "yes" if step.convincing else "no",
            f"{step.p:.2g}",
            f"{done.maximum.p:.2g}",
            str(len(step.units)),
            f"{step.smallest:.2f}",
            f"{step.bound:.2f}",
        )
    return table


def _units(document: dict[str, Any]) -> Table:
    table = Table(title="Units with the largest effects", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("head", "feature", "Hedges' g", "AUROC", "p, max-T", "q"):
        table.add_column(heading, justify="left" if heading == "feature" else "right", no_wrap=True)
    for row in document["top"][:_LISTED]:
        table.add_row(
            f"{row['layer']}.{row['head']}",
            row["mode"],
            _format_interval(row["g"], "+.2f"),
            _format_interval(row["auroc"], ".3f"),
            f"{row['p_max']:.2g}",
            f"{row['q']:.2g}",
        )
    return table


def _show_baselines(console: Console, document: dict[str, Any]) -> None:
    beyond, recurring = document["beyond_baselines"], document["recurrence"]
    if beyond is not None:
        difference = _format_interval(beyond["difference"], "+.3f")
        console.print(
            f"AUROC of free baselines {_format_interval(beyond['baseline'], '.3f')}, with heads "
            f"{_format_interval(beyond['combined'], '.3f')}; difference {difference}, p = {beyond['p']:.2g}",
            soft_wrap=True,
        )
    if recurring is not None:
        most = recurring["heads"][0]
        console.print(
            f"head {most['layer']}.{most['head']} ranks among the first {recurring['top']} in {most['count']} of "
            f"{recurring['modes']} features, p = {most['p']:.2g}",
            soft_wrap=True,
        )


def _show_labels(console: Console, document: dict[str, Any]) -> None:
    noise, kappa = document["reliability"]["noise"], document["reliability"]["kappa"]
    if noise is not None:
        words = ", ".join(
            f"{_most_common(noise['outcomes'], i)} at {rate:.0%}" for i, rate in enumerate(noise["rates"])
        )
        console.print(f"verdict after random label flips: {words}", soft_wrap=True)
    if kappa is not None:
        console.print(f"second scorer: agreement {kappa['agreement']:.1%}, kappa {_format_interval(kappa, '.2f')}")


def _most_common(outcomes: dict[str, list[float]], rate: int) -> str:
    return max(outcomes, key=lambda name: outcomes[name][rate])


def _format_interval(interval: dict[str, Any], form: str) -> str:
    return f"{interval['value']:{form}} ({interval['low']:{form}} to {interval['high']:{form}})"

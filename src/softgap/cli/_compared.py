"""The outcome of `compare`: the verdict first, then what it rests on, and the files it is saved in."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli._output import finite
from softgap.errors import UnsupportedError
from softgap.trajectories.folder import Folder

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings

__all__ = ["save_comparison", "show_comparison"]

_STYLES = {"separated": "bold green", "not separated": "bold", "not enough data": "bold yellow"}
_LISTED = 5


def save_comparison(findings: ComparisonFindings, study: str, out: str | None) -> list[str]:
    """Write result.json, figure.svg and findings.json for the report, and say where; a study numbers them."""
    from softgap.report.comparison_document import comparison_document
    from softgap.report.document import document_values

    if out is None:
        home = Folder.at(study)
        taken = [int(name) for name in home.names("comparisons") if name.isdecimal()]
        folder = home.below(f"comparisons/{max(taken, default=0) + 1:04d}")
    else:
        folder = Folder.at(out)
    folder.create()
    content = json.dumps(finite(findings.to_json()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    folder.replace("result.json", content.encode())
    said, picture = [f"saved {folder.given}"], None
    try:
        picture = _drawn(findings)
        folder.replace("figure.svg", picture)
    except UnsupportedError as error:
        said.append(f"no picture: {error}")
    document = document_values(comparison_document(findings, picture))
    folder.replace("findings.json", (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode())
    return said


def _drawn(findings: ComparisonFindings) -> bytes:
    from softgap.report.comparison_figure import draw_comparison
    from softgap.report.pictures import figure_bytes

    return figure_bytes(draw_comparison(findings), ".svg")


def show_comparison(console: Console, findings: ComparisonFindings) -> None:
    """Print the verdict and what a person wants to know behind it."""
    document = findings.to_json()
    console.print(Text(findings.verdict.sentence, _STYLES[findings.verdict.outcome]), soft_wrap=True)
    console.print(f"{findings.status}; {len(findings.tried)} lines in the study's log", soft_wrap=True)
    _show_family(console, document)
    console.print(_steps(findings))
    for name, reason in findings.impossible.items():
        console.print(f"{name}: not computed, {reason}", style="yellow", soft_wrap=True)
    console.print(findings.equivalence_sentence, soft_wrap=True)
    unequal = document["family"]["unequal_spread"]
    if unequal:
        console.print(
            f"The groups differ in spread in {unequal:,} units; there p-values are larger than plain permutation.",
            soft_wrap=True,
        )
    console.print(_units(document))
    _show_beyond(console, document)
    _show_labels(console, document)


def _show_family(console: Console, document: dict[str, Any]) -> None:
    family, (first, second), sizes = document["family"], document["groups"], document["sizes"]
    left = ", ".join(f"{count:,} {why}" for why, count in document["left_out"].items() if count)
    console.print(
        f"{first} ({sizes[0]:,}) minus {second} ({sizes[1]:,}), exchanged by {document['exchange']}"
        + (f"; left out: {left}" if left else ""),
        soft_wrap=True,
    )
    console.print(
        f"{family['units']:,} units: {len(family['modes'])} features of {family['heads']:,} "
        f"{'KV heads' if family['collapsed'] else 'heads'}"
        + (f"; {family['all_equal']:,} more never vary" if family["all_equal"] else ""),
        soft_wrap=True,
    )
    for name, reason in list(family["skipped"].items())[:_LISTED]:
        console.print(f"not looked at: {name}: {reason}", style="dim", soft_wrap=True)


def _steps(findings: ComparisonFindings) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("comparison", "convincing", "p, any", "p, max-T", "units", "finds from", "no more than"):
        table.add_column(heading, justify="left" if heading == "comparison" else "right", no_wrap=True)
    everything = {"all samples": findings.comparison, **findings.controls}
    for step in findings.verdict.steps:
        done = everything[step.name]
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
    table = Table(title="Largest units", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("head", "feature", "Hedges' g", "AUROC", "p, max-T", "q"):
        table.add_column(heading, justify="left" if heading == "feature" else "right", no_wrap=True)
    for row in document["top"][:_LISTED]:
        table.add_row(
            f"{row['layer']}.{row['head']}",
            row["mode"],
            _between(row["g"], "+.2f"),
            _between(row["auroc"], ".3f"),
            f"{row['p_max']:.2g}",
            f"{row['q']:.2g}",
        )
    return table


def _show_beyond(console: Console, document: dict[str, Any]) -> None:
    beyond, recurring = document["beyond_baselines"], document["recurrence"]
    if beyond is not None:
        console.print(
            f"AUROC of free baselines {_between(beyond['baseline'], '.3f')}, with heads "
            f"{_between(beyond['combined'], '.3f')}: {_between(beyond['difference'], '+.3f')} beyond them, p = "
            f"{beyond['p']:.2g}",
            soft_wrap=True,
        )
    if recurring is not None:
        most = recurring["heads"][0]
        console.print(
            f"head {most['layer']}.{most['head']} is among the first {recurring['top']} in {most['count']} of "
            f"{recurring['modes']} features, p = {most['p']:.2g}",
            soft_wrap=True,
        )


def _show_labels(console: Console, document: dict[str, Any]) -> None:
    noise, kappa = document["reliability"]["noise"], document["reliability"]["kappa"]
    if noise is not None:
        words = ", ".join(f"{_commonest(noise['outcomes'], i)} at {rate:.0%}" for i, rate in enumerate(noise["rates"]))
        console.print(f"the verdict with labels flipped at random: {words}", soft_wrap=True)
    if kappa is not None:
        console.print(f"second scorer: agreement {kappa['agreement']:.1%}, kappa {_between(kappa, '.2f')}")


def _commonest(outcomes: dict[str, list[float]], rate: int) -> str:
    return max(outcomes, key=lambda name: outcomes[name][rate])


def _between(found: dict[str, Any], form: str) -> str:
    return f"{found['value']:{form}} ({found['low']:{form}} to {found['high']:{form}})"

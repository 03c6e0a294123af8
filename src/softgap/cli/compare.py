"""`softgap compare`: whether two groups of a study differ, and how sure one can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli import _output
from softgap.cli._grouped import grouped
from softgap.cli._options import Json
from softgap.cli._plan_options import PlanOptions

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings, ComparisonPlan

__all__ = ["compare_command"]


@grouped
def compare_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    *,
    plan: Annotated[
        str | None,
        typer.Option(help="A TOML file that decides everything; its hash is kept first.", show_default=False),
    ] = None,
    options: PlanOptions,
    open_confirmation: Annotated[
        bool, typer.Option("--open-confirmation", help="Look at the locked samples: once.")
    ] = False,
    second: Annotated[
        str | None, typer.Option(help="Labels by another scorer, as for study label.", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for result.json and figure.svg; default: the study's own.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two groups of samples over every head and feature at once, with controls, and give a verdict."""
    if out is not None:
        from softgap.trajectories.folder import Folder

        # Before the labels are looked at, which the study's log counts.
        Folder.at(out).try_writing("a comparison is")
    findings = _compared(study, options.plan(plan), plan, second, open_confirmation)
    from softgap.cli._compared import save_comparison, show_comparison

    lines = save_comparison(findings, study, out)
    if as_json:
        _output.write_json(findings.to_json())
        return
    console = _output.console()
    show_comparison(console, findings)
    for line in lines:
        console.print(line, soft_wrap=True)


def _compared(
    study: str, plan: ComparisonPlan, source: str | None, second: str | None, open_confirmation: bool
) -> ComparisonFindings:
    from softgap.analysis import compare_study
    from softgap.cli._waiting import waiting_share
    from softgap.tasks import read_labels

    others = None if second is None else read_labels(second)
    with waiting_share("comparing") as show:
        return compare_study(
            study,
            plan,
            planned=source,
            open_confirmation=open_confirmation,
            second=others,
            progress=show,
        )

"""`softgap compare`: whether two groups of a study differ, and how sure one can be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli import _output
from softgap.cli._options import Json
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings, ComparisonPlan

__all__ = ["compare_command"]


def compare_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    plan: Annotated[
        str | None,
        typer.Option(help="A TOML file that decides everything; its hash is kept first.", show_default=False),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="The field that names the groups; label by default.", show_default=False)
    ] = None,
    between: Annotated[
        list[str] | None, typer.Option(help="A group to compare, given twice; all by default.", show_default=False)
    ] = None,
    first: Annotated[str | None, typer.Option(help="The group whose effect is positive.", show_default=False)] = None,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(help="Of the study's mechanisms; may be repeated, all by default.", show_default=False),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(help="mean, slope, entropy, complexity, sparsity; all by default.", show_default=False),
    ] = None,
    transform: Annotated[
        list[str] | None, typer.Option(help="Of entropies; may be repeated, diff by default.", show_default=False)
    ] = None,
    order: Annotated[
        list[int] | None, typer.Option(help="Of entropies; may be repeated, 3 by default.", show_default=False)
    ] = None,
    segment: Annotated[
        list[str] | None, typer.Option(help="full, early, mid, late; may be repeated.", show_default=False)
    ] = None,
    part: Annotated[str | None, typer.Option(help="completion (the default) or prompt.", show_default=False)] = None,
    collapse: Annotated[
        bool | None, typer.Option("--collapse", help="Average heads that share a key-value head.", show_default=False)
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(help="Match on this number; may be repeated, length by default.", show_default=False),
    ] = None,
    stratum: Annotated[
        list[str] | None, typer.Option(help="Exchange labels within this field; may be repeated.", show_default=False)
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="The smallest effect that would matter, in deviations; 0.5.", show_default=False),
    ] = None,
    confirm: Annotated[
        float | None, typer.Option(help="Lock this share of the samples for confirmation.", show_default=False)
    ] = None,
    open_confirmation: Annotated[
        bool, typer.Option("--open-confirmation", help="Look at the locked samples: once.")
    ] = False,
    second: Annotated[
        str | None, typer.Option(help="Labels by another scorer, as for study label.", show_default=False)
    ] = None,
    min_steps: Annotated[int | None, typer.Option(min=1, help="Leave out shorter samples.", show_default=False)] = None,
    permutations: Annotated[
        int | None, typer.Option(min=19, help="Relabellings; 4999 by default.", show_default=False)
    ] = None,
    refits: Annotated[
        int | None,
        typer.Option(min=19, help="Permutations with heads selected anew; 199 by default.", show_default=False),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of relabellings and intervals.", show_default=False)] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder for result.json and figure.svg; default: the study's own.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare two groups of samples over every head and feature at once, with controls, and give a verdict."""
    given = {
        "by": by, "between": between, "first": first, "mechanisms": mechanism, "features": feature,
        "transforms": transform, "orders": order, "segments": segment, "part": part, "collapse": collapse,
        "match": match, "strata": stratum, "margin": margin, "confirm": confirm, "min_steps": min_steps,
        "permutations": permutations, "refits": refits, "seed": seed,
    }  # fmt: skip
    if out is not None:
        from softgap.trajectories.folder import Folder

        # Before the labels are looked at, which the study's log counts.
        Folder.at(out).try_writing("a comparison is")
    decided = _plan(plan, {name: value for name, value in given.items() if value not in (None, [])})
    findings = _compared(study, decided, plan, second, open_confirmation)
    from softgap.cli._compared import save_comparison, show_comparison

    lines = save_comparison(findings, study, out)
    if as_json:
        _output.write_json(findings.to_json())
        return
    console = _output.console()
    show_comparison(console, findings)
    for line in lines:
        console.print(line, soft_wrap=True)


def _plan(path: str | None, given: dict[str, Any]) -> ComparisonPlan:
    from softgap.analysis import ComparisonPlan, read_plan

    if path is not None:
        if given:
            raise ValueInputError(
                f"a plan decides everything, got {', '.join(given)} on the command line too; write it into '{path}'"
            )
        return read_plan(path)
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return ComparisonPlan(**values)


def _compared(
    study: str, plan: ComparisonPlan, source: str | None, second: str | None, open_confirmation: bool
) -> ComparisonFindings:
    from softgap.analysis import compare_study
    from softgap.cli._waiting import waiting
    from softgap.tasks import read_labels

    others = None if second is None else read_labels(second)
    with waiting("comparing", 100) as show:
        return compare_study(
            study,
            plan,
            planned=source,
            open_confirmation=open_confirmation,
            second=others,
            progress=lambda what, share: show(what, int(100 * share)),
        )

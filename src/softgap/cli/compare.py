"""``softgap compare``: whether two groups of a study differ, and how sure one can be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli.options import Json, grouped
from softgap.cli.render import output
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings, Preregistration

__all__ = ["PlanOptions", "compare_command"]


@dataclass(frozen=True)
class PlanOptions:
    """Fields of ComparisonPlan by the same names; None where the plan's own default stands."""

    by: Annotated[
        str | None, typer.Option(help="The field that names the groups; label by default.", show_default=False)
    ] = None
    between: Annotated[
        list[str] | None, typer.Option(help="A group to compare, given twice; all by default.", show_default=False)
    ] = None
    first: Annotated[str | None, typer.Option(help="The group whose effect is positive.", show_default=False)] = None
    mechanisms: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism", help="Of the study's mechanisms; may be repeated, all by default.", show_default=False
        ),
    ] = None
    features: Annotated[
        list[str] | None,
        typer.Option(
            "--feature", help="mean, slope, entropy, complexity, sparsity; all by default.", show_default=False
        ),
    ] = None
    transforms: Annotated[
        list[str] | None,
        typer.Option("--transform", help="Of entropies; may be repeated, diff by default.", show_default=False),
    ] = None
    orders: Annotated[
        list[int] | None,
        typer.Option("--order", help="Of entropies; may be repeated, 3 by default.", show_default=False),
    ] = None
    segments: Annotated[
        list[str] | None, typer.Option("--segment", help="full, early, mid, late; may be repeated.", show_default=False)
    ] = None
    part: Annotated[str | None, typer.Option(help="completion (the default) or prompt.", show_default=False)] = None
    collapse: Annotated[
        bool | None, typer.Option("--collapse", help="Average heads that share a KV head.", show_default=False)
    ] = None
    match: Annotated[
        list[str] | None,
        typer.Option(help="Confounder (a number) to match on; may be repeated. Default: length.", show_default=False),
    ] = None
    strata: Annotated[
        list[str] | None,
        typer.Option("--stratum", help="Confounder (a field) to match within; may be repeated.", show_default=False),
    ] = None
    margin: Annotated[
        float | None,
        typer.Option(help="The smallest effect that would matter, in deviations; 0.5.", show_default=False),
    ] = None
    confirm: Annotated[
        float | None, typer.Option(help="Lock this share of the samples for confirmation.", show_default=False)
    ] = None
    min_steps: Annotated[int | None, typer.Option(min=1, help="Leave out shorter samples.", show_default=False)] = None
    permutations: Annotated[
        int | None, typer.Option(min=19, help="Relabellings; 4999 by default.", show_default=False)
    ] = None
    refits: Annotated[
        int | None,
        typer.Option(min=19, help="Permutations with heads selected anew; 199 by default.", show_default=False),
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Of relabellings and intervals.", show_default=False)] = None

    def plan(self, path: str | None) -> Preregistration:
        """The plan in a file, which decides everything; or the default one with what was given here."""
        from softgap.analysis import Preregistration, read_preregistration

        given: dict[str, Any] = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        if path is None:
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
            return Preregistration(**values)
        if given:
            raise ValueInputError(
                f"a plan decides everything, got {', '.join(given)} on the command line too; write it into '{path}'"
            )
        return read_preregistration(path)


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
    from softgap.cli.render.findings import save_comparison, show_comparison

    lines = save_comparison(findings, study, out)
    if as_json:
        output.write_json(findings.to_json())
        return
    console = output.console()
    show_comparison(console, findings)
    for line in lines:
        console.print(line, soft_wrap=True)


def _compared(
    study: str, plan: Preregistration, source: str | None, second: str | None, open_confirmation: bool
) -> ComparisonFindings:
    from softgap.analysis import compare_study
    from softgap.cli.render.output import waiting_share
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

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


_Plan = Annotated[
    str | None,
    typer.Option("--plan", help="A TOML file that decides everything; its hash is kept first.", show_default=False),
]
_By = Annotated[
    str | None, typer.Option("--by", help="The field that names the groups; label by default.", show_default=False)
]
_Between = Annotated[
    list[str] | None,
    typer.Option("--between", help="A group to compare, given twice; all by default.", show_default=False),
]
_First = Annotated[str | None, typer.Option("--first", help="The group whose effect is positive.", show_default=False)]
_Mechanisms = Annotated[
    list[str] | None,
    typer.Option("--mechanism", help="Of the study's mechanisms; may be repeated, all by default.", show_default=False),
]
_Features = Annotated[
    list[str] | None,
    typer.Option("--feature", help="mean, slope, entropy, complexity, sparsity; all by default.", show_default=False),
]
_Transforms = Annotated[
    list[str] | None,
    typer.Option("--transform", help="Of entropies; may be repeated, diff by default.", show_default=False),
]
_Orders = Annotated[
    list[int] | None, typer.Option("--order", help="Of entropies; may be repeated, 3 by default.", show_default=False)
]
_Segments = Annotated[
    list[str] | None, typer.Option("--segment", help="full, early, mid, late; may be repeated.", show_default=False)
]
_Part = Annotated[str | None, typer.Option("--part", help="completion (the default) or prompt.", show_default=False)]
_Collapse = Annotated[
    bool | None, typer.Option("--collapse", help="Average heads that share a KV head.", show_default=False)
]
_Match = Annotated[
    list[str] | None,
    typer.Option("--match", help="Match on this number; may be repeated, length by default.", show_default=False),
]
_Strata = Annotated[
    list[str] | None,
    typer.Option("--stratum", help="Exchange labels within this field; may be repeated.", show_default=False),
]
_Margin = Annotated[
    float | None,
    typer.Option("--margin", help="The smallest effect that would matter, in deviations; 0.5.", show_default=False),
]
_Confirm = Annotated[
    float | None, typer.Option("--confirm", help="Lock this share of the samples for confirmation.", show_default=False)
]
_OpenConfirmation = Annotated[bool, typer.Option("--open-confirmation", help="Look at the locked samples: once.")]
_Second = Annotated[
    str | None, typer.Option("--second", help="Labels by another scorer, as for study label.", show_default=False)
]
_MinSteps = Annotated[
    int | None, typer.Option("--min-steps", min=1, help="Leave out shorter samples.", show_default=False)
]
_Permutations = Annotated[
    int | None, typer.Option("--permutations", min=19, help="Relabellings; 4999 by default.", show_default=False)
]
_Refits = Annotated[
    int | None,
    typer.Option("--refits", min=19, help="Permutations with heads selected anew; 199 by default.", show_default=False),
]
_Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of relabellings and intervals.", show_default=False)]
_Out = Annotated[
    str | None,
    typer.Option("--out", help="Folder for result.json and figure.svg; default: the study's own.", show_default=False),
]


def compare_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    plan: _Plan = None,
    by: _By = None,
    between: _Between = None,
    first: _First = None,
    mechanism: _Mechanisms = None,
    feature: _Features = None,
    transform: _Transforms = None,
    order: _Orders = None,
    segment: _Segments = None,
    part: _Part = None,
    collapse: _Collapse = None,
    match: _Match = None,
    stratum: _Strata = None,
    margin: _Margin = None,
    confirm: _Confirm = None,
    open_confirmation: _OpenConfirmation = False,
    second: _Second = None,
    min_steps: _MinSteps = None,
    permutations: _Permutations = None,
    refits: _Refits = None,
    seed: _Seed = None,
    out: _Out = None,
    as_json: Json = False,
) -> None:
    """Compare two groups of samples over every head and feature at once, with controls, and give a verdict."""
    given = {
        "by": by, "between": between, "first": first, "mechanisms": mechanism, "features": feature,
        "transforms": transform, "orders": order, "segments": segment, "part": part, "collapse": collapse,
        "match": match, "strata": stratum, "margin": margin, "confirm": confirm, "min_steps": min_steps,
        "permutations": permutations, "refits": refits, "seed": seed,
    }  # fmt: skip
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

"""``softgap compare``: whether two groups of a study differ, and how sure one can be."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli.options import Json, PaperFigure, check_paper_figure, expand_option_groups
from softgap.cli.render import output
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings, Preregistration

__all__ = ["PreregistrationOptions", "compare_command"]


@dataclass(frozen=True)
class PreregistrationOptions:
    """The fields of ComparisonPlan as options; None stands for the default of the plan."""

    by: Annotated[str | None, typer.Option(help="Field that names the groups. Default: label.", show_default=False)] = (
        None
    )
    between: Annotated[
        list[str] | None,
        typer.Option(help="Group to compare; give it twice. Default: all groups.", show_default=False),
    ] = None
    first: Annotated[
        str | None, typer.Option(help="Group whose larger values count as a positive effect.", show_default=False)
    ] = None
    mechanisms: Annotated[
        list[str] | None,
        typer.Option(
            "--mechanism", help="Mechanism to compare; may be repeated. Default: all of the study.", show_default=False
        ),
    ] = None
    features: Annotated[
        list[str] | None,
        typer.Option(
            "--feature",
            help="Feature: mean, slope, entropy, complexity or sparsity; may be repeated. Default: all.",
            show_default=False,
        ),
    ] = None
    transforms: Annotated[
        list[str] | None,
        typer.Option(
            "--transform", help="Transform before the entropy; may be repeated. Default: diff.", show_default=False
        ),
    ] = None
    orders: Annotated[
        list[int] | None,
        typer.Option("--order", help="Order of the entropy; may be repeated. Default: 3.", show_default=False),
    ] = None
    segments: Annotated[
        list[str] | None,
        typer.Option("--segment", help="Segment: full, early, mid or late; may be repeated.", show_default=False),
    ] = None
    part: Annotated[
        str | None, typer.Option(help="Tokens to compare: completion (default) or prompt.", show_default=False)
    ] = None
    collapse: Annotated[
        bool | None, typer.Option("--collapse", help="Average the heads that share a KV head.", show_default=False)
    ] = None
    match: Annotated[
        list[str] | None,
        typer.Option(help="Numeric confounder to match on; may be repeated. Default: length.", show_default=False),
    ] = None
    strata: Annotated[
        list[str] | None,
        typer.Option(
            "--stratum", help="Categorical confounder: compare within its values; may be repeated.", show_default=False
        ),
    ] = None
    margin: Annotated[
        float | None,
        typer.Option(help="Smallest effect that matters, in standard deviations. Default: 0.5.", show_default=False),
    ] = None
    confirm: Annotated[
        float | None, typer.Option(help="Share of the samples to lock as a confirmation set.", show_default=False)
    ] = None
    min_steps: Annotated[
        int | None, typer.Option(min=1, help="Exclude samples with fewer steps.", show_default=False)
    ] = None
    permutations: Annotated[
        int | None, typer.Option(min=19, help="Number of permutations. Default: 4999.", show_default=False)
    ] = None
    refits: Annotated[
        int | None,
        typer.Option(
            min=19, help="Number of permutations that repeat the selection of heads. Default: 199.", show_default=False
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(min=0, help="Random seed for permutations and bootstrap.", show_default=False)
    ] = None

    def preregistration(self, path: str | None) -> Preregistration:
        """The preregistration in a file, or the default plan with the options given here."""
        from softgap.analysis import Preregistration, read_preregistration

        options: dict[str, Any] = {name: value for name, value in asdict(self).items() if value not in (None, [])}
        if path is None:
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
            return Preregistration(**values)
        if options:
            raise ValueInputError(
                f"a preregistration sets every option, but the command line also gives {', '.join(options)}; write "
                f"it into '{path}'"
            )
        return read_preregistration(path)


@expand_option_groups
def compare_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    *,
    preregistration: Annotated[
        str | None,
        typer.Option(
            "--preregistration",
            help="Preregistration file (TOML); its hash is logged before labels are read.",
            show_default=False,
        ),
    ] = None,
    options: PreregistrationOptions,
    open_confirmation: Annotated[
        bool, typer.Option("--open-confirmation", help="Unlock the confirmation set (one time only).")
    ] = False,
    second: Annotated[
        str | None, typer.Option(help="Labels of a second scorer (a file as for `study label`).", show_default=False)
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for result.json and figure.svg. Default: comparisons/ in the study.", show_default=False
        ),
    ] = None,
    paper: PaperFigure = None,
    force: output.Force = False,
    as_json: Json = False,
) -> None:
    """Compare two groups of samples over all heads and features, control for confounders, and give a verdict."""
    check_paper_figure(paper, out or study)
    if out is not None:
        from softgap.trajectories.folder import Folder

        # Before labels are read, because the study logs every look at them.
        Folder.at(out).try_writing("a comparison is")
    with output.overriding(force):
        findings = _compare(study, options.preregistration(preregistration), preregistration, second, open_confirmation)
    from softgap.cli.render.findings import save_comparison, show_comparison

    lines = save_comparison(findings, study, out, paper)
    if as_json:
        output.write_json(findings.to_json())
        return
    console = output.console()
    show_comparison(console, findings)
    for line in lines:
        console.print(line, soft_wrap=True)


def _compare(
    study: str, preregistration: Preregistration, source: str | None, second: str | None, open_confirmation: bool
) -> ComparisonFindings:
    from softgap.analysis import compare_study
    from softgap.progress import show_progress
    from softgap.tasks import read_labels

    second_labels = None if second is None else read_labels(second)
    with show_progress("comparing") as report:
        return compare_study(
            study,
            preregistration,
            preregistration_file=source,
            open_confirmation=open_confirmation,
            second=second_labels,
            progress=report,
        )

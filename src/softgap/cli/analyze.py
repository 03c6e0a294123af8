"""`softgap analyze`: the dynamics of the trajectories of a study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli.options import Json, PaperFigure, check_paper_figure
from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.analysis import Findings

__all__ = ["analyze_command"]


def analyze_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study.")],
    mechanism: Annotated[
        str | None, typer.Option(help="Mechanism of the study to analyze. Default: the first one.", show_default=False)
    ] = None,
    quantity: Annotated[
        str, typer.Option(help="Quantity to analyze: divergence, relative_l2 or norm_ratio.")
    ] = "divergence",
    transform: Annotated[
        str, typer.Option(help="Transform of the trajectories: raw, diff, diff2, diff3, residual or control.")
    ] = "diff",
    order: Annotated[int, typer.Option(help="Length of an ordinal pattern, 2 to 8.")] = 3,
    delay: Annotated[int, typer.Option(help="Number of steps between the values of a pattern.")] = 1,
    segment: Annotated[str, typer.Option(help="Part of each trajectory: full, early, mid or late.")] = "full",
    ties: Annotated[
        str, typer.Option(help="How to treat windows with equal values: exclude, stable, jitter or raise.")
    ] = "exclude",
    eligibility: Annotated[
        str, typer.Option(help="Minimum number of windows per head: spread, 2*order! or a number.")
    ] = "spread",
    alpha: Annotated[float, typer.Option(help="False discovery rate for the heads that differ from noise.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for noise, bootstrap and reference systems.")] = 0,
    out: Annotated[
        list[str] | None,
        typer.Option(
            help="File to write; may be repeated. .png and .svg hold the complexity-entropy plane; .json, .csv and "
            ".parquet hold the findings. Default: analysis/plane.svg and analysis/findings.json in the study.",
            show_default=False,
        ),
    ] = None,
    paper: PaperFigure = None,
    force: output.Force = False,
    as_json: Json = False,
) -> None:
    """Describe the dynamics of every head: permutation entropy and complexity against noise and known systems."""
    from softgap.cli.render.findings import (
        check_files,
        default_files,
        save_column,
        save_files,
        save_findings,
        show_findings,
    )

    check_files(out or ())
    check_paper_figure(paper, out or ("://" not in study or None))
    settings: dict[str, Any] = {
        "mechanism": mechanism,
        "quantity": quantity,
        "transform": transform,
        "order": order,
        "delay": delay,
        "segment": segment,
        "ties": ties,
        "eligibility": int(eligibility) if eligibility.isdecimal() else eligibility,
        "alpha": alpha,
        "seed": seed,
    }
    with output.overriding(force):
        findings = _analyze(study, settings)
    beside = out[0] if out else str(Path(study) / "analysis" / "plane.svg")
    drawn = None if paper is None else save_column(findings, beside, paper)
    if as_json:
        # Files first: a document on standard output means that all is done.
        for name in out or ():
            save_findings(findings, name)
        output.write_json(findings.to_json())
        return
    console = output.console()
    show_findings(console, findings)
    for line in save_files(findings, default_files(study, findings) if out is None else out):
        console.print(line, soft_wrap=True)
    if drawn is not None:
        console.print(f"saved {drawn}", soft_wrap=True)


def _analyze(study: str, settings: dict[str, Any]) -> Findings:
    from softgap.analysis import analyze
    from softgap.progress import show_progress
    from softgap.trajectories import open_study

    opened = open_study(study)
    with show_progress("analysing") as report:
        return analyze(opened, **settings, progress=report)

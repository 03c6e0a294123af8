"""`softgap lab focus`: how sparse attention weights can be, in closed form and in every head of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from softgap.cli.options import Json, Model, PaperFigure
from softgap.cli.render.lab import (
    Full,
    LabOut,
    LabText,
    LabTokens,
    check_out,
    choose_model,
    model_and_text,
    number,
    present_lab,
    run_lab,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory.focus.model import ModelFocus
    from softgap.theory.focus.synthetic import FocusFindings

__all__ = ["focus_command"]


def focus_command(
    model: Model = None,
    text: LabText = None,
    tokens: LabTokens = 512,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Mechanism to compare with softmax; may be repeated. Default: every mechanism with weights.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[int, typer.Option(max=65536, help="Without --model: number of keys.")] = 512,
    dim: Annotated[int, typer.Option(max=4096, help="Without --model: dimension of queries and keys.")] = 64,
    draws: Annotated[int, typer.Option(max=100_000, help="Without --model: number of simulated rows per check.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for simulations and bootstrap.")] = 0,
    out: LabOut = None,
    paper: PaperFigure = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Measure how far attention can focus: sparsity S in closed form; S, entropy and rank in the heads of a model."""
    check_out(out, paper)
    name = choose_model(model, text)
    if name is None:
        findings = _synthetic(keys, dim, draws, mechanism, seed)
        title = f"Focus on Gaussian keys ({keys} keys of dimension {dim})"
        draw = partial(_draw_synthetic, findings)
        table = partial(_rank_table, findings)
        present_lab(findings, draw, title=title, out=out, form=paper, as_json=as_json, full=full, table=table)
        return
    lab = _in_model(name, text, tokens, mechanism, seed)
    title = f"Focus in {lab.settings['model']} over {lab.settings['tokens']} tokens"
    table = partial(_mechanism_table, lab)
    present_lab(
        lab, partial(_draw_model, lab), title=title, out=out, form=paper, as_json=as_json, full=full, table=table
    )


def _synthetic(keys: int, dim: int, draws: int, mechanisms: list[str] | None, seed: int) -> FocusFindings:
    from softgap.theory.focus.synthetic import focus_lab

    return run_lab(focus_lab, stage="checking", seed=seed, n=keys, d=dim, draws=draws, mechanisms=mechanisms)


def _in_model(name: str, text: str | None, tokens: int, mechanisms: list[str] | None, seed: int) -> ModelFocus:
    from softgap.theory.focus.model import focus_in_model

    model_inputs = model_and_text(name, text, tokens, mechanisms)
    about = {"model": name, "text": text}
    return run_lab(focus_in_model, *model_inputs, stage="reading", seed=seed, about=about, mechanisms=mechanisms)


def _rank_table(findings: FocusFindings) -> Table:
    size = findings.ranks[0]
    table = Table(title=f"One random head of {size.n} keys, dimension {size.d}", title_justify="left")
    for heading in ("mechanism", "mask", "S", "rank", "rank of a block", "99 % of its energy"):
        table.add_column(heading, justify="left" if heading in ("mechanism", "mask") else "right", no_wrap=True)
    for row in findings.ranks:
        counts = (str(count) for count in (row.whole, row.block, row.energy))
        table.add_row(row.mechanism, row.mask, f"{row.sparsity:.3f}", *counts)
    return table


def _mechanism_table(lab: ModelFocus) -> Table:
    table = Table(title="Means over heads (columns, distance: share by position alone)", title_justify="left")
    table.add_column("mechanism", no_wrap=True)
    columns = {
        "features": "features",
        "S": "sparsity",
        "S i.i.d.": "iid",
        "from softmax": "from_softmax",
        "from uniform": "from_uniform",
        "columns": "columns",
        "distance": "distance",
        "weight error": "block_error",
        "floor": "floor",
    }
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for mechanism in lab.mechanisms:
        row = mechanism.summary()
        table.add_row(mechanism.name, *(number(row[field], ".3g") for field in columns.values()))
    return table


def _draw_synthetic(findings: FocusFindings) -> Figure:
    from softgap.report.focus_figure import draw_focus

    return draw_focus(findings)


def _draw_model(lab: ModelFocus) -> Figure:
    from softgap.report.focus_figure import draw_focus_in_model

    return draw_focus_in_model(lab)

"""`softgap lab injectivity`: which mechanisms tell queries apart, on synthetic keys or in every head of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

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
    present_lab,
    run_lab,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory.injectivity.model import ModelInjectivity
    from softgap.theory.injectivity.synthetic import Injectivity

__all__ = ["injectivity_command"]


def injectivity_command(
    model: Model = None,
    text: LabText = None,
    tokens: LabTokens = 512,
    near: Annotated[
        float,
        typer.Option(
            help="With --model: distance below which two queries count as confused, as a share of the mean distance."
        ),
    ] = 0.2,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Mechanism to test; may be repeated. Default: all that the lab supports.", show_default=False
        ),
    ] = None,
    dim: Annotated[int, typer.Option(max=4096, help="Without --model: dimension of queries and keys.")] = 8,
    keys: Annotated[int, typer.Option(max=65536, help="Without --model: number of keys.")] = 48,
    queries: Annotated[
        int | None,
        typer.Option(
            max=10_000,
            help="Number of queries per head (default 64), or of the collision search (default 2).",
            show_default=False,
        ),
    ] = None,
    starts: Annotated[
        int, typer.Option(max=10_000, help="Without --model: starts of the collision search per query and radius.")
    ] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for keys, collision search and bootstrap.")] = 0,
    out: LabOut = None,
    paper: PaperFigure = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Test which mechanisms give different queries different weights: margins, collisions, confusion in real heads."""
    check_out(out, paper)
    name = choose_model(model, text)
    if name is None:
        result = _synthetic(mechanism, dim, keys, 2 if queries is None else queries, starts, seed)
        draw = partial(_draw_synthetic, result)
        title, table = f"Injectivity on {keys} keys of dimension {dim}", partial(_search_table, result)
        present_lab(result, draw, title=title, out=out, form=paper, as_json=as_json, full=full, table=table)
        return
    lab = _in_model(name, text, tokens, mechanism, 64 if queries is None else queries, near, seed)
    title = f"Injectivity in {name} over {lab.settings['tokens']} tokens"
    present_lab(lab, partial(_draw_model, lab), title=title, out=out, form=paper, as_json=as_json, full=full)


def _synthetic(mechanisms: list[str] | None, dim: int, keys: int, queries: int, starts: int, seed: int) -> Injectivity:
    from softgap.theory.injectivity.synthetic import injectivity_lab

    sizes: dict[str, Any] = {"dim": dim, "keys": keys, "queries": queries, "starts": starts}
    return run_lab(injectivity_lab, stage="looking for collisions", seed=seed, mechanisms=mechanisms, **sizes)


def _in_model(
    name: str, text: str | None, tokens: int, mechanisms: list[str] | None, queries: int, near: float, seed: int
) -> ModelInjectivity:
    from softgap.theory.injectivity.model import injectivity_in_model

    model_inputs = model_and_text(name, text, tokens, mechanisms)
    about = {"model": name, "text": text}
    settings: dict[str, Any] = {"mechanisms": mechanisms, "queries": queries, "near": near}
    return run_lab(injectivity_in_model, *model_inputs, stage="reading", seed=seed, about=about, **settings)


def _search_table(lab: Injectivity) -> Table:
    title = "Results of the collision search (* outside proposition 2)"
    table = Table(title=title, title_justify="left")
    table.add_column("mechanism", no_wrap=True)
    table.add_column("collision")
    for heading in ("smallest distance", "starts", "evaluations"):
        table.add_column(heading, justify="right")
    table.add_column("* reason", overflow="fold")
    for search in lab.searches:
        table.add_row(
            search.mechanism + (" *" if search.outside else ""),
            "found" if search.has_collision else "none found",
            f"{search.closest:.1e}",
            str(search.starts),
            str(search.evaluations),
            search.outside,
        )
    return table


def _draw_synthetic(lab: Injectivity) -> Figure:
    from softgap.report.lab_figures import draw_injectivity

    return draw_injectivity(lab)


def _draw_model(lab: ModelInjectivity) -> Figure:
    from softgap.report.lab_figures import draw_injectivity_in_model

    return draw_injectivity_in_model(lab)

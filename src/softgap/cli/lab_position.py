"""`softgap lab position`: why divergence changes with position, in i.i.d. heads or in every head of a model."""

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
    check_out,
    choose_model,
    model_and_texts,
    number,
    present_lab,
    run_lab,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.intervals import ClusterInterval
    from softgap.theory.position.lab import Position

__all__ = ["position_command"]


def position_command(
    model: Model = None,
    text: LabText = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of tokens per text.")] = 512,
    texts: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Largest number of texts; --text is split into them."),
    ] = 8,
    start: Annotated[int, typer.Option(min=1, help="First position of the trend.")] = 8,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Mechanism to compare with softmax; may be repeated. The verdicts are about the first one. "
            "Default: elu1 and every other linear map.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[int, typer.Option(max=10_000, help="Without --model: number of heads.")] = 20,
    dim: Annotated[int, typer.Option(max=4096, help="Without --model: dimension of queries, keys and values.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for heads, random queries and bootstrap.")] = 0,
    out: LabOut = None,
    paper: PaperFigure = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Explain why divergence changes with position: normaliser, running mean of values, or concentration of softmax."""
    check_out(out, paper)
    name = choose_model(model, text)
    if name is None:
        lab = _synthetic(mechanism, heads, texts, tokens, dim, start, seed)
    else:
        lab = _in_model(name, text, texts, tokens, mechanism, start, seed)
    count = lab.settings["texts"]
    many = "1 text" if count == 1 else f"{count} texts"
    title = f"Position in {name or 'i.i.d. heads'} over {many} of {lab.settings['tokens']} tokens"
    table = partial(_shares_table, lab)
    present_lab(lab, partial(_draw, lab), title=title, out=out, form=paper, as_json=as_json, full=full, table=table)


def _synthetic(
    mechanisms: list[str] | None, heads: int, texts: int, tokens: int, dim: int, start: int, seed: int
) -> Position:
    from softgap.theory.position.lab import position_lab

    sizes: dict[str, Any] = {"heads": heads, "texts": texts, "length": tokens, "dim": dim, "start": start}
    return run_lab(position_lab, stage="drawing heads", seed=seed, mechanisms=mechanisms, **sizes)


def _in_model(
    name: str, text: str | None, texts: int, tokens: int, mechanisms: list[str] | None, start: int, seed: int
) -> Position:
    from softgap.theory.position.lab import position_in_model

    model_inputs = model_and_texts(name, text, texts, tokens, mechanisms)
    about = {"model": name, "text": text}
    return run_lab(
        position_in_model, *model_inputs, stage="reading", seed=seed, about=about, start=start, mechanisms=mechanisms
    )


def _shares_table(lab: Position) -> Table:
    from softgap.theory.position.drift import TERMS

    table = Table(title="Shares of the trend, over heads with a trend (false discovery rate 5 %)", title_justify="left")
    for heading in ("mechanism", "heads with a trend", "mean slope", *TERMS, "random queries"):
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for trend in lab.trends:
        shares = [_share(share) for share in (*trend.shares, trend.random_share)]
        count = f"{int(trend.trending.sum())} of {trend.trending.size}"
        table.add_row(trend.mechanism, count, f"{trend.slopes.value.mean():+.4f}", *shares)
    return table


def _share(share: ClusterInterval) -> str:
    """A share with its interval where there is one; a dash where no head has a trend."""
    if share.value != share.value:
        return number(None)
    known = share.low == share.low and share.high == share.high
    return number(share.value, ".2f") + (f" [{share.low:.2f}, {share.high:.2f}]" if known else "")


def _draw(lab: Position) -> Figure:
    from softgap.report.lab_figures import draw_position

    return draw_position(lab)

"""`softgap lab focus`: how sparse attention weights can be, in closed form and in every head of a model."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from softgap.cli import _output
from softgap.cli._lab import LabOut, present_lab
from softgap.cli._options import Json, Model
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory.focus.model import ModelFocus
    from softgap.theory.focus.synthetic import FocusFindings

__all__ = ["focus_command"]


def focus_command(
    model: Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="A text file for the model, or - for standard input; a built-in page by default. Without --model: "
            "the embedded model reads it.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="With --model: read no more than so many tokens.")] = 512,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: what to compare with softmax; may be repeated. Default: every mechanism with weights.",
            show_default=False,
        ),
    ] = None,
    keys: Annotated[int, typer.Option(help="Without --model: number of keys.")] = 512,
    dim: Annotated[int, typer.Option(help="Without --model: dimension of queries and keys.")] = 64,
    draws: Annotated[int, typer.Option(help="Without --model: simulated rows per check.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Of simulations and intervals.")] = 0,
    out: LabOut = None,
    as_json: Json = False,
) -> None:
    """How far attention can focus: closed forms of the sparsity S, and S, entropy and rank of the heads of a model."""
    if model is None and text is None:
        if mechanism:
            raise ValueInputError(
                f"--mechanism goes with --model, got {', '.join(mechanism)} without one; add --model smollm2-135m"
            )
        found = _synthetic(keys, dim, draws, seed)
        title = f"Focus on Gaussian keys ({keys} keys of dimension {dim})"
        present_lab(found, partial(_draw_synthetic, found), title=title, out=out, as_json=as_json)
        return
    lab = _in_model(model or "smollm2-135m", text, tokens, mechanism, seed)
    title = f"Focus in {lab.settings['model']} over {lab.settings['tokens']} tokens"
    present_lab(lab, partial(_draw_model, lab), title=title, out=out, as_json=as_json)
    if not as_json:
        _output.console().print(_mechanism_table(lab))


def _synthetic(keys: int, dim: int, draws: int, seed: int) -> FocusFindings:
    import numpy as np

    from softgap.cli._waiting import waiting
    from softgap.theory.focus.synthetic import focus_lab

    with waiting("checking", 100) as show:
        return focus_lab(
            n=keys,
            d=dim,
            draws=draws,
            rng=np.random.default_rng(seed),
            progress=lambda what, share: show(what, int(100 * share)),
        )


def _in_model(name: str, text: str | None, tokens: int, mechanisms: list[str] | None, seed: int) -> ModelFocus:
    import dataclasses

    import numpy as np

    from softgap.attention import resolve
    from softgap.cli._texts import given_text, plain_text
    from softgap.cli._waiting import waiting
    from softgap.probe import load_model
    from softgap.probe.capture import prompt_ids
    from softgap.theory.focus.model import focus_in_model
    from softgap.theory.passage import PASSAGE

    page = PASSAGE if text is None else plain_text(*given_text(text))
    for wanted in mechanisms or ():
        resolve(wanted)
    model, tokenizer = load_model(name)
    ids = prompt_ids(tokenizer, page, chat=False)[:tokens]
    with waiting("reading", 100) as show:
        lab = focus_in_model(
            model,
            ids,
            rng=np.random.default_rng(seed),
            mechanisms=mechanisms,
            progress=lambda what, share: show(what, int(100 * share)),
        )
    return dataclasses.replace(lab, settings={"model": name, "text": text, "seed": seed, **lab.settings})


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
    for found in lab.mechanisms:
        row = found.summary()
        cells = (
            "" if row[field] is None or row[field] != row[field] else f"{row[field]:.3g}" for field in columns.values()
        )
        table.add_row(found.name, *cells)
    return table


def _draw_synthetic(found: FocusFindings) -> Figure:
    from softgap.report.focus_figure import draw_focus

    return draw_focus(found)


def _draw_model(lab: ModelFocus) -> Figure:
    from softgap.report.focus_figure import draw_focus_in_model

    return draw_focus_in_model(lab)

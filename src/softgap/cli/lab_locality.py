"""`softgap lab locality`: what heads take from the keys near a query, and what local residuals close."""

from __future__ import annotations

from functools import partial
from pathlib import Path
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
    present_lab,
    run_lab,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory.locality.lab import Locality, ModelLocality

__all__ = ["locality_command"]


def locality_command(
    model: Model = None,
    text: LabText = None,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of tokens per text.")] = 256,
    texts: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of texts; with --model the largest one: --text is split.")
    ] = 8,
    width: Annotated[
        int, typer.Option(min=1, max=65536, help="Number of recent keys for single heads and residuals.")
    ] = 4,
    heads: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100_000,
            help="With --model: heads to mask one at a time, spread over the model; 0 for none (default 30). Without: "
            "planted heads of each kind (default 12).",
            show_default=False,
        ),
    ] = None,
    all_heads: Annotated[bool, typer.Option("--all-heads", help="With --model: mask every head of the model.")] = False,
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="With --model: linear mechanism to add residuals to; may be repeated. Default: elu1, relu, exp_dim, "
            "hedgehog, taylor2, inline, and fitted where there is a calibration.",
            show_default=False,
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train", help="Without --model: also train small models (takes minutes).")
    ] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(help="Tasks for --train: mixed, binding; may be repeated. Default: both.", show_default=False),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Training steps per model. Default: 400 and 800.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="With --train: models per arm.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for heads, random keys and bootstrap.")] = 0,
    out: LabOut = None,
    paper: PaperFigure = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Test how local attention is: mass near the query, masks of single heads, and what local residuals close."""
    check_out(out, paper)
    folder = None if out is None else Path(out).expanduser()
    name = choose_model(model, text)
    if name is None:
        sizes: dict[str, Any] = {
            "texts": texts,
            "length": tokens,
            "width": width,
            "heads": 12 if heads is None else heads,
        }
        trained: dict[str, Any] = {"train": train, "tasks": task, "seeds": seeds, "steps": steps}
        result = _synthetic(sizes, trained, seed, folder)
        draw = partial(_draw_synthetic, result)
        title = f"Locality in planted heads over {tokens} keys"
        arms = partial(_arms_table, result) if result.trained else None
        present_lab(result, draw, title=title, out=out, form=paper, as_json=as_json, full=full, table=arms)
        return
    masked = None if all_heads else 30 if heads is None else heads
    lab = _in_model(name, text, texts, tokens, mechanism, {"width": width, "heads": masked}, seed, folder)
    count = lab.settings["texts"]
    many = "1 text" if count == 1 else f"{count} texts"
    title = f"Locality in {name} over {many} of {lab.settings['tokens']} tokens"
    table = partial(_residual_table, lab)
    present_lab(
        lab, partial(_draw_model, lab), title=title, out=out, form=paper, as_json=as_json, full=full, table=table
    )


def _synthetic(sizes: dict[str, Any], trained: dict[str, Any], seed: int, folder: Path | None) -> Locality:
    from softgap.theory.locality.lab import locality_lab

    return run_lab(locality_lab, stage="planting heads", seed=seed, folder=folder, **sizes, **trained)


def _in_model(
    name: str,
    text: str | None,
    texts: int,
    tokens: int,
    mechanisms: list[str] | None,
    sizes: dict[str, Any],
    seed: int,
    folder: Path | None,
) -> ModelLocality:
    from softgap.theory.locality.lab import locality_in_model

    model_inputs = model_and_texts(name, text, texts, tokens, mechanisms)
    about = {"model": name, "text": text}
    settings: dict[str, Any] = {"mechanisms": mechanisms, "folder": folder, **sizes}
    return run_lab(locality_in_model, *model_inputs, stage="reading", seed=seed, about=about, **settings)


def _arms_table(lab: Locality) -> Table:
    table = Table(title="Accuracy of trained models, mean over seeds", title_justify="left")
    for heading in ("task", "arm", "recall (global)", "value before (local)"):
        table.add_column(heading, justify="right" if "(" in heading else "left")
    for ablation in lab.trained:
        for arm in ablation.arms:
            cells = [sum(ablation.scores(arm, part)) / len(ablation.scores(arm)) for part in ("recall", "before")]
            table.add_row(ablation.assignment.task, arm.label, *("" if x != x else f"{x:.3f}" for x in cells))
    return table


def _residual_table(lab: ModelLocality) -> Table:
    table = Table(title="Share of the gap to the mean of values that is closed", title_justify="left")
    kinds = list(dict.fromkeys(residual.kind for residual in lab.residuals))
    for heading in ("mechanism", *kinds):
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for name in dict.fromkeys(residual.mechanism for residual in lab.residuals):
        cells = []
        for kind in kinds:
            residual = lab.residual(name, kind)
            gap = None if residual is None else residual.gap_closed
            cells.append("" if gap is None else f"{gap.value:.2f} [{gap.low:.2f}, {gap.high:.2f}]")
        table.add_row(name, *cells)
    return table


def _draw_synthetic(lab: Locality) -> Figure:
    from softgap.report.locality_figure import draw_locality

    return draw_locality(lab)


def _draw_model(lab: ModelLocality) -> Figure:
    from softgap.report.locality_figure import draw_locality_in_model

    return draw_locality_in_model(lab)

"""`softgap lab separation`: two classes of sequences that softmax separates, and where it fails."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from softgap.cli.options import Json, PaperFigure, expand_option_groups
from softgap.cli.render.lab import Full, LabOut, check_out, present_lab, run_lab

if TYPE_CHECKING:
    from softgap.theory.separation.lab import Separation
    from softgap.theory.separation.training import Trained

__all__ = ["separation_command"]

_LARGEST = 2**24
_Cross = Annotated[bool, typer.Option("--cross", help="Take queries from one sequence, keys and values from another.")]
_Breaks = Annotated[
    bool,
    typer.Option(
        "--allow-breaks", help="Allow sizes outside the construction: n other than (d - 2) t, or b + c other than 1."
    ),
]
_Mechanisms = Annotated[
    list[str] | None,
    typer.Option(
        help="Mechanism to add to softmax and identity; may be repeated. Default: all in the network, softmax and "
        "identity in the map, softmax and elu1 in training.",
        show_default=False,
    ),
]
_Tasks = Annotated[
    list[str] | None,
    typer.Option(
        help="Tasks for --train: separation, separation_levels, separation_number, recall-<pairs>, "
        "counting-<length>, listops; may be repeated. Default: all.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class SequenceOptions:
    """Sizes and levels of the sequences of both classes, one field each."""

    n: Annotated[int | None, typer.Option(max=_LARGEST, help="Number of rows, (d - 2) t.", show_default=False)] = None
    d: Annotated[
        int | None,
        typer.Option(
            max=_LARGEST, help="Number of columns. Default: 514 if n is not given either.", show_default=False
        ),
    ] = None
    t: Annotated[
        int | None,
        typer.Option(max=_LARGEST, help="Number of stacked copies. Default: n / (d - 2), or 1.", show_default=False),
    ] = None
    m: Annotated[
        int | None,
        typer.Option(max=_LARGEST, help="Number of sign columns. Default: 4 log(n / 0.01).", show_default=False),
    ] = None
    a0: Annotated[float, typer.Option(help="Level of the marked row in class D0.")] = 0.05
    a1: Annotated[float, typer.Option(help="Level of the marked row in class D1.")] = 1.0
    b: Annotated[float, typer.Option(help="Level of the block columns.")] = 0.5
    c: Annotated[float | None, typer.Option(help="Level of the last column. Default: 1 - b.", show_default=False)] = (
        None
    )
    cross: _Cross = False


@dataclass(frozen=True)
class TrainingOptions:
    """Which small models are trained, and how long; one field each."""

    train: Annotated[bool, typer.Option("--train", help="Also train small models (takes minutes).")] = False
    task: _Tasks = None
    steps: Annotated[int, typer.Option(min=1, max=1_000_000, help="Training steps per model.")] = 600
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of models of each kind, trained with seeds 0, 1, ...")
    ] = 5


@expand_option_groups
def separation_command(
    *,
    sequences: SequenceOptions,
    allow_breaks: _Breaks = False,
    mechanism: _Mechanisms = None,
    axes: Annotated[
        str, typer.Option("--map", help="Two axes of the phase map, such as d,b or a1=0.5/0.7/1,n=512/8192/32768.")
    ] = "d,b",
    draws: Annotated[int, typer.Option(max=1_000_000, help="Number of draws of marked rows and signs.")] = 30,
    map_draws: Annotated[int, typer.Option(max=1_000_000, help="Number of draws per cell of the map and per n.")] = 20,
    training: TrainingOptions,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the draws.")] = 0,
    out: LabOut = None,
    paper: PaperFigure = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Test the separation of softmax from linear attention: all mechanisms, a phase map, growth in n, an ablation.

    With --train and --out, trained models are saved in cells/ of the folder and are not trained again.
    """
    from softgap.theory.separation.lab import separation_lab
    from softgap.theory.separation.phase_map import parse_axes

    check_out(out, paper)
    # The default map spans the source's own conditions; one that was asked for keeps the sizes that were.
    map_axes = None if axes == "d,b" else parse_axes(axes)
    settings: dict[str, Any] = {
        "mechanisms": mechanism,
        "mapped": ("softmax", "identity", *mechanism) if mechanism else None,
        "axes": map_axes,
        "draws": draws,
        "map_draws": map_draws,
        "allow_breaks": allow_breaks,
    }
    if training.train:
        _check_training(training.task, mechanism)
    result: Separation = run_lab(separation_lab, asdict(sequences), stage="separating", seed=seed, **settings)
    if training.train:
        result = replace(result, trained=_train(training, mechanism, out))

    def draw() -> Any:
        from softgap.report.lab_figures import draw_separation

        return draw_separation(result)

    present_lab(result, draw, title="Separation", out=out, form=paper, as_json=as_json, full=full)


def _check_training(tasks: list[str] | None, mechanisms: list[str] | None) -> None:
    """Refuse what cannot be trained before anything runs."""
    from softgap.theory.separation.small_models import task, trainable

    for name in mechanisms or ():
        trainable(name)
    for name in tasks or ():
        task(name)


def _train(options: TrainingOptions, mechanisms: list[str] | None, out: str | None) -> Trained:
    from softgap.progress import show_progress
    from softgap.theory.separation.training import Training, train_all

    with show_progress("training") as report:
        return train_all(
            options.task,
            mechanisms,
            seeds=options.seeds,
            training=Training(steps=options.steps),
            folder=None if out is None else Path(out).expanduser() / "cells",
            progress=report,
        )

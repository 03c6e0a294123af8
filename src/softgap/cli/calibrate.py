"""`softgap calibrate`: fit a linear attention to every head of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from softgap.cli.options import (
    WHOLE,
    Attn,
    Device,
    DryRun,
    Dtype,
    Engine,
    Json,
    PlacementOptions,
    RayAddress,
    check_new,
    check_ray_address,
    expand_option_groups,
    read_text_argument,
)
from softgap.cli.render import output
from softgap.cli.render.cost import present_cost
from softgap.cli.render.output import has_colour
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.calibration import Calibration, Ladders, Recipe
    from softgap.calibration.memory_ladder import MemoryEntry, MemoryLadder
    from softgap.intervals import Interval

__all__ = ["calibrate_command"]

_SOURCES = {"given": "the given text", "that comes with softgap": "the text that comes with softgap"}
_LEFT_OUT = (
    "A quick calibration does not measure the stability of the labels, other kinds of text, other memory sizes or the "
    "rank floor. 'softgap calibrate' measures them, fits in six times as many steps, and replaces it."
)


@expand_option_groups
def calibrate_command(
    model: Annotated[
        str | None, typer.Argument(help="Model to calibrate, as for --model of run.", show_default="smollm2-135m")
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="Text file to fit on; may be repeated. Default: text that the model generates.",
            show_default=False,
        ),
    ] = None,
    features: Annotated[int, typer.Option(help="Number of features per head.")] = 128,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Training steps per layer. This setting is reproducible; --minutes is not.",
            show_default="450, with --quick 75",
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Choose the number of steps so that the fit takes about this long.", show_default=False),
    ] = None,
    positions: Annotated[
        int | None, typer.Option(help="Longest context to fit.", show_default="the length of the text, up to 8192")
    ] = None,
    limit: Annotated[
        float,
        typer.Option(help="Share of the gap and of the energy that a substitute may leave and still suffice."),
    ] = 0.1,
    mix: Annotated[
        bool,
        typer.Option(
            "--mix/--no-mix",
            help="Also fit on text of many kinds that the model writes, and on text at random offsets.",
        ),
    ] = True,
    stability: Annotated[
        bool,
        typer.Option(
            "--stability/--no-stability",
            help="Measure how many heads keep their kind on other text and at other lengths.",
        ),
    ] = True,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Fit in about a minute, with fewer steps and little text, and measure only labels. Does nothing if "
            "the model already has a calibration.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the calibration.", show_default="in the cache, by the fingerprint of the model"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed for the fit and for generated text.")
    ] = 0,
    engine: Engine = "local",
    ray_address: RayAddress = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Fit the cheap substitutes of every head of a model, and say which of them suffices for each.

    `run` and `read` then measure the fitted linear attention as the mechanism `fitted`. The default takes about 12
    minutes for the embedded model on two cores, and --quick about one.
    """
    if quick and (minutes is not None or positions is not None):
        raise ValueInputError("--quick fixes the time and the positions; leave --minutes and --positions out")
    if steps is not None and minutes is not None:
        raise ValueInputError(
            f"give --steps or --minutes, not both, got {steps} and {minutes:g}; only --steps is reproducible"
        )
    if out is not None:
        check_new(out, overwrite)
    settings: dict[str, Any] = {"features": features, "seed": seed, **({} if steps is None else {"steps": steps})}
    texts = None if text is None else [read_text_argument(name)[1] for name in text]
    options = {"dtype": dtype, "device": device, "attn": attn, **placement.loading}
    if not mix:
        settings["rows"] = {"generated": 0.0, "moved": 0.0}
    check_ray_address(engine, ray_address)
    report: dict[str, Any] = {"minutes": minutes, "positions": positions, "limit": limit, "stability": stability}
    report |= {"quick": quick, "engine": engine, "address": ray_address}
    if dry_run:
        _show_cost(model, texts, settings, report, options, as_json=as_json)
        return
    calibration, path = _fit(model, texts, settings, report, out, options, overwrite=overwrite)
    if as_json:
        output.write_json({**calibration.metadata, **calibration.report(), "path": str(path)})
    else:
        _show(calibration, path)


def _show_cost(
    model: str | None,
    texts: list[str] | None,
    settings: dict[str, Any],
    report: dict[str, Any],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from softgap.costs import calibration_cost
    from softgap.models import load_model

    recipe = _recipe(settings, quick=report["quick"])
    about = {name: report[name] for name in ("minutes", "positions", "stability", "quick")}
    present_cost(
        lambda: load_model(model, **options),
        lambda loaded, probe: calibration_cost(*loaded, texts, probe, recipe=recipe, **about),
        as_json=as_json,
    )


def _recipe(settings: dict[str, Any], *, quick: bool) -> Recipe:
    from dataclasses import replace

    from softgap.calibration import Recipe, RowPlan
    from softgap.calibration.whole_model import QUICK

    rows = {"rows": RowPlan(**settings["rows"])} if "rows" in settings else {}
    return replace(QUICK if quick else Recipe(), **{**settings, **rows})


def _fit(
    model: str | None,
    texts: list[str] | None,
    settings: dict[str, Any],
    report: dict[str, Any],
    out: Path | None,
    options: dict[str, Any],
    *,
    overwrite: bool,
) -> tuple[Calibration, Path]:
    """A new calibration and its file; with --quick the one that the model has, if it has one."""
    from softgap.calibration import Calibration, calibrate
    from softgap.calibration.sufficiency import check_limit
    from softgap.models import load_model
    from softgap.models.fingerprint import model_fingerprint
    from softgap.models.loading import quiet_transformers
    from softgap.models.tensor_files import calibration_path, find_calibration
    from softgap.progress import show_progress

    recipe = _recipe(settings, quick=report["quick"])
    check_limit(report["limit"])
    loaded = load_model(model, **options)
    known = (
        find_calibration(model_fingerprint(loaded[0])) if report["quick"] and out is None and not overwrite else None
    )
    if known is not None:
        calibration = Calibration.load(known)
        word = "quick" if calibration.quick else "full"
        output.warn(f"this model has a {word} calibration, which stays as it is; --overwrite makes a new quick one")
        return calibration, known
    with quiet_transformers(downloads=False), show_progress("preparing the text") as progress:
        try:
            calibration = calibrate(
                *loaded,
                texts,
                recipe=recipe,
                **report,
                out=out,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                "interrupted; run the same command again to resume after the finished layers"
            ) from None
    return calibration, out or calibration_path(calibration.fingerprint, quick=calibration.quick)


def _show(calibration: Calibration, path: Path) -> None:
    import numpy as np

    from softgap.analysis.headline import held_out_sentence
    from softgap.cli.render.kinds import show_kinds
    from softgap.cli.render.output import heat_map
    from softgap.models.tensor_files import held_out_summary

    console = output.console()
    held_out = calibration.held_out
    source = _SOURCES.get(calibration.metadata["text"], "text that the model generated")
    steps, features = (calibration.metadata["recipe"][name] for name in ("steps", "features"))
    if calibration.metadata.get("generated_lengths"):
        source += " and on text of many kinds that the model generated"
    word = "Quick calibration: fitted" if calibration.quick else "Fitted"
    console.print(f"{word} {features} features to every head in {steps} steps, on {source}.", soft_wrap=True)
    console.print()
    if calibration.sufficiency is not None:
        show_kinds(console, calibration.sufficiency)
        console.print()
    console.print(held_out_sentence(held_out_summary(held_out.to_json())), width=min(console.width, 100))
    console.print()
    console.print(f"On {held_out.texts} held-out texts ({held_out.tokens:,} tokens), from position 64 on:")
    console.print(_table(calibration))
    if calibration.memory_ladder is not None:
        console.print(_memory_table(calibration.memory_ladder))
    if division := _division_sentence(calibration.metadata):
        console.print(division, width=min(console.width, 100))
    if calibration.quick:
        console.print(_LEFT_OUT, width=min(console.width, 100))
        console.print(f"Saved to {path}", soft_wrap=True)
        return
    console.print(_ladder_table(calibration.ladders))
    console.print(_capacity(calibration.ladders))
    values = np.array([[np.nan if x is None else 1 - x for x in row] for row in held_out.by_head])
    drawn, meaning = heat_map(values, tuple(range(len(values))), width=console.width, colour=has_colour(console))
    console.print(Text("Share of the gap that the fitted map leaves, by head (rows) and layer (columns)", "bold"))
    console.print(drawn)
    if meaning:
        console.print(meaning)
    console.print(f"Saved to {path}", soft_wrap=True)


def _table(calibration: Calibration) -> Table:
    from softgap.trajectories.validation import BASELINE

    held_out = calibration.held_out
    table = Table(show_header=True)
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_column("95 % interval over texts", justify="right")
    for name, closed in held_out.gap_closed.items():
        table.add_row(f"gap to the mean of values closed by {name}", *_cells(closed))
    for name, closed in held_out.against.items():
        if name != BASELINE:
            table.add_row(f"gap to {name} closed by fitted", *_cells(closed))
    for name, energy in {"fitted": held_out.explained, **held_out.explained_by}.items():
        table.add_row(f"energy explained by {name}, median head", f"{energy:.3f}", "")
    if held_out.rank_correlation is not None:
        table.add_row("rank correlation of gap closed and energy, over heads", f"{held_out.rank_correlation:.3f}", "")
    for name, closed in held_out.by_position.items():
        table.add_row(f"fitted, positions {name}", *_cells(closed))
    for name, closed in held_out.by_sink.items():
        table.add_row(f"fitted, heads with {name}", *_cells(closed))
    for name, closed in held_out.by_window.items():
        table.add_row(f"fitted, {name}", *_cells(closed))
    for name, closed in calibration.conditions.items():
        table.add_row(f"fitted, {name}", *_cells(closed))
    if calibration.memory_ladder is None:
        for name, closed in calibration.curve.items():
            table.add_row(f"{name} features, short fits in a few layers", *_cells(closed))
    return table


def _division_sentence(metadata: Mapping[str, Any]) -> str:
    """How window and hybrid divide their memory, and what else was tried; nothing where nothing was."""
    division = metadata.get("division") or {}
    if not division.get("by_sinks"):
        return ""

    def closing(choices: Mapping[str, float], words: str) -> str:
        order = sorted(choices, key=float)
        shares = ", ".join(f"{choices[choice]:.3f}" for choice in order)
        return f"with {', '.join(order)} {words} close {shares} of the gap"

    sentence = f"On text of the fit, in a few layers, windows {closing(division['by_sinks'], 'sinks')}"
    chosen = f"{division['sinks']} sink{'' if division['sinks'] == 1 else 's'}"
    if division["by_share"]:
        sentence += f", and hybrids {closing(division['by_share'], 'of their memory for features')}"
        chosen += f" and a share of {division['share']:g}"
    return f"{sentence}. The calibration takes {chosen}."


def _memory_table(ladder: MemoryLadder) -> Table:
    """Window, fitted map and hybrid by memory: what each keeps, and the share of the gap that it closes."""
    from softgap.calibration.memory_ladder import SUBSTITUTES

    layers = ", ".join(map(str, ladder.layers))
    title = f"Share of the gap closed at equal memory, short fits in layers {layers}, {ladder.texts} held-out texts"
    table = Table(title=title, title_justify="left")
    table.add_column("keys' worth per KV head", justify="right")
    for name in SUBSTITUTES:
        table.add_column(name)
    for rung in ladder.rungs:
        entries = (getattr(rung, name) for name in SUBSTITUTES)
        table.add_row(str(rung.keys), *(_memory_cell(entry) for entry in entries))
    return table


def _memory_cell(entry: MemoryEntry) -> str:
    counts = {"features": entry.features, "recent": entry.recent, "sinks": entry.sinks}
    kept = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    value, interval = _cells(entry.gap_closed)
    return f"{value} ({interval})\n{kept}"


def _cells(closed: Interval) -> tuple[str, str]:
    single_text = closed.low == closed.high
    return f"{closed.value:.3f}", "one text" if single_text else f"{closed.low:.3f} to {closed.high:.3f}"


def _ladder_table(ladders: Ladders) -> Table:
    table = Table(title=f"Distance from softmax over {ladders.tokens} held-out tokens", title_justify="left")
    for heading in ("mechanism", "features", "divergence", "weight error", "rank floor"):
        table.add_column(heading, justify="left" if heading == "mechanism" else "right")
    for rung in ladders.rungs:
        features, floor = (
            "" if value is None else form.format(value)
            for value, form in ((rung.features, "{}"), (rung.floor, "{:.3f}"))
        )
        table.add_row(rung.mechanism, features, f"{rung.divergence:.3f}", f"{rung.weight_error:.3f}", floor)
    return table


def _capacity(ladders: Ladders) -> str:
    """The rank of the off-diagonal blocks of softmax: one line per share of the energy, without the sink first."""
    lines = ["Rank of the off-diagonal blocks of softmax in the median head, and its growth with length:"]
    for growth in ladders.growth:
        ranks = ", ".join(f"{rank:.0f} of {size}" for size, rank in zip(ladders.sizes, growth.ranks, strict=True))
        line = f"  {'with' if growth.sink else 'without'} the sink, {growth.energy:.1%} of the energy: {ranks}"
        if growth.exponent is not None:
            low, middle, high = (round(x, 2) + 0.0 for x in growth.exponent)  # no -0.00
            line += f"; grows as length^{middle:.2f} (exponent {low:.2f} to {high:.2f} in 80 % of the heads)"
        lines.append(line)
    return "\n".join(lines)

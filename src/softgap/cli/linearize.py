"""`softgap linearize`: which heads of a model can go without softmax, as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.table import Table
from rich.text import Text

from softgap.cli import _output
from softgap.cli._new_file import check_new
from softgap.cli._options import Attn, Device, Dtype, Json
from softgap.cli._texts import given_text, plain_text
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.linearize import Plan
    from softgap.probe.layout import AttentionLayer

__all__ = ["linearize_command"]

_WORDS = {"loss": "loss, nats per token", "accuracy": "accuracy of the top token", "recall": "recall (lookups)"}


def linearize_command(
    model: Annotated[
        str | None, typer.Argument(help="The model, as for --model of run.", show_default="smollm2-135m")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="A text file to search on; may be repeated.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(help="Rise in loss that is allowed, in nats per token.")] = 0.1,
    out: Annotated[Path, typer.Option(help="File for the plan, as JSON.")] = Path("plan.json"),
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="What heads become, such as elu1 or fitted@FILE.",
            show_default="fitted where the model is calibrated, else elu1",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Keep softmax on so many of the nearest keys: a hybrid.", show_default=False)
    ] = None,
    by: Annotated[
        Literal["heads", "groups"], typer.Option(help="What goes one by one; memory is saved by whole KV groups only.")
    ] = "groups",
    score: Annotated[str, typer.Option(help="What ranks the heads.")] = "gradient+fisher",
    repair: Annotated[bool, typer.Option("--repair/--no-repair", help="Refit the output of swapped heads.")] = True,
    length: Annotated[int, typer.Option(help="Tokens of a passage.")] = 512,
    tokens: Annotated[int, typer.Option(help="Tokens to use of the text, about.")] = 16384,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw kept and freed heads, as .png or .svg.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the plan in --out.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of drawn labels and lookups.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Find the heads of a model that can go without softmax within a budget of loss, and write them down as a plan.

    softgap.linearize.load_plan reads the plan, softgap.linearize.apply runs the model under it.
    """
    if not text:
        raise ValueInputError("a search needs text, got none; give a file with --text")
    if out.suffix != ".json":
        raise ValueInputError(f"a plan must end in .json, got '{out.name}'; choose another name")
    check_new(out, overwrite)
    if picture is not None:
        _check_picture(picture)
    texts = [plain_text(*given_text(name)) for name in text]
    settings: dict[str, Any] = {
        "budget": budget, "by": by, "score": score, "repair": repair, "length": length, "tokens": tokens, "seed": seed,
    }  # fmt: skip
    plan, layers = _found(
        model, texts, mechanism, window, settings, out, {"dtype": dtype, "device": device, "attn": attn}
    )
    if picture is not None:
        _draw(plan, layers, picture)
    if as_json:
        import json

        _output.write_json(json.loads(out.read_text(encoding="utf-8")))
    else:
        _show(plan, layers, out)


def _check_picture(picture: Path) -> None:
    """Refuse a picture that could not be drawn or saved after the search."""
    from softgap.report.files import check_place
    from softgap.report.pictures import check_ending, require_matplotlib

    check_ending(picture)
    check_place(picture, "--picture")
    require_matplotlib()


def _found(
    model: str | None,
    texts: list[str],
    mechanism: str | None,
    window: int | None,
    settings: dict[str, Any],
    out: Path,
    options: dict[str, Any],
) -> tuple[Plan, tuple[AttentionLayer, ...]]:
    import shutil

    from softgap.linearize.search import check_search, find_plan
    from softgap.linearize.substitute import check_substitute, substitute
    from softgap.probe import load_model
    from softgap.probe.calibrations import calibrated
    from softgap.probe.layout import attention_layers
    from softgap.probe.progress import quiet_transformers, reporter

    check_search(settings["budget"], settings["score"], settings["length"], settings["tokens"])
    check_substitute(mechanism, window)
    loaded, tokenizer = load_model(model, **options)
    parts = out.with_name(f"{out.name}.parts")
    with quiet_transformers(downloads=False), reporter(True) as report:
        default = (*calibrated(loaded), "elu1")[0]
        chosen = substitute(default if mechanism is None else mechanism, loaded, window=window)
        try:
            plan = find_plan(loaded, tokenizer, texts, chosen, folder=parts, progress=report, **settings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; the same command goes on with what is done") from None
    plan.save(out)
    shutil.rmtree(parts, ignore_errors=True)
    layers = attention_layers(loaded)
    _document(plan, layers, out)
    return plan, layers


def _document(plan: Plan, layers: tuple[AttentionLayer, ...], out: Path) -> None:
    """What `softgap report` shows of the folder that the plan lies in."""
    from dataclasses import replace

    from softgap.report.document import save_document
    from softgap.report.plan_document import plan_document

    found = plan_document(plan, *_shape(layers))
    pictures = tuple(replace(picture, name=f"findings-{out.stem}.svg") for picture in found.pictures)
    save_document(replace(found, pictures=pictures), out.parent, out.stem)


def _draw(plan: Plan, layers: tuple[AttentionLayer, ...], picture: Path) -> None:
    from softgap.report.linearize_figure import draw_plan
    from softgap.report.pictures import save_figure

    save_figure(draw_plan(plan, *_shape(layers)), picture)


def _shape(layers: tuple[AttentionLayer, ...]) -> tuple[list[int], list[int], list[int]]:
    return [x.heads for x in layers], [x.kv_heads for x in layers], [x.number for x in layers]


def _show(plan: Plan, layers: tuple[AttentionLayer, ...], path: Path) -> None:
    console = _output.console()
    heads, groups = sum(x.heads for x in layers), sum(x.kv_heads for x in layers)
    console.print(
        f"{len(plan.heads)} of {heads} heads go without softmax ({plan.substitute.name}); {len(plan.groups)} of "
        f"{groups} KV groups are freed, {len(plan.layers)} layers whole."
    )
    table = Table(show_header=True)
    for name in ("on unseen text", "original", "change", "95 % over texts"):
        table.add_column(name, justify="left" if name == "on unseen text" else "right")
    for name, interval in plan.expected.items():
        spread = f"{interval.low:+.3f} to {interval.high:+.3f}"
        table.add_row(_WORDS[name], f"{plan.original[name]:.3f}", f"{interval.value:+.3f}", spread)
    console.print(table)
    saved = plan.memory["saved_per_token"] / plan.memory["per_token_original"]
    console.print(
        f"The KV cache takes {plan.memory['per_token']:,.0f} bytes per token instead of "
        f"{plan.memory['per_token_original']:,.0f} ({saved:.0%} less), and "
        f"{plan.memory['states'] / 1e6:.1f} MB of states."
    )
    console.print(
        Text("Heads (down) by layer (across): . softmax, o swapped, # swapped and its KV group freed", "bold")
    )
    for line in _grid(plan, layers):
        console.print(line)
    console.print(f"Saved to {path}", soft_wrap=True)


def _grid(plan: Plan, layers: tuple[AttentionLayer, ...]) -> list[str]:
    cells = np.full((max(x.heads for x in layers), len(layers)), " ")
    for column, layer in enumerate(layers):
        for head in range(layer.heads):
            freed = (layer.number, head // (layer.heads // layer.kv_heads)) in plan.groups
            cells[head, column] = "#" if freed else "o" if (layer.number, head) in plan.heads else "."
    return ["".join(row) for row in cells]

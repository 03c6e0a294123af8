"""``softgap linearize``: finds the heads of a model that can do without softmax, and saves them as a plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli.options import (
    Attn,
    Device,
    Dtype,
    Json,
    check_new,
    expand_option_groups,
    plain_text,
    read_text_argument,
)
from softgap.cli.render import output
from softgap.errors import StoreError, ValueInputError

if TYPE_CHECKING:
    from softgap.linearize import Plan
    from softgap.linearize.baselines import Baselines
    from softgap.probe.layout import AttentionLayer

__all__ = ["linearize_command"]


_WORDS = {
    "loss": "loss, nats per token",
    "accuracy": "accuracy of the top token",
    "recall": "recall (first token of each answer)",
    "whole_answers": "recall (whole answers)",
}


def show_plan(console: Console, plan: Plan, layers: Sequence[AttentionLayer], path: Path) -> None:
    """Print the number of swapped heads, their cost on unseen text, the memory saved, and a map of the heads."""
    heads, groups = sum(x.heads for x in layers), sum(x.kv_heads for x in layers)
    if plan.baselines is not None and plan.baselines.verdict():
        console.print(plan.baselines.verdict())
    console.print(
        f"The plan replaces softmax by {plan.substitute.name} in {len(plan.heads)} of {heads} heads. It frees "
        f"{len(plan.groups)} of {groups} KV groups and {len(plan.layers)} whole layers."
    )
    console.print(_costs(plan))
    if plan.recall:
        console.print(plan.recall_words())
    saved = plan.memory["saved_per_token"] / max(1.0, plan.memory["per_token_original"])
    console.print(
        f"The KV cache needs {plan.memory['per_token']:,.0f} bytes per token instead of "
        f"{plan.memory['per_token_original']:,.0f} ({saved:.0%} less). "
        f"The recurrent states need {plan.memory['states'] / 1e6:.1f} MB, and the plan itself "
        f"{plan.memory['parameters'] / 1e6:.1f} MB."
    )
    if plan.baselines is not None:
        _show_baselines(console, plan.baselines)
    console.print(Text("Heads (rows) by layer (columns): . softmax, o swapped, # swapped and KV group freed", "bold"))
    for line in _grid(plan, layers):
        console.print(line)
    console.print(f"Saved to {path}", soft_wrap=True)


def _costs(plan: Plan) -> Table:
    table = Table(show_header=True)
    for name in ("on unseen text", "original", "change", "95 % interval"):
        table.add_column(name, justify="left" if name == "on unseen text" else "right")
    for name, interval in plan.expected.items():
        spread = f"{interval.low:+.3f} to {interval.high:+.3f}"
        table.add_row(_WORDS[name], f"{plan.original[name]:.3f}", f"{interval.value:+.3f}", spread)
    return table


def _show_baselines(console: Console, baselines: Baselines) -> None:
    """Print what the same memory costs otherwise: one row per baseline, one column per length of text."""
    columns, rows = baselines.table()
    table = Table(show_header=True, title="Rise in loss of the plan and its baselines", title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in baselines.notes():
        console.print(note)


def _grid(plan: Plan, layers: Sequence[AttentionLayer]) -> list[str]:
    cells = np.full((max(x.heads for x in layers), len(layers)), " ")
    for column, layer in enumerate(layers):
        for head in range(layer.heads):
            freed = (layer.number, head // (layer.heads // layer.kv_heads)) in plan.groups
            cells[head, column] = "#" if freed else "o" if (layer.number, head) in plan.heads else "."
    return ["".join(row) for row in cells]


@dataclass(frozen=True)
class SearchOptions:
    """The options of the search itself, one field each."""

    by: Annotated[
        Literal["heads", "groups"], typer.Option(help="Unit of the search. Only whole KV groups save memory.")
    ] = "groups"
    score: Annotated[str, typer.Option(help="Score that ranks the heads.")] = "gradient+fisher"
    correct: Annotated[
        bool, typer.Option("--correct/--no-correct", help="Refit the output of swapped heads (output correction).")
    ] = True
    distil: Annotated[
        int,
        typer.Option("--distil", min=0, help="Training steps that distil the original model into the swapped heads."),
    ] = 0
    length: Annotated[int, typer.Option(help="Number of tokens per sequence.")] = 512
    tokens: Annotated[int, typer.Option(help="Approximate number of tokens of the text to use.")] = 16384
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="Also measure windows of equal memory, a constant and random heads, at up to 8,192 tokens.",
        ),
    ] = True


@expand_option_groups
def linearize_command(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model, as for --model of run.", show_default="smollm2-135m")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", help="Text file to search on; may be repeated.", show_default=False)
    ] = None,
    budget: Annotated[float, typer.Option(help="Largest rise in loss, in nats per token.")] = 0.1,
    recall_budget: Annotated[
        float | None,
        typer.Option(
            help="Largest drop in associative recall, 0 to 1, scored by the first token of each answer.",
            show_default="any",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="File for the plan (JSON).")] = Path("plan.json"),
    mechanism: Annotated[
        str | None,
        typer.Option(
            help="Substitute for the heads, such as elu1, fitted@FILE, window:w=60,sinks=4 or "
            "fitted+window:w=60,sinks=4,f=0.7.",
            show_default="fitted if the model is calibrated, else elu1",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Keep softmax on the N most recent keys: short for --mechanism MECHANISM+window:w=N,sinks=0.",
            show_default=False,
        ),
    ] = None,
    search: SearchOptions,
    picture: Annotated[
        Path | None, typer.Option(help="Also draw the swapped and freed heads, as .png or .svg.", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed for sampled labels and recall tasks.")
    ] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Find the heads of a model that can do without softmax within a budget, and save them as a plan.

    softgap.linearize.load_plan loads the plan; softgap.linearize.apply runs the model with it.
    """
    if not text:
        raise ValueInputError("a search needs text, got none; give a file with --text")
    _check_files(out, picture, overwrite=overwrite)
    texts = [plain_text(*read_text_argument(name)) for name in text]
    settings = {"budget": budget, "recall_budget": recall_budget, **asdict(search), "seed": seed}
    options = {"dtype": dtype, "device": device, "attn": attn}
    plan, layers = _search(model, texts, mechanism, window, settings, out, options)
    if picture is not None:
        _draw(plan, layers, picture)
    if as_json:
        output.write_json(json.loads(out.read_text(encoding="utf-8")))
    else:
        show_plan(output.console(), plan, layers, out)


def _check_files(out: Path, picture: Path | None, *, overwrite: bool) -> None:
    """Refuse files that could not be written, before the search starts."""
    if out.suffix != ".json":
        raise ValueInputError(f"the file of a plan must end in .json, got '{out.name}'; choose another name")
    check_new(out, overwrite)
    parameters = out.with_suffix(".safetensors")
    if parameters.exists() and not out.exists():
        raise StoreError(
            f"'{parameters}' already exists, and the plan would write its parameters there; choose another --out"
        )
    if picture is not None:
        from softgap.report.figures import check_ending, require_matplotlib
        from softgap.trajectories.folder import check_output_file

        check_ending(picture)
        check_output_file(picture, "--picture")
        require_matplotlib()


def _search(
    model: str | None,
    texts: list[str],
    mechanism: str | None,
    window: int | None,
    settings: dict[str, Any],
    out: Path,
    options: dict[str, Any],
) -> tuple[Plan, tuple[AttentionLayer, ...]]:
    from softgap.checkpoints import checkpoint_folder, remove_checkpoints
    from softgap.intervene.substitute import check_substitute, substitute
    from softgap.linearize.search import check_search, find_plan
    from softgap.models import load_model
    from softgap.models.loading import quiet_transformers
    from softgap.models.tensor_files import calibrated_mechanisms
    from softgap.probe.layout import attention_layers
    from softgap.progress import show_progress

    check_search(**{name: value for name, value in settings.items() if name not in ("by", "seed", "baselines")})
    check_substitute(mechanism, window)
    loaded, tokenizer = load_model(model, **options)
    parts = checkpoint_folder(out)
    with quiet_transformers(downloads=False), show_progress() as report:
        default = (*calibrated_mechanisms(loaded), "elu1")[0]
        head_substitute = substitute(default if mechanism is None else mechanism, loaded, window=window)
        try:
            plan = find_plan(loaded, tokenizer, texts, head_substitute, folder=parts, progress=report, **settings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run the same command again to resume") from None
    plan.save(out)
    remove_checkpoints(parts)
    layers = attention_layers(loaded)
    _document(plan, layers, out)
    return plan, layers


def _document(plan: Plan, layers: tuple[AttentionLayer, ...], out: Path) -> None:
    """Write the document that `softgap report` shows for the folder of the plan."""
    from softgap.report.documents import plan_document, save_document

    document = plan_document(plan, *_shape(layers))
    pictures = tuple(replace(picture, name=f"findings-{out.stem}.svg") for picture in document.pictures)
    save_document(replace(document, pictures=pictures), out.parent, out.stem)


def _draw(plan: Plan, layers: tuple[AttentionLayer, ...], picture: Path) -> None:
    from softgap.report.figures import draw_plan, save_figure

    save_figure(draw_plan(plan, *_shape(layers)), picture)


def _shape(layers: tuple[AttentionLayer, ...]) -> tuple[list[int], list[int], list[int]]:
    return [x.heads for x in layers], [x.kv_heads for x in layers], [x.number for x in layers]

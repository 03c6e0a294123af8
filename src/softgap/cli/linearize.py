"""``softgap linearize``: finds the heads of a model that can do without softmax, and saves them as a plan."""

from __future__ import annotations

import json
import re
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
    WHOLE,
    Attn,
    Device,
    DryRun,
    Dtype,
    Engine,
    Json,
    PaperFigure,
    PlacementOptions,
    RayAddress,
    check_new,
    check_paper_figure,
    check_ray_address,
    expand_option_groups,
    plain_text,
    read_text_argument,
)
from softgap.cli.render import output
from softgap.cli.render.cost import present_cost
from softgap.errors import StoreError, ValueInputError

if TYPE_CHECKING:
    from softgap.costs import Cost, Probe
    from softgap.linearize import Plan
    from softgap.linearize.baselines import Baselines
    from softgap.models.loading import Loaded, Model
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
    console.print(plan.sentence(heads, groups))
    console.print(_costs(plan))
    if plan.recall:
        console.print(plan.recall_words())
    if plan.provenance.get("recall_note"):
        console.print(plan.provenance["recall_note"])
    saved = plan.memory["saved_per_token"] / max(1.0, plan.memory["per_token_original"])
    console.print(
        f"The KV cache needs {plan.memory['per_token']:,.0f} bytes per token instead of "
        f"{plan.memory['per_token_original']:,.0f} ({saved:.0%} less). "
        f"The recurrent states need {plan.memory['states'] / 1e6:.1f} MB, and the plan itself "
        f"{plan.memory['parameters'] / 1e6:.1f} MB."
    )
    if plan.cache_words():
        console.print(plan.cache_words())
    if plan.baselines is not None:
        _show_baselines(console, plan.baselines)
    from softgap.kinds import LETTERS

    kinds = dict.fromkeys(plan.kinds().values())
    legend = "o swapped, # swapped and KV group freed"
    if len(kinds) > 1:
        legend = ", ".join(f"{LETTERS.get(kind, kind[0])} {kind}" for kind in kinds)
    console.print(Text(f"Heads (rows) by layer (columns): . softmax, {legend}", "bold"))
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
    from softgap.kinds import LETTERS

    cells = np.full((max(x.heads for x in layers), len(layers)), " ")
    kinds = plan.kinds()
    several = len(set(kinds.values())) > 1
    for column, layer in enumerate(layers):
        for head in range(layer.heads):
            kind = kinds.get((layer.number, head), "")
            freed = (layer.number, head // (layer.heads // layer.kv_heads)) in plan.groups
            letter = LETTERS.get(kind, kind[:1]) if several else "#" if freed else "o"
            cells[head, column] = letter if kind else "."
    return ["".join(row) for row in cells]


@dataclass(frozen=True)
class SearchOptions:
    """The options of the search itself, one field each."""

    by: Annotated[
        Literal["heads", "groups"], typer.Option(help="Unit of the search. Only whole KV groups save memory.")
    ] = "groups"
    context: Annotated[
        int | None,
        typer.Option(min=1, help="Context length at which bytes are counted.", show_default="8192"),
    ] = None
    score: Annotated[str, typer.Option(help="Score that ranks the heads, with one --mechanism.")] = "gradient+fisher"
    correct: Annotated[
        bool, typer.Option("--correct/--no-correct", help="Refit the output of swapped heads (output correction).")
    ] = True
    distil: Annotated[
        int,
        typer.Option("--distil", min=0, help="Training steps that distil the original model into the swapped heads."),
    ] = 0
    length: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens per sequence.", show_default="512, or up to 2048 to choose among several mechanisms"
        ),
    ] = None
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
    budget: Annotated[
        float | None,
        typer.Option(help="Largest rise in loss, in nats per token.", show_default="0.1 without --budget-bytes"),
    ] = None,
    budget_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="Largest KV cache of one sequence at --context tokens: bytes (96M) or a share of the model's (25%).",
            show_default=False,
        ),
    ] = None,
    recall_budget: Annotated[
        float | None,
        typer.Option(
            help="Largest drop in associative recall (0 to 1) that the 95 % interval may reach.",
            show_default="0.05 if the model itself recalls",
        ),
    ] = None,
    no_recall_budget: Annotated[bool, typer.Option("--no-recall-budget", help="Do not limit recall.")] = False,
    out: Annotated[Path, typer.Option(help="File for the plan (JSON).")] = Path("plan.json"),
    mechanism: Annotated[
        list[str] | None,
        typer.Option(
            help="Substitute for the heads, such as elu1, fitted@FILE, window:w=60,sinks=4 or "
            "fitted+window:w=60,sinks=4,f=0.7. If repeated, the search chooses one for each KV group.",
            show_default="constant, windows, and if the model is calibrated fitted and hybrids",
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            help="Keep softmax on the N most recent keys: short for --mechanism MECHANISM+window:w=N,sinks=0. The "
            "mechanism is fitted if the model is calibrated, else elu1.",
            show_default=False,
        ),
    ] = None,
    search: SearchOptions,
    picture: Annotated[
        Path | None,
        typer.Option(help="Also draw the swapped and freed heads, as .pdf, .png or .svg.", show_default=False),
    ] = None,
    paper: PaperFigure = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Random seed for sampled labels and recall tasks.")
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
    """Find the heads of a model that can do without softmax within a budget, and save them as a plan.

    The search chooses for each KV group whether it keeps softmax or becomes a constant, a window, a fitted map or a
    hybrid. It saves the most memory within --budget, or costs the least loss within --budget-bytes.

    softgap.linearize.load_plan loads the plan; softgap.linearize.apply runs the model with it.
    """
    if not text:
        raise ValueInputError("a search needs text, got none; give a file with --text")
    _check_files(out, picture, overwrite=overwrite)
    check_paper_figure(paper, out)
    texts = [plain_text(*read_text_argument(name)) for name in text]
    limit = _recall_limit(recall_budget, off=no_recall_budget)
    settings = {"budget": budget, "recall_budget": limit, **asdict(search), "seed": seed}
    size = None if budget_bytes is None else parse_bytes(budget_bytes)
    options = {"dtype": dtype, "device": device, "attn": attn, **placement.loading}
    several = _check_settings(mechanism or [], window, size, settings)
    check_ray_address(engine, ray_address)
    cluster = {"engine": engine, "address": ray_address}
    if dry_run:
        _show_cost(model, texts, mechanism or [], window, size, settings, options, several=several, as_json=as_json)
        return
    plan, layers = _search(
        model, texts, mechanism or [], window, size, {**settings, **cluster}, out, options, several=several
    )
    _draw(plan, layers, picture, out, paper)
    if as_json:
        output.write_json(json.loads(out.read_text(encoding="utf-8")))
    else:
        show_plan(output.console(), plan, layers, out)


def _recall_limit(recall_budget: float | None, *, off: bool) -> float | Literal["auto"] | None:
    """What ``find_plan`` takes as recall budget."""
    if off and recall_budget is not None:
        raise ValueInputError(
            f"--no-recall-budget does not limit recall, and --recall-budget {recall_budget:g} does; leave one out"
        )
    if off:
        return None
    return "auto" if recall_budget is None else recall_budget


def _check_files(out: Path, picture: Path | None, *, overwrite: bool) -> None:
    """Refuse files that could not be written, before the search starts."""
    if out.suffix != ".json":
        raise ValueInputError(f"the file of a plan must end in .json, got '{out.name}'; choose another name")
    check_new(out, overwrite)
    from softgap.checkpoints import checkpoint_folder

    parameters = out.with_suffix(".safetensors")
    # A search that was killed while it wrote its plan leaves the parameters, and its finished steps beside them.
    if parameters.exists() and not out.exists() and not checkpoint_folder(out).is_dir():
        raise StoreError(
            f"'{parameters}' already exists, and the plan would write its parameters there; choose another --out"
        )
    if picture is not None:
        from softgap.report.figures import check_ending, require_matplotlib
        from softgap.trajectories.folder import check_output_file

        check_ending(picture)
        check_output_file(picture, "--picture")
        require_matplotlib()


_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_UNITS |= {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}


def parse_bytes(text: str) -> tuple[float, bool]:
    """A number of bytes, or a share with True behind it."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%|[kmg]?i?b?)\s*", text, re.IGNORECASE)
    unit = match.group(2).lower() if match else ""
    if match is None or (unit not in _UNITS and unit not in ("%", "b")):
        raise ValueInputError(f"--budget-bytes takes bytes (96M, 1.5GiB) or a share (25%), got '{text}'")
    number = float(match.group(1))
    return (number / 100, True) if unit == "%" else (number * _UNITS.get(unit, 1.0), False)


def _check_settings(
    mechanisms: list[str], window: int | None, size: tuple[float, bool] | None, settings: dict[str, Any]
) -> bool:
    """Refuse what no search can be made with, without a model; whether the search chooses among several mechanisms."""
    from softgap.intervene.substitute import check_substitute
    from softgap.linearize.search import check_search

    if len(mechanisms) > 1 and window is not None:
        raise ValueInputError("--window needs one --mechanism to add it to; give MECHANISM+window:w=N for each instead")
    # A window without a mechanism is added to the fitted map, or to elu1 where there is none.
    several = len(mechanisms) != 1 and window is None
    limits = {name: value for name, value in settings.items() if name not in ("seed", "baselines")}
    check_search(**limits, budget_bytes=None if size is None else size[0], several=several)
    for name in (None, *mechanisms):
        check_substitute(name, window)
    return several


def _for_model(
    model: Model,
    mechanisms: list[str],
    window: int | None,
    size: tuple[float, bool] | None,
    settings: dict[str, Any],
    *,
    several: bool,
) -> tuple[Any, dict[str, Any]]:
    """The mechanisms of the search, and its settings with the byte budget in bytes."""
    from softgap.intervene.substitute import substitute
    from softgap.linearize.allocation import original_cache_bytes
    from softgap.models.tensor_files import calibrated_mechanisms

    if size is not None:
        nbytes = size[0] * (original_cache_bytes(model, settings["context"]) if size[1] else 1.0)
        settings = {**settings, "budget_bytes": nbytes}
    default = (*calibrated_mechanisms(model), "elu1")[:1]
    single = None if several else substitute((*mechanisms, *default)[0], model, window=window)
    return single or mechanisms or None, settings


def _show_cost(
    model: str | None,
    texts: list[str],
    mechanisms: list[str],
    window: int | None,
    size: tuple[float, bool] | None,
    settings: dict[str, Any],
    options: dict[str, Any],
    *,
    several: bool,
    as_json: bool,
) -> None:
    from softgap.costs import search_cost
    from softgap.models import load_model

    def estimate(loaded: Loaded, probe: Probe) -> Cost:
        options_of_search, own = _for_model(loaded[0], mechanisms, window, size, settings, several=several)
        return search_cost(*loaded, texts, options_of_search, probe, **own)

    present_cost(lambda: load_model(model, **options), estimate, as_json=as_json)


def _search(
    model: str | None,
    texts: list[str],
    mechanisms: list[str],
    window: int | None,
    size: tuple[float, bool] | None,
    settings: dict[str, Any],
    out: Path,
    options: dict[str, Any],
    *,
    several: bool,
) -> tuple[Plan, tuple[AttentionLayer, ...]]:
    from softgap.checkpoints import checkpoint_folder, last_step, one_writer
    from softgap.linearize.search import find_plan
    from softgap.models import load_model
    from softgap.models.loading import quiet_transformers
    from softgap.models.tensor_files import quick_calibration_note
    from softgap.probe.layout import attention_layers
    from softgap.progress import show_progress

    loaded, tokenizer = load_model(model, **options)
    if note := quick_calibration_note(loaded):
        output.warn(note)
    parts = checkpoint_folder(out)
    with one_writer(out), quiet_transformers(downloads=False), show_progress("preparing the search") as report:
        chosen, settings = _for_model(loaded, mechanisms, window, size, settings, several=several)
        try:
            plan = find_plan(loaded, tokenizer, texts, chosen, folder=parts, progress=report, **settings)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run the same command again to resume") from None
        layers = attention_layers(loaded)
        _document(plan, layers, out)
        with last_step(out):
            plan.save(out)  # while it is missing, the same command resumes
    return plan, layers


def _document(plan: Plan, layers: tuple[AttentionLayer, ...], out: Path) -> None:
    """Write the document that `softgap report` shows for the folder of the plan."""
    from softgap.report.documents import plan_document, save_document

    document = plan_document(plan, *_shape(layers))
    pictures = tuple(replace(picture, name=f"findings-{out.stem}.svg") for picture in document.pictures)
    save_document(replace(document, pictures=pictures), out.parent, out.stem)


def _draw(plan: Plan, layers: tuple[AttentionLayer, ...], picture: Path | None, out: Path, form: str | None) -> None:
    """Draw the plan into the file that was asked for, and for a paper beside the plan."""
    from softgap.report.figures import column_file, draw_plan, save_figure

    if picture is not None:
        save_figure(draw_plan(plan, *_shape(layers)), picture)
    if form is not None:
        column_file(draw_plan(plan, *_shape(layers), column=True), out, form)


def _shape(layers: tuple[AttentionLayer, ...]) -> tuple[list[int], list[int], list[int]]:
    return [x.heads for x in layers], [x.kv_heads for x in layers], [x.number for x in layers]

"""``softgap evaluate``: scores a model on tasks with known answers, and what a plan costs on them."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from softgap.cli.options import (
    WHOLE,
    Attn,
    Device,
    DryRun,
    Dtype,
    Json,
    PaperFigure,
    PlacementOptions,
    check_new,
    check_paper_figure,
    expand_option_groups,
    plain_text,
    read_text_argument,
)
from softgap.cli.render import output
from softgap.cli.render.cost import present_cost
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.evaluation import Evaluation, Row
    from softgap.intervals import Interval
    from softgap.linearize import Plan
    from softgap.models.loading import Model

__all__ = ["evaluate_command", "parse_counts"]


@expand_option_groups
def evaluate_command(
    *,
    model: Annotated[
        str | None, typer.Argument(help="Model, as for --model of run.", show_default="smollm2-135m")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="Plan of softgap linearize (JSON) to compare with the original model.", show_default=False),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="Another plan, in the place of the original model.", show_default=False),
    ] = None,
    tasks: Annotated[
        str,
        typer.Option(
            help="Tasks, separated by commas: loss, recall, needle, multi-key, multi-value, multi-query, variables, "
            "common-words, frequent-words, copying, induction, instructions; needles and all stand for several, "
            "own for your questions."
        ),
    ] = "loss,recall,needles",
    lengths: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens of the contexts, such as 512,1k,8k.", show_default="512,1k,2k"),
    ] = None,
    pairs: Annotated[str, typer.Option(help="Numbers of pairs in the lists of associative recall.")] = "12",
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text file for loss by position; may be repeated.", show_default="generated sentences"),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            help='Your own questions: a JSON lines file with {"prompt": ..., "answer": ...} on every line.',
            show_default=False,
        ),
    ] = None,
    generation: Annotated[
        bool, typer.Option("--generation/--no-generation", help="Also answer by generation, not by likelihood alone.")
    ] = True,
    contexts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of contexts per task and length.",
            show_default="200 for recall up to 2,048 tokens, else 64",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the result (JSON). An interrupted evaluation resumes.", show_default=False),
    ] = None,
    paper: PaperFigure = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed that contexts are drawn from.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Evaluate a model on tasks with known answers, and the cost of a plan on them.

    Tasks need no download: softgap generates them from --seed. Answers are scored by likelihood and by generation.
    With --plan, the change from the original model is paired by context. A folder of softgap export --format folder
    brings its plan. softgap.evaluate is the same in Python.
    """
    from softgap.tasks.long_context import read_questions

    if against is not None and plan is None:
        raise ValueInputError("--against needs a plan to compare, got none; give one with --plan")
    if out is not None:
        check_new(out, overwrite)
    check_paper_figure(paper, out)
    settings: dict[str, Any] = {
        "tasks": [name.strip() for name in tasks.split(",")],
        "lengths": None if lengths is None else parse_counts(lengths, "--lengths"),
        "pairs": parse_counts(pairs, "--pairs"),
        "texts": [plain_text(*read_text_argument(name)) for name in text or ()],
        "questions": () if questions is None else read_questions(str(questions)),
        "generation": generation,
        "contexts": contexts,
        "seed": seed,
    }
    options = {"dtype": dtype, "device": device, "attn": attn, **placement.loading}
    if dry_run:
        _show_cost(model, (plan, against), settings, options, as_json=as_json)
        return
    found = _evaluate(model, (plan, against), settings, out, options)
    if paper is not None and out is not None:
        _draw(found, out, paper)
    if as_json:
        output.write_json(found.to_json())
    else:
        show_evaluation(output.console(), found, out)


def _draw(found: Evaluation, out: Path, form: str) -> None:
    from softgap.report.evaluation_page import draw_evaluation
    from softgap.report.figures import column_file

    figure = draw_evaluation(found)
    if figure is None:
        output.warn("this evaluation has no scores by distance or position to draw, so --format wrote no figure")
        return
    column_file(figure, out, form)


def parse_counts(text: str, option: str) -> list[int]:
    """Whole numbers between commas; k stands for 1,024.

    >>> parse_counts("512,1k,8k", "--lengths")
    [512, 1024, 8192]
    """
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(k?)\s*", part, re.IGNORECASE)
        if match is None or not int(match.group(1)):
            raise ValueInputError(f"{option} takes whole numbers between commas, such as 512,1k, got '{text}'")
        counts.append(int(match.group(1)) * (1024 if match.group(2) else 1))
    return counts


def _plans(name: str | None, files: tuple[Path | None, Path | None]) -> list[tuple[Path, Plan] | None]:
    """The plans to evaluate under and against, with their files; a folder may bring the first."""
    from softgap.linearize import load_plan
    from softgap.linearize.attached import plan_in

    if files == (None, None) and (own := plan_in(name)) is not None:
        files = (own, None)
    return [None if file is None else (file, load_plan(file)) for file in files]


def _changes(model: Model, plans: Sequence[tuple[Path, Plan] | None]) -> dict[str, Any]:
    """What ``softgap.evaluate`` is told about the plans."""
    from softgap.linearize import apply

    change: dict[str, Any] = {"window": max((largest_window(entry[1]) for entry in plans if entry), default=0)}
    for entry, (under, label) in zip(plans, (("under", "label"), ("against", "against_label")), strict=True):
        if entry is not None:
            file, plan = entry
            plan.check(model)
            change[under] = functools.partial(apply, model, plan)
            change[label] = f"{file.name} ({_digest(file)})"
    return change


def _show_cost(
    name: str | None,
    files: tuple[Path | None, Path | None],
    settings: dict[str, Any],
    options: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from softgap.costs import evaluation_cost
    from softgap.models import load_model

    plans = _plans(name, files)
    present_cost(
        lambda: load_model(name, **options),
        lambda loaded, probe: evaluation_cost(
            loaded[0], loaded[1], probe=probe, **settings, **_changes(loaded[0], plans)
        ),
        as_json=as_json,
    )


def _evaluate(
    name: str | None,
    files: tuple[Path | None, Path | None],
    settings: dict[str, Any],
    out: Path | None,
    options: dict[str, Any],
) -> Evaluation:
    from softgap.checkpoints import checkpoint_folder, last_step, one_writer
    from softgap.evaluation import evaluate
    from softgap.models import load_model
    from softgap.models.loading import quiet_transformers
    from softgap.progress import show_progress

    plans = _plans(name, files)
    loaded, tokenizer = load_model(name, **options)
    change = _changes(loaded, plans)
    parts = None if out is None else checkpoint_folder(out)
    with nullcontext() if out is None else one_writer(out):
        with quiet_transformers(downloads=False), show_progress("preparing the tasks") as report:
            try:
                found = evaluate(loaded, tokenizer, **settings, **change, folder=parts, progress=report)
            except KeyboardInterrupt:
                hint = "run the same command again to resume" if out else "with --out an evaluation can resume"
                raise KeyboardInterrupt(f"interrupted; {hint}") from None
        if out is not None:
            with last_step(out):
                found.save(out)
    return found


def largest_window(plan: Plan) -> int:
    """Recent keys that a swapped head of the plan sees exactly, at most."""
    return max((part.window or 0 for _, part in plan.substitute.swaps(plan.heads)), default=0)


def _digest(plan_file: Path) -> str:
    """A hash of the plan and of its parameters."""
    digest = hashlib.sha256(plan_file.read_bytes())
    parameters = plan_file.with_suffix(".safetensors")
    if parameters.exists():
        digest.update(parameters.read_bytes())
    return digest.hexdigest()[:12]


def show_evaluation(console: Console, found: Evaluation, out: Path | None) -> None:
    """Print all distances together, then the first tokens of answers by distance and loss by position, and notes."""
    changed = bool(found.label)
    console.print(found.sentence())
    every = [row for row in found.rows if row.distance is None]
    base = found.against or "original"
    above = f" above the window of {found.window} keys" if found.window else ""
    _table(console, every, f"All distances{above}", base)
    by_distance = [row for row in found.rows if row.distance is not None and row.metric in ("first", "loss")]
    if by_distance:
        _table(console, by_distance, "By distance of the answer (first token), and loss by position", base, spans=True)
    console.print(
        "Floor: a guess that knows the candidates. Intervals (95 %) are over contexts"
        + ("; the change is paired by context." if changed else ".")
    )
    for note in found.notes:
        console.print(f"Note: {note}")
    if out is not None:
        console.print(f"Saved to {out}", soft_wrap=True)


def _table(console: Console, rows: Iterable[Row], title: str, base: str, *, spans: bool = False) -> None:
    from softgap.evaluation import METRICS

    listed = list(rows)
    changed = any(row.change is not None for row in listed)
    table = Table(title=title, title_justify="left")
    headings = ["task", "tokens", "distance or position" if spans else "metric", "floor", base]
    headings += [*(["change", "margin"] if changed else []), "contexts", "verdict" if changed else "measurable"]
    for heading in headings:
        left = heading in ("task", "metric", "verdict", "measurable")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading == "verdict")
    for row in listed:
        span = "" if row.distance is None else f"{row.distance[0]:,} to {row.distance[1] - 1:,}"
        cells = [f"{row.task}, {row.setting}" if row.setting else row.task, f"{row.length:,}"]
        cells += [span + (" (in window)" if row.long_range is False else "") if spans else METRICS[row.metric]]
        cells += ["" if math.isnan(row.floor) else f"{row.floor:.3f}", _shown(row.original)]
        cells += [*([_shown(row.change, "+"), f"{row.margin:g}"] if changed else []), str(row.contexts)]
        table.add_row(*cells, row.verdict if changed else "yes" if row.measurable else row.verdict)
    console.print(table)


def _shown(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return ""
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"

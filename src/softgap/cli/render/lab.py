"""The outcome of a lab: a verdict for each claim, its figure, and both on disk with --out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from softgap.cli.options import check_paper_figure
from softgap.cli.render import output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.theory import Claim

__all__ = [
    "Full",
    "LabOut",
    "LabResult",
    "LabText",
    "LabTokens",
    "check_out",
    "choose_model",
    "model_and_text",
    "model_and_texts",
    "number",
    "present_lab",
    "run_lab",
]

_STYLES = {"holds": "green", "holds only when": "yellow", "does not hold": "red", "not decided": "dim"}

Full = Annotated[bool, typer.Option("--full", help="Also show the numbers behind the verdicts, and all tables.")]
LabOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder for result.json and figure.svg. Default: save nothing.", show_default=False),
]
LabText = Annotated[
    str | None,
    typer.Option(
        "--text",
        help="Text file for the model, or - for standard input. Default: a built-in page. Without --model, the "
        "embedded model reads it.",
        show_default=False,
    ),
]
LabTokens = Annotated[int, typer.Option("--tokens", min=1, help="With --model: largest number of tokens to read.")]


class LabResult(Protocol):
    """What every lab returns."""

    @property
    def claims(self) -> Sequence[Claim]:
        """Its verdicts."""
        ...

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values, the settings included."""
        ...


Result = TypeVar("Result", bound=LabResult)


def run_lab(
    lab: Callable[..., Result],
    *inputs: Any,
    stage: str,
    seed: int,
    about: dict[str, Any] | None = None,
    **settings: Any,
) -> Result:
    """Run a lab from its seed under a progress bar; its settings then tell the seed, and what else is ``about`` it."""
    import numpy as np

    from softgap.progress import show_progress

    with show_progress(stage) as report:
        result: Any = lab(*inputs, rng=np.random.default_rng(seed), progress=report, **settings)
    return cast(Result, dataclasses.replace(result, settings={**(about or {}), **result.settings, "seed": seed}))


def choose_model(model: str | None, text: str | None) -> str | None:
    """The model that reads: the one asked for, the embedded one for a text without a model, or none."""
    return "smollm2-135m" if model is None and text is not None else model


def model_and_text(name: str, text: str | None, tokens: int, mechanisms: Sequence[str] | None) -> tuple[Any, list[int]]:
    """The model and the token ids that it reads; a wrong text or an unknown mechanism is said before it is loaded."""
    model, ids, _ = _model_and_ids(name, text, mechanisms)
    return model, ids[:tokens]


def model_and_texts(
    name: str, text: str | None, texts: int, tokens: int, mechanisms: Sequence[str] | None
) -> tuple[Any, list[list[int]]]:
    """The model and up to so many texts of equal length, evenly spread over what was given."""
    model, ids, first = _model_and_ids(name, text, mechanisms)
    # Where the tokenizer puts a first token in front of a text, every text gets it.
    front = ids[:1] if ids[0] == first and tokens > 1 else []
    body, size = ids[len(front) :], tokens - len(front)
    parts = [body[i : i + size] for i in range(0, len(body) - size + 1, size)] or [body]
    count = min(texts, len(parts))
    return model, [front + parts[i * len(parts) // count] for i in range(count)]


def _model_and_ids(name: str, text: str | None, mechanisms: Sequence[str] | None) -> tuple[Any, list[int], int | None]:
    """The model, the token ids of the whole text, and the model's BOS token."""
    from softgap.attention import resolve
    from softgap.cli.options import plain_text, read_text_argument
    from softgap.models import load_model
    from softgap.models.tensor_files import quick_calibration_note
    from softgap.probe.prompts import prompt_ids
    from softgap.probe.recording import prepare_mechanism
    from softgap.theory.lab import PASSAGE

    page = PASSAGE if text is None else plain_text(*read_text_argument(text))
    for mechanism in mechanisms or ():
        resolve(mechanism.partition("@")[0])
    model, tokenizer = load_model(name)
    if note := quick_calibration_note(model):
        output.warn(note)
    for mechanism in mechanisms or ():
        prepare_mechanism(mechanism, model)  # its parameters, if it needs any, are those of a calibration
    return model, prompt_ids(tokenizer, page, chat=False), getattr(tokenizer, "bos_token_id", None)


def check_out(out: str | None, form: str | None) -> None:
    """Refuse, before the lab runs, a folder that its result could not be saved in, and a figure without a folder."""
    check_paper_figure(form, out)
    if out is not None:
        from softgap.trajectories.folder import Folder

        Folder.at(out).try_writing("the result of a lab is")


def present_lab(
    result: LabResult,
    draw: Callable[[], Figure],
    *,
    title: str,
    out: str | None,
    form: str | None,
    as_json: bool,
    full: bool,
    table: Callable[[], Table] | None = None,
) -> None:
    """Print the verdicts, and with ``full`` their numbers and the table; or the result as JSON.

    Result and figure are saved where a folder was given, and for a paper in the format ``form``.
    """
    # Files first: a document on standard output means that all is done.
    if out is not None:
        _save(result, draw, Path(out).expanduser(), form)
    if as_json:
        output.write_json(result.to_json())
        return
    console = output.console()
    _show_verdicts(console, result.claims, title)
    if full:
        console.print(_numbers_table(result.claims))
        if table is not None:
            console.print(table())
    else:
        console.print(Text("--full shows the numbers behind the verdicts.", "dim"))
    if out is not None:
        console.print(f"saved {out}", soft_wrap=True)


def _show_verdicts(console: Console, claims: Sequence[Claim], title: str) -> None:
    """Every claim with its verdict, and nothing else."""
    console.print(Text(title, "bold"))
    console.print()
    width = min(console.width, 100)
    for claim in claims:
        console.print(Text(f"{claim.statement} [{claim.source}]"), width=width)
        verdict = Text(claim.verdict, _STYLES[claim.verdict])
        if claim.condition:
            verdict.append(f" {claim.condition}" if claim.verdict == "holds only when" else f" ({claim.condition})", "")
        console.print(Padding(verdict, (0, 0, 0, 4)), width=width)
    console.print()


def _numbers_table(claims: Sequence[Claim]) -> Table:
    table = Table(title="What the verdicts were read from", title_justify="left", show_lines=True)
    table.add_column("claim")
    table.add_column("numbers", overflow="fold")
    for claim in claims:
        table.add_row(claim.name, ", ".join(f"{name} {number(value)}" for name, value in claim.numbers.items()))
    return table


def number(value: float | None, form: str = ".4g") -> str:
    """A number of a lab, or a dash where there is none."""
    return "–" if value is None or value != value else f"{value:{form}}"


def _save(result: LabResult, draw: Callable[[], Figure], folder: Path, form: str | None) -> None:
    from softgap.report import save_figure, written_whole
    from softgap.report.figures import column_file

    with written_whole(folder / "result.json") as partial:
        partial.write_text(json.dumps(output.finite(result.to_json()), indent=2, allow_nan=False) + "\n")
    figure = save_figure(draw(), folder / "figure.svg")
    if form is not None:
        column_file(draw(), figure, form)

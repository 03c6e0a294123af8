"""Options that several commands share, and the checks of files and texts they name."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from softgap.cli.measurement import with_control
from softgap.errors import StoreError, ValueInputError
from softgap.tasks.text_files import check_text, decode_utf8, file_text

if TYPE_CHECKING:
    from softgap.study import StudySettings

__all__ = [
    "Attn",
    "Device",
    "DropSinks",
    "Dtype",
    "Focus",
    "Json",
    "Limit",
    "Measuring",
    "Mechanisms",
    "Model",
    "Out",
    "Overwrite",
    "StudyOut",
    "check_new",
    "given_prompt",
    "given_text",
    "grouped",
    "plain_text",
]


_MODEL_HELP = "smollm2-135m (the embedded default), a hub id org/name, a model folder or a .gguf file."


Model = Annotated[str | None, typer.Option(help=_MODEL_HELP, show_default=False)]


Mechanisms = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism",
        help="What to compare softmax with; may be repeated, the first one is shown. Default: elu1, and "
        "fitted where the model is calibrated. The control uniform is always measured too.",
        show_default=False,
    ),
]


Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="The model's dtype; auto is what its weights are stored in."),
]


Device = Annotated[str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps.")]


Attn = Annotated[
    Literal["sdpa", "eager"] | None,
    typer.Option(help="The model's attention implementation; its own default if left out.", show_default=False),
]


Focus = Annotated[
    bool, typer.Option("--focus", help="Also measure S(a), attention entropy and largest weight of every head.")
]


DropSinks = Annotated[int, typer.Option(min=0, help="Leave the first N tokens out of the visible set, on both sides.")]


Out = Annotated[
    str | None,
    typer.Option(help="New folder (or URI) for the study. Default: runs/<words>-<time>.", show_default=False),
]


Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the study in --out if it asked the same.")]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a summary.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command in which a parameter that is a dataclass of options stands for all of its fields.

    Typer reads parameters off a signature: this one names the fields in the place of their group, which is put together
    again when the command is called.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            hints = get_type_hints(parameter.annotation, include_extras=True)
            parameters.extend(_parameter(field, hints[field.name]) for field in fields(parameter.annotation))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return called


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


StudyOut = Annotated[
    str | None,
    typer.Option("--out", help="Folder (or URI) of the study; the same command goes on there.", show_default=False),
]


Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N prompts.", show_default=False)]


@dataclass(frozen=True)
class Measuring:
    """What both commands take beside their prompts; the fields are options."""

    model: Model = None
    mechanism: Mechanisms = None
    batch_size: Annotated[int, typer.Option(min=1, help="Samples that are computed together.")] = 8
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature, not greedily.", show_default=False)
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Give prompts as they are, without chat template.")] = False
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Threads of torch; they are recorded.", show_default=False)
    ] = None
    no_prompt_steps: Annotated[
        bool, typer.Option("--no-prompt-steps", help="Do not store the steps of the prompts.")
    ] = False
    engine: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local"
    ray_address: Annotated[
        str | None, typer.Option(help="Default: the running cluster, or a new one here.", show_default=False)
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check everything and estimate the cost.")] = False
    dtype: Dtype = "auto"
    device: Device = "cpu"
    attn: Attn = None
    focus: Focus = False
    drop_sinks: DropSinks = 0
    as_json: Json = False

    def settings(self, *, max_new_tokens: int, seed: int | None, scoring: str | None) -> StudySettings:
        """The settings of a study that the model answers at such length, seed and scoring."""
        from softgap.study import StudySettings

        return StudySettings(
            model=self.model,
            mechanisms=with_control(self.mechanism),
            max_new_tokens=max_new_tokens,
            batch_size=self.batch_size,
            chat=False if self.raw else None,
            seed=seed,
            temperature=self.temperature,
            scoring=scoring,
            focus=self.focus,
            drop_sinks=self.drop_sinks,
            keep_prompt=not self.no_prompt_steps,
            dtype=self.dtype,
            device=self.device,
            attn=self.attn,
            threads=self.threads,
        )


def check_new(path: Path, overwrite: bool) -> None:
    """Refuse a folder, a file that is there unless it may be replaced, and a place that cannot be written to."""
    from softgap.report.files import check_place

    check_place(path)
    if os.path.lexists(path) and not overwrite:
        raise StoreError(f"'{path}' is there already; choose another file, or replace it with --overwrite")


_STANDARD_INPUT = "standard input"


def given_prompt(prompt: str) -> str:
    """The prompt itself, or for ``-`` what standard input holds, without the line's end that a shell adds."""
    text = _standard_input().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
    return check_text(text, "the prompt")


def given_text(file: str) -> tuple[str, str]:
    """A file's name for messages and its text as it stands; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT, _standard_input()
    return f"'{file}'", file_text(file, ", or - for standard input")


def plain_text(name: str, text: str) -> str:
    """The text, if it is one."""
    return check_text(text, name)


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueInputError("standard input is closed, so that nothing can be read from it; give a file, or a pipe")
    return decode_utf8(sys.stdin.buffer.read(), _STANDARD_INPUT)

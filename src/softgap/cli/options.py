"""Options that several commands share, and the checks of files and texts they name."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from softgap.errors import StoreError, ValueInputError
from softgap.inputs import check_text, decode_utf8, file_text

if TYPE_CHECKING:
    from softgap.cluster import ClusterLimits
    from softgap.study import StudySettings

__all__ = [
    "WHOLE",
    "Anatomy",
    "Attn",
    "CommandWithAliases",
    "Device",
    "DropSinks",
    "DryRun",
    "Dtype",
    "Engine",
    "Focus",
    "Json",
    "Limit",
    "Map",
    "Mechanisms",
    "Model",
    "Out",
    "Overwrite",
    "PaperFigure",
    "PlacementOptions",
    "PlanFile",
    "RayAddress",
    "StudyOptions",
    "StudyOut",
    "check_new",
    "check_paper_figure",
    "check_ray_address",
    "default_out",
    "expand_option_groups",
    "plain_text",
    "read_prompt_argument",
    "read_text_argument",
    "with_baseline",
]


_MODEL_HELP = (
    "Model: smollm2-135m (embedded, the default), gemma-3-270m (optional; see softgap models), a hub id (org/name), "
    "a model folder or a .gguf file."
)


Model = Annotated[str | None, typer.Option(help=_MODEL_HELP, show_default=False)]


Mechanisms = Annotated[
    list[str] | None,
    typer.Option(
        "--mechanism",
        help="Mechanism to compare with softmax; may be repeated. The summary shows the first one. Default: elu1; if "
        "the model is calibrated, also fitted and the window that keeps as much. The baseline uniform is always "
        "measured.",
        show_default=False,
    ),
]


Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(help="Data type of the model; auto uses the type its weights are stored in."),
]


Device = Annotated[
    str,
    typer.Option(help="Device that runs the model: cpu, cuda, cuda:1 or mps. Tested on cpu only; mps was never run."),
]


Attn = Annotated[
    Literal["sdpa", "eager"] | None,
    typer.Option(help="Attention implementation of the model. Default: the model's own.", show_default=False),
]


Focus = Annotated[
    bool,
    typer.Option(
        "--focus", help="Also measure the sparsity S(a), the attention entropy and the largest weight of every head."
    ),
]


Anatomy = Annotated[
    str | None,
    typer.Option(
        "--anatomy",
        metavar="HEADS",
        help="Store the keys that these heads attend to, such as 18.8,3.2; the report then shows them.",
        show_default=False,
    ),
]
DropSinks = Annotated[int, typer.Option(min=0, help="Exclude the first N tokens from softmax and from the mechanisms.")]


Out = Annotated[
    str | None,
    typer.Option(help="Folder (or URI) to create for the study. Default: runs/<words>-<time>.", show_default=False),
]


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the study in --out if it has the same inputs and settings.")
]


PaperFigure = Annotated[
    Literal["pdf", "svg"] | None,
    typer.Option(
        "--format",
        help="Also save the figure for a paper, as NAME-column.pdf or .svg beside the other files: one column wide "
        "(3.35 inches), panels below each other, fonts embedded.",
        show_default=False,
    ),
]


PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="Plan of softgap linearize (JSON) to run the model under, or a folder of softgap export --format folder, "
        "which brings its model.",
        show_default=False,
    ),
]


Map = Annotated[
    Literal["kinds", "divergence", "both"],
    typer.Option(
        "--map",
        help="Map of the heads: kinds shows the cheapest substitute that suffices for each (by the calibration), "
        "divergence what was measured on this text. Without a calibration: divergence.",
    ),
]


DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Print the expected time, memory and disk from short timings of the model; do nothing else."
    ),
]


Engine = Annotated[Literal["local", "ray"], typer.Option(help="Run on this machine (local) or on a Ray cluster (ray).")]


RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Address of the Ray cluster. Default: the running cluster, or a new one on this machine.",
        show_default=False,
    ),
]


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a summary.")]


# Earlier spellings of options, accepted for one release; --help shows the present ones only.
_ALIASES = {
    "--plan": "--preregistration",
    "--repair": "--correct",
    "--no-repair": "--no-correct",
    "--tune": "--distil",
}


class CommandWithAliases(TyperCommand):
    """A command that also accepts the earlier spellings of its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, each earlier spelling replaced by the present one."""
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        end = args.index("--") if "--" in args else len(args)
        current = []
        for argument in args[:end]:
            name, sign, value = argument.partition("=")
            present = _ALIASES.get(name, name)
            current.append(f"{present}{sign}{value}" if present in known else argument)
        return super().parse_args(ctx, [*current, *args[end:]])


def expand_option_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose dataclass parameters become one option per field.

    Typer reads options from the signature. This wrapper lists the fields of each dataclass there, and builds the
    dataclass again when the command is called.
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
    def wrapper(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _parameter(field: Field[Any], annotation: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if field.default is MISSING else field.default
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


StudyOut = Annotated[
    str | None,
    typer.Option(
        "--out", help="Folder (or URI) of the study. Running the same command again resumes it.", show_default=False
    ),
]


Limit = Annotated[int | None, typer.Option("--limit", min=1, help="Use only the first N prompts.", show_default=False)]


@dataclass(frozen=True)
class PlacementOptions:
    """Where the weights of a model go, and how they are packed, one field each."""

    device_map: Annotated[
        str | None,
        typer.Option(
            "--device-map",
            help="Spread the weights instead of --device: auto (accelerators, then memory, then disk), or a JSON "
            'object of parts and places, as in {"model.layers.0": "disk", "": "cpu"}.',
            show_default=False,
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            "--max-memory",
            help="Most memory for weights on each device with --device-map auto, as in 0=10GiB,cpu=30GiB.",
            show_default=False,
        ),
    ] = None
    quantise: Annotated[
        Literal["int8"] | None,
        typer.Option(
            help="Quantise the weights of linear layers while loading (int8; extra quantised).", show_default=False
        ),
    ] = None

    @property
    def loading(self) -> dict[str, Any]:
        """What ``load_model`` is told about them; nothing, and no import, where none was given."""
        given = {"device_map": self.device_map, "max_memory": self.max_memory, "quantise": self.quantise}
        if self.device_map is not None or self.max_memory is not None:
            from softgap.models.placement import parse_device_map, parse_max_memory

            given["device_map"] = parse_device_map(self.device_map)  # type: ignore[assignment]
            given["max_memory"] = parse_max_memory(self.max_memory)  # type: ignore[assignment]
        return {name: value for name, value in given.items() if value is not None}


WHOLE = PlacementOptions()
"""Whole weights on one device."""


@dataclass(frozen=True)
class StudyOptions(PlacementOptions):
    """The options that `study run` and `study task` share, one field each."""

    model: Model = None
    mechanism: Mechanisms = None
    batch_size: Annotated[int, typer.Option(min=1, help="Number of samples per batch.")] = 8
    temperature: Annotated[
        float | None, typer.Option(help="Sample at this temperature instead of decoding greedily.", show_default=False)
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Pass prompts to the model without a chat template.")] = False
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Number of torch threads; stored with the study.", show_default=False),
    ] = None
    no_prompt_steps: Annotated[
        bool, typer.Option("--no-prompt-steps", help="Do not store the steps of the prompt tokens.")
    ] = False
    engine: Engine = "local"
    ray_address: RayAddress = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="Most workers of a Ray cluster at the same time.", show_default=False)
    ] = None
    worker_memory: Annotated[
        float | None,
        typer.Option(help="Most memory of a worker in GB. Default: an equal share of its machine.", show_default=False),
    ] = None
    dry_run: DryRun = False
    dtype: Dtype = "auto"
    device: Device = "cpu"
    attn: Attn = None
    focus: Focus = False
    drop_sinks: DropSinks = 0
    as_json: Json = False

    def limits(self) -> ClusterLimits:
        """What workers may take."""
        from softgap.cluster import ClusterLimits

        if self.engine != "ray" and (self.workers is not None or self.worker_memory is not None):
            raise ValueInputError("--workers and --worker-memory need --engine ray; add it, or leave them out")
        memory = self.worker_memory
        if memory is not None and not (math.isfinite(memory) and memory > 0):
            raise ValueInputError(f"--worker-memory must be a number of GB above 0, got {memory:g}")
        return ClusterLimits(self.workers, None if memory is None else int(memory * 1e9))

    def settings(self, *, max_new_tokens: int, seed: int | None, scoring: str | None) -> StudySettings:
        """The settings of the study that these options describe."""
        from softgap.study import StudySettings

        return StudySettings(
            model=self.model,
            mechanisms=with_baseline(self.mechanism),
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
            **self.loading,
        )


def check_paper_figure(form: str | None, out: object) -> None:
    """Refuse, before the work begins, a figure for a paper without a place or without matplotlib."""
    if form is None:
        return
    if out is None:
        raise ValueInputError(f"--format {form} saves the figure beside the file or folder of --out; give --out, too")
    from softgap.report.figures import require_matplotlib

    require_matplotlib()


def check_new(path: Path, overwrite: bool) -> None:
    """Refuse a folder, an existing file unless it may be replaced, and a place that cannot be written to."""
    from softgap.checkpoints import clear_finished
    from softgap.trajectories.folder import check_output_file

    check_output_file(path)
    clear_finished(path)
    if os.path.lexists(path) and not overwrite:
        raise StoreError(f"'{path}' already exists; choose another file, or replace it with --overwrite")


def check_ray_address(engine: str, address: str | None) -> None:
    """Refuse the address of a cluster that is not used."""
    if address is not None and engine != "ray":
        raise ValueInputError(f"--ray-address needs --engine ray, got '{address}' without it; add --engine ray")


def with_baseline(mechanisms: Sequence[str] | None) -> tuple[str, ...] | None:
    """The mechanisms a user named and the control, without which a divergence says little; None if none was named."""
    if not mechanisms:
        return None
    from softgap.trajectories.validation import BASELINE

    return tuple(mechanisms) if BASELINE in mechanisms else (*mechanisms, BASELINE)


def default_out(text: str) -> str:
    """A new folder under runs/, named by the first words of a text and the time."""
    from softgap.trajectories.folder import new_name, slug

    runs = Path("runs")
    return str(runs / new_name(runs, slug(text)))


_STANDARD_INPUT = "standard input"


def read_prompt_argument(prompt: str) -> str:
    """The prompt, or for ``-`` the text on standard input without its final newline."""
    text = _standard_input().removesuffix("\n").removesuffix("\r") if prompt == "-" else prompt
    return check_text(text, "the prompt")


def read_text_argument(file: str) -> tuple[str, str]:
    """The name of a file as messages show it, and its text; ``-`` is standard input."""
    if file == "-":
        return _STANDARD_INPUT, _standard_input()
    return f"'{file}'", file_text(file, ", or - for standard input")


def plain_text(name: str, text: str) -> str:
    """The text, if it is not empty."""
    return check_text(text, name)


def _standard_input() -> str:
    if sys.stdin is None:
        raise ValueInputError("standard input is closed; give a file or a pipe")
    return decode_utf8(sys.stdin.buffer.read(), _STANDARD_INPUT)

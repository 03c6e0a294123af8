"""Options that several commands share, so that the same word means the same thing everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = [
    "Attn",
    "Device",
    "DropSinks",
    "Dtype",
    "Focus",
    "Json",
    "Mechanisms",
    "Model",
    "Out",
    "Overwrite",
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

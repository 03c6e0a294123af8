"""``softgap export`` and ``softgap import``: hand plans to other tools, and read DuoAttention's pattern as a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softgap.cli.options import WHOLE, Attn, Device, Dtype, Json, PlacementOptions, check_new, expand_option_groups
from softgap.cli.render import output

__all__ = ["export_command", "import_command"]

_Model = Annotated[
    str | None,
    typer.Option("--model", help="The model that the plan is for, as for --model of run.", show_default="smollm2-135m"),
]


@expand_option_groups
def export_command(
    *,
    plan: Annotated[Path, typer.Argument(help="Plan of softgap linearize (JSON).")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the export.", show_default=False)],
    model: _Model = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            help="duo (DuoAttention's pattern), layers (a list of full layers) or folder (weights and plan).",
        ),
    ] = "duo",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export in --out.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Export a plan for other tools, and say what the format cannot hold.

    duo writes full_attention_heads.tsv and config.json, which DuoAttention and kvpress read. layers writes
    full_attention_layers.json for hybrids that choose whole layers. folder writes the model's weights with the plan
    beside them: transformers loads the original model from it, softgap.load_model the model under the plan. softgap
    evaluate compares the two; all other commands measure the original model.
    """
    from softgap.linearize import export_plan, load_plan
    from softgap.models import load_model

    found = load_plan(plan)
    loaded, tokenizer = load_model(model, dtype=dtype, device=device, attn=attn, **placement.loading)
    export = export_plan(loaded, found, out, format=format, tokenizer=tokenizer, overwrite=overwrite)  # type: ignore[arg-type]
    if as_json:
        output.write_json(export.to_json())
        return
    console = output.console()
    if export.lost:
        console.print(export.lost)
    console.print(f"Wrote {', '.join(export.files)} to {export.folder}", soft_wrap=True)


@expand_option_groups
def import_command(
    *,
    pattern: Annotated[Path, typer.Argument(help="Folder with full_attention_heads.tsv and config.json.")],
    out: Annotated[Path, typer.Option("--out", help="File for the plan (JSON).", show_default=False)],
    model: _Model = None,
    threshold: Annotated[float, typer.Option(help="KV heads with a smaller value stream.")] = 0.5,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace --out if it exists.")] = False,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    as_json: Json = False,
) -> None:
    """Read DuoAttention's pattern as a plan.

    Nothing is measured: run softgap evaluate --plan with the result.
    """
    from softgap.linearize import import_pattern
    from softgap.models import load_model

    check_new(out, overwrite)
    loaded, _ = load_model(model, dtype=dtype, device=device, attn=attn, **placement.loading)
    plan = import_pattern(loaded, pattern, threshold=threshold)
    plan.save(out)
    if as_json:
        output.write_json(
            {"out": str(out), "groups": [list(group) for group in plan.groups], "name": plan.substitute.name}
        )
        return
    console = output.console()
    console.print(f"{len(plan.groups)} KV groups become {plan.substitute.name}; what that costs was not measured.")
    console.print(f"Saved to {out}; softgap evaluate --plan {out} measures it.", soft_wrap=True)

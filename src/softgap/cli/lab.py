"""`softgap lab`: the claims of the sources, run; one command per lab."""

from __future__ import annotations

import typer

from softgap.cli.lab_focus import focus_command
from softgap.cli.lab_injectivity import injectivity_command
from softgap.cli.lab_position import position_command
from softgap.cli.lab_separation import separation_command

__all__ = ["lab"]

lab = typer.Typer(
    name="lab",
    add_completion=False,
    help="Run the claims of the theory: on synthetic data, and inside a real model with --model.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
lab.command("focus", epilog="Example: softgap lab focus --model smollm2-135m --out runs/focus")(focus_command)
lab.command("injectivity", epilog="Example: softgap lab injectivity --model smollm2-135m --out injectivity")(
    injectivity_command
)
lab.command("position", epilog="Example: softgap lab position --model smollm2-135m --mechanism elu1")(position_command)
lab.command("separation", epilog="Example: softgap lab separation --d 258 --map a1,n --out runs/separation")(
    separation_command
)

"""The application: the options before any command, and the list of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from softgap.cli import _output
from softgap.cli.analyze import analyze_command
from softgap.cli.calibrate import calibrate_command
from softgap.cli.doctor import doctor_command
from softgap.cli.lab import lab
from softgap.cli.linearize import linearize_command
from softgap.cli.mechanisms import mechanisms_command
from softgap.cli.models import models_command
from softgap.cli.read import read_command
from softgap.cli.report import report_command
from softgap.cli.run import run_command

__all__ = ["app"]

app = typer.Typer(
    name="softgap",
    add_completion=False,
    suggest_commands=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run", epilog='Example: softgap run "Tell me a story about a fox." --max-new-tokens 64')(run_command)
app.command("read", epilog="Example: softgap read letter.txt --mechanism taylor2 --out runs/letter")(read_command)
app.command("analyze", epilog="Example: softgap analyze runs/letter --transform diff --order 4")(analyze_command)
app.command("calibrate", epilog="Example: softgap calibrate --text book.txt --minutes 5")(calibrate_command)
app.command("linearize", epilog="Example: softgap linearize --text book.txt --budget 0.1 --out plan.json")(
    linearize_command
)
app.command("report", epilog="Example: softgap report runs/letter --out letter.html --open")(report_command)
app.command("doctor", epilog="Example: softgap doctor smollm2-135m --gate parity --gate oracle")(doctor_command)
app.command("models", epilog="Example: softgap models --json")(models_command)
app.command("mechanisms", epilog="Example: softgap mechanisms --measure")(mechanisms_command)
app.add_typer(lab)


def _show_version(wanted: bool) -> None:
    if wanted:
        from softgap import __version__

        _output.console().print(f"softgap {__version__}")
        raise typer.Exit


@app.callback(epilog='Example: softgap run "Tell me a story about a fox."')
def _softgap(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Measure the gap between softmax and linear attention, per head and per token."""

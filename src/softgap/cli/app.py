"""The application: the options before any command, and the list of commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from softgap.cli.analyze import analyze_command
from softgap.cli.calibrate import calibrate_command
from softgap.cli.compare import compare_command
from softgap.cli.doctor import doctor_command
from softgap.cli.evaluate import evaluate_command
from softgap.cli.exchange import export_command, import_command
from softgap.cli.lab_focus import focus_command
from softgap.cli.lab_injectivity import injectivity_command
from softgap.cli.lab_locality import locality_command
from softgap.cli.lab_position import position_command
from softgap.cli.lab_separation import separation_command
from softgap.cli.linearize import linearize_command
from softgap.cli.mechanisms import mechanisms_command
from softgap.cli.models import models_command
from softgap.cli.options import CommandWithAliases
from softgap.cli.read import read_command
from softgap.cli.render import output
from softgap.cli.report import report_command
from softgap.cli.run import run_command
from softgap.cli.serve import serve_command
from softgap.cli.study import study

__all__ = ["app"]


lab = typer.Typer(
    name="lab",
    add_completion=False,
    help="Test the claims of the theory on synthetic data, or in a real model with --model.",
    epilog="Example: softgap lab focus --model smollm2-135m",
    context_settings={"help_option_names": ["-h", "--help"]},
)


lab.command("focus", epilog="Example: softgap lab focus --model smollm2-135m --out runs/focus")(focus_command)


lab.command("injectivity", epilog="Example: softgap lab injectivity --model smollm2-135m --out injectivity")(
    injectivity_command
)


lab.command("locality", epilog="Example: softgap lab locality --model smollm2-135m --out runs/locality")(
    locality_command
)


lab.command("position", epilog="Example: softgap lab position --model smollm2-135m --mechanism elu1")(position_command)


lab.command("separation", epilog="Example: softgap lab separation --d 258 --map a1,n --out runs/separation")(
    separation_command
)


app = typer.Typer(
    name="softgap",
    rich_markup_mode="rich",
    suggest_commands=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# One line per command, in the order and under the headings of --help.
_COMMANDS: dict[str, tuple[tuple[str, Callable[..., Any], str], ...]] = {
    "Measure": (
        ("run", run_command, '"Tell me a story about a fox." --max-new-tokens 64'),
        ("read", read_command, "letter.txt --mechanism taylor2 --out runs/letter"),
        ("calibrate", calibrate_command, "--text book.txt --minutes 5"),
        ("doctor", doctor_command, "smollm2-135m --gate parity --gate oracle"),
    ),
    "Understand": (
        ("report", report_command, "runs/letter --out letter.html --open"),
        ("serve", serve_command, "--model smollm2-135m --open"),
        ("analyze", analyze_command, "runs/letter --transform diff --order 4"),
        ("compare", compare_command, "runs/recall --by label --stratum difficulty"),
    ),
    "Act": (
        ("linearize", linearize_command, "--text book.txt --budget 0.1 --out plan.json"),
        ("evaluate", evaluate_command, "smollm2-135m --plan plan.json --tasks recall,needles --lengths 512,1k"),
        ("export", export_command, "plan.json --format duo --out pattern"),
        ("import", import_command, "pattern --out plan.json"),
    ),
    "Look up": (
        ("models", models_command, "--json"),
        ("mechanisms", mechanisms_command, "--measure"),
    ),
}


for _panel, _listed in _COMMANDS.items():
    for _name, _function, _example in _listed:
        app.command(
            _name, cls=CommandWithAliases, rich_help_panel=_panel, epilog=f"Example: softgap {_name} {_example}"
        )(_function)


app.add_typer(study, rich_help_panel="Measure")


app.add_typer(lab, rich_help_panel="Understand")


def _show_version(requested: bool) -> None:
    if requested:
        from softgap import __version__

        output.console().print(f"softgap {__version__}")
        raise typer.Exit


@app.callback(epilog='Example: softgap run "Tell me a story about a fox."')
def _softgap(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Measure the gap between softmax and linear attention, per head and per token."""

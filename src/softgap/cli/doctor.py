"""`softgap doctor`: checks that the measurements of a model can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from softgap.cli.options import WHOLE, Attn, Device, Dtype, Json, PlacementOptions, expand_option_groups
from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.gates import Diagnosis

__all__ = ["doctor_command"]

_VERDICTS = {"fine": "green", "absent": "yellow", "wrong": "bold red"}
_STYLES = {"pass": "green", "fail": "bold red", "model": "yellow", "skip": "dim"}


@expand_option_groups
def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model to check, as for --model of run. Default: check the installation only.", show_default=False
        ),
    ] = None,
    gate: Annotated[
        list[str] | None, typer.Option("--gate", help="Run only this gate; may be repeated.", show_default=False)
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    placement: PlacementOptions = WHOLE,
    attn: Attn = None,
    as_json: Json = False,
) -> int:
    """Check the installation or, given a model, check that its measurements can be trusted.

    Each gate tests one property that must hold for the model. The exit code is 1 if a gate fails. With --gate and no
    model, the embedded model is checked.
    """
    if model is None and not gate:
        return _check_installation(as_json)
    diagnosis = _run_gates(model, gate, {"dtype": dtype, "device": device, "attn": attn, **placement.loading})
    if as_json:
        output.write_json(diagnosis.to_json())
    else:
        console = output.console()
        console.print(_table(diagnosis))
        console.print(_verdict(diagnosis))
    return 0 if diagnosis.passed else 1


def _check_installation(as_json: bool) -> int:
    from softgap import __version__
    from softgap.gates.diagnosis import installation

    parts = installation()
    fine = all(part.verdict != "wrong" for part in parts)
    if as_json:
        output.write_json({"softgap": __version__, "passed": fine, "parts": [part.to_json() for part in parts]})
        return 0 if fine else 1
    console = output.console()
    table = Table(title=f"softgap {__version__}", title_justify="left")
    for heading in ("part", "verdict", "found", "what to do"):
        table.add_column(heading, no_wrap=heading == "verdict", overflow="fold")
    for part in parts:
        table.add_row(part.name, Text(part.verdict, _VERDICTS[part.verdict]), part.detail, part.remedy)
    console.print(table)
    words = (
        "The installation is complete." if fine else "softgap cannot work with this installation: see the table above."
    )
    console.print(Text(words, "green" if fine else "bold red"))
    console.print("To check the measurements of a model, run: softgap doctor smollm2-135m")
    return 0 if fine else 1


def _run_gates(model: str | None, gates: list[str] | None, options: dict[str, Any]) -> Diagnosis:
    from softgap.errors import unknown_name
    from softgap.gates import doctor
    from softgap.gates.model import GATES
    from softgap.models import load_model
    from softgap.progress import show_progress

    for name in gates or ():
        if name not in GATES:
            raise unknown_name("gate", name, GATES)
    loaded = load_model(model, **options)
    names = list(gates or GATES)
    with show_progress("checking", items=len(names)) as report:
        return doctor(*loaded, gates=names, progress=report)


def _table(diagnosis: Diagnosis) -> Table:
    title = f"{diagnosis.model} ({diagnosis.dtype}, {diagnosis.backend})"
    table = Table(title=title, title_justify="left")
    table.add_column("gate", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for heading in ("measured", "threshold"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("measurement", overflow="fold")
    for gate in diagnosis.gates:
        numbers = ("" if number is None else f"{number:.3g}" for number in (gate.measured, gate.threshold))
        table.add_row(gate.name, Text(gate.verdict, _STYLES[gate.verdict]), *numbers, gate.detail)
    return table


def _verdict(diagnosis: Diagnosis) -> Text:
    if diagnosis.non_finite:
        return Text(f"The fault is the model's, not softgap's: {diagnosis.non_finite}.", "bold red")
    counts = {verdict: sum(gate.verdict == verdict for gate in diagnosis.gates) for verdict in _STYLES}
    outcome_words = {
        "pass": "passed",
        "fail": "failed",
        "model": "undecided (the model itself varies)",
        "skip": "skipped",
    }
    parts = [f"{count} {outcome_words[verdict]}" for verdict, count in counts.items() if count]
    return Text(f"{', '.join(parts)} of {len(diagnosis.gates)} gates", "green" if diagnosis.passed else "bold red")

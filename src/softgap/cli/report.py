"""`softgap report`: a study as one HTML file to look around in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.options import Json
from softgap.cli.render import output

if TYPE_CHECKING:
    from softgap.report import Report

__all__ = ["report_command"]

_Out = Annotated[
    str | None,
    typer.Option("--out", help="HTML file to write. Default: report.html in the study's folder.", show_default=False),
]
_Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        help="Sample to carry token by token; may be repeated. Default: as many as fit, of every label.",
        show_default=False,
    ),
]
_Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--heads",
        help="CSV file with layer, head and further quantities to show in the map; may be repeated.",
        show_default=False,
    ),
]
_Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="Calibration of the model, for the gap it closes in each head. Default: the study's own.",
        show_default=False,
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out even if it is not a report of softgap.")]


def report_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study, or folder of the result of a lab.")],
    out: _Out = None,
    sample: _Samples = None,
    heads: _Heads = None,
    calibration: _Calibration = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show the report in the browser.")] = False,
    overwrite: _Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a study as one self-contained HTML file: text, heads and time, linked, offline."""
    from softgap.cli.render.output import find_browser, show
    from softgap.progress import show_progress
    from softgap.report import write_explorer

    browser = find_browser() if open_it else None
    with show_progress("reading the study") as report:
        written = write_explorer(
            study,
            out,
            samples=sample or (),
            heads=heads or (),
            calibration=calibration,
            overwrite=overwrite,
            progress=report,
        )
    _present(written, study, as_json=as_json)
    if browser is not None:
        show(browser, written.path)


def _present(written: Report, study: str, *, as_json: bool) -> None:
    if as_json:
        place = {"study": study, "out": str(written.path), "bytes": written.size}
        output.write_json({**place, "samples": written.samples, "carried": written.carried})
        return
    console = output.console()
    carried = "" if written.carried == written.samples else f", {written.carried} of them token by token"
    many = {0: "findings", 1: "1 sample"}.get(written.samples, f"{written.samples:,} samples")
    console.print(f"a report on {many}{carried}; {written.size / 1e6:.1f} MB, opens in any browser:")
    # Last and alone on its line, so that a program can take it from there; never wrapped.
    console.print(str(written.path), soft_wrap=True)

"""`softgap report`: a study as one HTML file to look around in."""

from __future__ import annotations

from typing import Annotated

import typer

from softgap.cli import _output
from softgap.cli._options import Json

__all__ = ["report_command"]


def report_command(
    study: Annotated[str, typer.Argument(help="Folder (or URI) of a study, or folder of the result of a lab.")],
    out: Annotated[
        str | None,
        typer.Option(help="HTML file to write. Default: report.html in the study's folder.", show_default=False),
    ] = None,
    sample: Annotated[
        list[str] | None,
        typer.Option(
            help="Sample to carry token by token; may be repeated. Default: as many as fit, of every label.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            help="CSV file with layer, head and further quantities to show in the map; may be repeated.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Calibration of the model, for the gap it closes in each head. Default: the study's own.",
            show_default=False,
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show the report in the browser.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace --out even if it is not a report of softgap.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a study as one self-contained HTML file: text, heads and time, linked, offline."""
    from softgap.cli._browser import find_browser, show
    from softgap.cli._waiting import waiting
    from softgap.report import write_explorer

    browser = find_browser() if open_it else None
    with waiting("reading the study", 100) as tell:
        written = write_explorer(
            study,
            out,
            samples=sample or (),
            heads=heads or (),
            calibration=calibration,
            overwrite=overwrite,
            progress=lambda what, share: tell(what, int(100 * share)),
        )
    if as_json:
        _output.write_json(
            {
                "study": study,
                "out": str(written.path),
                "bytes": written.size,
                "samples": written.samples,
                "carried": written.carried,
            }
        )
    else:
        console = _output.console()
        carried = "" if written.carried == written.samples else f", {written.carried} of them token by token"
        many = {0: "findings", 1: "1 sample"}.get(written.samples, f"{written.samples:,} samples")
        console.print(f"a report on {many}{carried}; {written.size / 1e6:.1f} MB, opens in any browser:")
        # Last and alone on its line, so that a program can take it from there; never wrapped.
        console.print(str(written.path), soft_wrap=True)
    if browser is not None:
        show(browser, written.path)

"""`softgap report`: writes a study as one interactive HTML file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli.options import Json, PaperFigure, check_paper_figure
from softgap.cli.render import output
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from pathlib import Path

    from softgap.report import Report

__all__ = ["report_command"]

_Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="HTML file to write. Default: report.html in the study's folder, or beside the file.",
        show_default=False,
    ),
]
_Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--sample",
        help="Sample to include token by token; may be repeated. Default: as many of each label as fit.",
        show_default=False,
    ),
]
_Heads = Annotated[
    list[str] | None,
    typer.Option(
        "--heads",
        help="CSV file with the columns layer, head and further quantities to show in the map; may be repeated.",
        show_default=False,
    ),
]
_Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration",
        help="Calibration of the model, to show the gap closed in each head. Default: the one the study used.",
        show_default=False,
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace --out even if softgap did not write it.")]


def report_command(
    study: Annotated[
        str,
        typer.Argument(
            help="Folder (or URI) of a study, folder with the result of a lab, or file of softgap evaluate."
        ),
    ],
    other: Annotated[
        str | None,
        typer.Argument(
            metavar="[OTHER]",
            help="A second study: the page shows it minus the first, or both by depth if their models differ in shape.",
            show_default=False,
        ),
    ] = None,
    out: _Out = None,
    sample: _Samples = None,
    heads: _Heads = None,
    calibration: _Calibration = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open the report in the browser.")] = False,
    overwrite: _Overwrite = False,
    paper: PaperFigure = None,
    force: output.Force = False,
    as_json: Json = False,
) -> None:
    """Write a study as one self-contained HTML page with linked views of text, heads and time; it works offline.

    With a second study the page shows their difference: two runs, prompts or models, or a model with and without
    a plan. Models with different numbers of layers or heads are shown side by side, by relative depth.
    """
    from softgap.cli.render.output import find_browser, open_file
    from softgap.progress import show_progress
    from softgap.report import write_difference, write_explorer
    from softgap.report.explorer import write_kinds_figure

    if other is not None and (sample or heads or calibration is not None):
        raise ValueInputError("--sample, --heads and --calibration are for the report on one study; leave them out")
    if other is not None and paper is not None:
        raise ValueInputError("--format draws the kinds of heads of one study, got two; leave one out")
    check_paper_figure(paper, study)
    browser, drawn = find_browser() if open_it else None, None
    with output.overriding(force), show_progress("reading the study") as report:
        if other is not None:
            written = write_difference(study, other, out, overwrite=overwrite, progress=report)
        else:
            if paper is not None:
                drawn = write_kinds_figure(study, out, paper, calibration=calibration)
            written = write_explorer(
                study,
                out,
                samples=sample or (),
                heads=heads or (),
                calibration=calibration,
                overwrite=overwrite,
                progress=report,
            )
    _present(written, study, drawn, as_json=as_json)
    if browser is not None:
        open_file(browser, written.path)


def _present(written: Report, study: str, drawn: Path | None, *, as_json: bool) -> None:
    if as_json:
        place = {"study": study, "out": str(written.path), "bytes": written.size}
        if drawn is not None:
            place["figure"] = str(drawn)
        output.write_json({**place, "samples": written.samples, "carried": written.carried})
        return
    console = output.console()
    carried = "" if written.carried == written.samples else f" ({written.carried} of them token by token)"
    many = {0: "findings", 1: "1 sample"}.get(written.samples, f"{written.samples:,} samples")
    if drawn is not None:
        console.print(f"Map by kind, for a paper: {drawn}", soft_wrap=True)
    console.print(f"Report on {many}{carried}, {written.size / 1e6:.1f} MB. Open it in any browser:")
    # Last, alone on its line and never wrapped, so that a program can read it.
    console.print(str(written.path), soft_wrap=True)

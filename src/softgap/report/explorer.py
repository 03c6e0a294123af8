"""The explorer: a study as one self-contained HTML file, or in a notebook's frame."""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.checkpoints import written_whole
from softgap.errors import SoftgapError, StoreError, ValueInputError
from softgap.inputs import as_items
from softgap.progress import Progress
from softgap.report.columns import (
    Column,
    calibration_columns,
    calibration_kinds,
    read_columns,
    study_calibration,
)
from softgap.report.documents import (
    RESULT,
    Document,
    Table,
    comparison_document,
    lab_document,
    read_documents,
    read_lab,
)
from softgap.report.evaluation_page import evaluation_document, read_evaluation
from softgap.report.figures import column_file
from softgap.report.kinds import draw_kinds_of_study
from softgap.report.page import GENERATOR, render, render_documents
from softgap.report.payload import payload
from softgap.trajectories import Study, Trajectories, open_study
from softgap.trajectories.folder import check_output_file

if TYPE_CHECKING:
    from softgap.analysis import Findings
    from softgap.calibration.sufficiency import Sufficiency

__all__ = [
    "Report",
    "check_report_target",
    "explorer",
    "explorer_of",
    "notebook_html",
    "write_explorer",
    "write_kinds_figure",
    "write_page",
]


_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Report:
    """A report on disk.

    Attributes
    ----------
    path
        The HTML file.
    size
        Its bytes.
    samples, carried
        Samples of the study, and those whose text and trajectories are in the file.
    """

    path: Path
    size: int
    samples: int
    carried: int


def explorer(
    study: Study,
    *,
    samples: Sequence[str] = (),
    columns: Sequence[Column] = (),
    findings: Sequence[Document] = (),
    sufficiency: Sufficiency | None = None,
    progress: Progress | None = None,
) -> str:
    """The explorer of a study as HTML.

    Parameters
    ----------
    study
        A study from ``softgap.open_study``.
    samples
        Names of the samples to carry token by token; by default as many as the file holds.
    columns
        Further quantities of the heads; ``read_columns`` reads them from CSV files.
    findings
        Documents to show beside the study: comparisons, plans and labs.
    sufficiency
        The kinds of heads by a calibration, ``Calibration.sufficiency``; by default those that the study stores.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    str
        One self-contained page.

    Examples
    --------
    ``runs/fox`` is a folder that ``softgap run`` wrote:

    >>> import softgap
    >>> page = softgap.report.explorer(softgap.open_study("runs/fox"))
    >>> page[:15]
    '<!doctype html>'
    """
    return render(
        payload(study, samples=samples, columns=columns, findings=findings, sufficiency=sufficiency, progress=progress)
    )


def explorer_of(path: str | os.PathLike[str]) -> str:
    """The page of whatever lies at a path: a study with its findings, findings alone, a lab's result, an evaluation."""
    documents = _documents(path)
    if documents is not None:
        return render_documents(documents)
    study = open_study(path)
    columns, sufficiency = _calibrated(study, (), None)
    return explorer(study, columns=columns, findings=read_documents(Path(path)), sufficiency=sufficiency)


def write_explorer(
    study: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    samples: Sequence[str] = (),
    heads: Sequence[str | os.PathLike[str]] = (),
    calibration: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write the explorer of the study at a path or URI, or the page of a lab's result, an evaluation or other findings.

    Parameters
    ----------
    study
        A folder or URI, or the file of an evaluation.
    out
        The file; by default ``report.html`` in the study's folder, here for a study behind a URI, and beside the file
        of an evaluation, with its name. A report that is there is replaced.
    samples
        Names of the samples to carry token by token; by default as many as the file holds.
    heads
        CSV files with further quantities of the heads; see ``softgap.report.columns``.
    calibration
        File of the model's calibration, for the share of each head's gap that it closes; by default the one that the
        study was measured with, if it is at hand.
    overwrite
        Replace a file that is not a report, too.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Report
        The path and size of the file, and how many samples it carries.

    Raises
    ------
    StoreError
        If the study cannot be read, or the file not written. What was there stays then.

    Examples
    --------
    ``runs/fox`` is a folder that ``softgap run`` wrote:

    >>> import softgap
    >>> report = softgap.report.write_explorer("runs/fox", "fox.html")
    >>> report.path.name, report.samples
    ('fox.html', 1)
    """
    target = Path(out) if out is not None else _default_path(os.fspath(study))
    documents = _documents(study)
    if documents is not None:
        if samples or heads or calibration is not None:
            raise ValueInputError(
                f"samples, heads and calibration need a study, but '{os.fspath(study)}' holds only findings; "
                "leave them out"
            )
        check_report_target(target, overwrite)
        return Report(target, write_page(target, render_documents(documents)), 0, 0)
    opened = open_study(study)
    check_report_target(target, overwrite)
    columns, sufficiency = _calibrated(opened, as_items(heads), calibration)
    findings = read_documents(Path(study)) if "://" not in os.fspath(study) else []
    data = payload(
        opened, samples=samples, columns=columns, findings=findings, sufficiency=sufficiency, progress=progress
    )
    size = write_page(target, render(data))
    entries = data.document["samples"]
    return Report(target, size, len(entries), sum(entry["data"] is not None for entry in entries))


def _documents(path: str | os.PathLike[str]) -> list[Document] | None:
    """What a folder holds in place of a study, or an evaluation's file; None for a study, or what is not known."""
    folder = Path(path).expanduser()
    if folder.suffix == ".json" and folder.is_file():
        return [read_evaluation(folder)]
    if "://" in os.fspath(path) or (folder / "manifest.json").is_file():
        return None
    documents = read_documents(folder)
    if documents:
        return documents
    return [read_lab(folder)] if (folder / RESULT).is_file() else None


def write_kinds_figure(
    study: str | os.PathLike[str],
    out: str | os.PathLike[str] | None,
    form: str,
    *,
    calibration: str | os.PathLike[str] | None = None,
) -> Path:
    """Draw the map by kind of a study for a paper, as ``kinds-column.pdf`` or ``.svg`` beside its report."""
    if _documents(study) is not None:
        raise ValueInputError(
            f"--format draws the kinds of heads of a study, and '{os.fspath(study)}' holds findings; give --format to "
            "the command that makes them"
        )
    target = Path(out) if out is not None else _default_path(os.fspath(study))
    opened = open_study(study)
    _, sufficiency = _calibrated(opened, (), calibration)
    return column_file(draw_kinds_of_study(opened, sufficiency), target.with_name("kinds"), form)


def _calibrated(
    study: Study, heads: Sequence[str | os.PathLike[str]], calibration: str | os.PathLike[str] | None
) -> tuple[list[Column], Sufficiency | None]:
    """The quantities of heads from files and from the calibration, and the kinds of heads by the calibration."""
    path = study_calibration(study.manifest) if calibration is None else calibration
    from_files = [column for file in heads for column in read_columns(file)]
    first = next(iter(study), None)
    if path is None or first is None:
        return from_files, None
    columns = calibration_columns(path, first)
    # Where no head has a gap there is nothing to show; who named a file is told so.
    shown = columns if columns[0].values or calibration is not None else []
    return [*shown, *from_files], calibration_kinds(path)


def write_page(target: Path, page: str) -> int:
    """Write a page whole or not at all; its size in bytes."""
    content = page.encode()
    with written_whole(target) as partial:
        partial.write_bytes(content)
    return len(content)


def _default_path(study: str) -> Path:
    if "://" in study:
        return Path("report.html")
    path = Path(study).expanduser()
    return path.with_suffix(".html") if path.is_file() else path / "report.html"


def check_report_target(target: Path, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that is there and is no report."""
    check_output_file(target)
    if not target.exists() or overwrite:
        return
    try:
        with target.open("rb") as file:
            start = file.read(_HEAD_BYTES)
    except OSError as error:
        raise StoreError(f"cannot read '{target}': {error.strerror or error}; choose another file") from error
    if f'name="generator" content="{GENERATOR}'.encode() not in start:
        raise StoreError(
            f"'{target}' exists and is not a softgap report; choose another file, or add --overwrite to replace it"
        )


_HEIGHT = 760


_FIRST_HEADS = 20


def notebook_html(thing: object) -> str | None:
    """A sandboxed frame with the page of a result; None where none can be made, and the plain text is shown."""
    try:
        page = page_of(thing)
    except SoftgapError:
        return None
    title = html.escape(f"softgap: {type(thing).__name__}")
    return (
        f'<iframe title="{title}" sandbox="allow-scripts allow-downloads" width="100%" height="{_HEIGHT}" '
        f'style="border: 0" srcdoc="{html.escape(page)}"></iframe>'
    )


def page_of(thing: object) -> str:
    """The page of a run, of findings or of the result of a lab."""
    if isinstance(thing, Trajectories):
        with tempfile.TemporaryDirectory(prefix="softgap-") as folder:
            path = Path(folder) / "run"
            thing.save(path)
            return explorer(open_study(path))
    if isinstance(thing, Document):
        return render_documents([thing])
    from softgap.analysis import ComparisonFindings, Findings
    from softgap.evaluation import Evaluation

    if isinstance(thing, Evaluation):
        return render_documents([evaluation_document(thing)])
    if isinstance(thing, ComparisonFindings):
        return render_documents([comparison_document(thing)])
    return render_documents([findings_document(thing) if isinstance(thing, Findings) else lab_document(thing)])


def findings_document(findings: Findings) -> Document:
    """The dynamics of a study in words: which heads are not noise."""
    out = findings.standing_out()
    tested = f"{len(findings.eligible)} of {len(findings.heads)} heads have enough windows"
    verdict = (
        f"{len(out)} heads differ from white noise at a false discovery rate of {findings.alpha:g}; {tested}."
        if out
        else f"No head differs from white noise at a false discovery rate of {findings.alpha:g}; {tested}."
    )
    shown = sorted(findings.eligible, key=lambda head: head.z)[:_FIRST_HEADS]
    rows: tuple[tuple[Any, ...], ...] = tuple(
        (f"{head.layer}.{head.head}", head.entropy, head.z, head.q, head.complexity, head.nearest) for head in shown
    )
    columns = ("head", "permutation entropy", "z", "q", "complexity", "nearest known system")
    caption = f"The {len(rows)} heads furthest below noise"
    notes = tuple((name, str(value)) for name, value in {**findings.source, **findings.settings}.items() if value)
    title = f"Dynamics of {findings.samples} samples" if findings.samples != 1 else "Dynamics of one run"
    return Document(title, verdict, (Table(columns, rows, caption),) if rows else (), notes=notes)

"""What a result shows in a notebook: its page, in a frame that can neither read the notebook nor reach the network."""

from __future__ import annotations

import html
import tempfile
from pathlib import Path
from typing import Any

from softgap.analysis import ComparisonFindings, Findings
from softgap.errors import SoftgapError
from softgap.report.comparison_document import comparison_document
from softgap.report.document import Document, Table
from softgap.report.explorer import explorer
from softgap.report.labs import lab_document
from softgap.report.page import render_documents
from softgap.trajectories import Trajectories, open_study

__all__ = ["findings_document", "notebook_html", "page_of"]

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
    if isinstance(thing, ComparisonFindings):
        return render_documents([comparison_document(thing)])
    return render_documents([findings_document(thing) if isinstance(thing, Findings) else lab_document(thing)])


def findings_document(findings: Findings) -> Document:
    """The dynamics of a study in words: which heads are not noise."""
    out = findings.standing_out()
    tested = f"{len(findings.eligible)} of {len(findings.heads)} heads have windows enough"
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

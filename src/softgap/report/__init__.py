"""Findings as pictures, and a study as one self-contained HTML file."""

from softgap.checkpoints import written_whole
from softgap.report.columns import Column, read_columns
from softgap.report.documents import Document, Picture, Table, save_document
from softgap.report.explorer import Report, explorer, notebook_html, write_explorer
from softgap.report.figures import PICTURES, new_figure, require_matplotlib, save_figure
from softgap.report.pair import write_difference
from softgap.report.plane_figure import draw_plane, save_plane

__all__ = [
    "PICTURES",
    "Column",
    "Document",
    "Picture",
    "Report",
    "Table",
    "draw_plane",
    "explorer",
    "new_figure",
    "notebook_html",
    "read_columns",
    "require_matplotlib",
    "save_document",
    "save_figure",
    "save_plane",
    "write_difference",
    "write_explorer",
    "written_whole",
]

"""Findings as pictures."""

from softgap.report.files import written_whole
from softgap.report.pictures import PICTURES, new_figure, require_matplotlib, save_figure
from softgap.report.planes import draw_plane, save_plane

__all__ = [
    "PICTURES",
    "draw_plane",
    "new_figure",
    "require_matplotlib",
    "save_figure",
    "save_plane",
    "written_whole",
]

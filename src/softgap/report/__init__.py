"""Findings as pictures."""

from softgap.report.pictures import PICTURES, new_figure, save_figure
from softgap.report.planes import draw_plane, save_plane

__all__ = ["PICTURES", "draw_plane", "new_figure", "save_figure", "save_plane"]

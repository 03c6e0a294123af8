"""Names beside points, where they cover neither each other nor what is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["place_names"]

Points = Float[np.ndarray, "point 2"]
Boxes = Float[np.ndarray, "box 4"]

# Places that are tried, in points from the mark, nearest first; how wide and high a letter is for its size.
_DISTANCES = (7, 12, 18, 26, 36, 48, 62, 78, 96, 116, 138, 162)
_ANGLES = tuple(math.radians(sign * degrees) for degrees in range(0, 181, 15) for sign in (1, -1))
_LETTER = (0.62, 1.4)
# Half the width of a mark, in points.
_MARK = 3.0


def place_names(
    axes: Axes, names: Sequence[str], points: Points, others: Points, *, size: float = 7, colour: str = "black"
) -> None:
    """Write each name near its point, with a thin line to it, away from all points, ``others`` and earlier names.

    Limits and layout of the figure must be final.
    """
    figure = axes.get_figure(root=True)
    if figure is None or not names:
        return
    figure.draw_without_rendering()
    to_points = 72 / figure.dpi
    frame = np.asarray(axes.get_window_extent().extents) * to_points
    drawn = np.concatenate([points, others])
    marks = axes.transData.transform(drawn) * to_points
    taken = np.c_[marks - _MARK, marks + _MARK]
    line = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
    for name, point, at in zip(names, points, marks, strict=False):
        half = np.array([_LETTER[0] * len(name), _LETTER[1]]) * size / 2
        offset = _free_offset(at, half, frame, taken)
        taken = np.r_[taken, [[*(at + offset - half), *(at + offset + half)]]]
        axes.annotate(
            name,
            (float(point[0]), float(point[1])),
            (float(offset[0]), float(offset[1])),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=size,
            color=colour,
            arrowprops=line,
            zorder=4,
        )


def _free_offset(
    at: Float[np.ndarray, " 2"], half: Float[np.ndarray, " 2"], frame: Float[np.ndarray, " 4"], taken: Boxes
) -> Float[np.ndarray, " 2"]:
    """The nearest place inside the frame that covers nothing, else the one that covers least."""
    best, fewest = np.zeros(2), math.inf
    for distance in _DISTANCES:
        for angle in _ANGLES:
            offset = np.asarray(np.array([math.cos(angle), math.sin(angle)]) * (distance + half))
            low, high = at + offset - half, at + offset + half
            if (low < frame[:2] + 1).any() or (high > frame[2:] - 1).any():
                continue
            covered = int(((taken[:, :2] < high) & (taken[:, 2:] > low)).all(axis=1).sum())
            if covered == 0:
                return offset
            if covered < fewest:
                best, fewest = offset, covered
    return best

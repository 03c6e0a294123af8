"""The complexity-entropy plane as a picture: where the heads of a model lie among noise, maps and flows."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from softgap.errors import ValueInputError
from softgap.report.figures import COLUMN, SMALLEST_LETTER, dark_is_more, new_figure, one_column, save_figure
from softgap.signal import complexity_bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.analysis import Findings, HeadFinding, SystemPoint

__all__ = ["draw_plane", "save_plane"]


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
    boxes = np.c_[marks - _MARK, marks + _MARK]
    line = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
    for name, point, at in zip(names, points, marks, strict=False):
        half = np.array([_LETTER[0] * len(name), _LETTER[1]]) * size / 2
        offset = _free_offset(at, half, frame, boxes)
        boxes = np.r_[boxes, [[*(at + offset - half), *(at + offset + half)]]]
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
    at: Float[np.ndarray, " 2"], half: Float[np.ndarray, " 2"], frame: Float[np.ndarray, " 4"], boxes: Boxes
) -> Float[np.ndarray, " 2"]:
    """The nearest place inside the frame that covers nothing, else the one that covers least."""
    best, fewest = np.zeros(2), math.inf
    for distance in _DISTANCES:
        for angle in _ANGLES:
            offset = np.asarray(np.array([math.cos(angle), math.sin(angle)]) * (distance + half))
            low, high = at + offset - half, at + offset + half
            if (low < frame[:2] + 1).any() or (high > frame[2:] - 1).any():
                continue
            covered = int(((boxes[:, :2] < high) & (boxes[:, 2:] > low)).all(axis=1).sum())
            if covered == 0:
                return offset
            if covered < fewest:
                best, fewest = offset, covered
    return best


_MARKS = {"noise": "s", "periodic": "D", "map": "^", "flow": "v"}


_INK = "#444444"


def draw_plane(findings: Findings, *, column: bool = False) -> Figure:
    """The whole plane on the left, the part that the heads fill on the right; a head's colour is its layer.

    With ``column`` it is one column of a paper wide.
    """
    heads = findings.eligible
    if not heads:
        raise ValueInputError(
            f"no head has enough windows for the complexity-entropy plane; {findings.heads[0].reason}"
            if findings.heads
            else "a figure needs at least one head, got findings without heads"
        )
    figure = new_figure(11, 5.2)
    whole, near = figure.subplots(1, 2)
    order = int(findings.settings["order"])
    for axes in (whole, near):
        _draw_bounds(axes, order)
        points = _draw_heads(axes, heads)
        _draw_systems(axes, findings.systems)
        axes.set_xlabel("permutation entropy")
    whole.set_ylabel("statistical complexity")
    _zoom(near, findings)
    whole.legend(loc="upper left", fontsize="small", frameon=False)
    figure.colorbar(points, ax=near, label="layer")
    figure.suptitle(_title(findings))
    if column:
        one_column(figure)
    (left, right), (bottom, top) = near.get_xlim(), near.get_ylim()
    close = [s for s in findings.systems if left <= s.entropy <= right and bottom <= s.complexity <= top]
    # Last: where a name has room depends on everything else.
    _name_systems(whole, findings, [s for s in findings.systems if s not in close])
    _name_systems(near, findings, close)
    return figure


def save_plane(findings: Findings, path: str | os.PathLike[str]) -> Path:
    """Draw the plane and write it as PNG or SVG, by the ending of ``path``."""
    return save_figure(draw_plane(findings), path)


def _draw_bounds(axes: Axes, order: int) -> None:
    bounds = complexity_bounds(order)
    axes.plot(bounds.least_entropy, bounds.least_complexity, color=_INK, linewidth=1)
    axes.plot(bounds.greatest_entropy, bounds.greatest_complexity, color=_INK, linewidth=1, label="bounds")


def _draw_heads(axes: Axes, heads: tuple[HeadFinding, ...]) -> Any:
    return axes.scatter(
        [head.entropy for head in heads],
        [head.complexity for head in heads],
        c=[head.layer for head in heads],
        s=14,
        cmap=dark_is_more(),
        alpha=0.8,
        linewidths=0,
        label="heads",
        zorder=3,
    )


def _draw_systems(axes: Axes, systems: Sequence[SystemPoint]) -> None:
    for kind, mark in _MARKS.items():
        some = [system for system in systems if system.kind == kind]
        if some:
            entropy, complexity = [s.entropy for s in some], [s.complexity for s in some]
            axes.scatter(
                entropy,
                complexity,
                marker=mark,
                facecolors="none",
                edgecolors="#c2410c",
                s=28,
                zorder=4,
                label=f"known: {kind}",
            )


def _name_systems(axes: Axes, findings: Findings, named: Sequence[SystemPoint]) -> None:
    points = [(system.entropy, system.complexity) for system in named]
    others = [(head.entropy, head.complexity) for head in findings.eligible]
    others += [(system.entropy, system.complexity) for system in findings.systems]
    # The curves as points, dense enough that no name slips between them.
    entropy, bounds = np.linspace(*axes.get_xlim(), 200), complexity_bounds(int(findings.settings["order"]))
    others += zip(entropy, np.interp(entropy, bounds.least_entropy, bounds.least_complexity), strict=True)
    others += zip(entropy, np.interp(entropy, bounds.greatest_entropy, bounds.greatest_complexity), strict=True)
    size = 7 if axes.figure.get_figwidth() > COLUMN else SMALLEST_LETTER  # type: ignore[union-attr]
    place_names(axes, [system.name for system in named], _array(points), _array(others), size=size, colour="#9a3412")


def _array(points: Sequence[tuple[float, float]]) -> np.ndarray:
    return np.array(points, float).reshape(-1, 2)


def _zoom(axes: Axes, findings: Findings) -> None:
    entropy = np.array([head.entropy for head in findings.eligible] + [findings.noise_entropy])
    complexity = np.array([head.complexity for head in findings.eligible])
    width, height = max(0.02, float(np.ptp(entropy))), max(0.02, float(np.ptp(complexity)))
    axes.set_xlim(float(entropy.min()) - 0.15 * width, min(1.0, float(entropy.max()) + 0.15 * width))
    axes.set_ylim(max(0.0, float(complexity.min()) - 0.15 * height), float(complexity.max()) + 0.15 * height)
    axes.axvline(findings.noise_entropy, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_title("heads; dotted: white noise of the same length", fontsize="small")


def _title(findings: Findings) -> str:
    settings, source = findings.settings, findings.source
    model = f"{source['model']}: " if source.get("model") else ""
    samples = "1 sample" if findings.samples == 1 else f"{findings.samples:,} samples"
    return (
        f"{model}{settings['quantity']} from {settings['mechanism']}, transform {settings['transform']}, order "
        f"{settings['order']}, delay {settings['delay']}, segment {settings['segment']}; {samples}, "
        f"{findings.steps:,} steps"
    )

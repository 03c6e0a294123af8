"""The picture of the complexity-entropy plane: everything is drawn, and every name can be read."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from softgap.analysis import analyze
from softgap.report import draw_plane
from support.analysis_examples import noise, run_of


@pytest.mark.parametrize(("transform", "order"), [("raw", 4), ("diff", 3)])
def test_every_system_is_named_once_where_nothing_covers_it(transform: str, order: int) -> None:
    found = analyze(run_of(noise(1, 300, layers=6, heads=9)), transform=transform, order=order)
    figure = draw_plane(found)
    canvas: Any = FigureCanvasAgg(figure)  # matplotlib leaves it untyped
    canvas.draw()
    whole, near = figure.axes[:2]
    names = [text.get_text() for axes in (whole, near) for text in axes.texts]
    assert sorted(names) == sorted(system.name for system in found.systems)
    for axes in (whole, near):
        frame = axes.get_window_extent()
        # The words alone: the extent of an annotation has its line in it.
        boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in axes.texts]
        for box in boxes:
            assert frame.contains(box.x0, box.y0)
            assert frame.contains(box.x1, box.y1)
        for one, other in itertools.combinations(boxes, 2):
            assert not one.overlaps(other)

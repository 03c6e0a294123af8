"""Pictures of results: everything is drawn, and every name can be read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text

from softgap.analysis import analyze
from softgap.kinds import COLOURS, KINDS, LETTERS
from softgap.report import draw_plane
from softgap.report.figures import COLUMN, draw_kinds, save_figure
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


def test_each_head_has_the_colour_and_the_letter_of_its_kind() -> None:
    labels = [("window", "softmax", None), ("constant", "hybrid", "window"), ("window",)]
    figure = draw_kinds(labels, (3, 7, 11))
    axes = figure.axes[0]
    heads = {(column, head): kind for column, row in enumerate(labels) for head, kind in enumerate(row) if kind}
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        place: LETTERS[kind] for place, kind in heads.items()
    }
    cells: list[Any] = list(axes.patches)
    centres = {(round(p.get_x() + p.get_width() / 2), round(p.get_y() + p.get_height() / 2)): p for p in cells}
    assert {place: to_hex(patch.get_facecolor()) for place, patch in centres.items()} == {
        place: COLOURS[kind] for place, kind in heads.items()
    }
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["3", "7", "11"]
    counts = dict.fromkeys(KINDS, 0) | {"window": 3, "softmax": 1, "constant": 1, "hybrid": 1}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        f"{LETTERS[kind]}  {kind} {count}" for kind, count in counts.items()
    ]


def test_a_map_for_a_paper_is_one_column_wide_with_its_fonts_inside(tmp_path: Path) -> None:
    labels = [tuple(KINDS[(layer + head) % len(KINDS)] for head in range(9)) for layer in range(30)]
    figure = draw_kinds(labels, column=True)
    assert figure.get_size_inches()[0] == pytest.approx(COLUMN)
    assert figure.axes[0].get_title() == ""
    assert not figure.axes[0].texts
    first = save_figure(figure, tmp_path / "kinds.pdf").read_bytes()
    assert first.startswith(b"%PDF")
    assert b"/Subtype /Type0" in first or b"/FontFile2" in first
    assert b"/Subtype /Type3" not in first
    assert save_figure(draw_kinds(labels, column=True), tmp_path / "again.pdf").read_bytes() == first

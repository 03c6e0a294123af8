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
from softgap.report.figures import COLUMN, column_file, draw_kinds, new_figure, one_column, save_figure
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


def panels() -> Any:
    """Three panels beside each other, with everything that is too wide for a column."""
    figure = new_figure(13, 4.6)
    for number, axes in enumerate(figure.subplots(1, 3)):
        for line in range(4):
            axes.plot([0, 1], [line, number], label=f"a mechanism with a long name, {line}")
        axes.set_title("a title that is much too long for one column of a paper, however small its letters are")
        axes.set(xlabel="position", ylabel="divergence")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4)
    picture = axes.imshow([[0.0, 1.0]], aspect="auto")
    figure.colorbar(picture, ax=axes, label="layer")
    figure.suptitle("what the caption says")
    return figure


def test_a_figure_for_a_paper_has_its_panels_below_each_other_and_hides_nothing() -> None:
    figure = one_column(panels())
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.get_figwidth() == COLUMN
    assert figure.get_suptitle() == ""
    places = [axes.get_position() for axes in figure.axes[:3]]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(places))
    assert len({round(place.x0, 6) for place in places}) == 1
    assert all(5 <= float(text.get_fontsize()) <= 7 for text in figure.findobj(Text) if text.get_text())
    width, height = figure.get_size_inches() * figure.dpi
    panes: list[Any] = figure.axes[:3]
    for axes in panes:
        legend = axes.get_legend().get_window_extent()
        assert legend.y1 <= axes.xaxis.get_tightbbox().y0 + 1
        assert 0 <= legend.x0 < legend.x1 <= width
        assert legend.y0 >= 0
        title = axes.title.get_window_extent()
        assert 0 <= title.x0 < title.x1 <= width
        assert title.y1 <= height
    for upper, lower in itertools.pairwise(panes):
        assert upper.get_legend().get_window_extent().y0 >= lower.title.get_window_extent().y1


def test_a_narrow_figure_stays_as_it_is() -> None:
    figure = new_figure(COLUMN, 2)
    figure.suptitle("kept")
    assert one_column(figure).get_suptitle() == "kept"
    assert figure.get_size_inches().tolist() == [COLUMN, 2]


def test_a_figure_for_a_paper_brings_its_letters(tmp_path: Path) -> None:
    drawn = column_file(panels(), tmp_path / "figure.svg", "svg")
    assert drawn == tmp_path / "figure-column.svg"
    words = drawn.read_text()
    assert "<text" not in words
    assert 'width="241.2pt"' in words  # 3.35 inches
    content = column_file(panels(), tmp_path / "figure.svg", "pdf").read_bytes()
    assert b"/FontFile2" in content
    assert b"/Subtype /Type3" not in content
    assert not (tmp_path / "figure.svg").exists()

"""Figures of results (kinds of heads, comparisons, plans, frontiers), and the files of all figures."""

from __future__ import annotations

import io
import math
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.checkpoints import written_whole
from softgap.errors import UnsupportedError, ValueInputError
from softgap.kinds import COLOURS, KINDS, LETTERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    from softgap.analysis import ComparisonFindings
    from softgap.linearize.frontier import Frontier, Point
    from softgap.linearize.plan import Plan

__all__ = [
    "COLUMN",
    "PICTURES",
    "SMALLEST_LETTER",
    "check_ending",
    "column_file",
    "dark_is_more",
    "draw_comparison",
    "draw_frontier",
    "draw_kinds",
    "draw_plan",
    "figure_bytes",
    "new_figure",
    "one_column",
    "require_matplotlib",
    "save_figure",
]


PICTURES = (".pdf", ".png", ".svg")
COLUMN = 3.35
"""Inches of one column of a paper."""

# What `sequential` in assets/colours.js gives on a light page, in eight equal steps of lightness.
_SEQUENTIAL = ("#f6f4e0", "#d2dfc3", "#a8cbae", "#7bb6a3", "#4ca19f", "#158a9f", "#00719d", "#005594", "#303780")


def require_matplotlib() -> None:
    """Matplotlib is an extra: say so where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("a figure needs matplotlib; install it with: pip install 'softgap[plot]'") from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def dark_is_more() -> LinearSegmentedColormap:
    """The colours of the pages' maps: from the colour of the page for little to dark for much."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("softgap", list(_SEQUENTIAL))


def save_figure(figure: Figure, path: str | os.PathLike[str], *, outlines: bool = False) -> Path:
    """Write a figure, as its path ends; with ``outlines`` the letters of an SVG are drawn, so that it needs no font."""
    target = Path(path)
    content = figure_bytes(figure, check_ending(target), outlines=outlines)
    with written_whole(target) as partial:
        partial.write_bytes(content)
    return target


def check_ending(path: Path) -> str:
    """The ending of a picture's name, if it is one."""
    ending = path.suffix.lower()
    if ending not in PICTURES:
        raise ValueInputError(
            f"the file of a figure must end in .pdf, .png or .svg, got '{path.name}'; choose one of them"
        )
    return ending


def figure_bytes(figure: Figure, ending: str, *, outlines: bool = False) -> bytes:
    """A figure as the bytes of a file with this ending."""
    import matplotlib

    content = io.BytesIO()
    undated: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    metadata = undated.get(ending, {})
    # Type 42 embeds the fonts whole, as journals ask for.
    svg_text = "path" if outlines else "none"
    with matplotlib.rc_context({"svg.hashsalt": "softgap", "svg.fonttype": svg_text, "pdf.fonttype": 42}):
        figure.savefig(content, format=ending[1:], dpi=150, metadata=metadata)
    return content.getvalue()


# Of a figure one column wide: points of its largest and smallest letters, width of a letter for its size, and inches
# of the lowest and highest panel, and of what is written below one.
_LARGEST_LETTER, SMALLEST_LETTER, _LETTER_WIDTH = 7.0, 5.0, 0.5
_LOWEST_PANEL, _HIGHEST_PANEL, _BELOW_PANEL = 1.5, 2.6, 0.45


def column_file(figure: Figure, beside: str | os.PathLike[str], form: str) -> Path:
    """Write a figure for a paper as ``NAME-column.pdf`` or ``.svg`` beside a file called NAME, and return its path."""
    target = Path(beside)
    return save_figure(one_column(figure), target.with_name(f"{target.stem}-column.{form}"), outlines=True)


def one_column(figure: Figure) -> Figure:
    """The figure one column of a paper wide: its panels below each other, and no title, because a paper has a caption.

    A figure that is narrow enough stays as it is.
    """
    if figure.get_figwidth() <= COLUMN:
        return figure
    panels = [axes for axes in figure.axes if axes.get_subplotspec() is not None]
    legends = [_remove_legend(axes) for axes in panels]
    figure.draw_without_rendering()
    shapes = [axes.get_position() for axes in panels]
    tall = [COLUMN * figure.get_figheight() * shape.height / figure.get_figwidth() / shape.width for shape in shapes]
    heights = [min(_HIGHEST_PANEL, max(_LOWEST_PANEL, height)) for height in tall]
    figure.set_size_inches(COLUMN, sum(heights) + _BELOW_PANEL * len(heights))
    if figure.get_suptitle():
        figure.suptitle("")
    for axes in figure.axes:  # colour bars, too
        _shrink_words(axes)
    rows = figure.add_gridspec(len(panels), 1, height_ratios=heights)
    for number, (axes, height) in enumerate(zip(panels, heights, strict=True)):
        axes.set_subplotspec(rows[number])
        _break_titles(axes, height)
    figure.draw_without_rendering()
    below = sum(_legend_below(axes, *legend) for axes, legend in zip(panels, legends, strict=True))
    figure.set_figheight(figure.get_figheight() + below)
    return figure


def _remove_legend(axes: Axes) -> tuple[list[Any], list[str]]:
    """The marks and words of the panel's legend, which is gone."""
    legend = axes.get_legend()
    if legend is None:
        return [], []
    legend.remove()
    return list(legend.legend_handles), [text.get_text() for text in legend.get_texts()]


def _shrink_words(axes: Axes) -> None:
    from matplotlib.text import Text

    axes.tick_params(which="both", labelsize=6)
    for text in axes.findobj(Text):
        text.set_fontsize(min(_LARGEST_LETTER, max(SMALLEST_LETTER, float(text.get_fontsize()))))
    labels = axes.get_xticklabels()
    if len(labels) > 15 and any(label.get_rotation() for label in labels):
        axes.tick_params(axis="x", labelrotation=90, labelsize=SMALLEST_LETTER)
        for label in labels:
            label.set(rotation=90, ha="center", fontsize=SMALLEST_LETTER)


def _break_titles(axes: Axes, height: float) -> None:
    """Break what is written around a panel so many inches high into lines."""
    wide = COLUMN * 72 * 0.7
    for title, room in ((axes.title, wide), (axes.xaxis.label, wide), (axes.yaxis.label, height * 72)):
        letters = int(room / (_LETTER_WIDTH * float(title.get_fontsize())))
        title.set_text("\n".join(textwrap.fill(line, letters) for line in title.get_text().splitlines()))


def _legend_below(axes: Axes, marks: list[Any], words: list[str]) -> float:
    """Put a legend below all that is written under a panel, where it hides no data; the inches that it takes."""
    if not marks:
        return 0.0
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    written = axes.xaxis.get_tightbbox()
    if figure is None or written is None:
        return 0.0
    lower = (written.y0 - axes.bbox.y0) / figure.dpi
    place = axes.transAxes + ScaledTranslation(0, min(0.0, lower), figure.dpi_scale_trans)
    columns = max(1, min(len(words), int(COLUMN * 72 * 0.8 / (3.0 * max(map(len, words)) + 26))))
    shape = {"ncols": columns, "fontsize": 6, "frameon": False, "columnspacing": 1.0, "borderaxespad": 0.2}
    axes.legend(marks, words, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=place, **shape)
    return 0.13 * math.ceil(len(words) / columns)


def draw_comparison(findings: ComparisonFindings) -> Figure:
    """Largest |t| of every head, the null of max-T, and the effects that each comparison could find."""
    figure = new_figure(13, 4.6)
    heads, null, reach = figure.subplots(1, 3)
    _draw_head_effects(figure, heads, findings)
    _draw_null(null, findings)
    _draw_steps(reach, findings)
    first, second = findings.comparison.contrast.groups
    figure.suptitle(f"{first} minus {second}: {findings.verdict.outcome}")
    return figure


def _draw_head_effects(figure: Figure, axes: Axes, findings: ComparisonFindings) -> None:
    layers = np.unique(findings.table.layer)
    t = np.full(findings.varying.shape, np.nan)
    t[findings.varying] = np.abs(findings.comparison.contrast.t)
    largest = np.where(np.isnan(t).all(axis=0), np.nan, np.nanmax(np.where(np.isnan(t), -np.inf, t), axis=0))
    grid = np.full((int(findings.table.head.max()) + 1, len(layers)), np.nan)
    grid[findings.table.head, np.searchsorted(layers, findings.table.layer)] = largest
    # As the map of a page: head 0 at the top, layers to the right, dark for much.
    picture = axes.imshow(
        grid, aspect="auto", cmap=dark_is_more(), extent=(-0.5, len(layers) - 0.5, len(grid) - 0.5, -0.5)
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head" if findings.table.collapsed else "head")
    axes.set_title("largest |t| of any feature", fontsize="small")
    figure.colorbar(picture, ax=axes)


def _draw_null(axes: Axes, findings: ComparisonFindings) -> None:
    maximum = findings.comparison.maximum
    axes.hist(maximum.sample, bins=40, color="#9ca3af")
    axes.axvline(maximum.value, color="#c2410c", label=f"observed, p = {maximum.p:.2g}")
    axes.axvline(findings.comparison.critical, color="#444444", linestyle=":", label="critical")
    axes.set_xlabel(f"largest |t| of {int(findings.varying.sum()):,} units")
    axes.set_ylabel("permutations")
    axes.set_title("compared with permuted labels", fontsize="small")
    axes.legend(fontsize="small", frameon=False)


def _draw_steps(axes: Axes, findings: ComparisonFindings) -> None:
    steps = findings.verdict.steps
    places = np.arange(len(steps))
    axes.barh(places, [min(step.smallest, 3.0) for step in steps], color="#9ca3af")
    axes.axvline(findings.verdict.margin, color="#c2410c", label="margin")
    axes.set_yticks(places, [f"{step.name}\np = {step.p:.2g}" for step in steps], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("smallest detectable effect, in standard deviations")
    axes.set_title("sensitivity of each comparison", fontsize="small")
    axes.legend(fontsize="small", frameon=False)


def draw_kinds(
    labels: Sequence[Sequence[str | None]],
    layers: Sequence[int] | None = None,
    *,
    title: str = "",
    column: bool = False,
) -> Figure:
    """The map by kind: the cheapest substitute that suffices for each head, heads down and layers across.

    Parameters
    ----------
    labels
        The kind of each head, ``[layer][head]``, as ``Calibration.sufficiency.labels``; None where it is unknown.
    layers
        Numbers of the layers; by default they count from 0.
    title
        Over the map; for a column nothing, because a paper has a caption.
    column
        One column of a paper wide, with small letters.
    """
    from matplotlib.patches import Patch, Rectangle

    numbers = range(len(labels)) if layers is None else layers
    widest = max(map(len, labels))
    width, height = max(6.0, 0.3 * len(labels) + 0.8), max(2.4, 0.3 * widest + 1.5)
    scale = COLUMN / width if column else 1.0
    # Cells shrink with the width; letters below 5 points cannot be read, so that a column of many layers has none.
    letters, small = 8 * scale, max(6.0, 9 * scale)
    figure = new_figure(width * scale, max(1.6, height * scale) if column else height)
    axes = figure.subplots()
    for number, row in enumerate(labels):
        for head, kind in enumerate(row):
            if kind not in COLOURS:
                continue
            place = (number - 0.46, head - 0.45)
            look: dict[str, Any] = {"facecolor": COLOURS[kind], "edgecolor": "#bbbbbb", "linewidth": 0.4}
            axes.add_patch(Rectangle(place, 0.92, 0.9, clip_on=False, **look))
            ink = "white" if kind == "softmax" else "black"
            if letters >= 3:
                axes.text(number, head, LETTERS[kind], ha="center", va="center_baseline", fontsize=letters, color=ink)
    step = max(1, len(labels) // 15)
    axes.set_xticks(range(0, len(labels), step), [str(number) for number in numbers[::step]])
    axes.set_yticks(range(0, widest, max(1, widest // 16)))
    axes.set(xlabel="layer", ylabel="head", xlim=(-0.6, len(labels) - 0.4), ylim=(widest - 0.4, -0.6))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    counts = {kind: sum(row.count(kind) for row in map(list, labels)) for kind in KINDS}
    legend = [
        Patch(facecolor=COLOURS[kind], edgecolor="#bbbbbb", label=f"{LETTERS[kind]}  {kind} {count}")
        for kind, count in counts.items()
    ]
    columns = 3 if column else len(KINDS)
    figure.legend(handles=legend, loc="outside lower center", ncols=columns, frameon=False, fontsize=small)
    if column:
        axes.tick_params(labelsize=small)
        axes.xaxis.label.set_fontsize(small)
        axes.yaxis.label.set_fontsize(small)
    if title or not column:
        axes.set_title(title or "The cheapest substitute that suffices for each head", fontsize=small + 2)
    return figure


KEPT, SWAPPED, FREED = 0, 1, 2


_WORDS = {KEPT: "softmax", SWAPPED: "swapped", FREED: "swapped, KV group freed"}


# Told apart without colour as well: light, middle, dark.
_COLOURS = {KEPT: "#e5e7eb", SWAPPED: "#f59e0b", FREED: "#1d4ed8"}


def draw_plan(
    plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], numbers: Sequence[int], *, column: bool = False
) -> Figure:
    """The model as a grid of heads, layers across: kept, swapped, freed; or by kind where a plan has several.

    Parameters
    ----------
    heads, kv_heads, numbers
        Of every layer: how many it has, and what it is called.
    column
        One column of a paper wide, where the heads are of several kinds; ``one_column`` makes any other narrow.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rise = f", {plan.expected['loss']} nats per token" if "loss" in plan.expected else ""
    title = f"{len(plan.heads)} of {sum(heads)} heads without softmax, {len(plan.groups)} KV groups freed{rise}"
    kinds = plan.kinds()
    if len(set(kinds.values())) > 1 and set(kinds.values()) <= set(KINDS):
        sizes = zip(numbers, heads, strict=True)
        labels = [[kinds.get((number, head), "softmax") for head in range(n)] for number, n in sizes]
        return draw_kinds(labels, numbers, title="" if column else title, column=column)
    grid = np.full((max(heads), len(numbers)), np.nan)
    for place, (number, n, groups) in enumerate(zip(numbers, heads, kv_heads, strict=True)):
        for head in range(n):
            freed = (number, head // (n // groups)) in plan.groups
            grid[head, place] = FREED if freed else SWAPPED if (number, head) in plan.heads else KEPT
    figure = new_figure(max(6.0, 0.32 * len(numbers) + 1.5), max(3.0, 0.32 * max(heads) + 2.0))
    axes = figure.subplots()
    axes.imshow(grid, cmap=ListedColormap(list(_COLOURS.values())), vmin=-0.5, vmax=2.5, aspect="auto")
    for edge in range(1, len(numbers)):
        axes.axvline(edge - 0.5, color="white", linewidth=1)
    for edge in range(1, max(heads)):
        border = kv_heads[0] and edge % (heads[0] // kv_heads[0]) == 0
        axes.axhline(edge - 0.5, color="white", linewidth=2.5 if border else 0.6)
    step = max(1, len(numbers) // 15)
    axes.set_xticks(range(0, len(numbers), step), [str(number) for number in numbers[::step]])
    axes.set_yticks(range(max(heads)))
    axes.set(xlabel="layer", ylabel="head")
    legend = [Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in _WORDS]
    axes.legend(handles=legend, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False, fontsize=8)
    axes.set_title(title)
    return figure


def draw_frontier(result: Frontier) -> Figure:
    """Rise in loss and change in recall against the share that is swapped, one line per order and substitute."""
    quantities = [name for name in ("loss", "recall") if result.points and name in result.points[0].change]
    figure = new_figure(6.5 * len(quantities), 4.8)
    places = figure.subplots(1, len(quantities), squeeze=False)[0]
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in result.points:
        lines.setdefault((point.order, point.mechanism), []).append(point)
    for axes, quantity in zip(places, quantities, strict=True):
        for number, ((order, mechanism), points) in enumerate(lines.items()):
            equal = " (equal bytes)" if mechanism == result.settings.get("equal_window") else ""
            _draw_line(axes, quantity, f"{order}: {mechanism}{equal}", sorted(points, key=lambda p: p.share), number)
        axes.axhline(0, color="#444444", linewidth=0.8)
        axes.set(xlabel=f"share of {result.by} swapped", xlim=(0, 1.02))
    places[0].set(ylabel="rise in loss, nats per token", yscale="symlog")
    places[0].set_yscale("symlog", linthresh=0.05)
    if len(places) > 1:
        places[1].set(ylabel="change in recall")
    places[0].legend(fontsize=7, frameon=False)
    figure.suptitle(
        f"What {result.settings.get('model', 'a model')} loses, {result.settings.get('tokens', 0):,} tokens"
    )
    return figure


def _draw_line(axes: Axes, quantity: str, label: str, points: Sequence[Point], number: int) -> None:
    style = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:")[number % 7]
    middle = [point.change[quantity].value for point in points]
    below = [point.change[quantity].value - point.change[quantity].low for point in points]
    above = [point.change[quantity].high - point.change[quantity].value for point in points]
    error = np.clip([below, above], 0, None)
    axes.errorbar([p.share for p in points], middle, error, fmt=style, markersize=4, capsize=2, label=label)

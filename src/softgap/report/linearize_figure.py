"""Linearized models as pictures: which heads a plan keeps and frees, and the frontier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.report.pictures import new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.linearize.frontier_result import Frontier, Point
    from softgap.linearize.plan import Plan

__all__ = ["draw_frontier", "draw_plan"]

KEPT, SWAPPED, FREED = 0, 1, 2
_WORDS = {KEPT: "softmax", SWAPPED: "swapped", FREED: "swapped, its KV group freed"}
# Told apart without colour as well: light, middle, dark.
_COLOURS = {KEPT: "#e5e7eb", SWAPPED: "#f59e0b", FREED: "#1d4ed8"}


def draw_plan(plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], numbers: Sequence[int]) -> Figure:
    """The model as a grid of heads, layers across: kept, swapped, freed.

    Parameters
    ----------
    heads, kv_heads, numbers
        Of every layer: how many it has, and what it is called.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    grid = np.full((max(heads), len(numbers)), np.nan)
    for column, (number, n, groups) in enumerate(zip(numbers, heads, kv_heads, strict=True)):
        for head in range(n):
            freed = (number, head // (n // groups)) in plan.groups
            grid[head, column] = FREED if freed else SWAPPED if (number, head) in plan.heads else KEPT
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
    rise = f", {plan.expected['loss']} nats per token" if "loss" in plan.expected else ""
    axes.set_title(f"{len(plan.heads)} of {sum(heads)} heads without softmax, {len(plan.groups)} KV groups freed{rise}")
    return figure


def draw_frontier(found: Frontier) -> Figure:
    """Rise in loss and change in recall against the share that is swapped, one line per order and substitute."""
    quantities = [name for name in ("loss", "recall") if found.points and name in found.points[0].change]
    figure = new_figure(6.5 * len(quantities), 4.8)
    places = figure.subplots(1, len(quantities), squeeze=False)[0]
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in found.points:
        lines.setdefault((point.order, point.mechanism), []).append(point)
    for axes, quantity in zip(places, quantities, strict=True):
        for number, ((order, mechanism), points) in enumerate(lines.items()):
            _draw_line(axes, quantity, f"{order}: {mechanism}", sorted(points, key=lambda p: p.share), number)
        axes.axhline(0, color="#444444", linewidth=0.8)
        axes.set(xlabel=f"share of {found.by} swapped", xlim=(0, 1.02))
    places[0].set(ylabel="rise in loss, nats per token", yscale="symlog")
    places[0].set_yscale("symlog", linthresh=0.05)
    if len(places) > 1:
        places[1].set(ylabel="change in recall")
    places[0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"What {found.settings.get('model', 'a model')} loses, {found.settings.get('tokens', 0):,} tokens")
    return figure


def _draw_line(axes: Axes, quantity: str, label: str, points: Sequence[Point], number: int) -> None:
    style = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:")[number % 7]
    middle = [point.change[quantity].value for point in points]
    below = [point.change[quantity].value - point.change[quantity].low for point in points]
    above = [point.change[quantity].high - point.change[quantity].value for point in points]
    error = np.clip([below, above], 0, None)
    axes.errorbar([p.share for p in points], middle, error, fmt=style, markersize=4, capsize=2, label=label)

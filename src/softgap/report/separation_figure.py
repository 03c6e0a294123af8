"""The figure of the separation lab: every mechanism, the phase maps, growth in n, and what training makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.report.pictures import new_figure
from softgap.theory.separation.lab import Separation
from softgap.theory.separation.phase_map import PhaseMap
from softgap.theory.separation.trained import Trained
from softgap.theory.separation.trained_tasks import task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_separation"]

_D0, _D1, _INK = "#94a3b8", "#c2410c", "#444444"
_LINES = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0f766e")


def draw_separation(found: Separation) -> Figure:
    """Firing of every mechanism on top, phase maps and growth below; a row for trained models where there are any."""
    maps, trained = found.maps[:3], found.trained
    rows = 2 if trained is None else 3
    figure = new_figure(4.2 * (len(maps) + 1), 4.0 * rows)
    grid = figure.add_gridspec(rows, len(maps) + 1)
    _draw_trials(figure.add_subplot(grid[0, :]), found)
    for column, one in enumerate(maps):
        _draw_map(figure, figure.add_subplot(grid[1, column]), one)
    _draw_growth(figure.add_subplot(grid[1, len(maps)]), found)
    if trained is not None:
        _draw_scores(figure.add_subplot(grid[2, : len(maps)]), trained)
        _draw_gradients(figure.add_subplot(grid[2, len(maps)]), trained)
    size = found.construction
    kind = "cross-attention" if size.cross else "self-attention"
    figure.suptitle(
        f"Separation, {kind}: n = {size.n}, d = {size.d}, t = {size.t}, m = {size.m}, a0 = {size.a0:g}, "
        f"a1 = {size.a1:g}, b = {size.b:g}, c = {size.c:g}; {found.settings['draws']} draws"
    )
    return figure


def _draw_trials(axes: Axes, found: Separation) -> None:
    place = np.arange(len(found.trials))
    for offset, colour, label in ((-0.18, _D0, "D0"), (0.18, _D1, "D1")):
        shares = [one.fires_d0 if label == "D0" else one.fires_d1 for one in found.trials]
        values = np.array([one.value for one in shares])
        spread = np.array([[one.value - one.low for one in shares], [one.high - one.value for one in shares]])
        axes.bar(place + offset, values, 0.34, color=colour, label=label, yerr=spread.clip(0), ecolor=_INK, capsize=2)
    axes.set_xticks(place, [one.mechanism for one in found.trials], rotation=60, ha="right", fontsize="small")
    axes.set_ylabel("P(F > 0), 95 % interval")
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _draw_map(figure: Figure, axes: Axes, one: PhaseMap) -> None:
    image = axes.imshow(one.success, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
    axes.set_xticks(range(len(one.x.values)), [f"{value:g}" for value in one.x.values], rotation=45, fontsize="small")
    axes.set_yticks(range(len(one.y.values)), [f"{value:g}" for value in one.y.values], fontsize="small")
    axes.set_xlabel(one.x.name)
    axes.set_ylabel(one.y.name)
    columns, rows = np.meshgrid(range(len(one.x.values)), range(len(one.y.values)))
    lines: list[tuple[Any, str, str]] = [(one.median, "white", "argued"), (one.bound < 0.5, "#dc2626", "bound < 1/2")]
    named = []
    for values, colour, label in lines:
        inside = np.nan_to_num(np.asarray(values, float))
        if 0 < inside.mean() < 1 and min(inside.shape) > 1:
            axes.contour(columns, rows, inside, levels=[0.5], colors=[colour], linewidths=1.5)
            named.append(f"{label}: {'white' if colour == 'white' else 'red'}")
    axes.set_title(f"{one.mechanism}, P(both right)\n{'; '.join(named)}", fontsize="small")
    figure.colorbar(image, ax=axes, fraction=0.05)


def _draw_growth(axes: Axes, found: Separation) -> None:
    n = [one.n for one in found.scaled]
    for index, name in enumerate(one.mechanism for one in found.scaled[0].trials):
        shares = [one.trials[index].success for one in found.scaled]
        axes.plot(n, [one.value for one in shares], marker="o", color=_LINES[index], label=name)
        axes.fill_between(n, [one.low for one in shares], [one.high for one in shares], color=_LINES[index], alpha=0.15)
    if found.turning is not None:
        axes.axvline(found.turning, color=_INK, linestyle=":", label=f"margin lost, n = {found.turning:,}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("n (t = 1, a1 = 0.7, b = c = 0.5)")
    axes.set_title("P(both right)", fontsize="small")
    axes.legend(frameon=False, fontsize="small")


def _draw_scores(axes: Axes, trained: Trained) -> None:
    place, width = np.arange(len(trained.tasks)), 0.8 / len(trained.mechanisms)
    for index, mechanism in enumerate(trained.mechanisms):
        scores = [trained.score(name, mechanism) for name in trained.tasks]
        spread = np.nan_to_num([[one.mean - one.low, one.high - one.mean] for one in scores]).T
        where = place + (index - (len(trained.mechanisms) - 1) / 2) * width
        means = [one.mean for one in scores]
        axes.bar(where, means, width, yerr=spread, color=_LINES[index % 5], label=mechanism, ecolor=_INK, capsize=2)
    chances = [task(name).chance for name in trained.tasks]
    axes.hlines(chances, place - 0.45, place + 0.45, color=_INK, linestyle=":", label="chance")
    axes.set_xticks(place, trained.tasks, rotation=30, ha="right", fontsize="small")
    axes.set_ylim(-0.1, 1.15)
    axes.set_title("trained: accuracy or R², mean over seeds", fontsize="small")
    axes.legend(frameon=False, fontsize="small", ncols=len(trained.mechanisms) + 1)


def _draw_gradients(axes: Axes, trained: Trained) -> None:
    name = trained.tasks[0]
    for index, mechanism in enumerate(trained.mechanisms):
        for cell in trained.of(name, mechanism):
            steps, norms = zip(*((one.step, one.gradient) for one in cell.checkpoints), strict=True)
            label = mechanism if cell.seed == 0 else None
            axes.plot(steps, norms, color=_LINES[index % 5], alpha=0.7, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(f"gradient norm, {name}", fontsize="small")
    axes.legend(frameon=False, fontsize="small")

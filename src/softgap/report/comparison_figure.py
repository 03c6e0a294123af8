"""A comparison as a picture: where the heads differ, how that compares with relabelling, and the controls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.analysis import ComparisonFindings
from softgap.report.pictures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_comparison"]


def draw_comparison(findings: ComparisonFindings) -> Figure:
    """Largest |t| of every head, the null of max-T, and the effects that each comparison could find."""
    figure = new_figure(13, 4.6)
    heads, null, reach = figure.subplots(1, 3)
    _draw_heads(figure, heads, findings)
    _draw_null(null, findings)
    _draw_steps(reach, findings)
    first, second = findings.comparison.contrast.groups
    figure.suptitle(f"{first} minus {second}: {findings.verdict.outcome}")
    return figure


def _draw_heads(figure: Figure, axes: Axes, findings: ComparisonFindings) -> None:
    layers = np.unique(findings.table.layer)
    t = np.full(findings.kept.shape, np.nan)
    t[findings.kept] = np.abs(findings.comparison.contrast.t)
    largest = np.where(np.isnan(t).all(axis=0), np.nan, np.nanmax(np.where(np.isnan(t), -np.inf, t), axis=0))
    grid = np.full((int(findings.table.head.max()) + 1, len(layers)), np.nan)
    grid[findings.table.head, np.searchsorted(layers, findings.table.layer)] = largest
    picture = axes.imshow(
        grid, aspect="auto", origin="lower", cmap="viridis", extent=(-0.5, len(layers) - 0.5, -0.5, len(grid) - 0.5)
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
    axes.set_xlabel(f"largest |t| of {int(findings.kept.sum()):,} units")
    axes.set_ylabel("relabellings")
    axes.set_title("against relabelled samples", fontsize="small")
    axes.legend(fontsize="small", frameon=False)


def _draw_steps(axes: Axes, findings: ComparisonFindings) -> None:
    steps = findings.verdict.steps
    places = np.arange(len(steps))
    axes.barh(places, [min(step.smallest, 3.0) for step in steps], color="#9ca3af")
    axes.axvline(findings.verdict.margin, color="#c2410c", label="margin")
    axes.set_yticks(places, [f"{step.name}\np = {step.p:.2g}" for step in steps], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel("smallest effect that could be found, in deviations")
    axes.set_title("what each comparison could find", fontsize="small")
    axes.legend(fontsize="small", frameon=False)

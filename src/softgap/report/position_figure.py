"""The position lab as a picture: profiles over position, the terms of every head's trend, and their shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.report.pictures import new_figure
from softgap.theory.position.drift import TERMS
from softgap.theory.position.lab import Position

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_position"]

_COLOURS = ("#0f766e", "#c2410c", "#7c3aed", "#444444")


def draw_position(lab: Position) -> Figure:
    """Mean divergence by position on the left, the first mechanism's heads in the middle, shares on the right."""
    figure = new_figure(14, 5.6)
    profile, heads, shares = figure.subplots(1, 3)
    _draw_profiles(profile, lab)
    _draw_heads(heads, lab)
    _draw_shares(shares, lab)
    name = lab.settings.get("model") or "i.i.d. heads"
    tokens, texts = lab.settings["tokens"], lab.settings["texts"]
    figure.suptitle(
        f"{name}: divergence against position over {texts} {'text' if texts == 1 else 'texts'} of {tokens} tokens"
    )
    return figure


def _draw_profiles(axes: Axes, lab: Position) -> None:
    first = lab.trends[0].mechanism
    edges = np.unique(np.geomspace(lab.positions[0], lab.positions[-1] + 1, 24).astype(int))
    from matplotlib import colormaps

    shades = colormaps["tab20"].colors  # type: ignore[attr-defined]
    for place, (name, values) in enumerate(lab.profiles.items()):
        bins = np.digitize(lab.positions, edges)
        used = np.unique(bins)
        x = [lab.positions[bins == b].mean() for b in used]
        strong = name in (first, "uniform", "exchangeable values")
        style = "--" if name == "uniform" else ":" if name == "exchangeable values" else "-"
        y = [values[bins == b].mean() for b in used]
        width = 2.2 if strong else 0.9
        axes.plot(x, y, style, label=name, linewidth=width, zorder=3 if strong else 1, color=shades[place % 20])
    axes.set(xscale="log", xlabel="position", ylabel="divergence, mean over heads")
    _legend_below(axes, 4)


def _legend_below(axes: Axes, columns: int) -> None:
    """Under the panel, where no line or bar runs through it."""
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=columns)


def _draw_heads(axes: Axes, lab: Position) -> None:
    trend = lab.trends[0]
    order = np.argsort(trend.slopes.value.ravel())
    place = np.arange(len(order))
    low, high = trend.slopes.low.ravel()[order], trend.slopes.high.ravel()[order]
    axes.fill_between(place, low, high, color="#999999", alpha=0.35, linewidth=0, label="95 % over texts")
    for name, values, colour in zip(TERMS, trend.terms.value, _COLOURS, strict=True):
        axes.plot(place, values.ravel()[order], ".", markersize=2.5, color=colour, label=name)
    axes.plot(place, trend.slopes.value.ravel()[order], color="black", linewidth=1.2, label="all")
    axes.set(xlabel="heads, by slope", ylabel="slope per doubling of position")
    axes.set_title(f"{trend.mechanism}: every head's trend and its terms", fontsize="small")
    axes.locator_params(axis="x", integer=True)
    _legend_below(axes, 3)


def _draw_shares(axes: Axes, lab: Position) -> None:
    place = np.arange(len(lab.trends))
    width = 0.8 / len(TERMS)
    for i, (name, colour) in enumerate(zip(TERMS, _COLOURS, strict=True)):
        found = [trend.shares[i] for trend in lab.trends]
        value = np.array([share.value for share in found])
        spread = np.abs(np.array([[s.value - s.low for s in found], [s.high - s.value for s in found]]))
        axes.barh(place + i * width, value, width, xerr=spread, color=colour, label=name, error_kw={"linewidth": 0.6})
    axes.set_yticks(place + 0.4, [trend.mechanism for trend in lab.trends], fontsize="x-small")
    axes.axvline(0, color="#444444", linewidth=0.6)
    axes.set_xlabel("share of the trend, over heads that have one")
    _legend_below(axes, 4)

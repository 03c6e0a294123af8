"""The injectivity lab as a picture: margins and collisions on synthetic keys, a map of heads in a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from softgap.report.pictures import new_figure
from softgap.theory.injectivity.model import ModelInjectivity
from softgap.theory.injectivity.synthetic import Injectivity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_injectivity", "draw_injectivity_in_model"]

_INK, _WARM, _COOL = "#444444", "#c2410c", "#0f766e"
_SMALLEST = 1e-18


def draw_injectivity(lab: Injectivity) -> Figure:
    """Where softmax inverts, its error against both margins, and how near the finder came to a collision."""
    figure = new_figure(13, 4.6)
    few, error, search = figure.subplots(1, 3)
    _draw_prefixes(few, lab)
    for sweep, colour, name in (
        (lab.log_sweep, _COOL, "log-weights"),
        (lab.weight_sweep, _WARM, "weights (error per unit of change)"),
    ):
        error.loglog(sweep.margin, sweep.error, "o", color=colour, label=f"margin in {name}")
        error.loglog(sweep.margin, sweep.predicted, "-", color=colour, linewidth=0.8)
    error.set_xlabel("margin")
    error.set_ylabel("error of the recovered query")
    error.set_title("the inverter; lines: error over margin", fontsize="small")
    error.legend(fontsize="x-small", frameon=False)
    _draw_searches(search, lab)
    figure.suptitle(f"injectivity: d = {lab.settings['dim']}, {lab.settings['keys']} keys")
    return figure


def draw_injectivity_in_model(lab: ModelInjectivity) -> Figure:
    """Layer-by-head maps of margin and confusion above; both against the number of keys below."""
    figure = new_figure(12, 9)
    axes = figure.subplots(2, 3)
    keys = lab.lengths[lab.common]
    softmax, classical = lab.rate[lab.of("softmax")], lab.rate[lab.of("elu1")]
    top = float(np.nanmax([softmax, classical]))
    panels = (
        (np.log10(np.maximum(lab.weight_margin, _SMALLEST)), "log10 weight margin of softmax", None, None),
        (softmax, f"confusion under softmax, {keys} keys", 0.0, top),
        (classical, f"confusion under elu1, {keys} keys", 0.0, top),
    )
    for panel, (values, title, low, high) in zip(axes[0], panels, strict=True):
        image = panel.imshow(values, aspect="auto", origin="lower", cmap="viridis", vmin=low, vmax=high)
        figure.colorbar(image, ax=panel)
        panel.set(xlabel="head", ylabel="layer")
        panel.set_title(title, fontsize="small")
    _draw_margins(axes[1, 0], lab)
    _draw_confusion(axes[1, 1], lab)
    _draw_divergence(axes[1, 2], lab)
    name = lab.settings.get("model") or "model"
    figure.suptitle(f"{name}: injectivity over {lab.settings['tokens']} tokens")
    return figure


def _draw_prefixes(axes: Axes, lab: Injectivity) -> None:
    keys = np.array([prefix.keys for prefix in lab.prefixes])
    distance = np.array([prefix.collision for prefix in lab.prefixes])
    error = np.array([prefix.error for prefix in lab.prefixes])
    axes.semilogy(keys, np.maximum(distance, _SMALLEST), "s", color=_WARM, label="distance of a constructed collision")
    axes.semilogy(keys, np.maximum(error, _SMALLEST), "o", color=_COOL, label="error of the recovered query")
    axes.axvline(int(lab.settings["dim"]) + 0.5, color=_INK, linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    shown = sorted({int(keys[0]), int(lab.settings["dim"]), *(int(n) for n in keys if n >= 2 * lab.settings["dim"])})
    axes.set_xticks(shown, [str(n) for n in shown])
    axes.minorticks_off()
    axes.set_xlabel("keys")
    axes.set_title("softmax: it collides up to d keys (dotted), inverts beyond", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False, loc="center right")


def _draw_searches(axes: Axes, lab: Injectivity) -> None:
    ordered = sorted(lab.searches, key=lambda search: -search.closest)
    place = np.arange(len(ordered))
    colours = [_WARM if search.found else _COOL for search in ordered]
    axes.barh(place, [max(search.closest, _SMALLEST) for search in ordered], color=colours, left=_SMALLEST)
    names = [search.mechanism + ("" if not search.outside else " *") for search in ordered]
    axes.set_yticks(place, names, fontsize="x-small")
    axes.set_xscale("log")
    axes.set_xlabel("nearest two distributions, over the largest weight")
    axes.set_title("the finder; orange: a collision, *: outside proposition 2", fontsize="small")


def _draw_margins(axes: Axes, lab: ModelInjectivity) -> None:
    flat = lab.margin.reshape(-1, len(lab.lengths))
    low, middle, high = np.quantile(flat, [0.1, 0.5, 0.9], axis=0)
    axes.plot(lab.lengths, middle, color=_COOL, label="median head")
    axes.fill_between(lab.lengths, low, high, color=_COOL, alpha=0.2, linewidth=0, label="10 to 90 % of heads")
    axes.axvline(lab.dim + 1, color=_INK, linewidth=0.8, linestyle=":", label="d + 1 keys")
    axes.set(xlabel="keys", ylabel="margin in log-weights", xscale="log", yscale="symlog")
    _whole_ticks(axes, lab.lengths)
    axes.legend(fontsize="x-small", frameon=False)


def _draw_confusion(axes: Axes, lab: ModelInjectivity) -> None:
    from matplotlib import colormaps

    stop = lab.common + 1
    lengths = lab.lengths[:stop]
    colours = colormaps["tab20"](np.linspace(0, 1, 20))
    for i, name in enumerate(lab.mechanisms):
        rates = lab.confusion[i].reshape(-1, len(lab.lengths))[:, :stop]
        if np.isfinite(rates).any():
            width = 2.4 if name in ("softmax", "elu1", "fitted") else 0.9
            axes.plot(lengths, np.nanmean(rates, axis=0), label=name, linewidth=width, color=colours[i % 20])
    axes.set(xlabel="keys in the common set", ylabel="mean confusion rate", xscale="log")
    _whole_ticks(axes, lengths)
    axes.legend(fontsize=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=5)


def _whole_ticks(axes: Axes, lengths: Sequence[int]) -> None:
    """Powers of two among the lengths, in plain numbers."""
    shown = [n for n in lengths if n & (n - 1) == 0] or list(lengths)
    axes.set_xticks(shown, [str(n) for n in shown])
    axes.minorticks_off()


def _draw_divergence(axes: Axes, lab: ModelInjectivity) -> None:
    points = axes.scatter(
        lab.rate[lab.of("softmax")].ravel(),
        lab.divergence[lab.of("elu1")].ravel(),
        c=lab.focus.ravel(),
        s=14,
        cmap="viridis",
        linewidths=0,
    )
    axes.set(xlabel="confusion under softmax", ylabel="mean divergence from elu1")
    axes.figure.colorbar(points, ax=axes, label="S(a): 1 is even")

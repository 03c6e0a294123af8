"""The locality lab as pictures: planted heads and trained models, and what was found in the heads of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.report.figures import new_figure
from softgap.theory.locality.dependence import MASKS
from softgap.theory.locality.residuals import ALONE, KEYS, VALUES, WINDOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.theory.locality.ablation import Ablation
    from softgap.theory.locality.dependence import Dependence
    from softgap.theory.locality.lab import Locality, ModelLocality

__all__ = ["draw_locality", "draw_locality_in_model"]


_LABELS = {"local": "#c2410c", "heavy": "#1d4ed8", "neither": "#94a3b8", "not decided": "#444444"}


_KINDS = {ALONE: "#94a3b8", VALUES: "#c2410c", WINDOW: "#1d4ed8", KEYS: "#15803d"}


_MASKS = {"local": "#c2410c", "equal mass": "#1d4ed8", "heaviest": "#7c3aed", "random": "#94a3b8"}


def draw_locality(lab: Locality) -> Figure:
    """Planted heads by their rises; the accuracy of every trained arm where models were trained."""
    figure = new_figure(6 + 6 * len(lab.trained), 6)
    axes = np.atleast_1d(figure.subplots(1, 1 + len(lab.trained)))
    _draw_dependence(axes[0], lab.planted, "change of the output")
    for place, ablation in zip(axes[1:], lab.trained, strict=True):
        _draw_arms(place, ablation)
    figure.suptitle("locality: planted heads" + (" and trained models" if lab.trained else ""))
    return figure


def draw_locality_in_model(lab: ModelLocality) -> Figure:
    """Mass near the query, masks of one head and of all, gaps closed by residuals, and confusions."""
    figure = new_figure(15, 9)
    axes = figure.subplots(2, 3)
    _draw_mass(axes[0, 0], lab)
    _draw_together(axes[0, 1], lab)
    if lab.dependence is not None:
        _draw_dependence(axes[0, 2], lab.dependence, "rise in loss")
    else:
        axes[0, 2].set_axis_off()
    _draw_gaps(axes[1, 0], lab)
    _draw_confusions(axes[1, 1], lab)
    _draw_keys(axes[1, 2], lab)
    name, texts, tokens = (lab.settings.get(key) for key in ("model", "texts", "tokens"))
    figure.suptitle(
        f"{name or 'a model'}: locality over {texts} {'text' if texts == 1 else 'texts'} of {tokens} tokens"
    )
    return figure


def _draw_dependence(axes: Axes, dependence: Dependence, what: str) -> None:
    """Every head: the dearer of the two far masks against the local one."""
    local = dependence.mean("local")
    far = np.max([dependence.mean(kind) for kind in MASKS[1:]], axis=0)
    labels = np.array(dependence.labels)
    for label, colour in _LABELS.items():
        here = labels == label
        if here.any():
            axes.plot(far[here], local[here], "o", markersize=4, color=colour, label=f"{label} ({here.sum()})")
    low, high = float(min(local.min(), far.min())), float(max(local.max(), far.max()))
    axes.plot([low, high], [low, high], color="#444444", linewidth=0.6)
    axes.set_xscale("symlog", linthresh=dependence.least)
    axes.set_yscale("symlog", linthresh=dependence.least)
    axes.set_xlabel(f"{what}, far keys masked (the dearer mask)")
    axes.set_ylabel(f"{what}, last {dependence.width} keys masked")
    axes.set_title("one head at a time", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False)


def _draw_arms(axes: Axes, ablation: Ablation) -> None:
    for place, arm in enumerate(ablation.arms):
        scores = ablation.scores(arm)
        colour = {"none": "#94a3b8", "values": "#c2410c", "keys": "#15803d"}[arm.residual]
        axes.plot(scores, [place] * len(scores), "o", markersize=3, color=colour)
    axes.set_yticks(range(len(ablation.arms)), [arm.label for arm in ablation.arms], fontsize="xx-small")
    axes.invert_yaxis()
    axes.set_xlabel("accuracy, a point per seed")
    axes.set_title(f"trained on {ablation.assignment.task}", fontsize="small")


def _draw_mass(axes: Axes, lab: ModelLocality) -> None:
    share, even = lab.share.mean(axis=0), lab.even.mean(axis=(0, 2))
    axes.boxplot(share.T, positions=np.arange(len(lab.widths)), widths=0.5, showfliers=False)
    axes.plot(np.arange(len(lab.widths)), even, "o--", color="#c2410c", label="even: w / (t - 1)")
    axes.set_xticks(range(len(lab.widths)), [str(w) for w in lab.widths])
    axes.set(xlabel="w, last keys", ylabel="share of mass, sink and self left out", ylim=(0, 1))
    axes.set_title("attention mass near the query, over heads", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False)


def _draw_together(axes: Axes, lab: ModelLocality) -> None:
    for kind, values in lab.together.items():
        rise = values[..., 0]
        axes.plot(lab.widths, rise.mean(axis=0), "o-", color=_MASKS[kind], label=kind, markersize=4)
        axes.plot(lab.widths, rise.T, color=_MASKS[kind], linewidth=0.3)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set(xlabel="w, last keys", ylabel="rise in loss, nats per token")
    axes.set_title("all heads at once (off distribution)", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False)


def _draw_gaps(axes: Axes, lab: ModelLocality) -> None:
    names = list(dict.fromkeys(residual.mechanism for residual in lab.residuals))
    kinds = [kind for kind in _KINDS if kind != KEYS]
    for i, kind in enumerate(kinds):
        found = [(names.index(r.mechanism), r.gap_closed) for r in lab.residuals if r.kind == kind]
        place = np.array([p for p, _ in found]) + 0.25 * i
        value = np.array([gap.value for _, gap in found])
        spread = np.abs([[gap.value - gap.low for _, gap in found], [gap.high - gap.value for _, gap in found]])
        axes.barh(place, value, 0.25, xerr=spread, color=_KINDS[kind], label=kind, error_kw={"linewidth": 0.6})
    axes.set_yticks(np.arange(len(names)) + 0.25, names, fontsize="x-small")
    axes.axvline(0, color="#444444", linewidth=0.6)
    axes.set_xlim(left=max(axes.get_xlim()[0], -1))
    axes.set_xlabel("gap to the mean of values that is closed")
    axes.legend(fontsize="xx-small", frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=1)


def _draw_confusions(axes: Axes, lab: ModelLocality) -> None:
    top = max(float(np.nanmax(rates, initial=0.01)) for rates in lab.confusion.values())
    edges = np.linspace(0, top, 25)
    for name, rates in lab.confusion.items():
        known = rates[np.isfinite(rates)]
        width = 1.8 if name in ("softmax", "inline") else 0.9
        axes.hist(known, edges.tolist(), histtype="step", linewidth=width, label=name)
    axes.set_yscale("log")
    axes.set(xlabel="confused pairs, share of those far apart", ylabel="heads, over all texts")
    axes.set_title("histogram of confusions", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False)


def _draw_keys(axes: Axes, lab: ModelLocality) -> None:
    for residual in lab.residuals:
        plain = lab.residual(residual.mechanism, ALONE)
        if residual.kind == KEYS and plain is not None:
            gain = np.sort((plain.divergence - residual.divergence).mean(axis=0))
            axes.plot(np.arange(len(gain)), gain, label=residual.mechanism, linewidth=1.2)
    axes.axhline(0, color="#444444", linewidth=0.6)
    axes.set(xlabel="heads, by gain", ylabel="divergence less by a convolution on keys")
    axes.set_title("short convolution on keys", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False)

"""The focus lab as pictures: the article's curves, and what was found in the heads of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.report.files import new_figure
from softgap.theory.focus.concentration import AMOUNTS, FAMILIES
from softgap.theory.focus.synthetic import BETAS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.theory.focus.concentration import Milestone
    from softgap.theory.focus.model import ModelFocus
    from softgap.theory.focus.synthetic import FocusFindings

__all__ = ["draw_focus", "draw_focus_in_model"]

_SHOWN = ("softmax", "relu2_scores", "elu1")
_NAMED = ("softmax", "relu", "decay", "self_token", "first_token", "identity", "taylor2", "exp_dim", "favor")
_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7c3aed", "#444444")


def draw_focus(found: FocusFindings) -> Figure:
    """The curves of the article, redrawn: S against spread, length and number of features."""
    figure = new_figure(13, 7.5)
    axes = figure.subplots(2, 3)
    _draw_exp(axes[0, 0], found)
    for place, name, betas in ((axes[0, 1], "relu2", BETAS), (axes[0, 2], "identity", [b for b in BETAS if b >= 0])):
        for beta in betas:
            place.plot(found.gammas, found.curves[name][BETAS.index(beta)], label=f"β = {beta:g}")
        place.set_title(f"{name}")
        place.set_xlabel("γ, standard deviation of the scores")
        place.set_xscale("log")
    axes[0, 2].axhline(np.sqrt(2 / np.pi), color=_COLOURS[-1], linestyle=":", label="√(2/π)")
    for beta in BETAS:
        axes[1, 0].plot(found.gammas, found.curves["relu"][BETAS.index(beta)], label=f"β = {beta:g}")
    axes[1, 0].set(title="relu", xlabel="γ, standard deviation of the scores", xscale="log")
    for decay, curve in found.decays.items():
        axes[1, 1].plot(found.lengths, curve, label=f"λ = {decay:g}")
    axes[1, 1].set(title="decay", xlabel="n, number of keys", xscale="log", yscale="log")
    _draw_feature_families(axes[1, 2], found.road)
    for place in axes.flat[:-1]:
        place.legend(fontsize=7, frameon=False)
    for place in (*axes[0], axes[1, 0], axes[1, 1]):
        place.set_ylabel("S (small is focused)")
    figure.suptitle("Focus of each kind of attention")
    return figure


def draw_focus_in_model(found: ModelFocus) -> Figure:
    """Heads of a model: theory against measurement, mechanisms, capacity, interventions, placement, features."""
    figure = new_figure(17, 8.5)
    axes = figure.subplots(2, 4)
    _draw_predictions(axes[0, 0], found)
    _draw_sparsity(axes[0, 1], found)
    _draw_divergence(axes[0, 2], found)
    _draw_capacity(axes[0, 3], found)
    _draw_effects(axes[1, 0], found)
    _draw_placement(axes[1, 1], found)
    _draw_floor(axes[1, 2], found)
    _draw_feature_families(axes[1, 3], found.road)
    for place in (axes[0, 0], axes[0, 3], axes[1, 0]):
        place.legend(fontsize=7, frameon=False)
    name = found.settings.get("model", "a model")
    figure.suptitle(f"Focus in the heads of {name}, {found.settings['tokens']} tokens")
    return figure


def _draw_exp(axes: Axes, found: FocusFindings) -> None:
    axes.plot(found.gammas, found.curves["exp"][0], color=_COLOURS[0], label="n → ∞, every β")
    for colour, n in zip(_COLOURS[1:], sorted({row.n for row in found.finite}), strict=False):
        rows = [row for row in found.finite if row.n == n]
        gammas = [row.gamma for row in rows]
        axes.plot(gammas, [row.finite for row in rows], color=colour, label=f"n = {n}")
        axes.errorbar(
            gammas,
            [row.simulated for row in rows],
            [2 * row.error for row in rows],
            fmt="o",
            markersize=3,
            color=colour,
        )
    axes.set(
        title="exp (softmax)",
        xlabel="γ, standard deviation of the scores",
        xlim=(0, 4.2),
        yscale="log",
        ylim=(1e-4, 1.2),
    )


def _draw_feature_families(axes: Axes, road: Sequence[Milestone]) -> None:
    for colour, family in zip(_COLOURS, FAMILIES, strict=False):
        stops = [stop for stop in road if stop.family == family]
        features = [stop.features for stop in stops]
        label = {"shifted": "(1 + s/p)^p", "polynomial": "s^p"}.get(family, family)
        axes.plot(features, [stop.weight_error for stop in stops], "o-", color=colour, label=f"{label}: weight error")
        axes.plot(features, [stop.sparsity for stop in stops], "s:", color=colour, label=f"{label}: S")
    axes.axhline(road[-1].sparsity, color=_COLOURS[-1], linestyle="--", label="S of softmax")
    axes.set(title="more features", xlabel="features", xscale="log", yscale="log")
    # Below the panel: its lines cross all of it.
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _draw_predictions(axes: Axes, found: ModelFocus) -> None:
    for colour, rung in zip(_COLOURS, found.predictions[:4], strict=False):
        measured, predicted = np.nanmean(rung.measured, axis=-1).ravel(), np.nanmean(rung.values, axis=-1).ravel()
        axes.scatter(measured, predicted, s=6, color=colour, alpha=0.6, linewidths=0, label=rung.name)
    axes.plot([0, 1], [0, 1], color=_COLOURS[-1], linewidth=0.8)
    axes.set(title="softmax: theory and measurement", xlabel="S measured, mean of a head", ylabel="S predicted")


def _draw_sparsity(axes: Axes, found: ModelFocus) -> None:
    order = sorted(found.mechanisms, key=lambda one: float(np.nanmean(one.sparsity)))
    axes.boxplot(
        [one.sparsity[np.isfinite(one.sparsity)] for one in order],
        orientation="horizontal",
        flierprops={"markersize": 2},
    )
    axes.set_yticks(range(1, len(order) + 1), [one.name for one in order], fontsize=7)
    axes.set(title="S by mechanism", xlabel="S, heads")


def _draw_divergence(axes: Axes, found: ModelFocus) -> None:
    uniform, elu1 = found.of("uniform").from_softmax.ravel(), found.of("elu1").from_softmax.ravel()
    points = axes.scatter(uniform, elu1, c=found.of("softmax").sparsity.ravel(), s=10, cmap="viridis", linewidths=0)
    axes.plot([0, 1], [0, 1], color=_COLOURS[-1], linewidth=0.8)
    axes.set(title="divergence of heads", xlabel="from the mean of values", ylabel="from elu1")
    if axes.figure is not None:
        axes.figure.colorbar(points, ax=axes, label="S of softmax")


def _draw_capacity(axes: Axes, found: ModelFocus) -> None:
    capacity = found.capacity
    for i, energy in enumerate(capacity.energies):
        for ranks, style, name in ((capacity.ranks, "-", ""), (capacity.ranks_with_sink, ":", ", with the sink")):
            middle = np.median(ranks[i].reshape(len(capacity.sizes), -1), axis=1)
            axes.plot(capacity.sizes, middle, style, color=_COLOURS[i], label=f"{energy:.1%}{name}")
    axes.set(
        **{"title": "rank of the energy, median head, without the sink", "xlabel": "block size", "ylabel": "rank"},
        xscale="log",
        yscale="log",
    )
    axes.legend(frameon=False, fontsize="x-small")
    _mark(axes, capacity.sizes)


def _mark(axes: Axes, values: Sequence[float]) -> None:
    """Ticks at these values of a logarithmic axis, as plain numbers."""
    axes.minorticks_off()
    axes.set_xticks(list(values), [f"{value:g}" for value in values])


def _draw_effects(axes: Axes, found: ModelFocus) -> None:
    for style, change in zip(("o-", "s--"), ("scale q", "spread keys"), strict=True):
        for colour, name in zip(_COLOURS, _SHOWN, strict=False):
            some = [effect for effect in found.effects if (effect.change, effect.mechanism) == (change, name)]
            if some:
                axes.plot(
                    AMOUNTS[change],
                    [effect.sparsity for effect in some],
                    style,
                    color=colour,
                    label=f"{change}: {name}",
                )
    axes.set(title="interventions", xlabel="factor", ylabel="S", xscale="log")
    _mark(axes, AMOUNTS["scale q"])


def _draw_placement(axes: Axes, found: ModelFocus) -> None:
    for one in found.mechanisms:
        if np.isfinite(one.columns).any():
            place = (float(np.nanmedian(one.columns)), float(np.nanmedian(one.distance)))
            axes.scatter(*place, s=14, color=_COLOURS[0])
            if one.name in _NAMED:  # the others crowd around relu
                axes.annotate(one.name, place, (3, 3), textcoords="offset points", fontsize=7)
    axes.set(title="share by position alone", xlabel="absolute position (columns)", ylabel="distance (Toeplitz)")


def _draw_floor(axes: Axes, found: ModelFocus) -> None:
    mapped = sorted((one for one in found.mechanisms if one.features), key=lambda one: float(np.mean(one.block_error)))
    rows = range(len(mapped))
    axes.scatter([float(np.mean(one.block_error)) for one in mapped], rows, color=_COLOURS[1], s=14)
    axes.scatter([float(np.mean(one.floor)) for one in mapped], rows, color=_COLOURS[0], s=14, marker="|")
    axes.set_yticks(list(rows), [f"{one.name} ({one.features})" for one in mapped], fontsize=7)
    axes.set(
        title="weight error and its rank floor (|)", xlabel="relative error over off-diagonal blocks", xscale="symlog"
    )

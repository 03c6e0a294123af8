"""The focus lab as pictures: the article's curves, and what was found in the heads of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.report.figures import dark_is_more, new_figure
from softgap.theory.focus.concentration import AMOUNTS, FAMILIES
from softgap.theory.focus.synthetic import BETAS
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.theory.focus.concentration import FamilyPoint
    from softgap.theory.focus.model import ModelFocus
    from softgap.theory.focus.synthetic import FocusFindings

__all__ = ["draw_focus", "draw_focus_in_model"]

_SHOWN = ("softmax", "relu2_scores", "elu1")
_NAMED = ("softmax", "relu", "decay", "self_token", "first_token", "identity", "taylor2", "exp_dim", "favor")
_COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7c3aed", "#444444")


def draw_focus(findings: FocusFindings) -> Figure:
    """The curves of the article, redrawn: S against spread, length and number of features."""
    figure = new_figure(13, 7.5)
    axes = figure.subplots(2, 3)
    _draw_exp(axes[0, 0], findings)
    for place, name, betas in ((axes[0, 1], "relu2", BETAS), (axes[0, 2], "identity", [b for b in BETAS if b >= 0])):
        for beta in betas:
            place.plot(findings.gammas, findings.curves[name][BETAS.index(beta)], label=f"β = {beta:g}")
        place.set_title(f"{name}")
        place.set_xlabel("γ, standard deviation of the scores")
        place.set_xscale("log")
    axes[0, 2].axhline(np.sqrt(2 / np.pi), color=_COLOURS[-1], linestyle=":", label="√(2/π)")
    for beta in BETAS:
        axes[1, 0].plot(findings.gammas, findings.curves["relu"][BETAS.index(beta)], label=f"β = {beta:g}")
    axes[1, 0].set(title="relu", xlabel="γ, standard deviation of the scores", xscale="log")
    for decay, curve in findings.decays.items():
        axes[1, 1].plot(findings.lengths, curve, label=f"λ = {decay:g}")
    axes[1, 1].set(title="decay", xlabel="n, number of keys", xscale="log", yscale="log")
    _draw_feature_families(axes[1, 2], findings.feature_families)
    for place in axes.flat[:-1]:
        place.legend(fontsize=7, frameon=False)
    for place in (*axes[0], axes[1, 0], axes[1, 1]):
        place.set_ylabel("S (small is focused)")
    figure.suptitle("Focus of each kind of attention")
    return figure


def draw_focus_in_model(findings: ModelFocus) -> Figure:
    """Heads of a model: theory against measurement, mechanisms, capacity, interventions, placement, features."""
    figure = new_figure(17, 8.5)
    axes = figure.subplots(2, 4)
    _draw_predictions(axes[0, 0], findings)
    _draw_sparsity(axes[0, 1], findings)
    _draw_divergence(axes[0, 2], findings)
    _draw_capacity(axes[0, 3], findings)
    _draw_effects(axes[1, 0], findings)
    _draw_placement(axes[1, 1], findings)
    _draw_floor(axes[1, 2], findings)
    _draw_feature_families(axes[1, 3], findings.feature_families)
    for place in (axes[0, 0], axes[0, 3], axes[1, 0]):
        place.legend(fontsize=7, frameon=False)
    name = findings.settings.get("model", "a model")
    figure.suptitle(f"Focus in the heads of {name}, {findings.settings['tokens']} tokens")
    return figure


def _draw_exp(axes: Axes, findings: FocusFindings) -> None:
    axes.plot(findings.gammas, findings.curves["exp"][0], color=_COLOURS[0], label="n → ∞, every β")
    for colour, n in zip(_COLOURS[1:], sorted({row.n for row in findings.finite}), strict=False):
        rows = [row for row in findings.finite if row.n == n]
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


def _draw_feature_families(axes: Axes, family_points: Sequence[FamilyPoint]) -> None:
    for colour, family in zip(_COLOURS, FAMILIES, strict=False):
        points = [point for point in family_points if point.family == family]
        features = [point.features for point in points]
        label = {"shifted": "(1 + s/p)^p", "polynomial": "s^p"}.get(family, family)
        axes.plot(
            features, [point.weight_error for point in points], "o-", color=colour, label=f"{label}: weight error"
        )
        axes.plot(features, [point.sparsity for point in points], "s:", color=colour, label=f"{label}: S")
    axes.axhline(family_points[-1].sparsity, color=_COLOURS[-1], linestyle="--", label="S of softmax")
    axes.set(title="more features", xlabel="features", xscale="log", yscale="log")
    # Below the panel: its lines cross all of it.
    axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _draw_predictions(axes: Axes, findings: ModelFocus) -> None:
    for colour, rung in zip(_COLOURS, findings.predictions[:4], strict=False):
        measured, predicted = np.nanmean(rung.measured, axis=-1).ravel(), np.nanmean(rung.values, axis=-1).ravel()
        axes.scatter(measured, predicted, s=6, color=colour, alpha=0.6, linewidths=0, label=rung.name)
    axes.plot([0, 1], [0, 1], color=_COLOURS[-1], linewidth=0.8)
    axes.set(title="softmax: theory and measurement", xlabel="S measured, mean of a head", ylabel="S predicted")


def _draw_sparsity(axes: Axes, findings: ModelFocus) -> None:
    order = sorted(findings.mechanisms, key=lambda mechanism: float(np.nanmean(mechanism.sparsity)))
    axes.boxplot(
        [mechanism.sparsity[np.isfinite(mechanism.sparsity)] for mechanism in order],
        orientation="horizontal",
        flierprops={"markersize": 2},
    )
    axes.set_yticks(range(1, len(order) + 1), [mechanism.name for mechanism in order], fontsize=7)
    axes.set(title="S by mechanism", xlabel="S, heads")


def _draw_divergence(axes: Axes, findings: ModelFocus) -> None:
    uniform, elu1 = findings.of(BASELINE).from_softmax.ravel(), findings.of("elu1").from_softmax.ravel()
    points = axes.scatter(
        uniform, elu1, c=findings.of("softmax").sparsity.ravel(), s=10, cmap=dark_is_more(), linewidths=0
    )
    axes.plot([0, 1], [0, 1], color=_COLOURS[-1], linewidth=0.8)
    axes.set(title="divergence of heads", xlabel="from the mean of values", ylabel="from elu1")
    if axes.figure is not None:
        axes.figure.colorbar(points, ax=axes, label="S of softmax")


def _draw_capacity(axes: Axes, findings: ModelFocus) -> None:
    capacity = findings.capacity
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


def _draw_effects(axes: Axes, findings: ModelFocus) -> None:
    for style, change in zip(("o-", "s--"), ("scale q", "spread keys"), strict=True):
        for colour, name in zip(_COLOURS, _SHOWN, strict=False):
            some = [effect for effect in findings.effects if (effect.change, effect.mechanism) == (change, name)]
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


def _draw_placement(axes: Axes, findings: ModelFocus) -> None:
    for mechanism in findings.mechanisms:
        if np.isfinite(mechanism.columns).any():
            place = (float(np.nanmedian(mechanism.columns)), float(np.nanmedian(mechanism.distance)))
            axes.scatter(*place, s=14, color=_COLOURS[0])
            if mechanism.name in _NAMED:  # the others crowd around relu
                axes.annotate(mechanism.name, place, (3, 3), textcoords="offset points", fontsize=7)
    axes.set(title="share by position alone", xlabel="absolute position (columns)", ylabel="distance (Toeplitz)")


def _draw_floor(axes: Axes, findings: ModelFocus) -> None:
    ordered = sorted(
        (mechanism for mechanism in findings.mechanisms if mechanism.features),
        key=lambda mechanism: float(np.mean(mechanism.block_error)),
    )
    rows = range(len(ordered))
    axes.scatter([float(np.mean(mechanism.block_error)) for mechanism in ordered], rows, color=_COLOURS[1], s=14)
    axes.scatter([float(np.mean(mechanism.floor)) for mechanism in ordered], rows, color=_COLOURS[0], s=14, marker="|")
    axes.set_yticks(list(rows), [f"{mechanism.name} ({mechanism.features})" for mechanism in ordered], fontsize=7)
    axes.set(
        title="weight error and its rank floor (|)", xlabel="relative error over off-diagonal blocks", xscale="symlog"
    )

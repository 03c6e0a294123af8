"""Figures of the injectivity, position and separation labs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.report.figures import dark_is_more, new_figure
from softgap.theory.injectivity.model import ModelInjectivity
from softgap.theory.injectivity.synthetic import Injectivity
from softgap.theory.position.drift import TERMS
from softgap.theory.position.lab import Position
from softgap.theory.separation.lab import Separation
from softgap.theory.separation.phase_map import PhaseMap
from softgap.theory.separation.small_models import task
from softgap.theory.separation.training import Trained
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_injectivity", "draw_injectivity_in_model", "draw_position", "draw_separation"]


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
    error.set_title("inversion; lines: error over margin", fontsize="small")
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
        image = panel.imshow(values, aspect="auto", origin="lower", cmap=dark_is_more(), vmin=low, vmax=high)
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
    axes.set_title("softmax: collisions up to d keys (dotted), invertible beyond", fontsize="small")
    axes.legend(fontsize="x-small", frameon=False, loc="center right")


def _draw_searches(axes: Axes, lab: Injectivity) -> None:
    ordered = sorted(lab.searches, key=lambda search: -search.closest)
    place = np.arange(len(ordered))
    colours = [_WARM if search.has_collision else _COOL for search in ordered]
    axes.barh(place, [max(search.closest, _SMALLEST) for search in ordered], color=colours, left=_SMALLEST)
    names = [search.mechanism + ("" if not search.outside else " *") for search in ordered]
    axes.set_yticks(place, names, fontsize="x-small")
    axes.set_xscale("log")
    axes.set_xlabel("distance of the two closest distributions, relative to the largest weight")
    axes.set_title("collision search; orange: collision found, *: outside proposition 2", fontsize="small")


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
        cmap=dark_is_more(),
        linewidths=0,
    )
    axes.set(xlabel="confusion under softmax", ylabel="mean divergence from elu1")
    axes.figure.colorbar(points, ax=axes, label="S(a): 1 is even")


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
        strong = name in (first, BASELINE, "exchangeable values")
        style = "--" if name == BASELINE else ":" if name == "exchangeable values" else "-"
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
        shares = [trend.shares[i] for trend in lab.trends]
        value = np.array([share.value for share in shares])
        spread = np.abs(np.array([[s.value - s.low for s in shares], [s.high - s.value for s in shares]]))
        axes.barh(place + i * width, value, width, xerr=spread, color=colour, label=name, error_kw={"linewidth": 0.6})
    axes.set_yticks(place + 0.4, [trend.mechanism for trend in lab.trends], fontsize="x-small")
    axes.axvline(0, color="#444444", linewidth=0.6)
    axes.set_xlabel("share of the trend, over heads with a trend")
    _legend_below(axes, 4)


_D0, _D1 = "#94a3b8", "#c2410c"


_LINES = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0f766e")


def draw_separation(lab: Separation) -> Figure:
    """Firing of every mechanism on top, phase maps and growth below; a row for trained models where there are any."""
    maps, trained = lab.maps[:3], lab.trained
    rows = 2 if trained is None else 3
    figure = new_figure(4.2 * (len(maps) + 1), 4.0 * rows)
    grid = figure.add_gridspec(rows, len(maps) + 1)
    _draw_trials(figure.add_subplot(grid[0, :]), lab)
    for column, phase_map in enumerate(maps):
        _draw_map(figure, figure.add_subplot(grid[1, column]), phase_map)
    _draw_growth(figure.add_subplot(grid[1, len(maps)]), lab)
    if trained is not None:
        _draw_scores(figure.add_subplot(grid[2, : len(maps)]), trained)
        _draw_gradients(figure.add_subplot(grid[2, len(maps)]), trained)
    size = lab.construction
    kind = "cross-attention" if size.cross else "self-attention"
    figure.suptitle(
        f"Separation, {kind}: n = {size.n}, d = {size.d}, t = {size.t}, m = {size.m}, a0 = {size.a0:g}, "
        f"a1 = {size.a1:g}, b = {size.b:g}, c = {size.c:g}; {lab.settings['draws']} draws"
    )
    return figure


def _draw_trials(axes: Axes, lab: Separation) -> None:
    place = np.arange(len(lab.trials))
    for offset, colour, label in ((-0.18, _D0, "D0"), (0.18, _D1, "D1")):
        shares = [trial.fires_d0 if label == "D0" else trial.fires_d1 for trial in lab.trials]
        values = np.array([share.value for share in shares])
        spread = np.array(
            [[share.value - share.low for share in shares], [share.high - share.value for share in shares]]
        )
        axes.bar(
            place + offset,
            values,
            0.34,
            color=colour,
            label=label,
            yerr=spread.clip(0),
            ecolor=_INK,
            capsize=2,
        )
    axes.set_xticks(place, [trial.mechanism for trial in lab.trials], rotation=60, ha="right", fontsize="small")
    axes.set_ylabel("P(F > 0), 95 % interval")
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False, fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def _draw_map(figure: Figure, axes: Axes, phase_map: PhaseMap) -> None:
    image = axes.imshow(phase_map.success, origin="lower", aspect="auto", vmin=0, vmax=1, cmap=dark_is_more())
    axes.set_xticks(
        range(len(phase_map.x.values)), [f"{value:g}" for value in phase_map.x.values], rotation=45, fontsize="small"
    )
    axes.set_yticks(range(len(phase_map.y.values)), [f"{value:g}" for value in phase_map.y.values], fontsize="small")
    axes.set_xlabel(phase_map.x.name)
    axes.set_ylabel(phase_map.y.name)
    columns, rows = np.meshgrid(range(len(phase_map.x.values)), range(len(phase_map.y.values)))
    lines: list[tuple[Any, str, str]] = [
        (phase_map.median, "white", "argued"),
        (phase_map.bound < 0.5, "#dc2626", "bound < 1/2"),
    ]
    named = []
    for values, colour, label in lines:
        inside = np.nan_to_num(np.asarray(values, float))
        if 0 < inside.mean() < 1 and min(inside.shape) > 1:
            axes.contour(columns, rows, inside, levels=[0.5], colors=[colour], linewidths=1.5)
            named.append(f"{label}: {'white' if colour == 'white' else 'red'}")
    axes.set_title(f"{phase_map.mechanism}, P(both right)\n{'; '.join(named)}", fontsize="small")
    figure.colorbar(image, ax=axes, fraction=0.05)


def _draw_growth(axes: Axes, lab: Separation) -> None:
    n = [size.n for size in lab.scaled]
    for index, name in enumerate(trial.mechanism for trial in lab.scaled[0].trials):
        shares = [size.trials[index].success for size in lab.scaled]
        axes.plot(n, [share.value for share in shares], marker="o", color=_LINES[index], label=name)
        low, high = [share.low for share in shares], [share.high for share in shares]
        axes.fill_between(n, low, high, color=_LINES[index], alpha=0.15)
    if lab.turning is not None:
        axes.axvline(lab.turning, color=_INK, linestyle=":", label=f"margin lost, n = {lab.turning:,}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel("n (t = 1, a1 = 0.7, b = c = 0.5)")
    axes.set_title("P(both right)", fontsize="small")
    axes.legend(frameon=False, fontsize="small")


def _draw_scores(axes: Axes, trained: Trained) -> None:
    place, width = np.arange(len(trained.tasks)), 0.8 / len(trained.mechanisms)
    for index, mechanism in enumerate(trained.mechanisms):
        scores = [trained.score(name, mechanism) for name in trained.tasks]
        spread = np.nan_to_num([[score.value - score.low, score.high - score.value] for score in scores]).T
        where = place + (index - (len(trained.mechanisms) - 1) / 2) * width
        means = [score.value for score in scores]
        axes.bar(
            where,
            means,
            width,
            yerr=spread,
            color=_LINES[index % 5],
            label=mechanism,
            ecolor=_INK,
            capsize=2,
        )
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
            steps, norms = zip(
                *((checkpoint.step, checkpoint.gradient) for checkpoint in cell.checkpoints), strict=True
            )
            label = mechanism if cell.seed == 0 else None
            axes.plot(steps, norms, color=_LINES[index % 5], alpha=0.7, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_title(f"gradient norm, {name}", fontsize="small")
    axes.legend(frameon=False, fontsize="small")

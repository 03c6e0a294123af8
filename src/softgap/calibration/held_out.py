"""Measure how far a calibration closes the gap on held-out text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from scipy.stats import spearmanr

from softgap.attention import Mechanism, attend, compare_outputs
from softgap.errors import ValueInputError
from softgap.inputs import as_items
from softgap.intervals import Interval
from softgap.models.loading import Model
from softgap.models.placement import input_device
from softgap.models.support import check_measurable
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.probe.recording import record
from softgap.probe.tap import takes_positions
from softgap.probe.token_scores import forward_then_logits
from softgap.trajectories import Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = [
    "HeldLayer",
    "HeldOut",
    "divergences",
    "evaluate_held_out",
    "gap_closed",
    "held_layers",
    "measure_sequence",
    "some_layers",
    "spread_layers",
]


FIRST = 64


NO_GAP = 0.02


BINS = (0, 16, 64, 512, 1024, 2048, 4096, 8192)


RESAMPLES = 999


SINK = 0.5


SINKS, OTHERS = "first token over half", "first token at most half"


SLIDING, FULL = "layers with a sliding window", "layers that see every token"


@dataclass(frozen=True)
class HeldOut:
    """What held-out text says of a calibration.

    Attributes
    ----------
    gap_closed
        By mechanism, against ``uniform``, from position 64 on.
    against
        The fitted map against each baseline: 1 - mean divergence(fitted) / mean divergence(baseline).
    by_position
        The fitted map by range of positions, as ``"64-512"``.
    by_sink
        The fitted map in heads that give the first token more than half of their weight, and in the others.
    by_head
        The fitted map per ``[layer][head]``, None where there is no gap to close.
    explained
        1 - |l - o|^2 / |o|^2 of the fitted map: the median over heads of the mean over queries.
    texts, tokens
        How much text that was, without what is read for far positions alone.
    explained_by
        The same as ``explained``, for every mechanism. Below 0 an output is further from softmax's than no output is.
    explained_by_head
        The mean over queries of the fitted map's explained energy, per ``[layer][head]``; None where it is unknown.
    rank_correlation
        Spearman's rank correlation of ``by_head`` and ``explained_by_head`` over the heads with a gap: how far the
        order of the heads depends on the metric. None where it is undefined.
    by_window
        The fitted map in layers with a sliding window of the model's own, and in the others, where there are both.

    Notes
    -----
    The last four are empty or None in a calibration that an earlier version of softgap wrote.
    """

    gap_closed: Mapping[str, Interval]
    against: Mapping[str, Interval]
    by_position: Mapping[str, Interval]
    by_sink: Mapping[str, Interval]
    by_head: tuple[tuple[float | None, ...], ...]
    explained: float
    texts: int
    tokens: int
    explained_by: Mapping[str, float] = field(default_factory=dict)
    explained_by_head: tuple[tuple[float | None, ...], ...] = ()
    rank_correlation: float | None = None
    by_window: Mapping[str, Interval] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        shares = {name: {key: share.to_json() for key, share in getattr(self, name).items()} for name in _CLOSED}
        return {**asdict(self), **shares}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> HeldOut:
        """From plain data."""
        data = {"by_window": {}, **data}
        closed = {name: {key: Interval(**value) for key, value in data[name].items()} for name in _CLOSED}
        closed["by_position"] = dict(sorted(closed["by_position"].items(), key=lambda item: int(item[0].split("-")[0])))
        return cls(
            **closed,
            by_head=_rows(data["by_head"]),
            explained=float(data["explained"]),
            texts=int(data["texts"]),
            tokens=int(data["tokens"]),
            explained_by={name: float(value) for name, value in data.get("explained_by", {}).items()},
            explained_by_head=_rows(data.get("explained_by_head", ())),
            rank_correlation=None if data.get("rank_correlation") is None else float(data["rank_correlation"]),
        )


_CLOSED = ("gap_closed", "against", "by_position", "by_sink", "by_window")


def _rows(values: Sequence[Sequence[float | None]]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(None if x is None else float(x) for x in row) for row in values)


def gap_closed(
    fitted: Sequence[Float[np.ndarray, "*heads time"]],
    uniform: Sequence[Float[np.ndarray, "*heads time"]],
    positions: range | None = None,
    *,
    rng: np.random.Generator,
) -> Interval | None:
    """1 - mean(fitted) / mean(uniform) over the texts that reach these positions; None where none does.

    The interval is the middle 95 % over resampled texts. It has no width where there is one text only.
    """
    bounds = range(FIRST, 2**62) if positions is None else positions
    pairs = [
        (a[..., bounds.start : bounds.stop], b[..., bounds.start : bounds.stop])
        for a, b in zip(fitted, uniform, strict=True)
        if a.shape[-1] > bounds.start
    ]
    if not pairs:
        return None
    sums = np.array([[np.nansum(a, dtype=float), np.nansum(b, dtype=float)] for a, b in pairs])
    resampled = sums[rng.integers(len(sums), size=(RESAMPLES, len(sums)))].sum(axis=1)
    low, high = np.quantile(1 - resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    top, bottom = sums.sum(axis=0)
    return Interval(float(1 - top / bottom), float(low), float(high))


def measure_sequence(
    model: Model, ids: Sequence[int], mechanisms: Sequence[str | Mechanism], *, offset: int = 0
) -> Trajectories:
    """One sequence measured against mechanisms, its first token at position ``offset``; no logits are computed."""
    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=input_device(model)), "use_cache": False}
    if takes_positions(model):
        inputs["position_ids"] = offset + torch.arange(len(ids), device=input_device(model))[None]
    with record(model, mechanisms, block=1, logits=False) as recording, torch.inference_mode():
        forward_then_logits(model, inputs, len(ids))
    return recording.trajectories()[0]


def evaluate_held_out(
    model: Model,
    sequences: Sequence[Sequence[int]],
    mechanisms: Sequence[str | Mechanism],
    *,
    far: Sequence[Sequence[int]] = (),
    first: Float[np.ndarray, "layer head"] | None = None,
    windows: Sequence[int | None] = (),
    seed: int = 0,
    report: Callable[[int], None] = lambda done: None,
) -> HeldOut:
    """Read token sequences and compare: ``fitted`` and ``uniform`` must be among the mechanisms.

    ``far`` are long sequences, which tell of the positions that no other reaches and are compared with these two alone;
    ``first`` is the mean weight of each head on the first token, and ``windows`` the sliding window of each layer,
    where they are known; ``report`` hears how many sequences are read, the far ones last.
    """
    check_measurable(model)
    mechanisms = as_items(mechanisms)
    names = [mechanism if isinstance(mechanism, str) else mechanism.name for mechanism in mechanisms]
    if not {"fitted", BASELINE} <= set(names):
        raise ValueInputError(
            f"mechanisms must name fitted and {BASELINE}, got {', '.join(names)}; add what is missing"
        )
    divergence, energy = _measure_sequences(model, sequences, mechanisms, report)
    pair = [mechanism for mechanism, name in zip(mechanisms, names, strict=True) if name in ("fitted", BASELINE)]
    far_divergence: dict[str, list[np.ndarray]] = {"fitted": [], BASELINE: []}
    for number, ids in enumerate(far, start=len(sequences)):
        run = measure_sequence(model, ids, pair)
        for name, values in far_divergence.items():
            values.append(run.select(name).divergence)
        report(number + 1)
    shares = _gap_shares(divergence, far_divergence, first, windows, np.random.default_rng(seed))
    explained = {name: np.nanmean(np.concatenate(values, axis=-1), axis=-1) for name, values in energy.items()}
    by_head = _by_head(divergence["fitted"], divergence[BASELINE])
    return HeldOut(
        gap_closed=shares["gap_closed"],
        against=shares["against"],
        by_position=shares["by_position"],
        by_sink=shares["by_sink"],
        by_head=by_head,
        explained=float(np.nanmedian(explained["fitted"])),
        texts=len(sequences),
        tokens=sum(map(len, sequences)),
        explained_by={name: float(np.nanmedian(values)) for name, values in explained.items()},
        explained_by_head=_finite_rows(explained["fitted"]),
        rank_correlation=_rank_correlation(by_head, explained["fitted"]),
        by_window=shares["by_window"],
    )


def _measure_sequences(
    model: Model,
    sequences: Sequence[Sequence[int]],
    mechanisms: Sequence[str | Mechanism],
    report: Callable[[int], None],
) -> tuple[dict[str, list[np.ndarray]], dict[str, list[np.ndarray]]]:
    """The divergence of every mechanism in every sequence, and the energy of softmax that it explains."""
    divergence: dict[str, list[np.ndarray]] = {}
    energy: dict[str, list[np.ndarray]] = {}
    for number, ids in enumerate(sequences):
        run = measure_sequence(model, ids, mechanisms)
        for name in run.mechanisms:
            divergence.setdefault(name, []).append(run.select(name).divergence)
            energy.setdefault(name, []).append(1 - np.square(run.select(name).relative_l2[..., FIRST:]))
        report(number + 1)
    return divergence, energy


def _gap_shares(
    divergence: Mapping[str, list[np.ndarray]],
    far_divergence: Mapping[str, list[np.ndarray]],
    first: Float[np.ndarray, "layer head"] | None,
    windows: Sequence[int | None],
    rng: np.random.Generator,
) -> dict[str, dict[str, Interval]]:
    """Shares of the gap closed: by mechanism, against baselines, by position, by weight on the sink, and by window."""
    fitted, uniform = divergence["fitted"], divergence[BASELINE]
    closed = {name: gap_closed(values, uniform, rng=rng) for name, values in divergence.items() if name != BASELINE}
    against = {
        name: gap_closed(fitted, values, rng=rng)
        for name, values in divergence.items()
        if name not in ("fitted", "elu1")
    }
    ranges = {f"{a}-{b}": range(a, b) for a, b in pairwise(BINS)}
    positions = {
        name: gap_closed(fitted, uniform, bounds, rng=rng)
        or gap_closed(far_divergence["fitted"], far_divergence[BASELINE], bounds, rng=rng)
        for name, bounds in ranges.items()
    }
    groups = {} if first is None else {SINKS: first > SINK, OTHERS: first <= SINK}
    sinks = {
        name: gap_closed([x[heads] for x in fitted], [x[heads] for x in uniform], rng=rng)
        for name, heads in groups.items()
        if heads.any()
    }
    sliding = np.array([window is not None for window in windows], dtype=bool)
    layers = {SLIDING: sliding, FULL: ~sliding} if sliding.any() and not sliding.all() else {}
    by_window = {
        name: gap_closed([x[of] for x in fitted], [x[of] for x in uniform], rng=rng) for name, of in layers.items()
    }
    return {
        "gap_closed": _drop_missing(closed),
        "against": _drop_missing(against),
        "by_position": _drop_missing(positions),
        "by_sink": _drop_missing(sinks),
        "by_window": _drop_missing(by_window),
    }


def _drop_missing(shares: Mapping[str, Interval | None]) -> dict[str, Interval]:
    return {name: closed for name, closed in shares.items() if closed is not None}


def _by_head(fitted: Sequence[np.ndarray], uniform: Sequence[np.ndarray]) -> tuple[tuple[float | None, ...], ...]:
    means = [np.nanmean(np.concatenate([x[..., FIRST:] for x in part], axis=-1), axis=-1) for part in (fitted, uniform)]
    top, bottom = means
    return tuple(
        tuple(float(1 - a / b) if b >= NO_GAP else None for a, b in zip(*row, strict=True))
        for row in zip(top, bottom, strict=True)
    )


def _finite_rows(values: Float[np.ndarray, "layer head"]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(float(x) if np.isfinite(x) else None for x in row) for row in values)


def _rank_correlation(
    closed: Sequence[Sequence[float | None]], explained: Float[np.ndarray, "layer head"]
) -> float | None:
    """Spearman's correlation over the heads that have both numbers; None where either orders nothing."""
    shares = np.array([[np.nan if x is None else x for x in row] for row in closed])
    finite = np.isfinite(shares) & np.isfinite(explained)
    closed_shares, energies = shares[finite], explained[finite]
    if len(np.unique(closed_shares)) < 2 or len(np.unique(energies)) < 2:
        return None
    return float(spearmanr(closed_shares, energies).statistic)


LAYERS = 3


TEXTS, TOKENS = 3, 1024


@dataclass(frozen=True, eq=False)
class HeldLayer:
    """One layer on held-out texts, with the divergence of the mean of values there."""

    number: int
    texts: tuple[LayerTensors, ...]
    uniform: tuple[Float[np.ndarray, "head time"], ...]


def divergences(mechanism: str | Mechanism, texts: Sequence[LayerTensors]) -> tuple[np.ndarray, ...]:
    """Divergence of a mechanism from the model's output, text by text."""
    return tuple(
        compare_outputs(
            x.output,
            attend(
                mechanism, x.query[None], x.key[None], x.value[None], visible=x.visible, scale=x.scale, rule=x.rule
            ).output[0],
        )
        .divergence.cpu()
        .numpy()
        for x in texts
    )


def held_layers(model: Model, texts: Sequence[Sequence[int]], layers: Sequence[int]) -> tuple[HeldLayer, ...]:
    """Some layers of a model as held-out texts show them."""

    def visit(layer: LayerTensors) -> LayerTensors | None:
        if layer.layer not in layers:
            return None
        tensors = {name: getattr(layer, name).cpu().clone() for name in ("query", "key", "value", "output")}
        return replace(layer, **tensors)

    layers_by_text = [visit_layers(model, ids, visit) for ids in texts]
    layer_list = []
    for number in layers:
        layer_texts = tuple(layer for text in layers_by_text if (layer := text[number]) is not None)
        layer_list.append(HeldLayer(number, layer_texts, divergences(BASELINE, layer_texts)))
    return tuple(layer_list)


def some_layers(model: Model, texts: Sequence[Sequence[int]], windows: Sequence[int | None]) -> tuple[HeldLayer, ...]:
    """Layers spread evenly over a model, on the beginnings of a few texts; ``windows`` are those of all layers."""
    return held_layers(model, [ids[:TOKENS] for ids in texts[:TEXTS]], spread_layers(windows))


def spread_layers(windows: Sequence[int | None]) -> list[int]:
    """A few layers, spread evenly; where layers with and without a sliding window are mixed, some of either.

    >>> spread_layers([None] * 30)
    [7, 14, 21]
    >>> spread_layers([512, 512, 512, 512, 512, None] * 3)
    [5, 8, 12]
    """
    numbers = {int(x) for x in np.linspace(0, len(windows) - 1, LAYERS + 2)[1:-1]}
    for slides in (False, True):
        alike = [layer for layer, window in enumerate(windows) if (window is not None) == slides]
        if alike and not numbers & set(alike):
            # The layer next to one of those that are missing gives way to it.
            _, out, into = min((abs(a - b), a, b) for a in numbers for b in alike)
            numbers = numbers - {out} | {into}
    return sorted(numbers)

"""The position lab: why divergence changes with position, per head, in a model and in i.i.d. synthetic heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.probe.calibrations import calibrated
from softgap.probe.recording import ready
from softgap.probe.support import check_measurable
from softgap.probe.tensors import LayerTensors, visit_layers
from softgap.probe.text_ids import check_lengths
from softgap.theory.claims import Claim
from softgap.theory.intervals import Estimate, cluster_interval, ratio
from softgap.theory.position.claims import position_claims
from softgap.theory.position.drift import TERMS, LayerSeries, layer_series, synthetic_layer
from softgap.theory.position.trends import Slopes, log_slopes
from softgap.trajectories.display import Displayed

__all__ = ["Correction", "MechanismTrend", "Position", "fixed_maps", "position_in_model", "position_lab"]

Progress = Callable[[str, float], None]
GAINS = (0.3, 1.0, 2.0, 3.0, 4.5)


@dataclass(frozen=True)
class Correction:
    """What subtracting something from the divergence does to it, over the heads that have a trend.

    Attributes
    ----------
    left
        Sum of the absolute slopes after over that before.
    kept
        Median over heads of the variance around the trend after over that before.
    """

    name: str
    left: float
    kept: float


@dataclass(frozen=True, eq=False)
class MechanismTrend:
    """The trend of the divergence from one mechanism; slopes are per doubling of position.

    Attributes
    ----------
    slopes
        Of every head [layer, head].
    terms
        Slopes of the terms in :data:`TERMS`, [term, layer, head]; over the terms they sum to ``slopes.value``.
    random
        Slopes with queries of random direction and the same norms.
    shares
        For each term, its share of the trend over the heads that have one: sum of sign(slope) times its slope over the
        sum of |slope|.
    random_share
        The same for the trend with random queries.
    normaliser_change, normaliser_growth
        Largest change of a divergence when outputs are multiplied by the normaliser; the exponent with which it grows.
    """

    mechanism: str
    slopes: Slopes
    terms: Slopes
    random: Float64[np.ndarray, "layer head"]
    shares: tuple[Estimate, ...]
    random_share: Estimate
    corrections: tuple[Correction, ...]
    normaliser_change: float
    normaliser_growth: float

    @property
    def trending(self) -> np.ndarray:
        """Heads whose interval excludes 0."""
        return self.slopes.trending

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mechanism": self.mechanism,
            "slope": self.slopes.value.tolist(),
            "low": self.slopes.low.tolist(),
            "high": self.slopes.high.tolist(),
            "terms": {
                name: {key: getattr(self.terms, key)[i].tolist() for key in ("value", "low", "high")}
                for i, name in enumerate(TERMS)
            },
            "random": self.random.tolist(),
            "shares": {name: asdict(share) for name, share in zip(TERMS, self.shares, strict=True)},
            "random_share": asdict(self.random_share),
            "corrections": [asdict(correction) for correction in self.corrections],
            "normaliser_change": self.normaliser_change,
            "normaliser_growth": self.normaliser_growth,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Position(Displayed):
    """What the lab found; ``profiles`` are means over heads by position, [mechanism and uniform and P, step]."""

    trends: tuple[MechanismTrend, ...]
    positions: Float64[np.ndarray, " step"]
    profiles: dict[str, Float64[np.ndarray, " step"]]
    settings: dict[str, Any]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts on the first mechanism, read from its trend."""
        return position_claims(self)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "lab": "position",
            "settings": self.settings,
            "claims": [claim.to_json() for claim in self.claims],
            "positions": self.positions.tolist(),
            "profiles": {name: profile.tolist() for name, profile in self.profiles.items()},
            "trends": [trend.to_json() for trend in self.trends],
        }


def fixed_maps() -> list[str]:
    """elu1 first, then every other linear map that looks at the query and waits for no parameters."""
    found = [n for n, m in mechanisms().items() if m.kind == "features" and not m.missing and not m.query_free]
    return ["elu1", *(name for name in found if name != "elu1")]


def position_lab(
    *,
    rng: np.random.Generator,
    heads: int = 20,
    length: int = 512,
    dim: int = 64,
    value_mean: float = 0.3,
    start: int = 8,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress | None = None,
) -> Position:
    """The lab on i.i.d. heads, whose queries have gains from 0.3 to 4.5: from nearly even to concentrated softmax.

    Parameters
    ----------
    value_mean
        Size of each coordinate's common mean of the values against their deviation of 1.
    start
        First position that counts.
    """
    if heads < 8 or dim < 2:
        raise ValueInputError(f"heads must be at least 8 and dim at least 2, got {heads} and {dim}; use more")
    chosen = _chosen(mechanisms)
    tell = progress or (lambda *_: None)
    tell("drawing heads", 0.0)
    layer = synthetic_layer(heads=heads, length=length, dim=dim, rng=rng, gains=GAINS, value_mean=value_mean)
    series = layer_series(layer, chosen, start=start, rng=rng)
    settings = {"heads": heads, "tokens": length, "dim": dim, "value_mean": value_mean, "start": start, "layers": 1}
    return _assembled([series], chosen, np.arange(heads), settings, rng, tell)


def position_in_model(
    model: Any,
    token_ids: Sequence[int],
    *,
    rng: np.random.Generator,
    start: int = 8,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress | None = None,
) -> Position:
    """The lab in every head of a model over a text, with ``fitted`` where the model has a calibration."""
    check_measurable(model)
    if start < 1:
        raise ValueInputError(f"start must be at least 1, got {start}; the first position sees only itself")
    wanted = [*fixed_maps(), *calibrated(model)] if mechanisms is None else as_items(mechanisms)
    chosen = _chosen([ready(mechanism, model) for mechanism in wanted])
    check_lengths(model, [list(token_ids)], 0)
    tell = progress or (lambda *_: None)
    total = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    groups: list[int] = []

    def visit(layer: LayerTensors) -> LayerSeries:
        tell(f"layer {layer.layer}", 0.7 * layer.layer / total)
        groups.append(len(layer.key))
        return layer_series(layer, chosen, start=start, rng=rng)

    layers = visit_layers(model, token_ids, visit)
    if len({series.uniform.shape for series in layers}) != 1:
        raise UnsupportedError(
            "this lab needs the same heads in every layer, got layers that differ; use another model"
        )
    heads = layers[0].uniform.shape[0]
    clusters = (np.arange(len(layers))[:, None] * groups[0] + np.arange(heads) // (heads // groups[0])).ravel()
    settings = {"tokens": len(token_ids), "start": start, "layers": len(layers), "heads": heads}
    return _assembled(layers, chosen, clusters, settings, rng, tell)


def _chosen(wanted: Sequence[str | Mechanism] | None) -> list[Mechanism]:
    chosen = [resolve(m) for m in (fixed_maps() if wanted is None else as_items(wanted))]
    if not chosen:
        raise ValueInputError("a position lab needs at least one mechanism, got none; name one")
    for mechanism in chosen:
        mechanism.site(torch.arange(1), torch.float32)
    return chosen


def _assembled(
    layers: Sequence[LayerSeries],
    chosen: Sequence[Mechanism],
    clusters: Int[np.ndarray, " head"],
    settings: dict[str, Any],
    rng: np.random.Generator,
    tell: Progress,
) -> Position:
    positions = np.arange(layers[0].uniform.shape[-1], dtype=np.float64) + settings["start"] + 1
    uniform, exchangeable = (np.stack([getattr(x, name) for x in layers]) for name in ("uniform", "predicted"))
    mean_term, concentration = (np.stack([getattr(x, n) for x in layers]) for n in ("mean_term", "concentration_term"))
    profiles = {"uniform": uniform.mean(axis=(0, 1)), "exchangeable values": exchangeable.mean(axis=(0, 1))}
    trends = []
    for i, mechanism in enumerate(chosen):
        tell(f"trends of {mechanism.name}", 0.7 + 0.3 * i / len(chosen))
        divergence, random = (np.stack([getattr(x, name)[i] for x in layers]) for name in ("divergence", "random"))
        terms = np.stack([mean_term, concentration, uniform - exchangeable, divergence - uniform])
        effect = np.array([x.normaliser[i] for x in layers])
        profiles[mechanism.name] = divergence.mean(axis=(0, 1))
        trends.append(_trend(mechanism.name, divergence, random, terms, positions, clusters, effect, rng))
    return Position(tuple(trends), positions, profiles, {**settings, "mechanisms": [m.name for m in chosen]})


def _trend(
    name: str,
    divergence: np.ndarray,
    random: np.ndarray,
    terms: np.ndarray,
    positions: np.ndarray,
    clusters: np.ndarray,
    effect: np.ndarray,
    rng: np.random.Generator,
) -> MechanismTrend:
    # One call for all, so that every draw disturbs a series and its terms alike.
    together = log_slopes(np.concatenate([divergence[None], random[None], terms]), positions, rng=rng)
    total = _part(together, 0)
    slopes = together.value.reshape(len(together.value), -1)
    trending = total.trending.ravel()

    def share(row: int) -> Estimate:
        table = np.stack([np.sign(slopes[0]) * slopes[row], np.abs(slopes[0])])[:, trending]
        return cluster_interval(table, clusters[trending], ratio, rng=rng)

    known = np.isfinite(effect).all(axis=1)
    return MechanismTrend(
        mechanism=name,
        slopes=total,
        terms=_part(together, slice(2, None)),
        random=together.value[1],
        shares=tuple(share(2 + i) for i in range(len(TERMS))),
        random_share=share(1),
        corrections=_corrections(divergence, terms, positions, total.trending),
        normaliser_change=float(effect[known, 0].max()) if known.any() else float("nan"),
        normaliser_growth=float(effect[known, 1].mean()) if known.any() else float("nan"),
    )


def _part(slopes: Slopes, where: int | slice) -> Slopes:
    return Slopes(slopes.value[where], slopes.low[where], slopes.high[where], slopes.drawn[where])


def _corrections(
    divergence: np.ndarray, terms: np.ndarray, positions: np.ndarray, trending: np.ndarray
) -> tuple[Correction, ...]:
    """What is left of trend and variance when a term, or all that the control explains, is taken away."""
    if not trending.any():
        return ()
    candidates = {
        "minus running mean": terms[0],
        "minus concentration": terms[1],
        "minus exchangeable values": terms[0] + terms[1],
        "minus uniform": divergence - terms[3],
    }
    x = np.log2(positions) - np.log2(positions).mean()
    before_slope, before_spread = _line(divergence[trending], x)
    found = []
    for name, taken in candidates.items():
        slope, spread = _line((divergence - taken)[trending], x)
        left = float(np.abs(slope).sum() / np.abs(before_slope).sum())
        found.append(Correction(name, left, float(np.median(spread / np.maximum(before_spread, 1e-300)))))
    return tuple(found)


def _line(series: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope, and variance around the line."""
    centred = series - series.mean(axis=-1, keepdims=True)
    slope = centred @ x / (x @ x)
    return slope, (centred - slope[:, None] * x).var(axis=-1)

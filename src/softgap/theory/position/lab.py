"""The position lab: why divergence changes with position, per head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.deprecation import DeprecatedAttribute
from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.intervals import ClusterInterval, cluster_interval, ratio
from softgap.models.support import check_measurable
from softgap.models.tensor_files import calibrated_mechanisms
from softgap.probe.capture import check_lengths
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.probe.recording import prepare_mechanism
from softgap.progress import Progress, silent
from softgap.theory.lab import Claim, equal_texts
from softgap.theory.position.claims import position_claims
from softgap.theory.position.drift import (
    TERMS,
    LayerSeries,
    Slopes,
    layer_series,
    log_slopes,
    synthetic_layer,
)
from softgap.trajectories.run import Displayed
from softgap.trajectories.validation import BASELINE

__all__ = ["Correction", "MechanismTrend", "Position", "position_in_model", "position_lab"]


GAINS = (0.3, 1.0, 2.0, 3.0, 4.5)


@dataclass(frozen=True)
class Correction:
    """What subtracting something from the divergence does to it, over the heads that have a trend.

    Attributes
    ----------
    trend_left
        Sum of the absolute slopes after over that before.
    variance_left
        Median over heads of the variance around the trend after over that before.
    """

    name: str
    trend_left: float
    variance_left: float
    left = DeprecatedAttribute("trend_left")
    kept = DeprecatedAttribute("variance_left")

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"name": self.name, "left": self.trend_left, "kept": self.variance_left}


@dataclass(frozen=True, eq=False)
class MechanismTrend:
    """The trend of the divergence from one mechanism; slopes are per doubling of position.

    Attributes
    ----------
    slopes
        Of every head [layer, head]: means over texts.
    terms
        Slopes of the terms in ``TERMS``, [term, layer, head]; over the terms they sum to ``slopes.value``.
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
    shares: tuple[ClusterInterval, ...]
    random_share: ClusterInterval
    corrections: tuple[Correction, ...]
    normaliser_change: float
    normaliser_growth: float

    @property
    def trending(self) -> np.ndarray:
        """Heads with a trend over texts: q at most 0.05 among all heads."""
        return self.slopes.trending

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mechanism": self.mechanism,
            "slope": self.slopes.value.tolist(),
            "low": self.slopes.low.tolist(),
            "high": self.slopes.high.tolist(),
            "p": self.slopes.p.tolist(),
            "q": self.slopes.q.tolist(),
            "terms": {
                name: {key: getattr(self.terms, key)[i].tolist() for key in ("value", "low", "high")}
                for i, name in enumerate(TERMS)
            },
            "random": self.random.tolist(),
            "shares": {name: asdict(share) for name, share in zip(TERMS, self.shares, strict=True)},
            "random_share": asdict(self.random_share),
            "corrections": [correction.to_json() for correction in self.corrections],
            "normaliser_change": self.normaliser_change,
            "normaliser_growth": self.normaliser_growth,
        }


@dataclass(frozen=True, eq=False, repr=False)
class Position(Displayed):
    """What the lab found; ``profiles`` are means over texts and heads by position, of mechanisms, uniform and P."""

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
    names = [n for n, m in mechanisms().items() if m.kind == "features" and not m.missing and not m.query_free]
    return ["elu1", *(name for name in names if name != "elu1")]


def position_lab(
    *,
    rng: np.random.Generator,
    heads: int = 20,
    length: int = 512,
    dim: int = 64,
    value_mean: float = 0.3,
    texts: int = 8,
    start: int = 8,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress | None = None,
) -> Position:
    """The lab on i.i.d. heads, whose queries have gains from 0.3 to 4.5: from nearly even to concentrated softmax.

    Parameters
    ----------
    rng
        The generator of queries, keys and values.
    heads, length, dim
        Number of heads, positions, and dimension of a head.
    value_mean
        Size of each coordinate's common mean of the values against their deviation of 1.
    texts
        Independent draws of every head, the sample that intervals and p-values are over.
    start
        First position that counts.
    mechanisms
        Which mechanisms; every registered feature map that needs no parameters by default.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Position
        The slope of every head with its terms, and a verdict for each claim.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.theory import position_lab
    >>> lab = position_lab(rng=np.random.default_rng(0), heads=8, length=64, dim=8, texts=4, mechanisms=["elu1"])
    >>> len(lab.trends)
    1
    """
    if heads < 8 or dim < 2:
        raise ValueInputError(f"heads must be at least 8 and dim at least 2, got {heads} and {dim}; use more")
    if texts < 1:
        raise ValueInputError(f"texts must be at least 1, got {texts}; 8 or more show a trend")
    selection = _resolve_mechanisms(mechanisms)
    tell = progress or silent
    sizes: dict[str, Any] = {"heads": heads, "length": length, "dim": dim, "value_mean": value_mean}
    drawn = []
    for text in range(texts):
        tell("drawing heads", 0.7 * text / texts)
        layer = synthetic_layer(**sizes, gains=GAINS, rng=rng)
        drawn.append([layer_series(layer, selection, start=start, rng=rng)])
    settings = {
        **{"heads": heads, "tokens": length, "texts": texts, "dim": dim, "value_mean": value_mean},
        **{"start": start, "layers": 1},
    }
    return _assemble_lab(drawn, selection, np.arange(heads), settings, rng, tell)


def position_in_model(
    model: Any,
    texts: Sequence[Sequence[int]] | Sequence[int],
    *,
    rng: np.random.Generator,
    start: int = 8,
    mechanisms: Sequence[str | Mechanism] | None = None,
    progress: Progress | None = None,
) -> Position:
    """The lab in every head of a model over some texts, with ``fitted`` where the model has a calibration.

    Parameters
    ----------
    texts
        The token ids of each text, all equally many; one list of ids is one text. A head has a trend only over texts:
        with one text nothing is decided, and 8 or more are advised.
    start
        First position that counts.
    """
    check_measurable(model)
    if start < 1:
        raise ValueInputError(f"start must be at least 1, got {start}; the first position sees only itself")
    read = equal_texts(texts)
    requests = [*fixed_maps(), *calibrated_mechanisms(model)] if mechanisms is None else as_items(mechanisms)
    selection = _resolve_mechanisms([prepare_mechanism(mechanism, model) for mechanism in requests])
    check_lengths(model, read, 0)
    tell = progress or silent
    total = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    groups: list[int] = []
    by_text: list[list[LayerSeries]] = []

    def visit(layer: LayerTensors) -> LayerSeries:
        share = (len(by_text) + layer.layer / total) / len(read)
        tell(f"text {len(by_text) + 1} of {len(read)}, layer {layer.layer}", 0.7 * share)
        groups.append(len(layer.key))
        return layer_series(layer, selection, start=start, rng=rng)

    for token_ids in read:
        by_text.append(visit_layers(model, token_ids, visit))
    layers = by_text[0]
    if len({series.uniform.shape for series in layers}) != 1:
        raise UnsupportedError(
            "this lab needs the same number of heads in every layer, got layers that differ; use another model"
        )
    heads = layers[0].uniform.shape[0]
    clusters = (np.arange(len(layers))[:, None] * groups[0] + np.arange(heads) // (heads // groups[0])).ravel()
    settings = {"tokens": len(read[0]), "texts": len(read), "start": start, "layers": len(layers), "heads": heads}
    return _assemble_lab(by_text, selection, clusters, settings, rng, tell)


def _resolve_mechanisms(names: Sequence[str | Mechanism] | None) -> list[Mechanism]:
    selection = [resolve(m) for m in (fixed_maps() if names is None else as_items(names))]
    if not selection:
        raise ValueInputError("a position lab needs at least one mechanism, got none; name one")
    for mechanism in selection:
        mechanism.site(torch.arange(1), torch.float32)
    return selection


def _assemble_lab(
    texts: Sequence[Sequence[LayerSeries]],
    mechanisms: Sequence[Mechanism],
    clusters: Int[np.ndarray, " head"],
    settings: dict[str, Any],
    rng: np.random.Generator,
    tell: Progress,
) -> Position:
    def stacked(name: str, mechanism: int | None = None) -> Float64[np.ndarray, "text layer head step"]:
        every = [[getattr(series, name) for series in layers] for layers in texts]
        return np.array([[x if mechanism is None else x[mechanism] for x in layers] for layers in every])

    uniform, exchangeable = stacked("uniform"), stacked("predicted")
    positions = np.arange(uniform.shape[-1], dtype=np.float64) + settings["start"] + 1
    mean_term, concentration = stacked("mean_term"), stacked("concentration_term")
    profiles = {BASELINE: uniform.mean(axis=(0, 1, 2)), "exchangeable values": exchangeable.mean(axis=(0, 1, 2))}
    trends = []
    for i, mechanism in enumerate(mechanisms):
        tell(f"trends of {mechanism.label}", 0.7 + 0.3 * i / len(mechanisms))
        divergence, random = stacked("divergence", i), stacked("random", i)
        terms = np.stack([mean_term, concentration, uniform - exchangeable, divergence - uniform], axis=1)
        effect = np.array([series.normaliser[i] for layers in texts for series in layers])
        profiles[mechanism.label] = divergence.mean(axis=(0, 1, 2))
        trends.append(_trend(mechanism.label, divergence, random, terms, positions, clusters, effect, rng))
    return Position(tuple(trends), positions, profiles, {**settings, "mechanisms": [m.label for m in mechanisms]})


def _trend(
    name: str,
    divergence: Float64[np.ndarray, "text layer head step"],
    random: Float64[np.ndarray, "text layer head step"],
    terms: Float64[np.ndarray, "text term layer head step"],
    positions: np.ndarray,
    clusters: np.ndarray,
    effect: np.ndarray,
    rng: np.random.Generator,
) -> MechanismTrend:
    total, turned = log_slopes(divergence, positions), log_slopes(random, positions).value
    parts = log_slopes(terms, positions)
    trending = total.trending.ravel()

    def share(slopes: np.ndarray) -> ClusterInterval:
        table = np.stack([np.sign(total.value) * slopes, np.abs(total.value)]).reshape(2, -1)[:, trending]
        return cluster_interval(table, clusters[trending], ratio, rng=rng)

    known = np.isfinite(effect).all(axis=1)
    return MechanismTrend(
        mechanism=name,
        slopes=total,
        terms=parts,
        random=turned,
        shares=tuple(share(part) for part in parts.value),
        random_share=share(turned),
        corrections=_corrections(divergence, terms, positions, total.trending),
        normaliser_change=float(effect[known, 0].max()) if known.any() else float("nan"),
        normaliser_growth=float(effect[known, 1].mean()) if known.any() else float("nan"),
    )


def _corrections(
    divergence: Float64[np.ndarray, "text layer head step"],
    terms: Float64[np.ndarray, "text term layer head step"],
    positions: np.ndarray,
    trending: np.ndarray,
) -> tuple[Correction, ...]:
    """What is left of trend and variance when a term, or all that the control explains, is taken away."""
    if not trending.any():
        return ()
    candidates = {
        "minus running mean": terms[:, 0],
        "minus concentration": terms[:, 1],
        "minus exchangeable values": terms[:, 0] + terms[:, 1],
        "minus uniform": divergence - terms[:, 3],
    }
    x = np.log2(positions) - np.log2(positions).mean()
    before_slope, before_spread = _line(divergence[:, trending], x)
    corrections = []
    for name, term in candidates.items():
        slope, spread = _line((divergence - term)[:, trending], x)
        left = float(np.abs(slope).sum() / np.abs(before_slope).sum())
        corrections.append(Correction(name, left, float(np.median(spread / np.maximum(before_spread, 1e-300)))))
    return tuple(corrections)


def _line(series: Float64[np.ndarray, "text head step"], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every head, in means over texts: slope, and variance around the line of each text."""
    centred = series - series.mean(axis=-1, keepdims=True)
    slope = centred @ x / (x @ x)
    return slope.mean(axis=0), (centred - slope[..., None] * x).var(axis=-1).mean(axis=0)

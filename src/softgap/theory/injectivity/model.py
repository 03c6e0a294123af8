"""The injectivity lab inside a real model: every head over a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.errors import UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.intervals import ClusterInterval, cluster_interval, joint_level, rank_correlation, weighted_mean
from softgap.models.support import check_measurable
from softgap.models.tensor_files import calibrated_mechanisms
from softgap.probe.capture import check_lengths
from softgap.probe.layout import LayerTensors, visit_layers
from softgap.probe.recording import prepare_mechanism
from softgap.progress import Progress, silent
from softgap.theory.injectivity.collisions import Collision, multiples_collision
from softgap.theory.injectivity.confusion import LayerMeasures, LayerPlan, measure_layer
from softgap.theory.injectivity.model_claims import model_claims
from softgap.theory.lab import Claim
from softgap.trajectories.run import Displayed
from softgap.trajectories.validation import BASELINE

__all__ = ["Correlation", "ModelInjectivity", "injectivity_in_model"]


CLASSICAL = "elu1"


# Both are needed by the verdict on whether injectivity is what matters.
_ALWAYS = ("softmax", CLASSICAL, "relu2_scores", "taylor2", BASELINE)


@dataclass(frozen=True)
class Correlation:
    """Across heads: a measure against the divergence from a mechanism, plain and at equal concentration.

    ``at_equal_focus`` is the partial correlation given S(a) of the head's softmax weights: concentration alone moves
    both the divergence and most measures.
    """

    measure: str
    mechanism: str
    plain: ClusterInterval
    at_equal_focus: ClusterInterval


@dataclass(frozen=True, eq=False, repr=False)
class ModelInjectivity(Displayed):
    """What the lab found in a model; arrays are [layer, head].

    All intervals of a run hold together with 95 % confidence: each stands at the level of ``settings``, after
    Bonferroni.

    Attributes
    ----------
    lengths
        Prefix lengths (numbers of keys) of ``margin`` and ``confusion``.
    margin, first, weight_margin, focus, confusion, divergence
        As in ``LayerMeasures``; ``confusion`` and ``divergence`` by mechanism.
    linear
        Which of the mechanisms are linear maps, phi(q).phi(k).
    confused
        By mechanism, mean over heads of its confusion minus that of softmax, over the longest common key set.
    correlations
        Every measure against every divergence asked for.
    nearer
        Mean over heads of div(taylor2) - div(relu2_scores): above 0 where the mechanism that is not injective is the
        nearer one.
    collision
        q and 7 q of one head over its own keys under relu2_scores.
    """

    mechanisms: tuple[str, ...]
    linear: tuple[bool, ...]
    lengths: tuple[int, ...]
    margin: Float64[np.ndarray, "layer head length"]
    first: Int[np.ndarray, "layer head"]
    weight_margin: Float64[np.ndarray, "layer head"]
    focus: Float64[np.ndarray, "layer head"]
    confusion: Float64[np.ndarray, "mechanism layer head length"]
    divergence: Float64[np.ndarray, "mechanism layer head"]
    confused: tuple[ClusterInterval, ...]
    correlations: tuple[Correlation, ...]
    nearer: ClusterInterval
    collision: Collision
    dim: int
    settings: dict[str, Any]

    @property
    def rate(self) -> Float64[np.ndarray, "mechanism layer head"]:
        """Confusion over the longest common key set."""
        return np.asarray(self.confusion[..., self.common])

    @property
    def common(self) -> int:
        """Index of the longest common key set among ``lengths``."""
        measured = np.isfinite(self.confusion).any(axis=(0, 1, 2))
        return int(np.flatnonzero(measured)[-1])

    @property
    def claims(self) -> tuple[Claim, ...]:
        """The verdicts, read from the fields above."""
        return model_claims(self)

    def of(self, name: str) -> int:
        """Index of a mechanism."""
        return self.mechanisms.index(name)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        rate = self.rate
        return {
            "lab": "injectivity",
            "settings": self.settings,
            "claims": [claim.to_json() for claim in self.claims],
            "mechanisms": list(self.mechanisms),
            "lengths": list(self.lengths),
            "margin": self.margin.tolist(),
            "first": self.first.tolist(),
            "weight_margin": self.weight_margin.tolist(),
            "focus": self.focus.tolist(),
            "confusion_keys": self.lengths[self.common],
            "confusion": {name: rate[i].tolist() for i, name in enumerate(self.mechanisms)},
            "mean_confusion": {
                name: [_mean(self.confusion[i, :, :, j]) for j in range(len(self.lengths))]
                for i, name in enumerate(self.mechanisms)
            },
            "divergence": {name: self.divergence[i].tolist() for i, name in enumerate(self.mechanisms)},
            "confused": {name: asdict(self.confused[i]) for i, name in enumerate(self.mechanisms)},
            "correlations": [asdict(correlation) for correlation in self.correlations],
            "nearer": asdict(self.nearer),
            "collision": self.collision.to_json(),
        }


def comparable() -> list[str]:
    """Registered mechanisms that look at the query and wait for no parameters, and the control."""
    registry = mechanisms().items()
    return [n for n, m in registry if (m.kind in ("features", "scores") and not m.missing and not m.query_free)] + [
        BASELINE
    ]


def injectivity_in_model(
    model: Any,
    token_ids: Sequence[int],
    *,
    rng: np.random.Generator,
    mechanisms: Sequence[str | Mechanism] | None = None,
    queries: int = 64,
    near: float = 0.2,
    progress: Progress | None = None,
) -> ModelInjectivity:
    """Measure margins, confusion and divergence of every head of a model over a text.

    Parameters
    ----------
    token_ids
        The text; at least 2 (d + 2) tokens for heads of dimension d, and no more than the model's context.
    mechanisms
        Compared beside softmax, elu1, relu2_scores, taylor2 and uniform, which always are; every mechanism that looks
        at the query by default, ``fitted`` among them where the model has a calibration: its divergence is the
        calibrated one. A ``Mechanism`` may carry parameters for every layer and head.
    queries
        Queries of the second half of the text whose distributions are compared pairwise.
    near
        See ``confusion_rate``.
    """
    check_measurable(model)
    if queries < 8:
        raise ValueInputError(f"queries must be at least 8 for a rate over pairs, got {queries}; use more")
    requests = [*comparable(), *calibrated_mechanisms(model)] if mechanisms is None else as_items(mechanisms)
    selection = [prepare_mechanism(mechanism, model) for mechanism in requests]
    names = [m.name for m in selection]
    selection = [*(resolve(name) for name in _ALWAYS if name not in names), *selection]
    for mechanism in selection:
        mechanism.site(torch.arange(1), torch.float32)
    check_lengths(model, [list(token_ids)], 0)
    plan = LayerPlan(queries, tuple(selection), near, start=min(64, len(token_ids) // 2))
    total = int(getattr(model.config.get_text_config(), "num_hidden_layers", 1))
    tell = progress or silent
    first_head: list[tuple[np.ndarray, np.ndarray, float]] = []

    def visit(layer: LayerTensors) -> LayerMeasures:
        tell(f"layer {layer.layer}", layer.layer / total)
        if not first_head:
            half = layer.key.shape[1] // 2
            first_head.append((layer.query[0, -1].double().numpy(), layer.key[0, :half].double().numpy(), layer.scale))
        return measure_layer(layer, plan)

    layers = visit_layers(model, token_ids, visit)
    query, keys, scale = first_head[0]
    collision = multiples_collision(query, keys, scale=scale, factors=(1.0, 7.0), mechanism="relu2_scores")
    settings = {"tokens": len(token_ids), "queries": queries, "near": near, "start": plan.start}
    return _assemble_lab(layers, selection, collision, keys.shape[1], settings, rng)


def _assemble_lab(
    layers: Sequence[LayerMeasures],
    mechanisms: Sequence[Mechanism],
    collision: Collision,
    dim: int,
    settings: dict[str, Any],
    rng: np.random.Generator,
) -> ModelInjectivity:
    shapes = {(layer.margin.shape, layer.kv_heads) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedError(
            "this lab needs the same number of heads in every layer, got layers that differ; use another model"
        )
    names = tuple(m.label for m in mechanisms)
    stacked = {
        field: np.stack([getattr(layer, field) for layer in layers])
        for field in ("margin", "first", "weight_margin", "focus")
    }
    confusion = np.stack([layer.confusion for layer in layers], axis=1)
    divergence = np.stack([layer.divergence for layer in layers], axis=1)
    heads, kv_heads = divergence.shape[2], layers[0].kv_heads
    # Heads of one KV group share their keys: an interval draws whole groups.
    clusters = (np.arange(len(layers))[:, None] * kv_heads + np.arange(heads) // (heads // kv_heads)).ravel()
    common = int(np.flatnonzero(np.isfinite(confusion).any(axis=(0, 1, 2)))[-1])
    rate = confusion[..., common].reshape(len(names), -1)
    difference = (divergence[names.index("taylor2")] - divergence[names.index("relu2_scores")]).ravel()
    against = [name for name in (CLASSICAL, BASELINE, "fitted") if name in names]
    measures = _measures(names, confusion[..., common], stacked)
    softmax = rate[names.index("softmax")]
    rated = [name != "softmax" and bool(np.isfinite(row).any()) for name, row in zip(names, rate, strict=True)]
    # Every correlation plain and at equal concentration, every difference of rates, and which of two is nearer.
    intervals = 2 * len(measures) * len(against) + sum(rated) + 1
    level = joint_level(intervals)
    return ModelInjectivity(
        mechanisms=names,
        linear=tuple(m.kind == "features" and not m.query_free for m in mechanisms),
        lengths=layers[0].lengths,
        **stacked,
        confusion=confusion,
        divergence=divergence,
        correlations=_correlations(
            measures, {name: divergence[names.index(name)] for name in against}, stacked["focus"], clusters, level, rng
        ),
        nearer=_mean_over_heads(difference, clusters, level, rng),
        confused=tuple(_mean_over_heads(row - softmax, clusters, level, rng) for row in rate),
        collision=collision,
        dim=dim,
        settings={
            **settings,
            **{"layers": len(layers), "heads": heads, "kv_heads": kv_heads, "intervals": intervals, "level": level},
        },
    )


def _measures(
    names: tuple[str, ...], rate: Float64[np.ndarray, "mechanism layer head"], stacked: dict[str, np.ndarray]
) -> dict[str, Float64[np.ndarray, "layer head"]]:
    """What is held against divergences, by name."""
    softmax, classical = rate[names.index("softmax")], rate[names.index(CLASSICAL)]
    return {
        "softmax confusion": softmax,
        f"{CLASSICAL} confusion": classical,
        f"{CLASSICAL} confusion - softmax confusion": classical - softmax,
        "log margin": stacked["margin"][..., -1],
        "weight margin": stacked["weight_margin"],
    }


def _correlations(
    measures: dict[str, Float64[np.ndarray, "layer head"]],
    divergences: dict[str, Float64[np.ndarray, "layer head"]],
    focus: Float64[np.ndarray, "layer head"],
    clusters: Int[np.ndarray, " head"],
    level: float,
    rng: np.random.Generator,
) -> tuple[Correlation, ...]:
    correlations = []
    for measure, values in measures.items():
        for mechanism, divergence in divergences.items():
            x, y = values.ravel(), divergence.ravel()
            plain = rank_correlation(x, y, clusters, rng=rng, level=level)
            partial = rank_correlation(x, y, clusters, rng=rng, covariate=focus.ravel(), level=level)
            correlations.append(Correlation(measure, mechanism, plain, partial))
    return tuple(correlations)


def _mean_over_heads(
    values: np.ndarray, clusters: np.ndarray, level: float, rng: np.random.Generator
) -> ClusterInterval:
    known = np.isfinite(values)
    return cluster_interval(values[None, known], clusters[known], weighted_mean, rng=rng, level=level)


def _mean(values: np.ndarray) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")

"""Everything the focus lab measures in one layer of a model, while its tensors are at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from softgap.attention import Mechanism, Visible, attention_weights, compare_outputs, resolve
from softgap.attention.rank import BlockSpectra, block_error, block_spectra, numerical_rank, without_sink
from softgap.probe.layout import LayerTensors
from softgap.theory.focus.concentration import (
    Effect,
    FamilyPoint,
    column_share,
    concentration,
    distance_share,
    feature_prediction,
    intervention_effects,
    measure_feature_families,
    row_sparsity,
    score_moments,
)

__all__ = ["FocusPlan", "LayerFocus", "MechanismLayer", "SoftmaxFocus", "examine_layer"]

Reals = NDArray[np.float64]


@dataclass(frozen=True)
class FocusPlan:
    """What to measure.

    Attributes
    ----------
    mechanisms
        Beside softmax, with their parameters for all layers.
    first
        Means are over queries from this position on.
    smallest
        Smallest off-diagonal block.
    corner
        Ranks and shares are those of the first ``corner`` tokens; interventions and feature families take the
        last ``rows`` queries.
    """

    mechanisms: tuple[Mechanism, ...]
    first: int
    smallest: int = 16
    corner: int = 256
    rows: int = 64


@dataclass(frozen=True, eq=False)
class SoftmaxFocus:
    """Softmax per head and query, with what theory needs to predict it; ``without`` leaves the first key out."""

    n: Reals
    sparsity: Reals
    entropy: Reals
    largest: Reals
    gamma: Reals
    isotropic: Reals
    first: Reals
    without_sparsity: Reals
    without_gamma: Reals
    without_skewness: Reals


@dataclass(frozen=True, eq=False)
class MechanismLayer:
    """One mechanism on one layer, per head: means over the queries of the plan.

    Attributes
    ----------
    general, iid
        S by the general and the i.i.d. formula; NaN where they do not apply. ``gap`` is the largest difference between
        the general formula and S itself.
    from_softmax, from_uniform
        Divergence of its output from softmax's and from the mean of the visible values.
    columns, distance
        Share of the matrix that is a function of absolute position, or of distance, alone.
    block_error
        Relative error of its weights over the off-diagonal blocks of softmax.
    """

    sparsity: Reals
    general: Reals
    iid: Reals
    gap: float
    from_softmax: Reals
    from_uniform: Reals
    columns: Reals
    distance: Reals
    block_error: Reals


@dataclass(frozen=True, eq=False)
class LayerFocus:
    """One layer, measured."""

    softmax: SoftmaxFocus
    mechanisms: dict[str, MechanismLayer]
    spectra: BlockSpectra
    spectra_without: BlockSpectra
    ranks: dict[tuple[str, str], NDArray[np.int64]]
    effects: list[Effect]
    feature_families: list[FamilyPoint]


def examine_layer(layer: LayerTensors, plan: FocusPlan) -> LayerFocus:
    """Measure one layer; weights are softmax's own, without the caps, biases and learned sinks of some models."""
    seen = layer.visible.rows(0, layer.query.shape[1], (0, layer.key.shape[1]), layer.query.device)[0, 0].float()
    mechanisms = [mechanism.for_layers([layer.layer]) for mechanism in (resolve("softmax"), *plan.mechanisms)]
    exact = _weights(mechanisms[0], layer)
    last = layer.query[:, -plan.rows :]
    tail = Visible(window=layer.visible.window)
    return LayerFocus(
        softmax=_softmax_rows(layer, exact, seen),
        mechanisms={mechanism.label: _mechanism(mechanism, layer, exact, seen, plan) for mechanism in mechanisms},
        spectra=block_spectra(exact, plan.smallest),
        # The first key's column holds most of the energy of a sink head, and one rank.
        spectra_without=block_spectra(without_sink(exact), plan.smallest),
        ranks=_ranks(layer, exact, plan),
        effects=intervention_effects(mechanisms, last, layer.key, scale=layer.scale, visible=tail),
        feature_families=measure_feature_families(last, layer.key, layer.value, scale=layer.scale, visible=tail),
    )


def _weights(mechanism: Mechanism, layer: LayerTensors) -> Float[Tensor, "head query key"]:
    return attention_weights(mechanism, layer.query[None], layer.key[None], visible=layer.visible, scale=layer.scale)[0]


def _repeat_kv(layer: LayerTensors, tensor: Float[Tensor, "kv_head key dim"]) -> Float[Tensor, "head key dim"]:
    return tensor.repeat_interleave(layer.query.shape[0] // tensor.shape[0], dim=0)


def _softmax_rows(layer: LayerTensors, exact: Float[Tensor, "head query key"], seen: Tensor) -> SoftmaxFocus:
    n = seen.sum(dim=-1)
    whole = concentration(exact, n)
    key = _repeat_kv(layer, layer.key)
    moments = score_moments(layer.query, key, seen, layer.scale)
    later_keys = seen.clone()
    later_keys[torch.arange(len(seen)), seen.argmax(dim=-1)] = 0
    # A row that saw only that key has nothing left: NaN.
    without = concentration(exact * later_keys, later_keys.sum(dim=-1))
    without_moments = score_moments(layer.query, key, later_keys, layer.scale)
    arrays = (
        n,
        *(whole.sparsity, whole.entropy, whole.largest),
        *(moments.gamma, moments.isotropic, moments.first),
        *(without.sparsity, without_moments.gamma, without_moments.skewness),
    )
    return SoftmaxFocus(*(x.double().numpy() for x in arrays))


def _mechanism(
    mechanism: Mechanism, layer: LayerTensors, exact: Float[Tensor, "head query key"], seen: Tensor, plan: FocusPlan
) -> MechanismLayer:
    weights = exact if mechanism.name == "softmax" else _weights(mechanism, layer)
    n, some = seen.sum(dim=-1), slice(plan.first, None)
    s = row_sparsity(weights, n)
    value = _repeat_kv(layer, layer.value)
    output = weights @ value
    predicted = feature_prediction(mechanism, layer.query, _repeat_kv(layer, layer.key), seen, layer.scale)
    nothing = torch.full_like(s, torch.nan, dtype=torch.float64)
    general, iid = predicted if predicted is not None else (nothing, nothing)
    corner = weights[:, : plan.corner, : plan.corner]
    sparsity, by_formula, by_iid = (x[:, some].nanmean(dim=-1).double().numpy() for x in (s, general, iid))
    gap = (general - s)[:, some].abs().nan_to_num(0).amax().item() if predicted is not None else float("nan")
    from_softmax, from_uniform = (
        compare_outputs(other, output).divergence[:, some].mean(dim=-1).double().numpy()
        for other in (exact @ value, (seen / n[:, None]) @ value)
    )
    return MechanismLayer(
        sparsity,
        by_formula,
        by_iid,
        gap,
        from_softmax,
        from_uniform,
        column_share(corner).numpy(),
        distance_share(corner).numpy(),
        block_error(weights, exact, plan.smallest),
    )


def _ranks(layer: LayerTensors, exact: Tensor, plan: FocusPlan) -> dict[tuple[str, str], NDArray[np.int64]]:
    """Numerical rank of the corner under the model's mask, with the mask lifted, and of the corner's largest block."""
    length = min(plan.corner, exact.shape[1])
    query, key = (x[None, :, :length].double() for x in (layer.query, layer.key))
    lifted = Visible(mask=torch.ones(1, 1, length, length, dtype=torch.bool))
    ranks = {}
    for name in ("softmax", "elu1"):
        for mask, visible in (("causal", Visible()), ("bidirectional", lifted)):
            a = attention_weights(name, query, key, visible=visible, scale=layer.scale, dtype=torch.float64)[0]
            ranks[name, mask] = numerical_rank(a)
            if mask == "causal":
                ranks[name, "block"] = numerical_rank(a[:, length // 2 :, : length // 2])
    return ranks


def pool_effects(layers: Sequence[LayerFocus]) -> list[Effect]:
    """Means over layers."""
    rows = zip(*(layer.effects for layer in layers), strict=True)
    return [
        Effect(
            same[0].change,
            same[0].amount,
            same[0].mechanism,
            float(np.nanmean([effect.sparsity for effect in same])),
            float(np.mean([effect.empty for effect in same])),
        )
        for same in rows
    ]


def pool_feature_families(layers: Sequence[LayerFocus]) -> list[FamilyPoint]:
    """Means over layers."""
    rows = zip(*(layer.feature_families for layer in layers), strict=True)
    return [
        FamilyPoint(
            same[0].family,
            same[0].setting,
            same[0].features,
            *(
                float(np.mean([getattr(point, name) for point in same]))
                for name in ("sparsity", "weight_error", "divergence")
            ),
        )
        for same in rows
    ]

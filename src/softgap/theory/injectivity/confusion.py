"""Injectivity inside the heads of a model: margins of their keys, and how often a mechanism confuses queries.

Causal queries see different keys, so their distributions cannot be compared as they are. Here all queries of a head
are asked about one common key set, the first n keys of the text, and come from its second half, so that each of them
does see those keys in the model. Sliding windows are left out of account.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from softgap.attention import Mechanism, attend, attention_weights, compare_outputs, resolve
from softgap.errors import ValueInputError
from softgap.probe.layout import LayerTensors
from softgap.theory.injectivity.inversion import key_condition, weight_margin

__all__ = ["LayerMeasures", "LayerPlan", "common_weights", "confusion_rate", "first_injective", "measure_layer"]

_FLOAT32 = float(np.finfo(np.float32).eps)
_WEIGHT_MARGINS = 6


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """What is measured in every layer.

    Attributes
    ----------
    queries
        How many queries of the second half of the text are compared.
    near
        Share of a mechanism's own mean distance below which two distributions are nearly the same.
    start
        First query that counts for a mean divergence.
    """

    queries: int
    mechanisms: tuple[Mechanism, ...]
    near: float
    start: int


@dataclass(frozen=True, eq=False)
class LayerMeasures:
    """One layer: an array per quantity, heads first; margins are those of each head's KV group.

    Attributes
    ----------
    lengths
        Prefix lengths of margins and confusion; confusion is NaN beyond half the text.
    margin
        Smallest singular value of the centred keys at every prefix length.
    first
        Smallest number of keys with which softmax is injective; -1 if the whole text is not enough.
    weight_margin
        Median over some queries of the margin in weights, over the longest common key set.
    focus
        Mean of S(a) = 1 / sqrt(n sum a^2) of the softmax weights over it: 1 is even, small is concentrated.
    confusion
        Rate of each mechanism (first axis) at every prefix length; NaN where a mechanism ignores the query or has no
        weights.
    divergence
        Mean of 1 - cos to the model's own output.
    """

    lengths: tuple[int, ...]
    margin: Float64[np.ndarray, "head length"]
    first: Int[np.ndarray, " head"]
    weight_margin: Float64[np.ndarray, " head"]
    focus: Float64[np.ndarray, " head"]
    confusion: Float64[np.ndarray, "mechanism head length"]
    divergence: Float64[np.ndarray, "mechanism head"]
    kv_heads: int


def measure_layer(layer: LayerTensors, plan: LayerPlan) -> LayerMeasures:
    """Margins, confusion and divergence of all heads of one layer."""
    heads, time, dim = layer.query.shape
    if time < 2 * (dim + 2):
        raise ValueInputError(
            f"a text must have at least {2 * (dim + 2)} tokens for heads of dimension {dim}, got {time}; "
            "give a longer text"
        )
    group = heads // layer.key.shape[0]
    keys = layer.key.double().numpy()
    lengths = _prefix_lengths(dim, time)
    margin = np.array([[key_condition(k[:n], eps=_FLOAT32).log_margin for n in lengths] for k in keys])
    first = np.array([first_injective(k) for k in keys])
    positions = np.unique(np.linspace(time // 2, time - 1, plan.queries).astype(np.int64))
    queries = layer.query[:, torch.as_tensor(positions)]
    common = [n for n in lengths if n <= time // 2]
    confusion = np.full((len(plan.mechanisms), heads, len(lengths)), np.nan)
    for i, mechanism in enumerate(plan.mechanisms):
        if mechanism.kind == "constant":
            continue  # there are no weights to confuse
        layer_mechanism = mechanism.for_layers([layer.layer])
        for j, n in enumerate(common):
            weights = common_weights(layer_mechanism, queries, layer.key[:, :n], layer.scale)
            confusion[i, :, j] = confusion_rate(queries, weights, near=plan.near)
    softmax = common_weights(resolve("softmax"), queries, layer.key[:, : common[-1]], layer.scale).double()
    focus = (1 / (common[-1] * softmax.square().sum(dim=-1)).sqrt()).mean(dim=-1)
    return LayerMeasures(
        lengths=lengths,
        margin=margin.repeat(group, axis=0),
        first=first.repeat(group),
        weight_margin=_weight_margins(softmax, keys[:, : common[-1]], group),
        focus=focus.numpy(),
        confusion=confusion,
        divergence=np.stack([_divergence(layer, m, plan.start) for m in plan.mechanisms]),
        kv_heads=len(keys),
    )


def first_injective(keys: Float64[np.ndarray, "key dim"]) -> int:
    """The smallest n for which the first n keys affinely span the space, to float32 precision; -1 if none does.

    A key more adds a positive rank-one term to the Gram matrix of the centred keys, so the margin never falls as keys
    come in, and bisection finds the first n.
    """
    low, high = int(keys.shape[1]) + 1, len(keys)
    if low > high or not key_condition(keys, eps=_FLOAT32).injective:
        return -1
    while low < high:
        middle = (low + high) // 2
        if key_condition(keys[:middle], eps=_FLOAT32).injective:
            high = middle
        else:
            low = middle + 1
    return low


def confusion_rate(
    queries: Float[Tensor, "head query dim"], weights: Float[Tensor, "head query key"], *, near: float
) -> Float64[np.ndarray, " head"]:
    """Among pairs of queries that are far apart, the share whose distributions are nearly the same.

    Far: at or above the head's median distance between queries. Nearly the same: total variation below ``near`` times
    the mean over all pairs, so that a mechanism whose distributions hardly differ at all does not count as confused
    for that alone. NaN for a head in which all distributions agree.
    """
    if not 0 < near < 1:
        raise ValueInputError(f"near must be between 0 and 1, got {near}; 0.2 is usual")
    first, second = np.triu_indices(queries.shape[1], 1)
    apart = torch.cdist(queries.double(), queries.double()).numpy()[:, first, second]
    variation = 0.5 * torch.cdist(weights.double(), weights.double(), p=1.0).numpy()[:, first, second]
    spread = variation.mean(axis=1)
    far = apart >= np.median(apart, axis=1, keepdims=True)
    confused = far & (variation < near * spread[:, None])
    rate = confused.sum(axis=1) / np.maximum(far.sum(axis=1), 1)
    return np.asarray(np.where(spread > 1e-6, rate, np.nan))


def common_weights(
    mechanism: Mechanism,
    queries: Float[Tensor, "head query dim"],
    keys: Float[Tensor, "kv_head key dim"],
    scale: float,
) -> Float[Tensor, "head query key"]:
    """Every query over the same keys, at the position of the last of them.

    Parameters
    ----------
    mechanism
        With the parameters of one layer, if it has any.
    """
    heads, count, dim = queries.shape
    if all(tensor.shape[1] == 1 for tensor in mechanism.parameters.values()):
        # Each query is a head of its own, so that the features of the keys are made once.
        flat = queries.reshape(1, heads * count, 1, dim)
        return attention_weights(mechanism, flat, keys[None], scale=scale)[0, :, 0].view(heads, count, -1)
    # Parameters that belong to heads leave the heads as they are: each query is a sequence of its own.
    apart, repeated = queries.transpose(0, 1)[:, :, None], keys.expand(count, *keys.shape)
    return attention_weights(mechanism, apart, repeated, scale=scale)[:, :, 0].transpose(0, 1)


def _weight_margins(
    softmax: Float[Tensor, "head query key"], keys: Float64[np.ndarray, "kv_head key dim"], group: int
) -> Float64[np.ndarray, " head"]:
    some = np.linspace(0, softmax.shape[1] - 1, min(_WEIGHT_MARGINS, softmax.shape[1])).astype(int)
    rows = softmax.numpy()[:, some]
    return np.array([np.median([weight_margin(keys[h // group], a) for a in of]) for h, of in enumerate(rows)])


def _divergence(layer: LayerTensors, mechanism: Mechanism, start: int) -> Float64[np.ndarray, " head"]:
    layer_mechanism = mechanism.for_layers([layer.layer])
    q, k, v = (x[None] for x in (layer.query, layer.key, layer.value))
    output = attend(layer_mechanism, q, k, v, visible=layer.visible, scale=layer.scale, check=False).output[0]
    value = compare_outputs(layer.output, output).divergence[:, start:].double()
    return np.asarray(value.mean(dim=-1).numpy())


def _prefix_lengths(dim: int, time: int) -> tuple[int, ...]:
    """Around d, where softmax becomes injective, then by factors of about 1.4, half the text and the whole of it."""
    grid = {dim // 2, dim, dim + 1, time // 2, time}
    grid |= {step * dim * 2**i // 2 for i in range(12) for step in (3, 4)}
    return tuple(sorted(n for n in grid if 2 <= n <= time))

"""The divergence of every head against position, taken apart into terms that sum to it.

Let u_t be the mean of the visible values. Then, for the output l_t of a mechanism and o_t of softmax,

    1 - cos(o, l) = P + [D_u - P] + [D - D_u],   D = 1 - cos(o, l),   D_u = 1 - cos(o, u).

P is what exchangeable values with mean m and deviations of mean square s^2 would give. With r = |m|^2 / s^2, n = t
visible keys and n_eff = 1 / sum_j a_j^2,

    E o.u = |m|^2 + s^2 / n,   E |u|^2 = |m|^2 + s^2 / n,   E |o|^2 = |m|^2 + s^2 / n_eff,
    P = 1 - sqrt((r + 1 / n) / (r + 1 / n_eff)).

P changes with position because the running mean settles (n) and because softmax spreads (n_eff); its change is divided
between the two by letting each vary while the other rests, in both orders, and taking the mean. D_u - P is what values
do that are not exchangeable, D - D_u what the mechanism does that the running mean does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend, compare_outputs, resolve
from softgap.attention.features import featurise
from softgap.attention.quadratic import weight_blocks
from softgap.errors import ValueInputError
from softgap.probe.tensors import LayerTensors

__all__ = ["TERMS", "LayerSeries", "layer_series", "normaliser_effect", "predicted", "synthetic_layer"]

TERMS = ("running mean", "concentration", "values", "map")
"""The terms of a trend, in the order of the arrays; they sum to the divergence up to a constant."""


@dataclass(frozen=True, eq=False)
class LayerSeries:
    """Series over position of all heads of one layer, from the first position that counts.

    Attributes
    ----------
    divergence, random
        Of every mechanism, and of the same with queries of random direction and the same norms.
    uniform
        D_u.
    mean_term, concentration_term
        The two parts of the change of P.
    predicted
        P itself.
    normaliser
        Largest change of any divergence when the outputs are multiplied by their normaliser, and the slope of the
        normaliser's logarithm on that of position, for mechanisms that have one; NaN otherwise.
    """

    divergence: Float64[np.ndarray, "mechanism head step"]
    random: Float64[np.ndarray, "mechanism head step"]
    uniform: Float64[np.ndarray, "head step"]
    mean_term: Float64[np.ndarray, "head step"]
    concentration_term: Float64[np.ndarray, "head step"]
    predicted: Float64[np.ndarray, "head step"]
    normaliser: Float64[np.ndarray, "mechanism 2"]


def layer_series(
    layer: LayerTensors, mechanisms: Sequence[Mechanism], *, start: int, rng: np.random.Generator
) -> LayerSeries:
    """Everything the position lab needs of one layer."""
    heads, time, _ = layer.query.shape
    if time < start + 16:
        raise ValueInputError(
            f"a text must hold at least {start + 16} tokens to show a trend from position {start} on, got {time}; "
            "give a longer text"
        )
    count, effective = _key_counts(layer)
    values = layer.value.double()
    deviation = (values - values.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1)
    # The square of a sample mean is too large by the variance of that mean.
    ratio = (values.mean(dim=1).square().sum(dim=-1) / deviation.clamp(min=1e-300) - 1 / time).clamp(min=0)
    r = ratio.numpy().repeat(heads // len(values))[:, None]
    mean_term, concentration_term = _parts(r, count[:, start:], effective[:, start:])
    chosen = [m.for_layers([layer.layer]) for m in mechanisms]
    turned = _turned(layer.query, rng)
    return LayerSeries(
        divergence=np.stack([_diverged(layer, m, layer.query)[:, start:] for m in chosen]),
        random=np.stack([_diverged(layer, m, turned)[:, start:] for m in chosen]),
        uniform=_diverged(layer, resolve("uniform"), layer.query)[:, start:],
        mean_term=mean_term,
        concentration_term=concentration_term,
        predicted=predicted(r, count, effective)[:, start:],
        normaliser=np.array([normaliser_effect(layer, m, start) for m in chosen]),
    )


def predicted(r: np.ndarray, count: np.ndarray, effective: np.ndarray) -> np.ndarray:
    """P = 1 - sqrt((r + 1 / n) / (r + 1 / n_eff)): the divergence from the running mean of exchangeable values."""
    return np.asarray(1 - np.sqrt((r + 1 / count) / (r + 1 / effective)))


def normaliser_effect(layer: LayerTensors, mechanism: Mechanism, start: int) -> tuple[float, float]:
    """What the normaliser z_t = phi(q).sum phi(k) does to the divergence, and how it grows (slope in logarithms).

    The outputs are multiplied by it, in float64. Only for mechanisms with plain non-negative features.
    """
    plain = mechanism.kind == "features" and mechanism.normaliser == "sum" and mechanism.rate is None
    if not plain or mechanism.log or mechanism.signed or not mechanism.factorable(layer.query.shape[-1]):
        return float("nan"), float("nan")
    q, k, v = (x[None].double() for x in (layer.query, layer.key, layer.value))
    at = torch.arange(q.shape[2])
    features = featurise(mechanism, q, k, scale=layer.scale, query_positions=at, key_positions=at)
    state = features.key.cumsum(dim=2).repeat_interleave(q.shape[1] // features.key.shape[1], dim=1)
    z = (features.query * state).sum(dim=-1)[0, :, start:]
    output = attend(mechanism, q, k, v, visible=layer.visible, scale=layer.scale, dtype=torch.float64).output[0]
    own, other = layer.output.double()[:, start:], output[:, start:]
    grown = compare_outputs(own, other * z[..., None]).divergence - compare_outputs(own, other).divergence
    counted = z > 0
    x = torch.log(at[start:].double() + 1).expand_as(z)[counted].numpy()
    return float(grown[counted].abs().max()), float(np.polyfit(x, torch.log(z[counted]).numpy(), 1)[0])


def synthetic_layer(
    *, heads: int, length: int, dim: int, rng: np.random.Generator, gains: Sequence[float], value_mean: float
) -> LayerTensors:
    """Heads of i.i.d. standard normal queries (times a gain per head), keys and values (with a common mean).

    The gains are spread over the heads in turn: head h has gain ``gains[h % len(gains)]``.
    """
    q, k, v = (torch.as_tensor(rng.standard_normal((heads, length, dim)), dtype=torch.float32) for _ in range(3))
    q = q * torch.tensor([gains[h % len(gains)] for h in range(heads)])[:, None, None]
    direction = torch.as_tensor(rng.standard_normal((heads, 1, dim)), dtype=torch.float32)
    v = v + value_mean * direction
    scale = dim**-0.5
    output = attend("softmax", q[None], k[None], v[None], scale=scale).output[0]
    return LayerTensors(0, q, k, v, output, scale, Visible())


def _key_counts(layer: LayerTensors) -> tuple[np.ndarray, np.ndarray]:
    """Visible keys, and 1 / sum a^2 of the softmax weights, of every head and query."""
    q, k = layer.query[None], layer.key[None]
    visible = layer.visible.fitted_to(1, q.shape[1], q.shape[2], k.shape[2])
    effective, count = torch.ones(q.shape[1], q.shape[2]), torch.ones(q.shape[1], q.shape[2])
    for block in weight_blocks(resolve("softmax"), q, k, visible=visible, scale=layer.scale):
        effective[:, block.rows] = 1 / block.weights[0].square().sum(dim=-1)
        seen = visible.rows(block.rows.start, block.rows.stop, (block.keys.start, block.keys.stop), q.device)
        count[:, block.rows] = seen[0].sum(dim=-1).float().expand(q.shape[1], -1)
    # Rounding may put n_eff a hair above n where softmax is even.
    return count.double().numpy(), torch.minimum(effective, count).double().numpy()


def _parts(r: np.ndarray, count: np.ndarray, effective: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rest_count = np.exp(np.log(count).mean(axis=1, keepdims=True))
    rest_effective = np.exp(np.log(effective).mean(axis=1, keepdims=True))
    both, neither = predicted(r, count, effective), predicted(r, rest_count, rest_effective)
    by_count, by_effective = predicted(r, count, rest_effective), predicted(r, rest_count, effective)
    mean_term = 0.5 * ((by_count - neither) + (both - by_effective))
    return mean_term, 0.5 * ((by_effective - neither) + (both - by_count))


def _turned(query: Float[Tensor, "head query dim"], rng: np.random.Generator) -> Float[Tensor, "head query dim"]:
    """Queries of random direction with the norms of the given ones."""
    free = torch.as_tensor(rng.standard_normal(tuple(query.shape)), dtype=query.dtype)
    turned: Tensor = free * (query.norm(dim=-1, keepdim=True) / free.norm(dim=-1, keepdim=True))
    return turned


def _diverged(
    layer: LayerTensors, mechanism: Mechanism, query: Float[Tensor, "head query dim"]
) -> Float64[np.ndarray, "head query"]:
    k, v = layer.key[None], layer.value[None]
    found = attend(mechanism, query[None], k, v, visible=layer.visible, scale=layer.scale, check=False).output[0]
    return np.asarray(compare_outputs(layer.output, found).divergence.double().numpy())

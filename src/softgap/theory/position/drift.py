"""Divergence against position, split into terms that sum to it, and the slope of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from scipy import stats
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend, compare_outputs, resolve
from softgap.attention.feature_maps import featurise
from softgap.attention.quadratic import weight_blocks
from softgap.errors import ValueInputError
from softgap.intervals import ArrayInterval
from softgap.probe.layout import LayerTensors
from softgap.trajectories.validation import BASELINE

__all__ = [
    "FALSE_DISCOVERIES",
    "TERMS",
    "LayerSeries",
    "Slopes",
    "layer_series",
    "log_slopes",
    "normaliser_effect",
    "predicted",
    "synthetic_layer",
]


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
            f"a text must have at least {start + 16} tokens to show a trend from position {start} on, got {time}; "
            "give a longer text"
        )
    count, effective = _key_counts(layer)
    values = layer.value.double()
    deviation = (values - values.mean(dim=1, keepdim=True)).square().sum(dim=-1).mean(dim=1)
    # The square of a sample mean is too large by the variance of that mean.
    ratio = (values.mean(dim=1).square().sum(dim=-1) / deviation.clamp(min=1e-300) - 1 / time).clamp(min=0)
    r = ratio.numpy().repeat(heads // len(values))[:, None]
    mean_term, concentration_term = _split_terms(r, count[:, start:], effective[:, start:])
    layer_mechanisms = [m.for_layers([layer.layer]) for m in mechanisms]
    turned = _random_directions(layer.query, rng)
    return LayerSeries(
        divergence=np.stack([_divergence(layer, m, layer.query)[:, start:] for m in layer_mechanisms]),
        random=np.stack([_divergence(layer, m, turned)[:, start:] for m in layer_mechanisms]),
        uniform=_divergence(layer, resolve(BASELINE), layer.query)[:, start:],
        mean_term=mean_term,
        concentration_term=concentration_term,
        predicted=predicted(r, count, effective)[:, start:],
        normaliser=np.array([normaliser_effect(layer, m, start) for m in layer_mechanisms]),
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
    exact, approximate = layer.output.double()[:, start:], output[:, start:]
    grown = (
        compare_outputs(exact, approximate * z[..., None]).divergence - compare_outputs(exact, approximate).divergence
    )
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


def _split_terms(r: np.ndarray, count: np.ndarray, effective: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rest_count = np.exp(np.log(count).mean(axis=1, keepdims=True))
    rest_effective = np.exp(np.log(effective).mean(axis=1, keepdims=True))
    both, neither = predicted(r, count, effective), predicted(r, rest_count, rest_effective)
    by_count, by_effective = predicted(r, count, rest_effective), predicted(r, rest_count, effective)
    mean_term = 0.5 * ((by_count - neither) + (both - by_effective))
    return mean_term, 0.5 * ((by_effective - neither) + (both - by_count))


def _random_directions(
    query: Float[Tensor, "head query dim"], rng: np.random.Generator
) -> Float[Tensor, "head query dim"]:
    """Queries of random direction with the norms of the given ones."""
    free = torch.as_tensor(rng.standard_normal(tuple(query.shape)), dtype=query.dtype)
    turned: Tensor = free * (query.norm(dim=-1, keepdim=True) / free.norm(dim=-1, keepdim=True))
    return turned


def _divergence(
    layer: LayerTensors, mechanism: Mechanism, query: Float[Tensor, "head query dim"]
) -> Float64[np.ndarray, "head query"]:
    k, v = layer.key[None], layer.value[None]
    output = attend(mechanism, query[None], k, v, visible=layer.visible, scale=layer.scale, check=False).output[0]
    return np.asarray(compare_outputs(layer.output, output).divergence.double().numpy())


FALSE_DISCOVERIES = 0.05


"""Expected share of heads without a trend among those that are said to have one, at most."""


@dataclass(frozen=True, eq=False)
class Slopes(ArrayInterval):
    """Mean over texts of the least-squares slope of each series per doubling of position.

    Attributes
    ----------
    value, low, high
        The mean and its 95 % t interval over texts, each by itself. One text has no interval: NaN.
    p
        Two-sided p-value of the t test against 0.
    texts
        How many there are.
    """

    p: Float64[np.ndarray, "*series"]
    texts: int

    @property
    def q(self) -> Float64[np.ndarray, "*series"]:
        """p-values after Benjamini and Hochberg, over all series of this object."""
        if np.isnan(self.p).any():
            return np.full_like(self.p, np.nan)
        return np.asarray(stats.false_discovery_control(self.p, axis=None)).reshape(self.p.shape)

    @property
    def trending(self) -> np.ndarray:
        """Where q is at most 0.05; nowhere with one text."""
        return np.asarray(self.q <= FALSE_DISCOVERIES)

    def __getitem__(self, where: int | slice) -> Slopes:
        """Some of the series; their q-values count only them."""
        return Slopes(self.value[where], self.low[where], self.high[where], self.p[where], self.texts)


def log_slopes(series: Float64[np.ndarray, "text *series step"], positions: Float64[np.ndarray, " step"]) -> Slopes:
    """Slopes on log2(position), one per text, with their mean and t interval over texts.

    Slopes are linear in a series: those of terms that sum to a series sum to its slope.
    """
    texts, steps = series.shape[0], series.shape[-1]
    if steps < 16 or positions.shape != (steps,):
        raise ValueInputError(f"a trend needs at least 16 steps with a position each, got {steps}; read a longer text")
    x = np.log2(positions) - np.log2(positions).mean()
    by_text = series.astype(np.float64) @ x / (x @ x)
    value = by_text.mean(axis=0)
    if texts < 2:
        unknown = np.full_like(value, np.nan)
        return Slopes(value, unknown, unknown, unknown, texts)
    error = by_text.std(axis=0, ddof=1) / np.sqrt(texts)
    half = stats.t.ppf(0.975, texts - 1) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        # Texts that agree exactly leave no doubt about a slope, and none about a slope of 0.
        score = np.where(value == 0, 0.0, np.abs(value) / error)
    return Slopes(value, value - half, value + half, np.asarray(2 * stats.t.sf(score, texts - 1)), texts)

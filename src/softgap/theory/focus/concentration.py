"""How concentrated given weights are: S, entropy, largest weight, per row; and what theory predicts for a row.

Rows may see different numbers of keys: everything takes the number of visible keys ``n``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.attention.features import featurise
from softgap.errors import UnsupportedError
from softgap.inputs import as_items

__all__ = [
    "Concentration",
    "ScoreMoments",
    "concentration",
    "feature_prediction",
    "row_sparsity",
    "score_moments",
    "with_weights",
]


Prepare = Callable[[str | Mechanism], Mechanism]


def with_weights(
    given: Sequence[str | Mechanism] | None, always: Sequence[str], *, prepare: Prepare = resolve
) -> tuple[Mechanism, ...]:
    """The mechanisms asked for (all that have weights, if none) and those always compared; refused without weights.

    ``prepare`` gives a mechanism its parameters, where it has some.
    """
    if given is None:
        wanted = [name for name, found in mechanisms().items() if not found.missing and found.kind != "constant"]
        return tuple(prepare(name) for name in dict.fromkeys([*always, *wanted]))
    asked = {found.name: found for found in map(prepare, as_items(given))}
    for name, found in asked.items():
        found.site(torch.arange(1), torch.float32)
        if found.kind == "constant":
            raise UnsupportedError(f"mechanism '{name}' has no weights: its output is a constant; leave it out")
    return (*asked.values(), *(resolve(name) for name in always if name not in asked))


@dataclass(frozen=True, eq=False)
class Concentration:
    """Of weights over n keys, row by row; NaN where a row has no weight.

    Attributes
    ----------
    sparsity
        S = sum |a| / sqrt(n sum a^2), in [1 / sqrt(n), 1].
    entropy
        -sum p log p in nats of p = |a| / sum |a| (the weights themselves where none is negative).
    largest
        The largest p.
    """

    sparsity: Float[Tensor, "... query"]
    entropy: Float[Tensor, "... query"]
    largest: Float[Tensor, "... query"]


def row_sparsity(weights: Float[Tensor, "... query key"], n: Float[Tensor, " query"]) -> Float[Tensor, "... query"]:
    """S = sum |a| / sqrt(n sum a^2) of every row; NaN where a row has no weight."""
    return weights.abs().sum(dim=-1) / (n * weights.square().sum(dim=-1)).sqrt()


def concentration(weights: Float[Tensor, "... query key"], n: Float[Tensor, " query"]) -> Concentration:
    """S, entropy and largest share of weights whose hidden entries are zero; signs are dropped."""
    size = weights.abs()
    total = size.sum(dim=-1)
    share = size / total[..., None]
    return Concentration(row_sparsity(share, n), torch.special.entr(share).sum(dim=-1), share.amax(dim=-1))


@dataclass(frozen=True, eq=False)
class ScoreMoments:
    """What the Gaussian theory needs to know about the scores s_j = scale q.k_j that a query sees.

    Attributes
    ----------
    beta
        Mean of the scores, scale q.mu.
    gamma
        Their standard deviation, scale sqrt(q^T Sigma q), with the covariance of the visible keys.
    isotropic
        scale sigma |q| with sigma^2 = trace(Sigma) / d: the spread if keys were alike in all directions.
    first
        (s_0 - beta) / gamma: how far the first visible key stands out.
    skewness
        Of the scores; 0 for a Gaussian.
    """

    beta: Float[Tensor, "head query"]
    gamma: Float[Tensor, "head query"]
    isotropic: Float[Tensor, "head query"]
    first: Float[Tensor, "head query"]
    skewness: Float[Tensor, "head query"]


def score_moments(
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "head key dim"],
    seen: Float[Tensor, "query key"],
    scale: float,
) -> ScoreMoments:
    """Moments of every query's scores over the keys it sees, in float64; ``seen`` is 1 where it sees, else 0."""
    q, k, shown = query.double(), key.double(), seen.double()
    n = shown.sum(dim=-1)
    scores = scale * q @ k.transpose(-1, -2)
    mean = (scores * shown).sum(dim=-1) / n
    apart = (scores - mean[..., None]) * shown
    variance = apart.square().sum(dim=-1) / n
    centre = (shown / n[:, None]) @ k
    trace = (shown / n[:, None]) @ k.square().sum(dim=-1, keepdim=True)
    spread = (trace[..., 0] - centre.square().sum(dim=-1)).clamp(min=0) / q.shape[-1]
    gamma = variance.sqrt()
    first = scores.gather(-1, shown.argmax(dim=-1).expand(q.shape[0], -1)[..., None])[..., 0]
    skewness = apart.pow(3).sum(dim=-1) / n / gamma**3
    return ScoreMoments(mean, gamma, scale * spread.sqrt() * q.norm(dim=-1), (first - mean) / gamma, skewness)


def feature_prediction(
    mechanism: Mechanism,
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "head key dim"],
    seen: Float[Tensor, "query key"],
    scale: float,
) -> tuple[Float[Tensor, "head query"], Float[Tensor, "head query"]] | None:
    """S of a non-negative linear map by the general and by the i.i.d. formula, from its own key features.

    The general formula is exact: it is S itself, by way of mean and covariance of the features. The i.i.d. one takes
    features for independent and alike, with the mean and the variance that they have on average. None for mechanisms
    without a feature map, with a decay, with negative features or with features too many to hold.
    """
    d = query.shape[-1]
    if not mechanism.factorable(d) or mechanism.rate is not None or mechanism.signed or mechanism.query_free:
        return None
    if (mechanism.feature_dim(d) or 0) > 4 * d or mechanism.score_weights is not None:
        return None
    positions = torch.arange(key.shape[1])
    made = featurise(
        mechanism,
        query.double()[None],
        key.double()[None],
        scale=scale,
        query_positions=positions[-query.shape[1] :],
        key_positions=positions,
    )
    phi_q, phi_k = made.query[0], made.key[0]
    if made.log:
        # S does not change with the scale of a query's features, nor with one common scale of all key features.
        phi_q = (phi_q - phi_q.amax(dim=-1, keepdim=True)).exp()
        phi_k = (phi_k - phi_k.amax(dim=(-1, -2), keepdim=True)).exp()
    if bool((phi_q < 0).any()) or bool((phi_k < 0).any()):
        return None
    average = seen.double() / seen.double().sum(dim=-1, keepdim=True)
    mean = average @ phi_k
    level = (phi_q * mean).sum(dim=-1)
    raw_second = ((phi_q @ phi_k.transpose(-1, -2)).square() * average).sum(dim=-1)
    one_mean = mean.mean(dim=-1)
    one_second = (average @ phi_k.square().mean(dim=-1, keepdim=True))[..., 0]
    noise = (one_second - one_mean.square()).clamp(min=0).sqrt() / one_mean
    ratio = phi_q.norm(dim=-1) / phi_q.sum(dim=-1)
    return level / raw_second.sqrt(), 1 / torch.sqrt(1 + (noise * ratio).square())

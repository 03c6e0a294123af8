"""How concentrated attention weights are, and what changes it: interventions on a head, and more features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention import Mechanism, Visible, attention_weights, compare_outputs, mechanisms, resolve
from softgap.attention.feature_maps import featurise
from softgap.attention.mechanism import Options
from softgap.errors import ShapeError, UnsupportedError
from softgap.inputs import as_items
from softgap.trajectories.validation import BASELINE

__all__ = [
    "AMOUNTS",
    "FAMILIES",
    "Effect",
    "FamilyPoint",
    "closes_gap",
    "column_share",
    "concentration",
    "distance_share",
    "feature_prediction",
    "intervene",
    "intervention_effects",
    "measure_feature_families",
    "row_sparsity",
    "score_moments",
    "with_weights",
]


Prepare = Callable[[str | Mechanism], Mechanism]


def with_weights(
    selection: Sequence[str | Mechanism] | None, always: Sequence[str], *, prepare: Prepare = resolve
) -> tuple[Mechanism, ...]:
    """The mechanisms asked for (all that have weights, if none) and those always compared; refused without weights.

    ``prepare`` gives a mechanism its parameters, where it has some.
    """
    if selection is None:
        available = [
            name for name, mechanism in mechanisms().items() if not mechanism.missing and mechanism.kind != "constant"
        ]
        return tuple(prepare(name) for name in dict.fromkeys([*always, *available]))
    by_name = {mechanism.label: mechanism for mechanism in map(prepare, as_items(selection))}
    for name, mechanism in by_name.items():
        mechanism.site(torch.arange(1), torch.float32)
        if mechanism.kind == "constant":
            raise UnsupportedError(f"mechanism '{name}' has no weights: its output is a constant; leave it out")
    return (*by_name.values(), *(resolve(name) for name in always if name not in by_name))


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
    features = featurise(
        mechanism,
        query.double()[None],
        key.double()[None],
        scale=scale,
        query_positions=positions[-query.shape[1] :],
        key_positions=positions,
    )
    phi_q, phi_k = features.query[0], features.key[0]
    if features.log:
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


def column_share(weights: Float[Tensor, "head query key"]) -> Float[Tensor, " head"]:
    """Share of a causal matrix's deviation from uniform that a function of the key's position explains, per head.

    1 - min |A - B|^2 / |A - U|^2 over t >= j, where b_tj = c_j + h_j / (t + 1), c_j h_j >= 0, and U is uniform. A sink
    is a constant c_j; weights spread over all keys shrink as 1 / (t + 1), which holds U (h = 1), so the share is never
    negative. Of opposite signs the two would make a slope, and with a free factor per row even decay would pass for
    columns: lambda^(t - j) = lambda^t lambda^(-j). NaN where A = U.
    """
    _check(weights)
    return _share(weights.double().tril())


def distance_share(weights: Float[Tensor, "head query key"]) -> Float[Tensor, " head"]:
    """The same for functions of the distance, b_tj = c_(t-j) + h_(t-j) / (t + 1): Toeplitz matrices such as decay."""
    _check(weights)
    position = torch.arange(weights.shape[1])
    # Row t read backwards from the diagonal: column m holds a_(t, t-m).
    back = (position[:, None] - position).clamp(min=0).expand(weights.shape[0], -1, -1)
    return _share(weights.double().gather(-1, back).tril())


def _check(weights: Float[Tensor, "head query key"]) -> None:
    if weights.dim() != 3 or weights.shape[1] != weights.shape[2]:
        raise ShapeError(f"weights must be [head, query, key] with as many queries as keys, got {list(weights.shape)}")


def _share(a: Float[Tensor, "head row column"]) -> Float[Tensor, " head"]:
    """Least squares in every column by itself, over the rows from the diagonal down."""
    length = a.shape[1]
    shown = torch.ones(length, length, dtype=a.dtype).tril()
    inverse = 1 / torch.arange(1, length + 1, dtype=a.dtype)
    basis = torch.stack([torch.ones_like(inverse), inverse])
    gram = torch.einsum("it,kt,tj->jik", basis, basis, shown)
    onto = torch.einsum("it,htj->hji", basis, a)
    # The last column has a single row: its two numbers are not determined, their sum is.
    both = (onto[:, :, None] @ torch.linalg.pinv(gram, hermitian=True))[:, :, 0]
    alone = (onto.square() / gram.diagonal(dim1=-2, dim2=-1)).amax(dim=-1)
    explained = torch.where(both.prod(dim=-1) >= 0, (both * onto).sum(dim=-1), alone)
    energy = a.square().sum(dim=(-1, -2))
    spread = (a - shown * inverse[:, None]).square().sum(dim=(-1, -2))
    share = 1 - (energy - explained.sum(dim=-1)).clamp(min=0) / spread
    return torch.where(spread > 1e-12 * energy, share, torch.nan)


AMOUNTS: dict[str, tuple[float, ...]] = {
    "scale q": (0.5, 1.0, 2.0, 4.0),
    "spread keys": (0.5, 1.0, 2.0, 4.0),
    "shift bias": (1.0, 0.0, -1.0, -2.0, -4.0),
}


@dataclass(frozen=True)
class Effect:
    """One mechanism after one change; means over heads and queries.

    Attributes
    ----------
    sparsity
        Mean S of rows with any weight.
    empty
        Share of rows whose weights are all zero: such a query gets no output at all.
    """

    change: str
    amount: float
    mechanism: str
    sparsity: float
    empty: float


def intervene(
    change: str,
    amount: float,
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
) -> tuple[Float[Tensor, "head query dim"], Float[Tensor, "kv_head key dim"]]:
    """Changed queries and keys.

    ``scale q`` multiplies queries; ``spread keys`` multiplies the keys' deviations from their mean; ``shift bias`` adds
    one vector to all keys of a KV head, along the mean of its group's queries, so long that scores move by ``amount``
    of their standard deviation on average. Softmax ignores that last change: it adds one number to a row of scores.
    """
    if change == "scale q":
        return amount * query, key
    centre = key.mean(dim=1, keepdim=True)
    if change == "spread keys":
        return query, centre + amount * (key - centre)
    groups = query.unflatten(0, (key.shape[0], -1)).flatten(1, 2)
    direction = groups.mean(dim=1)
    deviation = (groups @ (key - centre).transpose(-1, -2)).std(dim=-1).mean(dim=-1)
    tiny = torch.finfo(key.dtype).tiny
    step = amount * deviation / direction.square().sum(dim=-1).clamp(min=tiny)
    return query, key + (step[:, None] * direction)[:, None]


def intervention_effects(
    mechanisms: Sequence[Mechanism],
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
    *,
    scale: float,
    visible: Visible | None = None,
) -> list[Effect]:
    """Every change at every amount for every mechanism; the queries are the last of the keys' positions."""
    even = attention_weights(BASELINE, query[None, :1], key[None, :1], visible=visible, scale=scale)
    n = (even[0, 0] > 0).sum(dim=-1)
    effects = []
    for change, amounts in AMOUNTS.items():
        for amount in amounts:
            q, k = intervene(change, amount, query, key)
            for mechanism in mechanisms:
                s = row_sparsity(attention_weights(mechanism, q[None], k[None], visible=visible, scale=scale)[0], n)
                empty = s.isnan().float().mean().item()
                effects.append(Effect(change, amount, mechanism.label, s.nanmean().item(), empty))
    return effects


FAMILIES = ("favor", "polynomial", "shifted")


@dataclass(frozen=True)
class FamilyPoint:
    """One map of a family, against softmax on the same queries and keys; means over heads and queries.

    Attributes
    ----------
    family
        ``favor``, ``polynomial`` (s^p) or ``shifted`` ((1 + s / p)^p, which tends to exp(s)); ``softmax`` is the end.
    setting
        Its number of random features, or its power p.
    features
        Dimension of its feature map.
    sparsity
        S of its weights.
    weight_error
        |A - A_softmax| / |A_softmax| over all rows.
    divergence
        1 - cos of its output and softmax's.
    """

    family: str
    setting: float
    features: float
    sparsity: float
    weight_error: float
    divergence: float


def family_maps(
    d: int, *, random: Sequence[int] = (16, 64, 256, 1024), powers: Sequence[int] = (2, 4, 8, 16)
) -> list[tuple[str, float, float, Mechanism]]:
    """Family, setting, feature count and mechanism of every map, softmax last."""
    maps: list[tuple[str, float, float, Mechanism]] = [
        ("favor", m, m, resolve("favor").configure(features=m)) for m in random
    ]
    # Monomials of degree p in d variables; with the constant in front, of degree up to p.
    maps += [("polynomial", p, math.comb(d + p - 1, p), resolve("polynomial").configure(p=p)) for p in powers]
    maps += [("shifted", p, math.comb(d + p, p), _power_mechanism(p)) for p in powers]
    return [*maps, ("softmax", math.nan, math.inf, resolve("softmax"))]


def measure_feature_families(
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
    value: Float[Tensor, "kv_head key value_dim"],
    *,
    scale: float,
    visible: Visible | None = None,
    maps: Sequence[tuple[str, float, float, Mechanism]] | None = None,
) -> list[FamilyPoint]:
    """Every map on one layer; the queries are the last of the keys' positions."""
    v = value.repeat_interleave(query.shape[0] // value.shape[0], dim=0)
    maps = family_maps(query.shape[-1]) if maps is None else maps
    exact = attention_weights("softmax", query[None], key[None], visible=visible, scale=scale)[0]
    output = exact @ v
    # Counted on uniform weights: those of softmax may underflow.
    even = attention_weights(BASELINE, query[None, :1], key[None, :1], visible=visible, scale=scale)
    n = (even[0, 0] > 0).sum(dim=-1)
    results = []
    for family, setting, features, mechanism in maps:
        weights = attention_weights(mechanism, query[None], key[None], visible=visible, scale=scale)[0]
        s = row_sparsity(weights, n)
        error = (weights - exact).norm() / exact.norm()
        far = compare_outputs(output, weights @ v).divergence.mean()
        results.append(FamilyPoint(family, setting, features, s.nanmean().item(), error.item(), far.item()))
    return results


def closes_gap(family_points: Sequence[FamilyPoint], family: str) -> bool:
    """Whether the error of the weights at least halves from the first map of a family to its last.

    With the default maps theory promises a factor of 8 twice: m random features err as m^(-1/2), from 16 to 1024 of
    them, and (1 + s / p)^p errs as s^2 / 2p, from p = 2 to 16. A family that does not even reach 2 does not close it.
    """
    points = [point for point in family_points if point.family == family]
    return points[-1].weight_error < 0.5 * points[0].weight_error


def _power_mechanism(p: int) -> Mechanism:
    def weigh(
        scores: Float[Tensor, "batch head query key"], seen: Bool[Tensor, "batch head query key"], options: Options
    ) -> Float[Tensor, "batch head query key"]:
        base = (1 + scores / p).abs()
        top = base.masked_fill(~seen, 0).amax(dim=-1, keepdim=True)
        return torch.pow(base / top.clamp(min=torch.finfo(scores.dtype).tiny), p)

    return Mechanism("shifted", "(1 + s_j / p)^p", "limit of exp", "scores", scale="scores", score_weights=weigh)

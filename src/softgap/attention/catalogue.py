"""The built-in mechanisms, one entry each, and the weights of those that are not feature maps."""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention import feature_maps
from softgap.attention.exact_set import ExactSet
from softgap.attention.mechanism import Mechanism, Options, Site
from softgap.errors import ValueInputError

__all__ = ["ALIASES", "BUILT_IN", "check_window", "top_k"]

# Names of earlier versions.
ALIASES = {"mean_ablation": "constant"}


Scores = Float[Tensor, "batch head query key"]


Seen = Bool[Tensor, "batch head query key"]


def softmax(scores: Scores, seen: Seen, options: Options) -> Scores:
    """exp(s_j), relative to the largest visible score."""
    lowest = torch.finfo(scores.dtype).min
    top = scores.masked_fill(~seen, lowest).amax(dim=-1, keepdim=True)
    return (scores - top).clamp(max=0).exp()


def relu2(scores: Scores, seen: Seen, options: Options) -> Scores:
    """relu(s_j)^2."""
    return functional.relu(scores).square()


def polynomial(scores: Scores, seen: Seen, options: Options) -> Scores:
    """s_j^p for even p, relative to the largest visible |s_j| so that no power overflows."""
    top = scores.abs().masked_fill(~seen, 0).amax(dim=-1, keepdim=True)
    return (scores / top.clamp(min=torch.finfo(scores.dtype).tiny)) ** options["p"]


def taylor2(scores: Scores, seen: Seen, options: Options) -> Scores:
    """1 + s_j + s_j^2 / 2, at least one half."""
    return 1 + scores + scores.square() / 2


def top_k(scores: Scores, seen: Seen, options: Options) -> Scores:
    """exp(s_j) on the k largest visible scores, 0 elsewhere; scores equal to the k-th are all kept."""
    hidden = scores.masked_fill(~seen, -torch.inf)
    k = min(int(options["k"]), hidden.shape[-1])
    threshold = hidden.topk(k, dim=-1).values[..., -1:]
    return softmax(scores, seen, options).masked_fill(hidden < threshold, 0)


def self_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the last visible key (the token itself under causal attention)."""
    return _last_seen(seen)


def previous_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the last visible key but one, or on the only one."""
    last = _last_seen(seen)
    before = _last_seen(seen & (last == 0))
    return torch.where(before.any(dim=-1, keepdim=True), before, last)


def first_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the first visible key (token 0 unless a window or padding hides it)."""
    return _first_seen(seen).float()


def profile(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """A weight for the first visible key, and one by distance for the others; the last distance serves all beyond."""
    by_distance = site.parameters["by_distance"]
    distance = (p - j).abs().clamp(max=by_distance.shape[-1] - 1)
    return torch.where(_first_seen(seen), site.parameters["first"][..., None, None], by_distance[..., distance])


def _first_seen(seen: Seen) -> Seen:
    return seen & (seen.cumsum(dim=-1) == 1)


def _last_seen(seen: Seen) -> Scores:
    return _first_seen(seen.flip(-1)).flip(-1).float()


def _options(**options: float) -> Options:
    return MappingProxyType(options)


def _require(fine: bool, requirement: str, value: float) -> None:
    if not fine:
        raise ValueInputError(f"{requirement}, got {value:g}")


def _check_lam(options: Options) -> None:
    _require(0 < options["lam"] <= 1, "decay's lam must be above 0 and at most 1", options["lam"])


def _check_power(options: Options) -> None:
    _require(options["p"] >= 2 and options["p"] % 2 == 0, "polynomial's p must be an even number", options["p"])


def _check_k(options: Options) -> None:
    _require(options["k"] >= 1 and options["k"] % 1 == 0, "top_k's k must be a whole number from 1 on", options["k"])


def _check_features(options: Options) -> None:
    _require(
        options["features"] >= 1 and options["features"] % 1 == 0,
        "favor's features must be a whole number from 1 on",
        options["features"],
    )


def _check_focus(options: Options) -> None:
    _require(options["p"] > 0, "focused's p must be above 0", options["p"])


def _check_context(options: Options) -> None:
    _require(options["context"] >= 1, "cosformer's context must be at least 1", options["context"])


def check_window(options: Options) -> None:
    """Refuse a window of no keys, and a factor of the tail that is no share."""
    exact = ExactSet.of(options)
    # The priorities of all keys in the window are held from the beginning.
    _require(not exact.far or exact.recent <= 2**16, "with far keys, a window's w must be at most 65536", exact.recent)
    if "f" in options:
        _require(0 <= options["f"] <= 1, "a hybrid's f must be from 0 to 1", options["f"])


def _lam_rate(site: Site) -> Float[Tensor, "1 1 1"]:
    return torch.full((1, 1, 1), -math.log(site.options["lam"]), dtype=torch.float64, device=site.positions.device)


def _fitted_rate(site: Site) -> Float[Tensor, "batch head feature"]:
    return site.parameters["rate"]


def _mean_output(site: Site) -> Float[Tensor, "batch head value_dim"]:
    return site.parameters["mean"]


_maps = feature_maps


_FITTED = Mechanism(
    name="fitted",
    formula="phi(x) = exp(W [x, R_-p x] + b), each feature times exp(-a_r (t - j)); fitted to each head",
    paper="softgap calibration",
    kind="features",
    log=True,
    needs=("query_weight", "query_bias", "key_weight", "key_bias", "rate"),
    accepts=("frequency", "turn"),
    query_map=_maps.exp_affine_query,
    key_map=_maps.exp_affine_key,
    rate=_fitted_rate,
    dim=lambda d, mechanism: _maps.affine_dim("key_weight", 2 * d, mechanism),
)


BUILT_IN: tuple[Mechanism, ...] = (
    Mechanism(
        name="softmax",
        formula="a_j = exp(s_j) / sum_i exp(s_i)",
        paper="Vaswani et al. 2017, arXiv:1706.03762",
        kind="scores",
        scale="scores",
        score_weights=softmax,
    ),
    Mechanism(
        name="elu1",
        formula="phi(x) = elu(x) + 1",
        paper="Katharopoulos et al. 2020, arXiv:2006.16236",
        kind="features",
        query_map=_maps.elu1,
        key_map=_maps.elu1,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="relu",
        formula="phi(x) = relu(x)",
        paper="Kasai et al. 2021, arXiv:2103.13076",
        kind="features",
        query_map=_maps.relu,
        key_map=_maps.relu,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="relu_affine",
        formula="phi(x) = relu(A x + b), A and b given or seeded",
        paper="Han et al. 2024, arXiv:2412.06590",
        kind="features",
        accepts=("A", "b"),
        options=_options(seed=0),
        query_map=_maps.relu_affine,
        key_map=_maps.relu_affine,
        dim=lambda d, mechanism: _maps.affine_dim("A", d, mechanism),
    ),
    Mechanism(
        name="identity",
        formula="phi(x) = x, divided by its signed sum",
        paper="Katharopoulos et al. 2020, arXiv:2006.16236",
        kind="features",
        signed=True,
        query_map=_maps.identity,
        key_map=_maps.identity,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="exp_dim",
        formula="phi(x) = softmax(x) over the features",
        paper="Shen et al. 2018, arXiv:1812.01243",
        kind="features",
        log=True,
        query_map=_maps.log_exp_dim,
        key_map=_maps.log_exp_dim,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="hedgehog",
        formula="phi(x) = softmax([x, -x]), untrained",
        paper="Zhang et al. 2024, arXiv:2402.04347",
        kind="features",
        log=True,
        query_map=_maps.log_hedgehog,
        key_map=_maps.log_hedgehog,
        dim=lambda d, _: 2 * d,
    ),
    Mechanism(
        name="focused",
        formula="phi(x) = r^p |r| / |r^p|, r = relu(x)",
        paper="Han et al. 2023, arXiv:2308.00442",
        kind="features",
        options=_options(p=3),
        check=_check_focus,
        query_map=_maps.focused,
        key_map=_maps.focused,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="dpfp",
        formula="phi(x) = r * roll(r, 1), r = relu([x, -x])",
        paper="Schlag et al. 2021, arXiv:2102.11174",
        kind="features",
        query_map=_maps.dpfp,
        key_map=_maps.dpfp,
        dim=lambda d, _: 2 * d,
    ),
    Mechanism(
        name="favor",
        formula="phi(x) = exp(W x - |x|^2 / 2) / sqrt(m), W orthogonal and seeded",
        paper="Choromanski et al. 2020, arXiv:2009.14794",
        kind="features",
        scale="sqrt",
        log=True,
        options=_options(features=256, seed=0),
        check=_check_features,
        query_map=_maps.favor,
        key_map=_maps.favor,
        dim=lambda _, mechanism: int(mechanism.options["features"]),
    ),
    Mechanism(
        name="taylor2",
        formula="1 + s_j + s_j^2 / 2",
        paper="Arora et al. 2024, arXiv:2402.18668",
        kind="features",
        scale="sqrt",
        score_weights=taylor2,
        query_map=_maps.taylor2,
        key_map=_maps.taylor2,
        dim=lambda d, _: 1 + d + d * d,
    ),
    Mechanism(
        name="polynomial",
        formula="s_j^p, p even",
        paper="Kacham et al. 2023, arXiv:2310.01655",
        kind="features",
        cancels=True,
        scale="sqrt",
        options=_options(p=2),
        check=_check_power,
        query_map=_maps.pair_products,
        key_map=_maps.pair_products,
        score_weights=polynomial,
        dim=lambda d, mechanism: d * d if mechanism.options["p"] == 2 else None,
    ),
    Mechanism(
        name="cosformer",
        formula="relu(q).relu(k_j) cos(pi (t - j) / 2M), M the context",
        paper="Qin et al. 2022, arXiv:2202.08791",
        kind="features",
        options=_options(context=8192),
        check=_check_context,
        query_map=_maps.cosformer,
        key_map=_maps.cosformer,
        dim=lambda d, _: 2 * d,
    ),
    Mechanism(
        name="l2_normalised",
        formula="phi(x) = (elu(x) + 1) / |elu(x) + 1|",
        paper="elu1 on the unit sphere",
        kind="features",
        query_map=_maps.l2_normalised,
        key_map=_maps.l2_normalised,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="inline",
        formula="w_j = (1 + s_j - mean_i s_i) / N",
        paper="Han et al. 2024, arXiv:2412.06590",
        kind="features",
        signed=True,
        scale="sqrt",
        normaliser="centred",
        query_map=_maps.identity,
        key_map=_maps.identity,
        dim=lambda d, _: d,
    ),
    Mechanism(
        name="decay",
        formula="w_j proportional to lam^(t - j)",
        paper="Sun et al. 2023, arXiv:2307.08621",
        kind="features",
        log=True,
        query_free=True,
        options=_options(lam=0.9),
        check=_check_lam,
        query_map=lambda x, site: _maps.ones(x, site).zero_(),
        key_map=lambda x, site: _maps.ones(x, site).zero_(),
        rate=_lam_rate,
        dim=lambda d, _: 1,
    ),
    Mechanism(
        name="relu2_scores",
        formula="relu(s_j)^2",
        paper="Hua et al. 2022, arXiv:2202.10447",
        kind="scores",
        scale="scores",
        score_weights=relu2,
    ),
    Mechanism(
        name="top_k",
        formula="softmax over the k largest s_j",
        paper="Zhao et al. 2019, arXiv:1912.11637",
        kind="scores",
        scale="scores",
        options=_options(k=32),
        check=_check_k,
        score_weights=top_k,
    ),
    _FITTED,
    Mechanism(
        name="hybrid",
        formula="softmax on the first sinks and the last w keys, a fitted map on the others; fitted together",
        paper="softgap calibration; arXiv:2410.10254",
        kind="hybrid",
        needs=_FITTED.needs,
        accepts=(*_FITTED.accepts, "tail_factor"),
        options=_options(w=30, sinks=4, f=1, far=0),
        check=check_window,
        tail=_FITTED,
    ),
    Mechanism(
        name="uniform",
        formula="w_j = 1 / N: the mean of the visible values",
        paper="baseline",
        kind="features",
        query_free=True,
        query_map=_maps.ones,
        key_map=_maps.ones,
        dim=lambda d, _: 1,
    ),
    Mechanism(
        name="window",
        formula="softmax on the first sinks and the last w keys",
        paper="Xiao et al. 2023, arXiv:2309.17453",
        kind="window",
        options=_options(w=60, sinks=4, far=0),
        check=check_window,
    ),
    Mechanism(
        name="razor",
        formula="the same with one more key: the mean of the others, its logit raised by the log of their number",
        paper="Tang et al. 2024, arXiv:2407.15891",
        kind="hybrid",
        options=_options(w=60, sinks=4, far=0),
        check=check_window,
        tail=Mechanism(name="mean_key", formula="the mean key", paper="arXiv:2407.15891", kind="mean_key"),
    ),
    Mechanism(name="zero", formula="0", paper="baseline", kind="constant"),
    Mechanism(
        name="constant",
        formula="the head's mean output over calibration text",
        paper="baseline",
        kind="constant",
        needs=("mean",),
        constant=_mean_output,
    ),
    Mechanism(
        name="self_token",
        formula="v_t (the last visible value)",
        paper="baseline",
        kind="positions",
        position_weights=self_token,
    ),
    Mechanism(
        name="previous_token",
        formula="v_(t-1) (the last visible value but one)",
        paper="baseline",
        kind="positions",
        position_weights=previous_token,
    ),
    Mechanism(
        name="first_token",
        formula="v_0 (the first visible value)",
        paper="baseline",
        kind="positions",
        position_weights=first_token,
    ),
    Mechanism(
        name="profile",
        formula="a weight for the first visible token, one by distance for the others; from calibration text",
        paper="baseline",
        kind="positions",
        needs=("first", "by_distance"),
        position_weights=profile,
    ),
)

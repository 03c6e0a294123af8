"""Feature maps of the fixed mechanisms, and the feature vectors a mechanism makes of queries and keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention.mechanism import Mechanism, Site
from softgap.attention.rotary import with_unrotated
from softgap.errors import ValueInputError

__all__ = ["LOG_ZERO", "Features", "featurise", "orthogonal_projection", "relu", "seeded_affine"]


Vectors = Float[Tensor, "batch head time dim"]


FeatureVectors = Float[Tensor, "batch head time feature"]


def elu1(x: Vectors, site: Site) -> FeatureVectors:
    """phi = elu(x) + 1, that is exp(x) below zero and x + 1 above."""
    # Two clamps and an exponential take half the time of functional.elu.
    below, above = x.clamp(max=0).exp_(), x.clamp(min=0)
    return below + above if below.requires_grad else below.add_(above)  # a gradient needs the exponential as it was


def relu(x: Vectors, site: Site) -> FeatureVectors:
    """phi = max(x, 0)."""
    return functional.relu(x)


def identity(x: Vectors, site: Site) -> FeatureVectors:
    """phi = x."""
    return x


def ones(x: Vectors, site: Site) -> FeatureVectors:
    """phi = 1: one feature that ignores the vector."""
    return x.new_ones((*x.shape[:-1], 1))


def log_exp_dim(x: Vectors, site: Site) -> FeatureVectors:
    """log phi, phi = softmax(x) over the features."""
    return functional.log_softmax(x, dim=-1)


def log_hedgehog(x: Vectors, site: Site) -> FeatureVectors:
    """log phi, phi = softmax([x, -x]) over the features."""
    return functional.log_softmax(torch.cat([x, -x], dim=-1), dim=-1)


def focused(x: Vectors, site: Site) -> FeatureVectors:
    """phi = r^p |r| / |r^p| with r = relu(x), and 0 where r = 0."""
    r = functional.relu(x)
    norm = torch.linalg.vector_norm(r, dim=-1, keepdim=True)
    # Powers are taken of the unit vector, so that no norm over- or underflows.
    power = torch.pow(r / norm.clamp(min=torch.finfo(x.dtype).tiny), site.options["p"])
    power_norm = torch.linalg.vector_norm(power, dim=-1, keepdim=True)
    return power.mul_(norm).div_(power_norm.clamp(min=torch.finfo(x.dtype).tiny))


def dpfp(x: Vectors, site: Site) -> FeatureVectors:
    """phi = r * roll(r, 1) with r = relu([x, -x]) (nu = 1)."""
    r = functional.relu(torch.cat([x, -x], dim=-1))
    return r * r.roll(1, dims=-1)


def l2_normalised(x: Vectors, site: Site) -> FeatureVectors:
    """phi = (elu(x) + 1) / |elu(x) + 1|."""
    # Above about 87 below zero elu(x) + 1 rounds to 0 in float32; the floor keeps 0 / 0 out.
    return functional.normalize(elu1(x, site), dim=-1, eps=torch.finfo(x.dtype).tiny)


def pair_products(x: Vectors, site: Site) -> FeatureVectors:
    """phi = vec(x x^T), so that phi(q).phi(k) = (q.k)^2."""
    return (x[..., :, None] * x[..., None, :]).flatten(-2)


def taylor2(x: Vectors, site: Site) -> FeatureVectors:
    """phi = [1, x, vec(x x^T) / sqrt 2], so that phi(q).phi(k) = 1 + s + s^2 / 2."""
    return torch.cat([ones(x, site), x, pair_products(x, site) / math.sqrt(2)], dim=-1)


def cosformer(x: Vectors, site: Site) -> FeatureVectors:
    """phi = relu(x) [cos(pi i / 2M), sin(pi i / 2M)] at position i, so that weights carry cos(pi (t - j) / 2M)."""
    context = site.options["context"]
    if len(site.positions) and int(site.positions.max()) >= context:
        raise ValueInputError(
            f"cosformer is defined for positions below its context M = {context:g}, got position "
            f"{int(site.positions.max())}; set a larger one with configure(context=...)"
        )
    angle = (site.positions.to(x.dtype) * (math.pi / (2 * context)))[..., None]
    r = functional.relu(x)
    return torch.cat([r * angle.cos(), r * angle.sin()], dim=-1)


@lru_cache(maxsize=32)
def orthogonal_projection(m: int, d: int, seed: int) -> Float[Tensor, "feature dim"]:
    """The seeded W of favor: rows orthogonal in blocks of d, with the norms of independent Gaussian vectors."""
    # What is kept must serve gradients too, even if it is first asked for in inference mode.
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        blocks = []
        for start in range(0, m, d):
            directions, triangle = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
            # QR fixes signs by convention; undone, the directions are uniform on the sphere.
            directions = directions * triangle.diagonal().sign()
            norms = torch.randn(d, d, generator=generator, dtype=torch.float64).norm(dim=1)
            blocks.append((directions.T * norms[:, None])[: m - start])
        return torch.cat(blocks)


def favor(x: Vectors, site: Site) -> FeatureVectors:
    """log phi, phi = exp(W x - |x|^2 / 2) / sqrt(m); x arrives times sqrt(scale)."""
    m, seed = int(site.options["features"]), int(site.options["seed"])
    w = orthogonal_projection(m, x.shape[-1], seed).to(x.device, x.dtype)
    return x @ w.T - 0.5 * x.square().sum(dim=-1, keepdim=True) - 0.5 * math.log(m)


@lru_cache(maxsize=32)
def seeded_affine(d: int, seed: int) -> tuple[Float[Tensor, "dim dim"], Float[Tensor, " dim"]]:
    """The seeded A (entries of variance 1 / d) and b (variance 1) of relu_affine."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        a = torch.randn(d, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
        return a, torch.randn(d, generator=generator, dtype=torch.float64)


def relu_affine(x: Vectors, site: Site) -> FeatureVectors:
    """phi = relu(A x + b); A is ``[1 or batch, 1 or head, feature, dim]``, b without the last axis."""
    if "A" in site.parameters and "b" in site.parameters:
        return functional.relu(_affine(x, site.parameters["A"], site.parameters["b"]))
    a, b = seeded_affine(x.shape[-1], int(site.options["seed"]))
    return functional.relu(x @ a.T.to(x.device, x.dtype) + b.to(x.device, x.dtype))


def exp_affine_query(x: Vectors, site: Site) -> FeatureVectors:
    """log phi_q of a fitted map, phi_q = exp(W_q x + b_q); x with R_-p x behind it where the map has a rotation."""
    return _affine(_with_unrotated(x, site), site.parameters["query_weight"], site.parameters["query_bias"])


def exp_affine_key(x: Vectors, site: Site) -> FeatureVectors:
    """log phi_k of a fitted map, phi_k = exp(W_k x + b_k), likewise; one map per KV head, or one per query head."""
    weight = site.parameters["key_weight"]
    x = _with_unrotated(x, site)
    if weight.shape[1] > x.shape[1]:
        x = x.repeat_interleave(weight.shape[1] // x.shape[1], dim=1)
    return _affine(x, weight, site.parameters["key_bias"])


def affine_dim(weight: str, fallback: int | None, mechanism: Mechanism) -> int | None:
    """Number of features of an affine map: rows of its weight, or the fallback while it has none."""
    return int(mechanism.parameters[weight].shape[-2]) if weight in mechanism.parameters else fallback


def _with_unrotated(x: Vectors, site: Site) -> Float[Tensor, "batch head time seen"]:
    """The vectors, and behind them the same before rotary embedding, where the parameters tell how to undo it."""
    if "frequency" not in site.parameters:
        return x
    return with_unrotated(x, site.turned_by, site.parameters["frequency"], site.parameters["turn"])


def _affine(
    x: Vectors, weight: Float[Tensor, "batch head feature dim"], bias: Float[Tensor, "batch head feature"]
) -> FeatureVectors:
    return (x @ weight.transpose(-1, -2)).add_(bias[..., None, :])


# Logarithm of a feature that is not there. Finite, so that differences of two of them are 0 and not NaN.
LOG_ZERO = -1e30


@dataclass(frozen=True, eq=False)
class Features:
    """phi(q) and phi(k), or their logarithms, with the rate at which each feature decays with distance.

    ``key`` has one head per query head where the mechanism's key map does, else one per KV head.
    """

    query: Float[Tensor, "batch query_head query feature"]
    key: Float[Tensor, "batch key_head key feature"]
    rate: Float[Tensor, "batch key_head feature"] | None
    log: bool


def featurise(
    mechanism: Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    *,
    scale: float,
    query_positions: Int[Tensor, " query"],
    key_positions: Int[Tensor, " key"],
    query_turned: Int[Tensor, "#batch query"] | None = None,
    key_turned: Int[Tensor, "#batch key"] | None = None,
    key_valid: Bool[Tensor, "batch key"] | None = None,
    share_heads: bool = False,
) -> Features:
    """Feature vectors of the queries and keys of one call; hidden keys get features of zero.

    ``query_turned`` and ``key_turned`` are the positions that rotary embedding knew, where they differ from the others.
    ``share_heads`` lets a mechanism that ignores the query answer once per KV head instead of once per query head.
    """
    if mechanism.query_map is None or mechanism.key_map is None:
        raise AssertionError(f"mechanism '{mechanism.name}' has no feature maps")  # callers dispatch on kind
    if key_valid is not None:
        # A hidden slot may hold anything, NaN included: it must not reach a map.
        k = k.masked_fill(~key_valid[:, None, :, None], 0)
    if mechanism.scale == "sqrt":
        q, k = q * math.sqrt(scale), k * math.sqrt(scale)
    if share_heads and mechanism.query_free:
        q = q[:, :: q.shape[1] // k.shape[1]]
    at_keys = mechanism.site(key_positions, k.dtype, key_turned)
    key = mechanism.key_map(k, at_keys)
    if key_valid is not None:
        key = key.masked_fill(~key_valid[:, None, :, None], LOG_ZERO if mechanism.log else 0)
    # Keys appended without a question bring no queries whose heads a map could match.
    has_queries = q.shape[2] > 0
    query = key[:, :, :0]
    if has_queries:
        query = mechanism.query_map(q, mechanism.site(query_positions, q.dtype, query_turned))
    rate = None if mechanism.rate is None else mechanism.rate(at_keys)
    if rate is not None:
        if not bool((rate >= 0).all()):
            raise ValueInputError(f"decay rates must not be negative, got {rate.min().item():g}; clamp them at 0")
        rate = rate.to(key.dtype).expand(key.shape[0], key.shape[1], key.shape[-1])
    return Features(query, key, rate, mechanism.log)

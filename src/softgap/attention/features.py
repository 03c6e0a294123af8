"""From a mechanism and its tensors to feature vectors, ready for any of the three forms."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.mechanism import Mechanism
from softgap.errors import ValueInputError

__all__ = ["LOG_ZERO", "Features", "featurise"]

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
    asked = q.shape[2] > 0
    query = key[:, :, :0]
    if asked:
        query = mechanism.query_map(q, mechanism.site(query_positions, q.dtype, query_turned))
    rate = None if mechanism.rate is None else mechanism.rate(at_keys)
    if rate is not None:
        if not bool((rate >= 0).all()):
            raise ValueInputError(f"decay rates must not be negative, got {rate.min().item():g}; clamp them at 0")
        rate = rate.to(key.dtype).expand(key.shape[0], key.shape[1], key.shape[-1])
    return Features(query, key, rate, mechanism.log)

"""The fitted map of one layer: features exp(W x + b) that decay with distance, and their distance from softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism, resolve
from softgap.attention.rotation import Rotation
from softgap.calibration.rows import LayerText, Rows

__all__ = ["Maps", "Scores", "landmark_maps", "log_weights", "softmax_scores", "weights_kl"]

Scores = Float[Tensor, "block kv_head group row key"]

# A feature that decays by exp(-1) a step sees little but its own token; the kernels are safe up to a spread of 5.
FASTEST = 1.0


@dataclass(frozen=True, eq=False)
class Maps:
    """log phi_q = W_q q + b_q per query head, log phi_k = W_k k + b_k and a decay rate per KV head, r features each.

    With a rotation q and k are followed by the same vectors before rotary embedding, and weights are twice as wide.
    """

    query_weight: Float[Tensor, "kv_head group feature seen"]
    query_bias: Float[Tensor, "kv_head group feature"]
    key_weight: Float[Tensor, "kv_head feature seen"]
    key_bias: Float[Tensor, "kv_head feature"]
    log_rate: Float[Tensor, "kv_head feature"]

    @property
    def rate(self) -> Float[Tensor, "kv_head feature"]:
        """Decay per position."""
        return self.log_rate.exp().clamp(max=FASTEST)

    def parameters(self) -> dict[str, Float[Tensor, "layer head ..."]]:
        """What the mechanism ``fitted`` needs, for one layer."""
        return {
            "query_weight": self.query_weight.flatten(0, 1)[None],
            "query_bias": self.query_bias.flatten(0, 1)[None],
            "key_weight": self.key_weight[None],
            "key_bias": self.key_bias[None],
            "rate": self.rate[None],
        }

    def mechanism(self, rotation: Rotation | None = None) -> Mechanism:
        """The mechanism ``fitted`` of one layer, given the rotation that the maps were fitted with."""
        turning = {} if rotation is None else rotation.parameters()
        return resolve("fitted").with_parameters(**self.parameters(), **turning)

    def widened(self, more: int) -> Maps:
        """The same maps of vectors that are longer by so many numbers, which count for nothing yet."""
        wider = {name: functional.pad(getattr(self, name), (0, more)) for name in ("query_weight", "key_weight")}
        return replace(self, **wider)

    def tensors(self) -> dict[str, Tensor]:
        """The free numbers by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def log_weights(maps: Maps, rows: Rows) -> Scores:
    """log sum_r exp(log phi_q,r + log phi_k,r - a_r (t - s)): unnormalised log-weights, up to a term per row."""
    rate = maps.rate
    key = _affine(rows.key_seen, maps.key_weight, maps.key_bias)
    key = key + rate[:, None] * rows.key_from_middle[:, None, :, None]
    query = _affine(rows.query_seen, maps.query_weight, maps.query_bias)
    query = query - rate[:, None, None] * rows.from_middle[:, None, None, :, None]
    # Constants per key and per row keep the exponentials in range; the first is put back, the second cancels.
    key_top = key.detach().amax(dim=-1, keepdim=True)
    query_top = query.detach().amax(dim=-1, keepdim=True)
    product = (query - query_top).exp().flatten(2, 3) @ (key - key_top).exp().transpose(-1, -2)
    logs = product.clamp(min=torch.finfo(product.dtype).tiny).log() + key_top.transpose(-1, -2)
    return _by_row(logs, rows)


def _affine(
    x: Float[Tensor, "block *head row seen"],
    weight: Float[Tensor, "*head feature seen"],
    bias: Float[Tensor, "*head feature"],
) -> Float[Tensor, "block *head row feature"]:
    """W x + b with the rows of all blocks side by side: one product per head is faster than one per block and head."""
    together = x.movedim(0, -3).flatten(-3, -2)
    found: Tensor = together @ weight.transpose(-1, -2) + bias[..., None, :]
    by_block: Tensor = found.unflatten(-2, (len(x), -1))
    return by_block.movedim(-3, 0)


def softmax_scores(rows: Rows, scale: float, softcap: float | None = None) -> Scores:
    """The model's own scores s q.k, capped where the model caps them."""
    scores = (rows.query.flatten(2, 3) * scale) @ rows.key.transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return _by_row(scores, rows)


def _by_row(logs: Float[Tensor, "block kv_head group_row key"], rows: Rows) -> Scores:
    blocks, kv_heads, group, count = rows.query.shape[:4]
    return logs.reshape(blocks, kv_heads, group, count, -1)


def weights_kl(wanted: Scores, found: Scores, rows: Rows) -> Float[Tensor, "block kv_head group row"]:
    """KL divergence of the found weights from the wanted ones, both given as unnormalised log-weights, per row."""
    prior = rows.log_count[:, None, :].masked_fill(~rows.seen, -torch.inf)[:, None, None]
    target, reached = (functional.log_softmax(logs + prior, dim=-1) for logs in (wanted, found))
    # Hidden keys are -inf on both sides; their share is 0.
    difference = (target - reached).masked_fill(~rows.seen[:, None, None], 0.0)
    return (target.exp() * difference).sum(dim=-1)


def landmark_maps(
    texts: Sequence[LayerText], features: int, scale: float, *, sharpness: float = 1.0, rng: np.random.Generator
) -> Maps:
    """Where the fit starts: every feature is the softmax distribution of one real query, a landmark.

    phi_k,r = exp(s q_r.k), and phi_q,r is large for queries whose distribution is near that of q_r: to second order the
    KL divergence between the two is s^2 (q - q_r)^T Sigma (q - q_r) / 2, with Sigma the covariance of the keys.
    """
    kv_heads = texts[0].key.shape[0]
    group = texts[0].query.shape[0] // kv_heads
    queries = torch.cat([text.query for text in texts], dim=1).unflatten(0, (kv_heads, group)).flatten(1, 2)
    keys = torch.cat([text.key for text in texts], dim=1)
    some = keys[:, torch.from_numpy(rng.choice(keys.shape[1], size=min(2048, keys.shape[1]), replace=False))]
    at = torch.from_numpy(np.stack([rng.choice(queries.shape[1], size=features) for _ in range(kv_heads)]))
    landmark = queries[torch.arange(kv_heads)[:, None], at]
    centred = some - some.mean(dim=1, keepdim=True)
    covariance = centred.transpose(-1, -2) @ centred / some.shape[1]
    pull = sharpness * scale**2 * landmark @ covariance
    total = torch.logsumexp(scale * landmark @ some.transpose(-1, -2), dim=-1)
    query_bias = -0.5 * (pull * landmark).sum(dim=-1) - total
    rate = torch.logspace(-4, -1.5, features, dtype=keys.dtype)
    order = torch.from_numpy(np.stack([rng.permutation(features) for _ in range(kv_heads)]))
    return Maps(
        query_weight=pull[:, None].expand(-1, group, -1, -1).clone(),
        query_bias=query_bias[:, None].expand(-1, group, -1).clone(),
        key_weight=scale * landmark.clone(),
        key_bias=torch.zeros(kv_heads, features, dtype=keys.dtype),
        log_rate=rate[order].log(),
    )

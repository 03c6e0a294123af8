"""The oracle: every mechanism by its formula, one query at a time, in float64.

Nothing here is shared with the fast forms but the seeded matrices of favor and relu_affine. Slow on purpose.
``reference_chunked`` shows the idea behind the chunked form on one page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.feature_maps import orthogonal_projection, seeded_affine
from softgap.attention.mechanism import Mechanism

__all__ = ["Row", "reference_attention", "reference_chunked", "reference_comparison", "reference_weights"]

Vector = Float[np.ndarray, " n"]
Matrix = Float[np.ndarray, "n d"]


@dataclass(frozen=True, eq=False)
class Row:
    """One query with the keys it sees, the distance t - j to each, and the numbers of its mechanism and head.

    ``turned_by`` and ``keys_turned_by`` are the positions that rotary embedding knew; ``ordinals`` count the keys of
    the sequence, padding left out; ``far`` marks the keys between sinks and window that stay exact.
    """

    q: Vector
    k: Matrix
    distance: Vector
    position: int
    turned_by: int
    keys_turned_by: Vector
    ordinals: Vector
    scale: float
    options: dict[str, float]
    parameters: dict[str, np.ndarray]
    softcap: float | None = None
    sink_logit: float | None = None
    far: Bool[np.ndarray, " n"] | None = None

    @property
    def s(self) -> Vector:
        """Scores s_j = scale q.k_j."""
        return np.asarray(self.scale * (self.k @ self.q))

    def capped(self, scores: np.ndarray) -> np.ndarray:
        """Scores as the model's own softmax sees them."""
        return scores if self.softcap is None else np.asarray(self.softcap * np.tanh(scores / self.softcap))


def reference_attention(
    mechanism: Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    seen: Bool[Tensor, "batch head query key"],
    *,
    scale: float,
    offset: int,
    turned_by: Int[Tensor, "batch key"] | None = None,
    ordinals: Int[Tensor, "batch key"] | None = None,
    softcap: float | None = None,
    sink_logits: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head query value_dim"]:
    """Output of every query, by loops; ``seen`` lists the visible keys of each.

    ``turned_by`` is the position that rotary embedding gave each key, ``ordinals`` how many keys of its sequence come
    before it; None where it is the key's place. Only windows and hybrids have a use for the model's ``softcap`` and
    learned ``sink_logits``.
    """
    batch, heads, n_queries, _ = q.shape
    output = np.zeros((batch, heads, n_queries, v.shape[-1]))
    places = torch.arange(max(k.shape[2], offset + n_queries)).expand(batch, -1) if turned_by is None else turned_by
    priorities = {}
    if mechanism.options.get("far"):
        priorities = _priorities(mechanism, q, k, seen, ordinals, scale, offset, softcap, sink_logits)
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // k.shape[1])
            values = v[b, kv].double().numpy()
            parameters = {name: _of_head(x, b, h, kv, k.shape[1]) for name, x in mechanism.parameters.items()}
            for t in range(n_queries):
                visible = seen[b, h, t].nonzero()[:, 0].numpy()
                if len(visible) == 0:
                    continue
                if mechanism.kind == "constant":
                    output[b, h, t] = parameters.get("mean", 0.0)
                    continue
                row = Row(
                    q=q[b, h, t].double().numpy(),
                    k=k[b, kv].double().numpy()[visible],
                    distance=(offset + t - visible).astype(float),
                    position=offset + t,
                    turned_by=int(places[b, offset + t]),
                    keys_turned_by=places[b, visible].double().numpy(),
                    ordinals=visible.astype(float) if ordinals is None else ordinals[b, visible].double().numpy(),
                    scale=scale,
                    options=dict(mechanism.options),
                    parameters=parameters,
                    softcap=softcap,
                    sink_logit=None if sink_logits is None else float(sink_logits[h]),
                )
                if mechanism.options.get("far"):
                    row = replace(row, far=_far_keys(row, visible, priorities[b, kv]))
                output[b, h, t] = reference_weights(mechanism, row) @ values[visible]
    return torch.from_numpy(output)


def reference_weights(mechanism: str | Mechanism, row: Row) -> Vector:
    """The weights of one query over the keys it sees: normalised by their sum, all zero where that is zero."""
    name = mechanism if isinstance(mechanism, str) else mechanism.name
    if isinstance(mechanism, Mechanism) and mechanism.kind in ("window", "hybrid"):
        return _window(mechanism, row)
    if name == "inline":
        return np.asarray((1 + row.s - row.s.mean()) / len(row.s))
    weights = RELATIVE[name](row)
    total = weights.sum()
    return weights / total if total != 0 else np.zeros_like(weights)


def reference_chunked(
    query: Float[np.ndarray, "t r"],
    key: Float[np.ndarray, "t r"],
    value: Float[np.ndarray, "t e"],
    *,
    chunk: int,
    rate: Float[np.ndarray, " r"] | None = None,
) -> Float[np.ndarray, "t e"]:
    """Causal linear attention of one head in O(T) time: the idea of ``attention/chunked.py``, and nothing else.

    ``query`` and ``key`` hold the features phi(q_t) and phi(k_j). The weights
    ``w_tj = sum_r phi(q_t)_r phi(k_j)_r exp(-rate_r (t - j))`` factor at any position s between j and t. So all keys
    before a chunk that begins at s reach its queries through ``S = sum_j exp(-rate (s - j)) phi(k_j) v_j^T`` and
    ``z = sum_j exp(-rate (s - j)) phi(k_j)``, whose size does not depend on T. Within the chunk, weights are explicit.
    """
    rate = np.zeros(key.shape[1]) if rate is None else rate
    state, normaliser = np.zeros((key.shape[1], value.shape[1])), np.zeros(key.shape[1])
    outputs = []
    for start in range(0, len(key), chunk):
        q, k, v = (x[start : start + chunk] for x in (query, key, value))
        length, inside = len(k), np.arange(len(k))[:, None]
        # The keys before this chunk.
        decayed = q * np.exp(-rate * inside)
        sums, totals = decayed @ state, decayed @ normaliser
        # The keys of this chunk, up to each query.
        distance = inside - inside.T
        decay = np.exp(-rate * np.maximum(distance, 0)[:, :, None])
        weights = np.einsum("tr,jr,tjr->tj", q, k, decay) * (distance >= 0)
        sums, totals = sums + weights @ v, totals + weights.sum(axis=1)
        outputs.append(sums / np.where(totals == 0, 1, totals)[:, None])
        # What this chunk leaves for the next.
        carried, left = np.exp(-rate * length), k * np.exp(-rate * (length - inside))
        state, normaliser = carried[:, None] * state + left.T @ v, carried * normaliser + left.sum(axis=0)
    return np.concatenate(outputs)


def _window(mechanism: Mechanism, row: Row) -> Vector:
    """exp(s_j) on sinks and recent keys; on the others what the tail gives, matched on the recent keys."""
    scores, recent = row.capped(row.s), row.distance < row.options["w"]
    top = scores.max()
    weights = np.exp(scores - top)
    dropped = ~recent & (row.ordinals >= row.options["sinks"])
    if row.far is not None:
        dropped &= ~row.far
    tail = np.zeros_like(weights)
    if mechanism.tail is not None and mechanism.tail.kind == "mean_key" and dropped.any():
        logit = row.capped(row.scale * row.k[dropped].mean(axis=0) @ row.q)
        tail[:] = np.exp(logit - top)  # the token's exp(logit) times their number, shared among them
    elif mechanism.tail is not None and mechanism.tail.kind != "mean_key":
        tail_row = replace(row, options=dict(mechanism.tail.options))
        tail = reference_weights(mechanism.tail, tail_row)
        matched = tail[recent].sum()
        tail = tail * (weights[recent].sum() / matched) if matched > 0 else np.zeros_like(tail)
    factor = row.options.get("f", 1.0) * float(row.parameters.get("tail_factor", 1.0))
    weights = np.where(dropped, factor * tail, weights)
    total = weights.sum() + (0 if row.sink_logit is None else np.exp(row.sink_logit - top))
    return np.asarray(weights / total) if weights.sum() > 0 else np.zeros_like(weights)


def _priorities(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    seen: Tensor,
    ordinals: Tensor | None,
    scale: float,
    offset: int,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> dict[tuple[int, int], Vector]:
    """By batch and KV head, the attention that each key got from queries while it was in the window."""
    (batch, heads, n_queries, _), kv_heads = q.shape, k.shape[1]
    priorities = {(b, kv): np.zeros(k.shape[2]) for b in range(batch) for kv in range(kv_heads)}
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            for t in range(n_queries):
                if not seen[b, h, t, offset + t]:
                    continue  # a query of padding
                weights = {}
                for j in range(offset + t + 1):
                    number = j if ordinals is None else int(ordinals[b, j])
                    recent = offset + t - j < mechanism.options["w"]
                    if seen[b, h, t, j] and (recent or number < mechanism.options["sinks"]):
                        score = scale * float(q[b, h, t].double() @ k[b, kv, j].double())
                        score = score if softcap is None else softcap * math.tanh(score / softcap)
                        weights[j] = math.exp(score)
                total = sum(weights.values()) + (0 if sink_logits is None else math.exp(float(sink_logits[h])))
                for j, weight in weights.items():
                    if offset + t - j < mechanism.options["w"]:
                        priorities[b, kv][j] += weight / total
    return priorities


def _far_keys(row: Row, visible: np.ndarray, priorities: Vector) -> Bool[np.ndarray, " n"]:
    """The keys with the largest priorities among those that have left the window, the earlier of equal ones."""
    left = (row.distance >= row.options["w"]) & (row.ordinals >= row.options["sinks"])
    candidates = [i for i in np.flatnonzero(left) if priorities[visible[i]] > 0]
    candidates.sort(key=lambda i: (-priorities[visible[i]], visible[i]))
    far = np.zeros(len(visible), dtype=bool)
    far[candidates[: int(row.options["far"])]] = True
    return far


def reference_comparison(o: Vector, m: Vector) -> tuple[float, float, float]:
    """Divergence, relative L2 and norm ratio of two vectors."""
    n_o, n_m = float(np.linalg.norm(o)), float(np.linalg.norm(m))
    if n_o == 0:
        return (0.0 if n_m == 0 else 1.0), math.nan, math.nan
    cosine = float(o @ m) / (n_o * n_m) if n_m > 0 else 0.0
    return 1 - cosine, float(np.linalg.norm(m - o)) / n_o, n_m / n_o


def _of_head(x: Tensor, b: int, h: int, kv: int, kv_heads: int) -> np.ndarray:
    """The slice of a ``[batch, head, ...]`` parameter that a query head uses: its own, its KV head's, or the shared."""
    of_batch = x[b if x.shape[0] > 1 else 0]
    head = 0 if of_batch.shape[0] == 1 else kv if of_batch.shape[0] == kv_heads else h
    return np.asarray(of_batch[head].double().numpy())


def _elu1(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x, 0))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return np.asarray(e / e.sum(axis=-1, keepdims=True))


def _both(x: np.ndarray) -> np.ndarray:
    return np.concatenate([x, -x], axis=-1)


def _focus(x: np.ndarray, p: float) -> np.ndarray:
    r = _relu(x)
    norm, power = np.linalg.norm(r, axis=-1, keepdims=True), np.linalg.norm(r**p, axis=-1, keepdims=True)
    return np.asarray(r**p * norm / np.where(power > 0, power, 1))


def _dpfp(x: np.ndarray) -> np.ndarray:
    r = _relu(_both(x))
    return np.asarray(r * np.roll(r, 1, axis=-1))


def _unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(_elu1(x) / np.linalg.norm(_elu1(x), axis=-1, keepdims=True))


def _relu_affine(row: Row) -> Vector:
    a, b = (x.numpy() for x in seeded_affine(len(row.q), int(row.options["seed"])))
    if "A" in row.parameters:
        a, b = row.parameters["A"], row.parameters["b"]
    return np.asarray(_relu(row.k @ a.T + b) @ _relu(a @ row.q + b))


def _favor(row: Row) -> Vector:
    w = orthogonal_projection(int(row.options["features"]), len(row.q), int(row.options["seed"])).numpy()
    q, k = row.q * math.sqrt(row.scale), row.k * math.sqrt(row.scale)
    exponents = (k + q) @ w.T - (k**2).sum(1)[:, None] / 2 - (q**2).sum() / 2
    return _row_exp(exponents)


def _fitted(row: Row) -> Vector:
    p, q, k = row.parameters, row.q, row.k
    if "frequency" in p:
        q = np.concatenate([q, _before_rotation(q, row.turned_by, p)])
        k = np.stack(
            [np.concatenate([x, _before_rotation(x, at, p)]) for x, at in zip(k, row.keys_turned_by, strict=True)]
        )
    exponents = p["query_weight"] @ q + p["query_bias"] + k @ p["key_weight"].T + p["key_bias"]
    return _row_exp(exponents - np.outer(row.distance, p["rate"]))


def _before_rotation(x: Vector, position: float, parameters: dict[str, np.ndarray]) -> Vector:
    """R_-p x = x cos(p f) - J x sin(p f)."""
    angle = position * parameters["frequency"]
    return np.asarray(x * np.cos(angle) - (parameters["turn"] @ x) * np.sin(angle))


def _row_exp(exponents: Matrix) -> Vector:
    """sum_r exp of each key's exponents, all relative to the largest: the weights are normalised anyway."""
    return np.asarray(np.exp(exponents - exponents.max()).sum(axis=1))


def _top_k(row: Row) -> Vector:
    k = min(int(row.options["k"]), len(row.s))
    return np.where(row.s >= np.sort(row.s)[-k], np.exp(row.s - row.s.max()), 0)


def _profile(row: Row) -> Vector:
    weights = row.parameters["by_distance"][
        np.minimum(np.abs(row.distance), len(row.parameters["by_distance"]) - 1).astype(int)
    ]
    return np.concatenate([np.atleast_1d(row.parameters["first"]), weights[1:]])


def _one_hot(row: Row, index: int) -> Vector:
    return np.asarray(np.eye(len(row.distance))[index])


RELATIVE: dict[str, Callable[[Row], Vector]] = {
    "softmax": lambda row: np.exp(row.s - row.s.max()),
    "elu1": lambda row: _elu1(row.k) @ _elu1(row.q),
    "relu": lambda row: _relu(row.k) @ _relu(row.q),
    "relu_affine": _relu_affine,
    "identity": lambda row: row.k @ row.q,
    "exp_dim": lambda row: _softmax(row.k) @ _softmax(row.q),
    "hedgehog": lambda row: _softmax(_both(row.k)) @ _softmax(_both(row.q)),
    "focused": lambda row: _focus(row.k, row.options["p"]) @ _focus(row.q, row.options["p"]),
    "dpfp": lambda row: _dpfp(row.k) @ _dpfp(row.q),
    "favor": _favor,
    "taylor2": lambda row: 1 + row.s + row.s**2 / 2,
    "polynomial": lambda row: row.s ** row.options["p"],
    "cosformer": lambda row: (
        (_relu(row.k) @ _relu(row.q)) * np.cos(math.pi * row.distance / (2 * row.options["context"]))
    ),
    "l2_normalised": lambda row: _unit(row.k) @ _unit(row.q),
    "decay": lambda row: row.options["lam"] ** row.distance,
    "relu2_scores": lambda row: _relu(row.s) ** 2,
    "top_k": _top_k,
    "fitted": _fitted,
    "uniform": lambda row: np.ones(len(row.distance)),
    "self_token": lambda row: _one_hot(row, -1),
    "previous_token": lambda row: _one_hot(row, -2 if len(row.distance) > 1 else -1),
    "first_token": lambda row: _one_hot(row, 0),
    "profile": _profile,
}

"""The row-blocked quadratic form: any mechanism, any visible set, memory O(T)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.exact_set import ExactRows, ExactSet, ScoreRule
from softgap.attention.far_keys import far_priorities, far_rows
from softgap.attention.feature_maps import LOG_ZERO, Features, featurise
from softgap.attention.mechanism import Mechanism
from softgap.attention.outputs import Attention, divide
from softgap.attention.visible import Visible
from softgap.errors import UnsupportedError

__all__ = ["quadratic", "weight_blocks"]

# Numbers held at once per block of rows (float32: 16 MiB); the block shrinks as the keys grow.
BLOCK_NUMBERS = 2**22
# Decay within a block of rows: a feature falls by at most exp(-FALL), and products below VANISHED are summed in logs.
FALL = 24.0
VANISHED = 1e-30


class WeightBlock(NamedTuple):
    """Normalised weights of the query rows start..stop-1 over the keys first..last-1."""

    rows: slice
    keys: slice
    weights: Float[Tensor, "batch head query key"]
    flagged: Bool[Tensor, "batch head query"]


def quadratic(
    mechanism: Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    visible: Visible,
    scale: float,
    rule: ScoreRule | None = None,
) -> Attention:
    """Attention by explicit weights, a block of query rows at a time; ``rule`` is what windows do to scores."""
    batch, heads, n_queries, _ = q.shape
    valid = visible.row_valid(batch, n_queries, q.device)
    if mechanism.kind == "constant":
        return _constant(mechanism, q, v, valid, visible)
    output = q.new_zeros(batch, heads, n_queries, v.shape[-1])
    flagged = torch.zeros(batch, heads, n_queries, dtype=torch.bool, device=q.device)
    if visible.key_valid is not None:
        # 0 * NaN is NaN: a hidden slot must not reach the product.
        v = v.masked_fill(~visible.key_valid[:, None, :, None], 0)
    for block in weight_blocks(mechanism, q, k, visible=visible, scale=scale, rule=rule):
        grouped = block.weights.unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        output[:, :, block.rows] = (grouped @ v[:, :, block.keys]).reshape(batch, heads, -1, v.shape[-1])
        flagged[:, :, block.rows] = block.flagged
    return Attention(output, valid, flagged & valid[:, None])


def weight_blocks(
    mechanism: Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    *,
    visible: Visible,
    scale: float,
    rule: ScoreRule | None = None,
) -> Iterator[WeightBlock]:
    """The mechanism's normalised weights, block by block of query rows; zero where nothing is visible."""
    if mechanism.kind in ("window", "hybrid"):
        yield from _window_blocks(mechanism, q, k, visible, scale, rule or ScoreRule())
        return
    if mechanism.kind == "constant":
        raise UnsupportedError(f"mechanism '{mechanism.name}' has no weights: its output is a constant")
    batch, heads, n_queries, _ = q.shape
    relative = _relative_weights(mechanism, q, k, visible, scale)
    rows = max(1, min(relative.rows, BLOCK_NUMBERS // (batch * heads * k.shape[2] * relative.width)))
    for start in range(0, n_queries, rows):
        stop = min(n_queries, start + rows)
        keys = visible.key_range(start, stop, k.shape[2])
        seen = visible.rows(start, stop, keys, q.device)
        weights, terms = relative.block(slice(start, stop), slice(*keys), seen)
        weights = weights.expand(batch, heads, -1, -1)
        normalised, flagged = _normalise(mechanism, weights, terms, seen)
        yield WeightBlock(slice(start, stop), slice(*keys), normalised, flagged)


def _window_blocks(
    mechanism: Mechanism, q: Tensor, k: Tensor, visible: Visible, scale: float, rule: ScoreRule
) -> Iterator[WeightBlock]:
    """Weights of a window or a hybrid: exp(s_j) on the exact set, and what the tail gives to the other keys."""
    exact, tail = ExactSet.of(mechanism.options), mechanism.tail_with_parameters()
    if visible.key_valid is not None:
        k = k.masked_fill(~visible.key_valid[:, None, :, None], 0)
    blocks: Iterator[tuple[slice, slice, Tensor | None]]
    if tail is None or tail.kind == "mean_key":
        step = max(1, BLOCK_NUMBERS // (q.shape[0] * q.shape[1] * k.shape[2]))
        parts = (slice(start, min(q.shape[2], start + step)) for start in range(0, q.shape[2], step))
        blocks = ((part, slice(*visible.key_range(part.start, part.stop, k.shape[2])), None) for part in parts)
    else:
        tail_blocks = weight_blocks(tail, q, k, visible=visible, scale=scale)
        blocks = ((block.rows, block.keys, block.weights) for block in tail_blocks)

    def scores(rows: slice, keys: slice) -> Tensor:
        return rule.cap(_products(q[:, :, rows], k[:, :, keys]) * scale)

    priorities = None
    if exact.far:
        shape = (q.shape[0], q.shape[2], k.shape[2])
        priorities = far_priorities(scores, exact, visible, rule, shape, k.shape[1])
    for rows, keys, tail_weights in blocks:
        raw = _products(q[:, :, rows], k[:, :, keys]) * scale
        sets = exact.rows(visible, rows.start, rows.stop, (keys.start, keys.stop), q.device)
        if priorities is not None:
            far = far_rows(priorities[:, :, keys], exact, sets.seen & ~sets.exact, q.shape[1])
            sets = sets._replace(exact=sets.exact | (far & sets.seen))
        yield WeightBlock(rows, keys, *_window_weights(mechanism, raw, sets, tail_weights, rule))


def _window_weights(
    mechanism: Mechanism, raw: Tensor, sets: ExactRows, tail_weights: Tensor | None, rule: ScoreRule
) -> tuple[Float[Tensor, "batch head query key"], Bool[Tensor, "batch head query"]]:
    """Normalised weights of some rows from their scores before the softcap, and which rows lack a factor c_t."""
    scores, logits = rule.cap(raw), rule.sink_column(raw)
    top = scores.masked_fill(~sets.exact, -torch.inf).amax(dim=-1, keepdim=True)
    top = top if logits is None else torch.maximum(top, logits)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top).masked_fill(~sets.exact, -torch.inf).exp()
    dropped = (sets.seen & ~sets.exact).to(raw.dtype)
    lost = torch.zeros_like(weights[..., :1], dtype=torch.bool)
    factor = mechanism.tail_factor(raw)
    if tail_weights is not None:
        recent = (tail_weights * sets.recent).sum(dim=-1, keepdim=True)
        lost = (recent <= torch.finfo(recent.dtype).tiny) & (dropped.sum(dim=-1, keepdim=True) > 0)
        matched = (weights * sets.recent).sum(dim=-1, keepdim=True) / recent.masked_fill(recent == 0, torch.inf)
        weights = weights + factor * matched.masked_fill(lost, 0) * tail_weights * dropped
    elif mechanism.tail is not None:
        count = dropped.sum(dim=-1, keepdim=True)
        mean = dropped / count.clamp(min=1)
        logit = rule.cap((mean * raw).sum(dim=-1, keepdim=True)) + count.clamp(min=1).log()
        # The compensation token shares its weight among the keys that it stands for.
        weights = weights + factor * (logit - top).exp() * mean
    total = weights.sum(dim=-1, keepdim=True)
    normaliser = total if logits is None else total + (logits - top).exp()
    return weights / normaliser.masked_fill(total == 0, 1), lost[..., 0]


Block = Callable[[slice, slice, Bool[Tensor, "batch head query key"]], tuple[Tensor, Tensor | None]]


class _Relative(NamedTuple):
    """Weights up to a factor per row, with the absolute terms of signed ones, for any block of rows and keys.

    A block takes ``width`` numbers per weight, and has at most so many ``rows``.
    """

    block: Block
    width: int = 1
    rows: int = BLOCK_NUMBERS


def _relative_weights(mechanism: Mechanism, q: Tensor, k: Tensor, visible: Visible, scale: float) -> _Relative:
    if visible.key_valid is not None:
        k = k.masked_fill(~visible.key_valid[:, None, :, None], 0)
    if mechanism.position_weights is not None:
        weigh_positions = mechanism.position_weights
        site = mechanism.site(visible.positions(0, q.shape[2], q.device), q.dtype)

        def by_position(rows: slice, keys: slice, seen: Tensor) -> tuple[Tensor, None]:
            j = torch.arange(keys.start, keys.stop, device=q.device)
            return weigh_positions(site.positions[rows, None], j, seen, site).to(q.dtype), None

        return _Relative(by_position)
    if mechanism.score_weights is not None:
        weigh_scores = mechanism.score_weights

        def by_score(rows: slice, keys: slice, seen: Tensor) -> tuple[Tensor, None]:
            return weigh_scores(_products(q[:, :, rows], k[:, :, keys]) * scale, seen, mechanism.options), None

        return _Relative(by_score)
    at_queries, at_keys = visible.positions(0, q.shape[2], q.device), torch.arange(k.shape[2], device=k.device)
    features = featurise(
        mechanism,
        q,
        k,
        scale=scale,
        query_positions=at_queries,
        key_positions=at_keys,
        query_turned=visible.turned_by(at_queries),
        key_turned=visible.turned_by(at_keys),
        key_valid=visible.key_valid,
    )

    def by_features(rows: slice, keys: slice, seen: Tensor) -> tuple[Tensor, Tensor | None]:
        return _feature_weights(mechanism, features, rows, keys, seen, visible)

    if features.rate is None:
        return _Relative(by_features)
    if visible.mask is not None:
        return _Relative(by_features, width=features.key.shape[-1])
    return _Relative(by_features, rows=max(1, int(FALL / features.rate.detach().amax().clamp(min=1e-6).item())))


def _products(
    x: Float[Tensor, "batch head query dim"], y: Float[Tensor, "batch kv_head key dim"]
) -> Float[Tensor, "batch head query key"]:
    """x.y for every query and key, KV heads shared by their group without being repeated."""
    grouped = x.unflatten(1, (y.shape[1], -1)).flatten(2, 3)
    product: Tensor = torch.matmul(grouped, y.transpose(-1, -2))
    return product.view(x.shape[0], x.shape[1], x.shape[2], y.shape[2])


def _feature_weights(
    mechanism: Mechanism, features: Features, rows: slice, keys: slice, seen: Tensor, visible: Visible
) -> tuple[Float[Tensor, "batch head query key"], Float[Tensor, "batch head query key"] | None]:
    query, key = features.query[:, :, rows], features.key[:, :, keys]
    if not features.log:
        terms = _products(query.abs(), key.abs()) if mechanism.signed else None
        return _products(query, key), terms
    if features.rate is None:
        query_top, key_top = query.amax(-1, keepdim=True), key.amax(-1, keepdim=True)
        product = _products((query - query_top).exp(), (key - key_top).exp())
        per_key = key_top.transpose(-1, -2).repeat_interleave(product.shape[1] // key.shape[1], dim=1)
        exponent = product.log() + per_key
    else:
        p = visible.positions(rows.start, rows.stop, key.device)
        j = torch.arange(keys.start, keys.stop, device=key.device)
        form = _decayed_exponents if visible.mask is not None else _decayed_products
        exponent = form(query, key, features.rate, p, j, seen)
    return _row_exponentials(exponent, seen), None


def _decayed_exponents(
    query: Float[Tensor, "batch head query feature"],
    key: Float[Tensor, "batch kv_head key feature"],
    rate: Float[Tensor, "batch kv_head feature"],
    p: Int[Tensor, " query"],
    j: Int[Tensor, " key"],
    seen: Bool[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """log sum_r exp(query_r + key_r - rate_r |p - j|), term by term."""
    grouped = query.unflatten(1, (key.shape[1], -1))[..., :, None, :]
    lost = (p[:, None] - j).abs()[..., None] * rate[:, :, None, None, None]
    exponent: Tensor = (grouped + key[:, :, None, None] - lost).logsumexp(dim=-1).flatten(1, 2)
    return exponent


def _decayed_products(
    query: Float[Tensor, "batch head query feature"],
    key: Float[Tensor, "batch kv_head key feature"],
    rate: Float[Tensor, "batch kv_head feature"],
    p: Int[Tensor, " query"],
    j: Int[Tensor, " key"],
    seen: Bool[Tensor, "batch head query key"],
) -> Float[Tensor, "batch head query key"]:
    """The same by a matrix product, for keys that are not ahead of a query and rows so near that no power overflows.

    p - j = (p - m) + (m - j) with m the first row, so that each side carries its own part of the decay.
    """
    group = query.shape[1] // key.shape[1]
    start = p[0]
    q = query - rate.repeat_interleave(group, dim=1)[:, :, None] * (p - start)[:, None]
    k = key - rate[:, :, None] * (start - j)[:, None]
    query_top, key_top = (x.detach().amax(-1, keepdim=True) for x in (q, k))
    product = _products((q - query_top).exp(), (k - key_top).exp())
    exponent = product.log() + query_top + key_top.transpose(-1, -2).repeat_interleave(group, dim=1)
    # Where one side likes only what the other does not, the product has lost its digits.
    lost = ((product < VANISHED) & seen).any(dim=-1).any(dim=1).any(dim=0)
    for row in lost.nonzero()[:, 0].tolist():
        single_row = slice(row, row + 1)
        exponent[:, :, single_row] = _decayed_exponents(
            query[:, :, single_row], key, rate, p[single_row], j, seen[..., single_row, :]
        )
    return exponent


def _row_exponentials(exponent: Tensor, seen: Bool[Tensor, "batch head query key"]) -> Tensor:
    """exp relative to the row's largest visible exponent."""
    top = exponent.masked_fill(~seen, LOG_ZERO).amax(dim=-1, keepdim=True)
    return (exponent - top).clamp(max=0).exp()


def _normalise(
    mechanism: Mechanism, weights: Tensor, terms: Tensor | None, seen: Bool[Tensor, "batch head query key"]
) -> tuple[Float[Tensor, "batch head query key"], Bool[Tensor, "batch head query"]]:
    weights = weights.masked_fill(~seen, 0)
    if mechanism.normaliser == "centred":
        count = seen.sum(dim=-1, keepdim=True).clamp(min=1)
        centred = (1 + weights - weights.sum(dim=-1, keepdim=True) / count) / count
        return centred.masked_fill(~seen, 0), torch.zeros_like(weights[..., 0], dtype=torch.bool)
    absolute = None if terms is None else terms.masked_fill(~seen, 0).sum(dim=-1, keepdim=True)
    return divide(weights, weights.sum(dim=-1, keepdim=True), absolute)


def _constant(
    mechanism: Mechanism, q: Tensor, v: Tensor, valid: Bool[Tensor, "batch query"], visible: Visible
) -> Attention:
    """The same output wherever a head sees a key: a mask may show keys to some heads only."""
    shown = valid[:, None]
    if visible.mask is not None:
        mask = visible.mask if visible.key_valid is None else visible.mask & visible.key_valid[:, None, None]
        shown = shown & mask.any(dim=-1)
    batch, heads, n_queries, _ = q.shape
    output = q.new_zeros(batch, heads, n_queries, v.shape[-1])
    if mechanism.constant is not None:
        value = mechanism.constant(mechanism.site(torch.arange(n_queries, device=q.device), q.dtype))
        output = output + value[:, :, None] * shown[..., None]
    return Attention(output, valid, torch.zeros_like(output[..., 0], dtype=torch.bool))

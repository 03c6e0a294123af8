"""One new position of windows, hybrids and fitted maps as operations on tensors of fixed shapes.

This is the decode step where the compiled pass for the CPU (``softgap.attention.decode_kernel``) cannot go: on other
devices, and in float64. It computes the same. No number goes back to the host, no shape depends on a number, and
nothing branches on one, so ``torch.compile`` captures it as one graph without a break.

The sum over the features of the recent keys, which the factor c_t of a hybrid asks for, is made anew from the keys of
the window at every step: the compiled pass keeps parts of it instead, in loops whose length depends on the position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.chunked import PRESENT
from softgap.attention.feature_maps import LOG_ZERO

__all__ = ["Correction", "FarTensors", "Fitted", "Parts", "Rule", "State", "Window", "decode_tensors"]


class Window(NamedTuple):
    """Slots of sinks, then of the ring; the last three are None while there was no padding."""

    keys: Float[Tensor, "batch kv_head slot dim"]
    values: Float[Tensor, "batch kv_head slot value_dim"]
    ordinals: Int[Tensor, "batch ring"] | None
    counts: Int[Tensor, " batch"] | None
    sink_positions: Int[Tensor, "batch sink"] | None


class FarTensors(NamedTuple):
    """Far keys, and the priorities of the keys in the window, the oldest first (``softgap.attention.far_keys``)."""

    keys: Float[Tensor, "batch kv_head far dim"]
    values: Float[Tensor, "batch kv_head far value_dim"]
    priorities: Float[Tensor, "batch kv_head far"]
    positions: Int[Tensor, "batch kv_head far"]
    ordinals: Int[Tensor, "batch kv_head far"]
    pending: Float[Tensor, "batch kv_head recent"]


class State(NamedTuple):
    """The state of a fitted map, relative to exp(scale - rate * age) per feature."""

    sums: Float[Tensor, "batch*key_head feature value_dim"]
    totals: Float[Tensor, "batch*key_head feature"]
    scale: Float[Tensor, "batch*key_head feature"]
    age: Float[Tensor, "batch*key_head feature"]


class Fitted(NamedTuple):
    """The affine maps of a fitted mechanism, its decay, the rotation that it undoes, and the factor f of a tail."""

    query_weight: Float[Tensor, "head feature seen"]
    query_bias: Float[Tensor, "head feature"]
    key_weight: Float[Tensor, "key_head feature seen"]
    key_bias: Float[Tensor, "key_head feature"]
    rate: Float[Tensor, "key_head feature"]
    frequency: Float[Tensor, " dim"] | None
    turn: Float[Tensor, "dim dim"] | None
    factor: Float[Tensor, " head"]


class Rule(NamedTuple):
    """Scaling of the scores, and the model's softcap and learned sinks, where there are any."""

    scale: float
    softcap: float | None
    logits: Float[Tensor, " head"] | None


class Correction(NamedTuple):
    """The output correction."""

    weight: Float[Tensor, "head value_dim value_dim"]
    bias: Float[Tensor, "head value_dim"]


class Parts(NamedTuple):
    """All that a step works on; None for what a mechanism does not have. ``at`` counts the keys, and is moved on.

    ``origin`` is the position of each row's first key.
    """

    sinks: int
    at: Int[Tensor, ""]
    origin: Int[Tensor, " batch"]
    window: Window | None
    far: FarTensors | None
    state: State | None
    fitted: Fitted | None
    rule: Rule
    correction: Correction | None


class _Sums(NamedTuple):
    """Softmax sums of the queries over exact keys, each times exp(top); ``near`` are those of recent keys."""

    values: Float[Tensor, "batch head value_dim"]
    totals: Float[Tensor, "batch head"]
    near: Float[Tensor, "batch head"]
    top: Float[Tensor, "batch head"]


class _Key(NamedTuple):
    """One key and value for each KV head: those that enter the state, where ``present``."""

    key: Float[Tensor, "batch kv_head dim"]
    value: Float[Tensor, "batch kv_head value_dim"]
    present: Bool[Tensor, "batch _"]
    turned: Int[Tensor, "batch _"]
    late: Int[Tensor, "batch _"] | None


def decode_tensors(
    parts: Parts,
    q: Float[Tensor, "batch head dim"],
    k: Float[Tensor, "batch kv_head dim"],
    v: Float[Tensor, "batch kv_head value_dim"],
    valid: Bool[Tensor, " batch"] | None,
) -> Float[Tensor, "batch head value_dim"]:
    """Append one key per row and answer its queries; the tensors of the state are written in place.

    ``valid`` says which rows hold no padding now. It needs ordinals.
    """
    window = parts.window
    count = parts.at.expand(len(k)) if window is None or window.counts is None else window.counts
    ordinal = count if valid is None else torch.where(valid, count, -1)
    if valid is not None:
        k, v = k.masked_fill(~valid[:, None, None], 0), v.masked_fill(~valid[:, None, None], 0)
    if window is None:
        entering = _Key(k, v, (ordinal >= 0)[:, None], ordinal.clamp(min=0)[:, None], None)
        output = _alone(parts, q, entering, ordinal)
    else:
        entering = _move_window(parts, window, k, v, ordinal)
        sums, weights = _ask_window(parts, window, q)
        if parts.far is not None:
            entering = _exchange(parts, parts.far, entering, weights / sums.totals[..., None], ordinal)
            sums = _ask_far(parts, parts.far, q, sums)
        output = _divide(sums.values, sums.totals)
        if parts.state is not None and parts.fitted is not None:
            output = _join(parts, window, q, entering, sums, ordinal)
    parts.at.add_(1)
    if parts.correction is None:
        return output
    corrected: Tensor = (parts.correction.weight @ output[..., None])[..., 0] + parts.correction.bias
    return corrected


def _ring(parts: Parts, window: Window) -> tuple[Tensor, Tensor]:
    """The position that each slot of the ring holds, and which key of its sequence that is: below 0 for none."""
    size = window.keys.shape[2] - parts.sinks
    at = parts.at - (parts.at - torch.arange(size, device=parts.at.device)) % size
    return at, at[None] if window.ordinals is None else window.ordinals


def _move_window(parts: Parts, window: Window, k: Tensor, v: Tensor, ordinal: Tensor) -> _Key:
    """Put the new key into the ring, and among the sinks where it is one; what leaves the window."""
    sinks, size = parts.sinks, window.keys.shape[2] - parts.sinks
    slot = parts.at % size
    keys, values = (x[:, :, sinks:].index_select(2, slot[None])[:, :, 0] for x in (window.keys, window.values))
    before = (parts.at - size)[None] if window.ordinals is None else window.ordinals.index_select(1, slot[None])[:, 0]
    before = before.expand(len(k))
    here = torch.arange(sinks + size, device=k.device) == sinks + slot
    first = torch.arange(sinks + size, device=k.device) == torch.where(ordinal < sinks, ordinal, -1)[:, None]
    write = (here | first)[:, None, :, None]
    window.keys.copy_(torch.where(write, k[:, :, None], window.keys))
    window.values.copy_(torch.where(write, v[:, :, None], window.values))
    if window.ordinals is not None and window.counts is not None and window.sink_positions is not None:
        window.ordinals.copy_(torch.where(here[sinks:], ordinal[:, None], window.ordinals))
        window.sink_positions.copy_(torch.where(first[:, :sinks], parts.at, window.sink_positions))
        window.counts.add_(ordinal >= 0)
    present = ((parts.at >= size) & (before >= sinks))[:, None]
    return _Key(keys, values, present, before.clamp(min=0)[:, None], None)


def _scores(parts: Parts, q: Tensor, keys: Float[Tensor, "batch kv_head key dim"]) -> Float[Tensor, "batch head key"]:
    grouped = (q * parts.rule.scale).unflatten(1, (keys.shape[1], -1))
    scores = (grouped @ keys.transpose(-1, -2)).flatten(1, 2)
    cap = parts.rule.softcap
    return scores if cap is None else torch.tanh(scores / cap) * cap


def _weighted(weights: Tensor, values: Float[Tensor, "batch kv_head key value_dim"]) -> Tensor:
    weighted: Tensor = (weights.unflatten(1, (values.shape[1], -1)) @ values).flatten(1, 2)
    return weighted


def _ask_window(parts: Parts, window: Window, q: Tensor) -> tuple[_Sums, Float[Tensor, "batch head ring"]]:
    """Softmax sums over sinks and recent keys, and the weights of the ring relative to exp(top)."""
    sinks, size = parts.sinks, window.keys.shape[2] - parts.sinks
    _, ordinals = _ring(parts, window)
    places = torch.arange(sinks, device=q.device)[None] if window.sink_positions is None else window.sink_positions
    # A sink counts in its own slot, not in the ring.
    shown = torch.cat([(places <= parts.at).expand(len(ordinals), -1), ordinals >= sinks], dim=1)
    recent = torch.cat([(parts.at - places < size).expand(len(ordinals), -1), ordinals >= sinks], dim=1)
    scores = _scores(parts, q, window.keys).masked_fill(~shown[:, None], -torch.inf)
    top = scores.amax(dim=-1)
    if parts.rule.logits is not None:
        top = torch.maximum(top, parts.rule.logits)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = (scores - top[..., None]).exp()
    totals = weights.sum(dim=-1)
    near = (weights * recent[:, None]).sum(dim=-1)
    if parts.rule.logits is not None:
        totals = totals + (parts.rule.logits - top).exp() * (totals > 0)
    return _Sums(_weighted(weights, window.values), totals, near, top), weights[..., sinks:]


def _exchange(parts: Parts, far: FarTensors, leaving: _Key, received: Tensor, ordinal: Tensor) -> _Key:
    """Let the key that leaves the window become a far key if it may, and count the votes; what enters the state."""
    size, kv_heads = far.pending.shape[-1], far.keys.shape[1]
    priority = far.pending[..., 0].clone()
    votes = received.nan_to_num(0).unflatten(1, (kv_heads, -1)).sum(dim=2) * (ordinal >= 0)[:, None, None]
    # From slots of the ring to ages, the oldest first.
    votes = votes.index_select(2, (parts.at + 1 + torch.arange(size, device=votes.device)) % size)
    far.pending.copy_(torch.cat([far.pending[..., 1:], far.pending.new_zeros(*priority.shape, 1)], dim=-1) + votes)
    least = far.priorities.amin(dim=-1)
    # Of equal priorities the earlier key stays.
    lowest = torch.iinfo(far.positions.dtype).min
    worst = far.positions.masked_fill(far.priorities > least[..., None], lowest).argmax(dim=-1, keepdim=True)
    position = parts.at - size
    moved = leaving.present & (priority > least)
    key, value = (
        x.gather(2, worst[..., None].expand(-1, -1, -1, x.shape[-1]))[:, :, 0] for x in (far.keys, far.values)
    )
    turned = far.ordinals.gather(2, worst)[..., 0].long()
    late = position - far.positions.gather(2, worst)[..., 0].long()
    write = moved[..., None] & (torch.arange(far.keys.shape[2], device=worst.device) == worst)
    far.keys.copy_(torch.where(write[..., None], leaving.key[:, :, None], far.keys))
    far.values.copy_(torch.where(write[..., None], leaving.value[:, :, None], far.values))
    far.priorities.copy_(torch.where(write, priority[..., None], far.priorities))
    far.positions.copy_(torch.where(write, position.to(far.positions.dtype), far.positions))
    far.ordinals.copy_(torch.where(write, leaving.turned[..., None].to(far.ordinals.dtype), far.ordinals))
    return _Key(
        torch.where(moved[..., None], key, leaving.key),
        torch.where(moved[..., None], value, leaving.value),
        torch.where(moved, least > 0, leaving.present),
        torch.where(moved, turned, leaving.turned),
        torch.where(moved, late, 0),
    )


def _ask_far(parts: Parts, far: FarTensors, q: Tensor, sums: _Sums) -> _Sums:
    """The sums with the far keys, which are not recent."""
    there = (far.priorities > 0).repeat_interleave(q.shape[1] // far.keys.shape[1], dim=1)
    scores = _scores(parts, q, far.keys).masked_fill(~there, -torch.inf)
    top = torch.maximum(sums.top, scores.amax(dim=-1))
    weights, own = (scores - top[..., None]).exp(), (sums.top - top).exp()
    values = sums.values * own[..., None] + _weighted(weights, far.values)
    return _Sums(values, sums.totals * own + weights.sum(dim=-1), sums.near * own, top)


def _seen(fitted: Fitted, x: Float[Tensor, "*rows dim"], turned: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows seen"]:
    """What the maps see of vectors: themselves, and behind them R_-p x where the maps undo the rotation."""
    if fitted.frequency is None or fitted.turn is None:
        return x
    # In float32 an angle of 8,192 radians has lost 5e-4 of one.
    angle = -turned[..., None].double() * fitted.frequency.double()
    before = x * angle.cos().to(x.dtype) + (x @ fitted.turn.T) * angle.sin().to(x.dtype)
    return torch.cat([x, before], dim=-1)


def _key_features(
    fitted: Fitted, keys: Float[Tensor, "batch kv_head *key dim"], turned: Int[Tensor, "batch kv_head *key"]
) -> Float[Tensor, "batch key_head *key feature"]:
    """Logarithms of the features of keys; one map per KV head, or one per query head."""
    seen = _seen(fitted, keys, turned.expand(keys.shape[:-1]))
    seen = seen.repeat_interleave(len(fitted.key_weight) // keys.shape[1], dim=1)
    if keys.dim() == 3:
        return (fitted.key_weight @ seen[..., None])[..., 0] + fitted.key_bias
    return seen @ fitted.key_weight.transpose(-1, -2) + fitted.key_bias[:, None]


def _enter(parts: Parts, state: State, fitted: Fitted, entering: _Key) -> None:
    """Add a key to the state, and count one position."""
    turned = entering.turned + parts.origin[:, None]
    key = _key_features(fitted, entering.key, turned)
    copies = key.shape[1] // entering.key.shape[1]
    if entering.late is not None:
        late = entering.late.expand(entering.key.shape[:2]).repeat_interleave(copies, dim=1)
        key = key - fitted.rate * late[..., None]
    present = entering.present.expand(entering.key.shape[:2]).repeat_interleave(copies, dim=1)
    key = key.masked_fill(~present[..., None], LOG_ZERO).flatten(0, 1)
    value = entering.value.repeat_interleave(copies, dim=1).flatten(0, 1)
    carried = state.scale - fitted.rate.repeat(len(entering.key), 1) * state.age
    newer = (key > carried) & (key > PRESENT)
    top = torch.where(newer, key, carried)
    keep, new = (carried - top).exp(), (key - top).exp() * (key > PRESENT)
    state.sums.copy_(state.sums * keep[..., None] + new[..., None] * value[:, None])
    state.totals.copy_(state.totals * keep + new)
    # The larger of the two sets the scale, and its age is counted to the position behind this one.
    state.scale.copy_(torch.where(newer, key, state.scale))
    state.age.copy_(torch.where(newer, 0.0, state.age) + 1)


def _query_features(parts: Parts, fitted: Fitted, q: Tensor, ordinal: Tensor) -> Float[Tensor, "batch head feature"]:
    turned = (ordinal.clamp(min=0) + parts.origin)[:, None].expand(q.shape[:2])
    return (fitted.query_weight @ _seen(fitted, q, turned)[..., None])[..., 0] + fitted.query_bias


def _ask_state(
    state: State, fitted: Fitted, query: Float[Tensor, "batch head feature"], recent: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sums of values and of ones for each query, and the logarithm that they are relative to."""
    key_heads = len(fitted.rate)
    # The age was raised by one when this position's key was added.
    scale = state.scale - fitted.rate.repeat(len(query), 1) * (state.age - 1 + recent)
    terms = query.unflatten(1, (key_heads, -1)) + scale.unflatten(0, (-1, key_heads))[:, :, None]
    top = terms.amax(dim=-1, keepdim=True)
    weights = (terms - top).exp()
    values = weights @ state.sums.unflatten(0, (-1, key_heads))
    totals = weights @ state.totals.unflatten(0, (-1, key_heads))[..., None]
    return values.flatten(1, 2), totals.flatten(1, 3), top.flatten(1, 3)


def _alone(parts: Parts, q: Tensor, entering: _Key, ordinal: Tensor) -> Tensor:
    """A state without a window: the new key enters it at once."""
    if parts.state is None or parts.fitted is None:
        raise AssertionError("a part without a window has a state")
    _enter(parts, parts.state, parts.fitted, entering)
    query = _query_features(parts, parts.fitted, q, ordinal)
    values, totals, _ = _ask_state(parts.state, parts.fitted, query, 0)
    return _divide(values, totals)


def _join(parts: Parts, window: Window, q: Tensor, entering: _Key, sums: _Sums, ordinal: Tensor) -> Tensor:
    """Exact keys and the state, times f c_t, under one normaliser."""
    state, fitted = parts.state, parts.fitted
    if state is None or fitted is None:
        raise AssertionError("a hybrid has a state")
    sinks, size = parts.sinks, window.keys.shape[2] - parts.sinks
    _enter(parts, state, fitted, entering)
    query = _query_features(parts, fitted, q, ordinal)
    values, totals, top = _ask_state(state, fitted, query, size)
    at, ordinals = _ring(parts, window)
    turned = (ordinals.clamp(min=0) + parts.origin[:, None])[:, None]
    key = _key_features(fitted, window.keys[:, :, sinks:], turned.expand(-1, window.keys.shape[1], -1))
    key = key - fitted.rate[:, None] * (parts.at - at).to(key.dtype)[:, None]
    there = ((ordinals >= 0) & (at >= 0))[:, None, :, None]
    key = key.masked_fill(~there, LOG_ZERO)
    scale = key.amax(dim=2)
    near_sums = (key - scale[:, :, None]).exp().sum(dim=2)
    terms = query.unflatten(1, (len(fitted.rate), -1)) + scale[:, :, None]
    near_top = terms.amax(dim=-1, keepdim=True)
    near = ((terms - near_top).exp() * near_sums[:, :, None]).sum(dim=-1).flatten(1, 2)
    near_top = near_top.flatten(1, 3)
    lost = (near_top <= PRESENT) | (totals <= 0)
    far_top = torch.where(lost, -torch.inf, top - near_top + sums.top)
    highest = torch.maximum(sums.top, far_top)
    own, other = (sums.top - highest).exp(), (far_top - highest).exp() * sums.near / near * fitted.factor
    joined = sums.values * own[..., None] + values * other[..., None]
    return _divide(joined, sums.totals * own + totals * other)


def _divide(values: Float[Tensor, "batch head value_dim"], totals: Float[Tensor, "batch head"]) -> Tensor:
    divided: Tensor = values / totals.masked_fill(totals <= 0, torch.inf)[..., None]
    return divided

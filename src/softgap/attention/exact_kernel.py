"""Softmax over exact keys in compiled code: sinks, recent keys and far keys.

The functions of one query serve ``decode_kernel``. ``ask_exact_keys`` is for many positions of a window with far keys,
whose choice depends on the attention that each key receives: it walks through the positions of every KV head once,
where tensor operations compare all candidates of a block in pairs (``softgap.attention.far_keys``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from softgap.attention.decode_arrays import Array, Far, Rule
from softgap.attention.simd import SUMS, compiled, compiled_with, dot_rows, exponentials, sum_rows

__all__ = [
    "Leaving",
    "Sinks",
    "Sums",
    "Text",
    "add_far",
    "ask_exact_keys",
    "cap_scores",
    "exchange_far",
    "softmax_row",
]

_ZERO, _INFINITE = np.float32(0), np.float32(np.inf)


class Text(NamedTuple):
    """n new keys behind w recent ones; ordinals are below 0 for padding, and where there is no key yet."""

    queries: Array  # [batch, head, n, dim]
    keys: Array  # [batch, kv_head, w + n, dim]
    values: Array  # [batch, kv_head, w + n, value_dim]
    ordinals: Array  # [batch, w + n]
    first: int  # the position of the first key


class Sinks(NamedTuple):
    """The sinks, and their positions: beyond any text where there is none yet."""

    keys: Array  # [batch, kv_head, sink, dim]
    values: Array  # [batch, kv_head, sink, value_dim]
    positions: Array  # [batch, sink]


class Sums(NamedTuple):
    """What comes out: sums over the exact keys of every query, each times exp(scale)."""

    values: Array  # [batch, head, n, value_dim]
    totals: Array  # [batch, head, n]
    recent: Array  # [batch, head, n]
    scale: Array  # [batch, head, n]


class Leaving(NamedTuple):
    """What comes out: the key that leaves the exact set with each new key, as in ``far_keys.Dropped``."""

    keys: Array  # [batch, kv_head, n, dim]
    values: Array  # [batch, kv_head, n, value_dim]
    present: Array  # [batch, kv_head, n]
    ordinals: Array  # [batch, kv_head, n]
    positions: Array  # [batch, kv_head, n]
    late: Array  # [batch, kv_head, n]


class _Room(NamedTuple):
    shown: Array  # [sink + w]
    scores: Array  # [sink + w]
    bits: Array  # [longest]
    votes: Array  # [w + n]: the attention that each key of the text has received
    query: Array  # [dim]
    sums: Array  # [3]
    weights: Array  # [far]


@compiled
def cap_scores(scores: Array, rule: Rule) -> None:
    """Scores after the model's softcap, in place."""
    if rule.softcap > 0:
        for i in range(scores.size):
            scores[i] = np.tanh(scores[i] / rule.softcap) * rule.softcap


@compiled_with(fastmath=SUMS)
def softmax_row(scores: Array, shown: Array, rule: Rule, head: int, bits: Array) -> tuple[Any, Any, Any]:
    """Weights in place of the scores, relative to exp(top): top, their sum, and the sum over recent keys."""
    top = -_INFINITE
    for i in range(scores.size):
        if shown[i] == 0:
            scores[i] = -_INFINITE
        top = max(top, scores[i])
    if rule.logits.size:
        top = max(top, rule.logits[head])
    if top == -_INFINITE:
        top = _ZERO
    for i in range(scores.size):
        scores[i] -= top
    exponentials(scores, bits)
    total, recent = _ZERO, _ZERO
    for i in range(scores.size):
        total += scores[i]
        recent += scores[i] if shown[i] == 2 else _ZERO
    if rule.logits.size and total > 0:
        total += np.exp(rule.logits[head] - top)
    return top, total, recent


@compiled
def exchange_far(
    far: Far, b: int, n: int, priority: Any, at: int, ordinal: int, key: Array, value: Array
) -> tuple[bool, bool, int, int]:
    """Let the key that leaves the window become a far key if it may; ``key`` and ``value`` get what it displaces.

    Whether it was taken, whether a key was displaced, and that key's position and ordinal.
    """
    worst = 0
    for i in range(1, far.priorities.shape[2]):
        p, least = far.priorities[b, n, i], far.priorities[b, n, worst]
        if p < least or (p == least and far.positions[b, n, i] > far.positions[b, n, worst]):
            worst = i
    before = far.priorities[b, n, worst]
    if not priority > before:
        return False, False, 0, 0
    old_at, old_ordinal = int(far.positions[b, n, worst]), int(far.ordinals[b, n, worst])
    for i in range(key.size):
        key[i], far.keys[b, n, worst, i] = far.keys[b, n, worst, i], key[i]
    for i in range(value.size):
        value[i], far.values[b, n, worst, i] = far.values[b, n, worst, i], value[i]
    far.priorities[b, n, worst], far.positions[b, n, worst], far.ordinals[b, n, worst] = priority, at, ordinal
    return True, before > 0, old_at, old_ordinal


@compiled_with(fastmath=SUMS)
def add_far(far: Far, b: int, n: int, query: Array, rule: Rule, sums: Array, answer: Array, weights: Array,
            bits: Array) -> None:  # fmt: skip
    """Add the far keys to the sums of a query that is scaled: ``sums`` are its top, total and recent mass."""
    dot_rows(far.keys[b, n], query, weights)
    cap_scores(weights, rule)
    top = sums[0]
    for i in range(weights.size):
        if not far.priorities[b, n, i] > 0:
            weights[i] = -_INFINITE
        top = max(top, weights[i])
    own = np.exp(sums[0] - top)
    for i in range(weights.size):
        weights[i] -= top
    exponentials(weights, bits)
    for e in range(answer.size):
        answer[e] *= own
    sum_rows(weights, far.values[b, n], answer)
    sums[1] *= own
    sums[2] *= own
    for i in range(weights.size):
        sums[1] += weights[i]
    sums[0] = top


@compiled
def _show(text: Text, sinks: Sinks, b: int, t: int, shown: Array) -> None:
    """Which keys a query sees: 1, and 2 where they are recent. A sink counts in its own place, not in the window."""
    n_sinks = sinks.positions.shape[1]
    recent = shown.size - n_sinks
    at = text.first + recent + t
    for i in range(n_sinks):
        place = sinks.positions[b, i]
        shown[i] = 0 if place > at else (2 if at - place < recent else 1)
    for i in range(recent):
        shown[n_sinks + i] = 2 if text.ordinals[b, t + 1 + i] >= n_sinks else 0


@compiled
def _leave(text: Text, n_sinks: int, far: Far, left: Leaving, b: int, n: int, t: int, priority: Any) -> None:
    """Let the key that leaves the window become a far key if it may, and note what leaves the exact set."""
    at, ordinal, late = text.first + t, text.ordinals[b, t], 0
    key, value = left.keys[b, n, t], left.values[b, n, t]
    key[:], value[:] = text.keys[b, n, t], text.values[b, n, t]
    present = ordinal >= n_sinks
    if present:
        taken, there, old_at, old_ordinal = exchange_far(far, b, n, priority, at, ordinal, key, value)
        if taken:
            present, late, at, ordinal = there, at - old_at, old_at, old_ordinal
    left.present[b, n, t] = present
    left.ordinals[b, n, t], left.positions[b, n, t] = max(ordinal, 0), at
    left.late[b, n, t] = late if present else 0


@compiled_with(fastmath=SUMS)
def _ask(scale: Any, text: Text, sinks: Sinks, far: Far, rule: Rule, out: Sums, b: int, n: int, h: int, t: int,
         room: _Room) -> None:  # fmt: skip
    """The sums of one query, and its votes for the keys of its window."""
    n_sinks, sums, answer = sinks.positions.shape[1], room.sums, out.values[b, h, t]
    recent = room.scores.size - n_sinks
    first, near = room.scores[:n_sinks], room.scores[n_sinks:]
    for i in range(room.query.size):
        room.query[i] = text.queries[b, h, t, i] * scale
    dot_rows(sinks.keys[b, n], room.query, first)
    dot_rows(text.keys[b, n, t + 1 : t + 1 + recent], room.query, near)
    cap_scores(room.scores, rule)
    sums[0], sums[1], sums[2] = softmax_row(room.scores, room.shown, rule, h, room.bits)
    answer[:] = _ZERO
    sum_rows(first, sinks.values[b, n], answer)
    sum_rows(near, text.values[b, n, t + 1 : t + 1 + recent], answer)
    if text.ordinals[b, recent + t] >= 0 and sums[1] > 0:
        for i in range(recent):
            room.votes[t + 1 + i] += near[i] / sums[1]
    add_far(far, b, n, room.query, rule, sums, answer, room.weights, room.bits)
    out.scale[b, h, t], out.totals[b, h, t], out.recent[b, h, t] = sums[0], sums[1], sums[2]


@compiled
def ask_exact_keys(scale: Any, text: Text, sinks: Sinks, far: Far, softcap: Any, logits: Array, out: Sums,
                   left: Leaving, start: int, stop: int) -> None:  # fmt: skip
    """Answer the queries of a block over sinks, window and far keys, and move the far keys on.

    Of the units, which are KV heads of rows of the batch, those from ``start`` to before ``stop`` are computed; threads
    may share them out. logits [batch, head] are the model's learned sinks; no heads for none.
    """
    kv_heads, count, single = text.keys.shape[1], text.queries.shape[2], np.float32
    recent, n_sinks, n_far = text.keys.shape[2] - count, sinks.positions.shape[1], far.priorities.shape[2]
    group = text.queries.shape[1] // kv_heads
    room = _Room(
        np.zeros(n_sinks + recent, np.int8),
        np.empty(n_sinks + recent, single),
        np.empty(max(n_sinks + recent, n_far), np.int32),
        np.zeros(recent + count, single),
        np.empty(text.queries.shape[3], single),
        np.empty(3, single),
        np.empty(n_far, single),
    )
    for unit in range(start, stop):
        b, n = unit // kv_heads, unit % kv_heads
        rule = Rule(softcap, logits[b])
        room.votes[:recent], room.votes[recent:] = far.pending[b, n], _ZERO
        for t in range(count):
            _show(text, sinks, b, t, room.shown)
            # Its last vote came from the query before.
            _leave(text, n_sinks, far, left, b, n, t, room.votes[t])
            for h in range(n * group, (n + 1) * group):
                _ask(scale, text, sinks, far, rule, out, b, n, h, t, room)
        far.pending[b, n] = room.votes[count:]

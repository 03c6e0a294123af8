"""One new position of windows, hybrids and fitted maps, computed in one compiled pass on the CPU.

A call serves all query heads of a layer that share a mechanism, and all rows of the batch, in float32. For each KV head
it

1. moves the window on (``_move_window``): the new key comes, another one leaves;
2. asks sinks and recent keys by softmax (``_ask_exact``);
3. lets the key that has left become a far key or enter the state (``_leave_window``);
4. asks the far keys and the state, joins all under one normaliser, and corrects the output (``_answer_group``).

``decode_arrays`` says what it works on, ``feature_kernel`` computes features and state, and
``softgap.attention.decode`` hands over the tensors of a state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softgap.attention.decode_arrays import (
    Array,
    Carried,
    Exact,
    Far,
    Maps,
    Readout,
    Recent,
    Room,
    Rule,
    Step,
    make_room,
)
from softgap.attention.exact_kernel import add_far, cap_scores, exchange_far, softmax_row
from softgap.attention.feature_kernel import (
    ABSENT,
    PRESENT,
    add_to_chunk,
    add_to_state,
    age_state,
    fill_edge,
    key_features,
    map_queries,
    ordinal_of,
    sum_recent,
)
from softgap.attention.simd import SUMS, compiled, compiled_with, dot_rows, exponentials, sum_rows

__all__ = ["decode_position"]

Inputs = tuple[Array, Array, Array]
Places = tuple[Array, Array, Array, Array]

_ZERO, _ONE, _INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)


@compiled
def _append(step: Step, exact: Exact, b: int, ordinal: int, kv_heads: Array, k: Array, v: Array) -> None:
    """Put the new key into the ring, and among the sinks where it is one."""
    ring = exact.keys.shape[2] - step.sinks
    slot = step.sinks + step.length % ring
    for n in range(kv_heads.size):
        for i in range(k.shape[2]):
            exact.keys[b, n, slot, i] = k[b, kv_heads[n], i] if ordinal >= 0 else _ZERO
        for i in range(v.shape[2]):
            exact.values[b, n, slot, i] = v[b, kv_heads[n], i] if ordinal >= 0 else _ZERO
        if 0 <= ordinal < step.sinks:
            exact.keys[b, n, ordinal] = exact.keys[b, n, slot]
            exact.values[b, n, ordinal] = exact.values[b, n, slot]
    if exact.counts.size:
        exact.ordinals[b, step.length % ring] = ordinal
        if ordinal >= 0:
            exact.counts[b] += 1
            if ordinal < step.sinks:
                exact.sink_positions[b, ordinal] = step.length


@compiled
def _shown(step: Step, exact: Exact, b: int, shown: Array) -> None:
    """Which slots softmax sees: 1, and 2 where they are recent. A sink counts in its own slot, not in the ring."""
    t, sinks = step.length, step.sinks
    ring = exact.keys.shape[2] - sinks
    for i in range(sinks):
        at = i if exact.counts.size == 0 else exact.sink_positions[b, i]
        shown[i] = 0 if at > t else (2 if t - at < step.recent else 1)
    for i in range(ring):
        if i > t:
            shown[sinks + i] = 0
            continue
        ordinal = t - (t - i) % ring if exact.counts.size == 0 else exact.ordinals[b, i]
        shown[sinks + i] = 2 if ordinal >= sinks else 0


@compiled
def _vote(step: Step, exact: Exact, far: Far, b: int, n: int, weights: Array, shown: Array, total: Any) -> None:
    """Add the attention that recent keys receive from one query to what they have received before."""
    ring = exact.keys.shape[2] - step.sinks
    for i in range(ring):
        if shown[step.sinks + i] == 2:
            since = (step.length - i) % ring
            far.pending[b, n, step.recent - 1 - since] += weights[step.sinks + i] / total


@compiled
def _next_priority(step: Step, far: Far, b: int, n: int) -> Any:
    """The priority of the key that leaves the window; those of the others move up."""
    first = far.pending[b, n, 0]
    for i in range(step.recent - 1):
        far.pending[b, n, i] = far.pending[b, n, i + 1]
    far.pending[b, n, step.recent - 1] = _ZERO
    return first


@compiled
def _ask_far(step: Step, far: Far, b: int, n: int, h: int, query: Array, rule: Rule, room: Room) -> None:
    """Add the far keys to the sums of one query."""
    for i in range(query.size):
        room.query[i] = query[i] * step.scale
    add_far(far, b, n, room.query, rule, room.sums[h], room.answers[h], room.weights, room.bits)


@compiled
def _move_window(step: Step, exact: Exact, recent: Recent, maps: Maps, b: int, ordinal: int, origin: int,
                 kv_heads: Array, k: Array, v: Array, room: Room) -> None:  # fmt: skip
    """Save what leaves the window, put the new key into it, and see which slots count."""
    at = step.length - step.recent
    ring = exact.keys.shape[2] - step.sinks
    copies = maps.rate.shape[0] // kv_heads.size
    for n in range(kv_heads.size):
        if at >= 0:
            room.keys[n] = exact.keys[b, n, step.sinks + at % ring]
            room.values[n] = exact.values[b, n, step.sinks + at % ring]
        if at >= 0 and maps.rate.shape[1] and at % recent.edge.shape[2] == 0:
            for j in range(n * copies, (n + 1) * copies):
                fill_edge(step, exact, recent, b, j, n, origin, at, maps, room)
    room.leaving[0] = ordinal_of(exact, b, at) if at >= 0 else -1
    _append(step, exact, b, ordinal, kv_heads, k, v)
    _shown(step, exact, b, room.shown)


@compiled
def _ask_exact(step: Step, exact: Exact, far: Far, rule: Rule, b: int, n: int, h: int, query: Array, ordinal: int,
               room: Room) -> None:  # fmt: skip
    """The softmax sums of one query over sinks and recent keys, and its vote for far keys."""
    for i in range(query.size):
        room.query[i] = query[i] * step.scale
    dot_rows(exact.keys[b, n], room.query, room.scores)
    cap_scores(room.scores, rule)
    top, total, near = softmax_row(room.scores, room.shown, rule, h, room.bits)
    room.sums[h, 0], room.sums[h, 1], room.sums[h, 2] = top, total, near
    room.answers[h] = _ZERO
    sum_rows(room.scores, exact.values[b, n], room.answers[h])
    if far.priorities.shape[2] and ordinal >= 0:
        _vote(step, exact, far, b, n, room.scores, room.shown, total)


@compiled
def _leave_window(step: Step, exact: Exact, far: Far, carried: Carried, recent: Recent, maps: Maps, b: int, n: int,
                  priority: Any, origin: int, room: Room) -> None:  # fmt: skip
    """Move the key that leaves the window to the far keys, or into the state."""
    at = step.length - step.recent
    ordinal = room.leaving[0]
    present, late, turned = ordinal >= step.sinks, 0, ordinal
    other = False
    if present and far.priorities.shape[2]:
        taken, present_old, old_at, old_ordinal = exchange_far(
            far, b, n, priority, at, ordinal, room.keys[n], room.values[n]
        )
        if taken:
            present, other, late, turned = present_old, True, at - old_at, old_ordinal
    if at < 0 or maps.rate.shape[1] == 0:
        return
    copies = maps.rate.shape[0] // exact.keys.shape[1]
    for j in range(n * copies, (n + 1) * copies):
        unit = b * maps.rate.shape[0] + j
        if not present:
            age_state(carried, unit, maps.rate[j])
            continue
        if other:
            key_features(room.keys[n], turned + origin, j, maps, room.angles, room.seen, room.logs)
            for i in range(room.logs.size):
                room.logs[i] -= maps.rate[j, i] * np.float32(late)
        else:
            room.logs[:] = recent.edge[b, j, at % recent.edge.shape[2]]
        add_to_state(carried, unit, room.logs, room.values[n], maps.rate[j], room.work, room.bits)


@compiled
def _answer_group(step: Step, carried: Carried, recent: Recent, maps: Maps, readout: Readout, b: int, n: int,
                  turned: int, ordinal: int, inputs: Inputs, places: Places, logs: Array, room: Room,
                  out: Array) -> None:  # fmt: skip
    """Join exact keys and state for the queries of one KV head, and write their outputs."""
    heads, kv_heads = places[0], places[1]
    group = heads.size // kv_heads.size
    features = maps.rate.shape[1]
    copies = maps.rate.shape[0] // kv_heads.size if features else 1
    for j in range(n * copies, (n + 1) * copies):
        if features:
            room.logs[:] = ABSENT
            if ordinal >= 0:
                key_features(inputs[1][b, kv_heads[n]], turned, j, maps, room.angles, room.seen, room.logs)
            if step.recent == 0:
                _append_alone(carried, b, j, inputs[2][b, kv_heads[n]], ordinal, maps, room)
            else:
                c = recent.edge.shape[2]
                chunk = recent.chunks[b, j, step.length // c % recent.chunks.shape[2]]
                add_to_chunk(chunk, step.length % c == 0, maps.rate[j], room.logs)
                sum_recent(step, recent, b, j, maps.rate[j], room.work, room.bits)
        first = n * group + (j - n * copies) * group // copies
        for h in range(first, first + group // copies):
            if features:
                _add_tail(step, carried, maps, b, j, h, logs[b, h], room)
            _write(readout, h, room.sums[h, 1], room.answers[h], room.answer, out[b, heads[h]])


@compiled
def _append_alone(carried: Carried, b: int, j: int, value: Array, ordinal: int, maps: Maps, room: Room) -> None:
    """A state without a window takes the new key at once."""
    unit = b * maps.rate.shape[0] + j
    if ordinal >= 0:
        add_to_state(carried, unit, room.logs, value, maps.rate[j], room.work, room.bits)
    else:
        age_state(carried, unit, maps.rate[j])


@compiled_with(fastmath=SUMS)
def _add_tail(step: Step, carried: Carried, maps: Maps, b: int, j: int, h: int, logs: Array, room: Room) -> None:
    """Add the state's keys, times f c_t, to the sums of one query; its log-features are used up."""
    unit = b * maps.rate.shape[0] + j
    rate, term = maps.rate[j], room.work[0]
    near_top, top = -_INFINITE, -_INFINITE
    for i in range(logs.size):
        near_top = max(near_top, logs[i] + room.work[3, i])
        # The state's own age was raised by one when this position's key was added.
        term[i] = logs[i] + carried.scale[unit, i] - rate[i] * (carried.age[unit, i] - _ONE + np.float32(step.recent))
        top = max(top, term[i])
    for i in range(logs.size):
        term[i] -= top
    exponentials(term, room.bits)
    total = _ZERO
    for i in range(logs.size):
        total += term[i] * carried.totals[unit, i]
    if not total > 0:
        if step.recent == 0:
            room.sums[h, 1] = _ZERO
            room.answers[h] = _ZERO
        return
    room.answer[:] = _ZERO
    sum_rows(term, carried.sums[unit], room.answer)
    if step.recent == 0:
        room.sums[h, 1] = total
        room.answers[h] = room.answer
        return
    if near_top <= PRESENT:
        return
    for i in range(logs.size):
        logs[i] += room.work[3, i] - near_top
    exponentials(logs, room.bits)
    near = _ZERO
    for i in range(logs.size):
        near += logs[i] * room.work[2, i]
    mass = room.sums[h, 2] / near
    far_top = top - near_top + room.sums[h, 0]
    highest = max(room.sums[h, 0], far_top)
    own = np.exp(room.sums[h, 0] - highest)
    other = np.exp(far_top - highest) * mass * maps.factor[h]
    for e in range(room.answer.size):
        room.answers[h, e] = room.answers[h, e] * own + room.answer[e] * other
    room.sums[h, 1] = room.sums[h, 1] * own + total * other


@compiled_with(fastmath=SUMS)
def _write(readout: Readout, h: int, total: Any, answer: Array, room: Array, out: Array) -> None:
    """The output of one head: its sums divided, and corrected where there is a correction."""
    factor = _ONE / total if total > 0 else _ZERO
    if readout.weight.size == 0:
        for e in range(out.size):
            out[e] = answer[e] * factor
        return
    for e in range(answer.size):
        answer[e] *= factor
    dot_rows(readout.weight[h], answer, room)
    for e in range(out.size):
        out[e] = room[e] + readout.bias[h, e]


@compiled
def decode_position(
    step: Step,
    inputs: Inputs,
    places: Places,
    exact: Exact,
    far: Far,
    carried: Carried,
    recent: Recent,
    maps: Maps,
    rule: Rule,
    readout: Readout,
    out: Array,
) -> None:
    """Append one key per row, answer its queries, and write their outputs into the heads' places.

    inputs: q [batch, head, dim], k [batch, kv_head, dim], v [batch, kv_head, value_dim], of the whole layer. places:
    which query heads and KV heads of it are meant, each row's position of its first key [batch], and which rows hold no
    padding now [batch]. out [batch, head, value_dim].
    """
    q, k, v = inputs
    heads, kv_heads, origin, valid = places
    batch, features = q.shape[0], maps.rate.shape[1]
    room = make_room(exact, far, maps, heads.size, q.shape[2], v.shape[2])
    turned, ordinals = np.empty(batch, np.int64), np.empty(batch, np.int64)
    for b in range(batch):
        count = step.length if exact.counts.size == 0 else exact.counts[b]
        ordinals[b] = count if valid[b] else -1
        turned[b] = max(0, ordinals[b]) + origin[b]
    logs = np.empty((batch, heads.size, features), np.float32)
    if features:
        map_queries(q, heads, maps, turned, room, logs)
    for b in range(batch):
        if step.recent:
            _move_window(step, exact, recent, maps, b, ordinals[b], origin[b], kv_heads, k, v, room)
        for n in range(kv_heads.size):
            if step.recent:
                queries = range(n * heads.size // kv_heads.size, (n + 1) * heads.size // kv_heads.size)
                priority = _next_priority(step, far, b, n) if far.priorities.shape[2] else _ZERO
                for h in queries:
                    _ask_exact(step, exact, far, rule, b, n, h, q[b, heads[h]], ordinals[b], room)
                _leave_window(step, exact, far, carried, recent, maps, b, n, priority, origin[b], room)
                if far.priorities.shape[2]:
                    for h in queries:
                        _ask_far(step, far, b, n, h, q[b, heads[h]], rule, room)
            _answer_group(step, carried, recent, maps, readout, b, n, turned[b], ordinals[b], inputs, places, logs,
                          room, out)  # fmt: skip

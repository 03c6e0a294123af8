"""The tail of a hybrid for many positions, computed in one compiled pass on the CPU.

At query t the key at t - w leaves the window and enters the state; the queries of t ask the state, and their answers
join the softmax over exact keys under one normaliser (``softgap.attention.hybrid``). Tensor operations take some thirty
passes over memory for that. Here the positions are walked through once for each key head, with its state in the
first-level cache. Features come as logarithms, and a product of two features is formed only relative to the largest of
its row, so nothing overflows.

The factor c_t asks for sum_j phi(k_j) exp(-rate (t - j)) over the w recent keys. The keys are cut into blocks of w:
every window is the end of one block and the beginning of the next (van Herk 1992), so nothing is subtracted. The sums
over all ends of a block are computed when it is complete.

Positions are cut into segments of whole such blocks. What the state holds where a segment begins is a product of
matrices, so the segments have nothing in common, and threads share them out.

Everything is float32; rows of features and values are padded to whole vectors (``softgap.attention.simd``).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from softgap.attention.simd import LANES, compiled, exp, fill, larger, largest, load, multiply_add, spread, store, total

__all__ = ["Answers", "Block", "TailState", "add_tail"]

Array = np.ndarray[Any, Any]

_ZERO, _ONE = np.float32(0), np.float32(1)
# The logarithm of a feature that is not there, and what lies above it.
_ABSENT, _PRESENT = np.float32(-1e30), np.float32(-5e29)


class Block(NamedTuple):
    """n new positions behind w recent keys: logarithms of features, and the keys that leave the exact set.

    Key ``w + t`` is the newest at query t. ``enters`` says whether a key enters the state with it, ``leaving`` and
    ``values`` are that key's: of key t, or of a far key that it displaces.
    """

    query: Array  # [batch, head, n, feature]
    key: Array  # [batch, key_head, w + n, feature]
    leaving: Array  # [batch, key_head, n, feature]
    values: Array  # [batch, kv_head, n, value_dim]
    enters: Array  # [batch, kv_head, n]
    rate: Array  # [batch, key_head, feature]


class TailState(NamedTuple):
    """The state of the keys that have left before each segment, relative to exp(scale - rate * age) per feature.

    It is moved on to the end of its segment.
    """

    sums: Array  # [segment, batch * key_head, feature, value_dim]
    totals: Array  # [segment, batch * key_head, feature]
    scale: Array  # [segment, batch * key_head, feature]
    age: Array  # [segment, batch * key_head, feature]


class Answers(NamedTuple):
    """Sums over the exact keys, times exp(scale). The outputs take the place of ``values``.

    ``flagged`` marks rows whose recent keys the mechanism gives nothing, so that the tail has no normaliser.
    """

    values: Array  # [batch, head, n, value_dim]
    totals: Array  # [batch, head, n]
    recent: Array  # [batch, head, n]
    scale: Array  # [batch, head, n]
    flagged: Array  # [batch, head, n]


class _Room(NamedTuple):
    """What one key head needs at hand; rows are padded, and their padding is absent or 0."""

    sums: Array  # [feature * value_dim]: the state
    state: Array  # [3 * feature]: its totals, scale and age
    ends: Array  # [w * 2 * feature]: of the complete block, sums over all keys from each one on, and their scales
    begun: Array  # [2 * feature]: sums over the keys of the next block so far, and their scale
    rate: Array  # [feature]
    key: Array  # [feature]: the key that comes
    keep: Array  # [feature]: what remains of the old sums
    new: Array  # [feature]: the weight of the new key
    near: Array  # [2 * feature]: sums over the recent keys, and their scale
    carried: Array  # [feature]: the state's scale at the query
    row: Array  # [feature]: what a query's features are
    queries: Array  # [asked, feature]: what each query asks of the state
    value: Array  # [value_dim]
    answers: Array  # [asked * value_dim]


@compiled
def _padded(n: int) -> int:
    return (n + LANES - 1) // LANES * LANES


@compiled
def _room(recent: int, features: int, value_dim: int, asked: int) -> _Room:
    long, wide, single = _padded(features), _padded(value_dim), np.float32
    return _Room(
        np.zeros(long * wide, single),
        np.zeros(3 * long, single),
        np.zeros(recent * 2 * long, single),
        np.zeros(2 * long, single),
        np.zeros(long, single),
        np.full(long, _ABSENT, single),
        np.zeros(long, single),
        np.zeros(long, single),
        np.zeros(2 * long, single),
        np.zeros(long, single),
        np.full(long, 2 * _ABSENT, single),
        np.zeros(asked * long, single),
        np.zeros(wide, single),
        np.zeros(asked * wide, single),
    )


@compiled
def _less(a: Any, b: Any) -> Any:
    return multiply_add(b, fill(np.float32(-1)), a)


@compiled
def _add_key(sums: Array, key: Array) -> None:
    """Add exp(key) to sums whose second half is the logarithm that they are relative to."""
    long = key.size
    for i in range(0, long, LANES):
        old, new = load(sums, long + i), load(key, i)
        top = larger(old, new)
        store(sums, i, multiply_add(load(sums, i), exp(_less(old, top)), exp(_less(new, top))))
        store(sums, long + i, top)


@compiled
def _take_key(keys: Array, b: int, j: int, at: int, distance: Any, room: _Room) -> bool:
    """Copy the logarithms of a key, as they were ``distance`` positions ago; whether there is a key."""
    if keys[b, j, at, 0] <= _PRESENT:
        return False
    for i in range(keys.shape[3]):
        room.key[i] = keys[b, j, at, i] + room.rate[i] * distance
    return True


@compiled
def _sum_ends(keys: Array, b: int, j: int, first: int, room: _Room) -> None:
    """Sums over the keys of a complete block from each one on, counted from the block's beginning."""
    begun, ends = room.begun, room.ends
    long = room.key.size
    begun[:long], begun[long:] = _ZERO, _ABSENT
    for i in range(ends.size // begun.size - 1, -1, -1):
        if _take_key(keys, b, j, first + i, np.float32(i), room):
            _add_key(begun, room.key)
        for f in range(0, begun.size, LANES):
            store(ends, i * begun.size + f, load(begun, f))
    begun[:long], begun[long:] = _ZERO, _ABSENT


@compiled
def _sum_recent(i: int, recent: int, room: _Room) -> None:
    """Sums over the recent keys of the query that stands ``i`` positions behind the complete block's last key."""
    long, begun, near, ends = room.key.size, room.begun, room.near, room.ends
    at = i * begun.size
    older, newer = -np.float32(recent - 1 + i), -np.float32(i - 1)
    for f in range(0, long, LANES):
        rate = load(room.rate, f)
        first = multiply_add(rate, fill(older), load(ends, at + long + f))
        second = multiply_add(rate, fill(newer), load(begun, long + f))
        top = larger(first, second)
        newest = multiply_add(load(begun, f), exp(_less(second, top)), fill(_ZERO))
        store(near, f, multiply_add(load(ends, at + f), exp(_less(first, top)), newest))
        store(near, long + f, top)


@compiled
def _weigh_leaving(keys: Array, b: int, j: int, at: int, enters: bool, room: _Room) -> None:
    """Move scale and age of the state on by one position, and weigh its sums and the key that enters it."""
    long, state = room.key.size, room.state
    if not enters or not _take_key(keys, b, j, at, _ZERO, room):
        for i in range(long):
            state[2 * long + i] += _ONE
        room.keep[:], room.new[:] = _ONE, _ZERO
        return
    for i in range(keys.shape[3]):
        carried = state[long + i] - room.rate[i] * state[2 * long + i]
        key = room.key[i]
        # The larger of the two sets the scale, and its age is counted to the position behind this one.
        newer = key > carried
        room.keep[i], room.new[i] = min(carried - key, _ZERO), min(key - carried, _ZERO)
        state[long + i] = key if newer else state[long + i]
        state[2 * long + i] = _ONE if newer else state[2 * long + i] + _ONE
    for i in range(0, long, LANES):
        keep, new = exp(load(room.keep, i)), exp(load(room.new, i))
        store(room.keep, i, keep)
        store(room.new, i, new)
        store(state, i, multiply_add(load(state, i), keep, new))
    for i in range(keys.shape[3], long):
        room.keep[i], room.new[i], state[i] = _ZERO, _ZERO, _ZERO


@compiled
def _ask_state(first: int, append: bool, room: _Room) -> None:
    """The answers of three queries; with ``append`` the sums are weighed anew and the new value is added before."""
    wide, long = room.value.size, room.key.size
    sums, answers = room.sums, room.answers
    one, two, three = first * long, (first + 1) * long, (first + 2) * long
    for e in range(0, wide, LANES):
        value = load(room.value, e)
        a, b, c = fill(_ZERO), fill(_ZERO), fill(_ZERO)
        for i in range(long):
            row = load(sums, i * wide + e)
            if append:
                new = multiply_add(value, spread(room.new, i), fill(_ZERO))
                row = multiply_add(row, spread(room.keep, i), new)
                store(sums, i * wide + e, row)
            a = multiply_add(spread(room.queries, one + i), row, a)
            b = multiply_add(spread(room.queries, two + i), row, b)
            c = multiply_add(spread(room.queries, three + i), row, c)
        store(answers, first * wide + e, a)
        store(answers, (first + 1) * wide + e, b)
        store(answers, (first + 2) * wide + e, c)


@compiled
def _scale_state(recent: int, room: _Room) -> None:
    """The scale of every feature of the state, at the position of the query."""
    long, state = room.key.size, room.state
    for i in range(0, long, LANES):
        # The state's age was raised by one already.
        age = multiply_add(load(state, 2 * long + i), fill(_ONE), fill(np.float32(recent - 1)))
        store(room.carried, i, _less(load(state, long + i), multiply_add(load(room.rate, i), age, fill(_ZERO))))


@compiled
def _weigh_query(query: Array, place: tuple[int, int, int], at: int, room: _Room, weights: Array) -> None:
    """What a query asks of the state: its weights' sum and scale, then those of the recent keys."""
    b, h, t = place
    long, n = room.key.size, query.shape[3]
    state, row, near = room.state, room.row, room.near
    first = ((b * query.shape[1] + h) * query.shape[2] + t) * n
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        store(row, i, load(query, first + i))
    for i in range(whole, n):
        row[i] = query[b, h, t, i]
    tops, near_tops = fill(_ABSENT), fill(_ABSENT)
    for i in range(0, long, LANES):
        tops = larger(tops, multiply_add(load(row, i), fill(_ONE), load(room.carried, i)))
        near_tops = larger(near_tops, multiply_add(load(row, i), fill(_ONE), load(near, long + i)))
    top, near_top = largest(tops), largest(near_tops)
    far, mass = fill(_ZERO), fill(_ZERO)
    for i in range(0, long, LANES):
        logs = load(row, i)
        term = exp(_less(multiply_add(logs, fill(_ONE), load(room.carried, i)), fill(top)))
        store(room.queries, at * long + i, term)
        far = multiply_add(term, load(state, i), far)
        own = exp(_less(multiply_add(logs, fill(_ONE), load(near, long + i)), fill(near_top)))
        mass = multiply_add(own, load(near, i), mass)
    weights[4 * at], weights[4 * at + 1] = total(far), top
    weights[4 * at + 2], weights[4 * at + 3] = total(mass), near_top


@compiled
def _join(answers: Answers, place: tuple[int, int, int], weights: Array, factor: Any, at: int, room: _Room) -> None:
    """Exact keys and tail under one normaliser, in the place of the exact sums."""
    b, h, t = place
    far, top, near, near_top = weights[4 * at], weights[4 * at + 1], weights[4 * at + 2], weights[4 * at + 3]
    out, scale = answers.values, answers.scale[b, h, t]
    own, other = _ONE, _ZERO
    if far > 0:
        answers.flagged[b, h, t] = near_top <= _PRESENT
        if near_top > _PRESENT:
            # exp(s_j) are relative to scale, so c_t brings it along.
            far_top = top - near_top + scale
            highest = max(scale, far_top)
            own = np.exp(scale - highest)
            other = np.exp(far_top - highest) * answers.recent[b, h, t] / near * factor
    denominator = answers.totals[b, h, t] * own + far * other
    own = own / denominator if denominator > 0 else _ZERO
    other = other / denominator if denominator > 0 else _ZERO
    for e in range(out.shape[3]):
        out[b, h, t, e] = out[b, h, t, e] * own + room.answers[at * room.value.size + e] * other


@compiled
def _walk(recent: int, block: Block, answers: Answers, factor: Array, place: tuple[int, int, int, int],
          room: _Room) -> None:  # fmt: skip
    """The positions of a segment for one key head, whose state is at hand."""
    b, j, start, stop = place
    group, copies = block.query.shape[1] // block.key.shape[1], block.key.shape[1] // block.values.shape[1]
    keys, values = block.key, block.values
    weights = np.zeros(4 * group, np.float32)
    for t in range(start, stop):
        i = t % recent
        if i == 0:
            _sum_ends(keys, b, j, t + 1, room)
        elif _take_key(keys, b, j, t + recent, np.float32(i - 1), room):
            _add_key(room.begun, room.key)
        _sum_recent(i, recent, room)
        _weigh_leaving(block.leaving, b, j, t, block.enters[b, j // copies, t], room)
        for e in range(values.shape[3]):
            room.value[e] = values[b, j // copies, t, e]
        _scale_state(recent, room)
        for at in range(group):
            _weigh_query(block.query, (b, j * group + at, t), at, room, weights)
        for first in range(0, group, 3):
            _ask_state(first, first == 0, room)
        for at in range(group):
            h = j * group + at
            _join(answers, (b, h, t), weights, factor[b, h], at, room)


@compiled
def add_tail(recent: int, length: int, block: Block, state: TailState, answers: Answers, factor: Array, first: int,
             last: int) -> None:  # fmt: skip
    """Let the keys that leave the window enter the state, and add the state to every query's sums over exact keys.

    ``length`` is that of a segment, a multiple of ``recent``. factor [batch, head] is that of the tail, f. Of the
    units, which are segments of key heads of rows of the batch, those from ``first`` to before ``last`` are computed:
    they have nothing in common, so threads may share them out.
    """
    key_heads, n = block.key.shape[1], block.query.shape[2]
    rows, r, e = state.sums.shape[1], state.sums.shape[2], state.sums.shape[3]
    group = block.query.shape[1] // key_heads
    room = _room(recent, r, e, (group + 2) // 3 * 3)
    long, wide = room.key.size, room.value.size
    for unit in range(first, last):
        segment, row = unit // rows, unit % rows
        b, j = row // key_heads, row % key_heads
        sums, totals = state.sums[segment, row], state.totals[segment, row]
        scale, age = state.scale[segment, row], state.age[segment, row]
        room.sums.reshape(long, wide)[:r, :e] = sums
        room.state[:r] = totals
        room.state[long : long + r], room.state[2 * long : 2 * long + r] = scale, age
        room.rate[:r] = block.rate[b, j]
        _walk(recent, block, answers, factor, (b, j, segment * length, min(n, (segment + 1) * length)), room)
        sums[:] = room.sums.reshape(long, wide)[:r, :e]
        totals[:] = room.state[:r]
        scale[:], age[:] = room.state[long : long + r], room.state[2 * long : 2 * long + r]

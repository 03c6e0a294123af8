"""Features of keys and queries in compiled code: the state over them, and their sums over the recent keys.

A fitted map gives the logarithms of features. The state of the keys behind the window is relative to a scale for each
feature, as in ``softgap.attention.chunked``.

The factor c_t of a hybrid needs z = sum_j exp(log phi(k_j) - rate (t - j)) over the w recent keys. z is never formed by
subtraction, since a single large feature would leave its rounding behind. The recent keys are cut into chunks of
c = ceil(sqrt(w)) positions: the logarithm of each chunk's sum is kept, and the log-features of the chunk that is just
leaving, key by key. A step adds up at most w / c + c rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from softgap.attention.decode_arrays import Array, Carried, Exact, Maps, Recent, Room, Step
from softgap.attention.simd import SUMS, compiled, compiled_with, dot_rows, exponentials

__all__ = [
    "ABSENT",
    "PRESENT",
    "add_to_chunk",
    "add_to_state",
    "age_state",
    "fill_edge",
    "fill_recent",
    "key_features",
    "map_queries",
    "ordinal_of",
    "sum_recent",
]

_ZERO, _ONE, _INFINITE = np.float32(0), np.float32(1), np.float32(np.inf)
# The logarithm of a feature that is not there, and what lies above it.
ABSENT, PRESENT = np.float32(-1e30), np.float32(-5e29)


@compiled
def _turn_angles(turned: int, frequency: Array, cos: Array, sin: Array) -> None:
    """Cosines and sines of -p f: in float32 an angle of 8,192 radians has lost 5e-4 of one."""
    for i in range(frequency.size):
        angle = -np.float64(turned) * frequency[i]
        cos[i], sin[i] = np.float32(np.cos(angle)), np.float32(np.sin(angle))


@compiled
def _see(x: Array, cos: Array, sin: Array, maps: Maps, seen: Array) -> None:
    """What the maps see of a vector: itself, and behind it R_-p x where they undo the rotation."""
    d = x.size
    for i in range(d):
        seen[i] = x[i]
    if seen.size > d:
        for i in range(d):
            seen[d + i] = x[i] * cos[i] + maps.sign[i] * x[maps.partner[i]] * sin[i]


@compiled
def _log_features(weight: Array, bias: Array, seen: Array, out: Array) -> None:
    dot_rows(weight, seen, out)
    for i in range(out.size):
        out[i] += bias[i]


@compiled
def key_features(x: Array, turned: int, head: int, maps: Maps, angles: Array, seen: Array, out: Array) -> None:
    """Log-features of a key that rotary embedding has turned by so many positions."""
    if seen.size > x.size:
        _turn_angles(turned, maps.frequency, angles[0], angles[1])
    _see(x, angles[0], angles[1], maps, seen)
    _log_features(maps.key_weight[head], maps.key_bias[head], seen, out)


@compiled
def map_queries(q: Array, heads: Array, maps: Maps, turned: Array, room: Room, logs: Array) -> None:
    """Log-features of the queries of these heads, which rotary embedding has turned by so many positions."""
    for b in range(q.shape[0]):
        if maps.key_weight.shape[2] > q.shape[2]:
            _turn_angles(turned[b], maps.frequency, room.angles[0], room.angles[1])
        for h in range(heads.size):
            _see(q[b, heads[h]], room.angles[0], room.angles[1], maps, room.seen)
            _log_features(maps.query_weight[h], maps.query_bias[h], room.seen, logs[b, h])


@compiled
def ordinal_of(exact: Exact, b: int, position: int) -> int:
    """How manieth key of its sequence the key at a position of the ring is, -1 for padding."""
    if exact.counts.size == 0:
        return position
    return int(exact.ordinals[b, position % exact.ordinals.shape[1]])


@compiled_with(fastmath=SUMS)
def add_to_state(carried: Carried, unit: int, key: Array, value: Array, rate: Array, work: Array, bits: Array) -> None:
    """Add a key's log-features to the state."""
    sums, totals, scale, age = carried.sums[unit], carried.totals[unit], carried.scale[unit], carried.age[unit]
    falls = work[1]
    for i in range(key.size):
        work[0, i] = scale[i] - rate[i] * age[i]
        falls[i] = -abs(key[i] - work[0, i])
    exponentials(falls, bits)
    for i in range(key.size):
        age[i] += _ONE
        if key[i] <= PRESENT:
            continue
        new = falls[i]
        if key[i] > work[0, i]:
            # The larger of the two sets the scale, and its age is counted to the position behind this one.
            for e in range(value.size):
                sums[i, e] = sums[i, e] * new + value[e]
            totals[i] = totals[i] * new + _ONE
            scale[i], age[i] = key[i], _ONE
        else:
            for e in range(value.size):
                sums[i, e] += new * value[e]
            totals[i] += new


@compiled
def age_state(carried: Carried, unit: int, rate: Array) -> None:
    """The same where no key comes."""
    for i in range(rate.size):
        carried.age[unit, i] += _ONE


@compiled
def add_to_chunk(chunk: Array, first: bool, rate: Array, key: Array) -> None:
    """Add a key's log-features to the newest chunk, whose sum is counted to this position."""
    for i in range(key.size):
        older = ABSENT if first else chunk[i] - rate[i]
        high, low = max(older, key[i]), min(older, key[i])
        chunk[i] = high if low <= PRESENT else high + np.log1p(np.exp(low - high))


@compiled_with(fastmath=SUMS)
def sum_recent(step: Step, recent: Recent, b: int, j: int, rate: Array, work: Array, bits: Array) -> None:
    """z of the recent keys as work[2] * exp(work[3])."""
    c, chunks = recent.edge.shape[2], recent.chunks.shape[2]
    t, first = step.length, max(0, step.length - step.recent + 1)
    whole = -(-first // c)
    total, top, term = work[2], work[3], work[1]
    for i in range(rate.size):
        total[i], top[i] = _ZERO, ABSENT
    for turn in range(2):
        for position in range(first, whole * c):
            _add_row(recent.edge[b, j, position % c], rate, np.float32(t - position), turn, total, top, term, bits)
        for chunk in range(whole, t // c + 1):
            distance = np.float32(t - min(t, (chunk + 1) * c - 1))
            _add_row(recent.chunks[b, j, chunk % chunks], rate, distance, turn, total, top, term, bits)


@compiled
def _add_row(
    row: Array, rate: Array, distance: Any, turn: int, total: Array, top: Array, term: Array, bits: Array
) -> None:
    """First the largest logarithms, then the sums relative to them."""
    if turn == 0:
        for i in range(row.size):
            top[i] = max(top[i], row[i] - rate[i] * distance)
        return
    for i in range(row.size):
        term[i] = row[i] - rate[i] * distance - top[i]
        if row[i] <= PRESENT:
            term[i] = -_INFINITE
    exponentials(term, bits)
    for i in range(row.size):
        total[i] += term[i]


@compiled
def fill_edge(step: Step, exact: Exact, recent: Recent, b: int, j: int, n: int, origin: int, at: int, maps: Maps,
               room: Room) -> None:  # fmt: skip
    """Log-features of the keys of a chunk that begins to leave, from the position ``at`` on."""
    c = recent.edge.shape[2]
    ring = exact.keys.shape[2] - step.sinks
    for position in range(at, min(step.length + 1, (at // c + 1) * c)):
        row = recent.edge[b, j, position % c]
        ordinal = ordinal_of(exact, b, position)
        if ordinal < 0:
            row[:] = ABSENT
        else:
            key = exact.keys[b, n, step.sinks + position % ring]
            key_features(key, ordinal + origin, j, maps, room.angles, room.seen, row)


@compiled
def fill_recent(step: Step, exact: Exact, recent: Recent, maps: Maps, origin: Array) -> None:
    """The sums of all recent keys anew, after other code has moved the ring on; ``step`` counts the last key.

    origin [batch]: the position of each row's first key.
    """
    angles = np.empty((2, max(1, maps.frequency.size)), np.float32)
    seen = np.empty(maps.key_weight.shape[2], np.float32)
    key_heads, features = maps.rate.shape
    logs = np.empty(features, np.float32)
    c, chunks = recent.edge.shape[2], recent.chunks.shape[2]
    first = max(0, step.length - step.recent + 1)
    ring = exact.keys.shape[2] - step.sinks
    for b in range(exact.keys.shape[0]):
        for j in range(key_heads):
            n = j * exact.keys.shape[1] // key_heads
            for position in range(first, step.length + 1):
                ordinal = ordinal_of(exact, b, position)
                logs[:] = ABSENT
                if ordinal >= 0:
                    key = exact.keys[b, n, step.sinks + position % ring]
                    key_features(key, ordinal + origin[b], j, maps, angles, seen, logs)
                if position < -(-first // c) * c:
                    recent.edge[b, j, position % c] = logs
                else:
                    add_to_chunk(recent.chunks[b, j, position // c % chunks], position % c == 0, maps.rate[j], logs)

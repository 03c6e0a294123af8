"""One new position of windows, hybrids and fitted maps, computed in one compiled pass on the CPU.

A call serves all query heads of a layer that share a mechanism, and all rows of the batch: it maps the queries and the
new key to features, moves the key that leaves the window to the far keys or into the state, and writes the output,
corrected where there is an output correction. Everything is float32.

All of it is one file: numba's cache on disk notices changes only of the file that holds the function it was asked for.

The factor c_t of a hybrid needs z = sum_j exp(log phi(k_j) - rate (t - j)) over the w recent keys. z is never formed by
subtraction, since a single large feature would leave its rounding behind. The recent keys are cut into chunks of
c = ceil(sqrt(w)) positions: the logarithm of each chunk's sum is kept, and the log-features of the chunk that is just
leaving, key by key. A step adds up at most w / c + c rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from softgap.attention.simd import compiled_with

__all__ = [
    "Carried",
    "Exact",
    "Far",
    "Maps",
    "Readout",
    "Recent",
    "Rule",
    "Step",
    "decode_position",
    "fill_recent",
]

Array = np.ndarray[Any, Any]
Inputs = tuple[Array, Array, Array]
Places = tuple[Array, Array, Array, Array]


class Step(NamedTuple):
    """Numbers of the call: keys so far, recent keys, sinks, and the scaling. ``recent`` is 0 for a state alone."""

    length: int
    recent: int
    sinks: int
    scale: Any


class Exact(NamedTuple):
    """Slots of sinks, then of the ring; ordinals, counts and sink positions are empty while there was no padding."""

    keys: Array  # [batch, kv_head, slot, dim]
    values: Array  # [batch, kv_head, slot, value_dim]
    ordinals: Array  # [batch, ring]
    counts: Array  # [batch]
    sink_positions: Array  # [batch, sink]


class Far(NamedTuple):
    """Far keys; none where the mechanism keeps none."""

    keys: Array  # [batch, kv_head, far, dim]
    values: Array  # [batch, kv_head, far, value_dim]
    priorities: Array  # [batch, kv_head, far]
    positions: Array  # [batch, kv_head, far]
    ordinals: Array  # [batch, kv_head, far]
    pending: Array  # [batch, kv_head, recent]


class Carried(NamedTuple):
    """The state, relative to exp(scale - rate * age) per feature; no features where there is no tail."""

    sums: Array  # [batch * key_head, feature, value_dim]
    totals: Array  # [batch * key_head, feature]
    scale: Array  # [batch * key_head, feature]
    age: Array  # [batch * key_head, feature]


class Recent(NamedTuple):
    """Logarithms of the features of recent keys: sums by chunk, and key by key where a chunk is leaving."""

    chunks: Array  # [batch, key_head, chunk, feature]
    edge: Array  # [batch, key_head, position of the chunk, feature]


class Maps(NamedTuple):
    """The affine maps of a fitted mechanism, its decay, and the rotation that it undoes: J x = sign * x[partner]."""

    query_weight: Array  # [head, feature, seen]
    query_bias: Array  # [head, feature]
    key_weight: Array  # [key_head, feature, seen]
    key_bias: Array  # [key_head, feature]
    rate: Array  # [key_head, feature]
    frequency: Array  # [dim]
    partner: Array  # [dim]
    sign: Array  # [dim]
    factor: Array  # [head]


class Rule(NamedTuple):
    """The model's softcap (0 for none) and learned sinks (empty for none)."""

    softcap: Any
    logits: Array  # [head]


class Readout(NamedTuple):
    """The output correction; empty for none."""

    weight: Array  # [head, value_dim, value_dim]
    bias: Array  # [head, value_dim]


class _Scratch(NamedTuple):
    """Room for one unit of work."""

    angles: Array  # [2, dim]
    seen: Array  # [seen]
    leaving: Array  # [1]: ordinal of what leaves the window
    logs: Array  # [feature]
    work: Array  # [4, feature]: two for terms, then z and the logarithms it is to be multiplied by
    bits: Array  # [longest]
    shown: Array  # [slot]
    scores: Array  # [slot]
    weights: Array  # [far]
    keys: Array  # [kv_head, dim]: what leaves the window
    values: Array  # [kv_head, value_dim]
    query: Array  # [dim]
    sums: Array  # [head, 3]: top, total and recent mass
    answers: Array  # [head, value_dim]
    answer: Array  # [value_dim]


# Sums may be reordered, so that they run in vector registers; NaN and infinities keep their meaning.
_SUMS = {"reassoc", "contract", "nsz", "arcp"}

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_INFINITE = np.float32(np.inf)
# The logarithm of a feature that is not there, and what lies above it.
_ABSENT, _PRESENT = np.float32(-1e30), np.float32(-5e29)
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.3)
_LOG2E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
# Minimax coefficients of exp on [-ln 2 / 2, ln 2 / 2] (Cephes, expf).
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_BIAS = np.int32(127)


@compiled_with()
def _exponentials(x: Array, bits: Array) -> None:
    """exp(x) in place, to 2 units in the last place; ``bits`` holds as many int32.

    The same as a loop over libm's expf, but without a call, so that it runs in vector registers.
    """
    powers = bits.view(np.float32)
    for i in range(x.size):
        y = min(max(x[i], _LOWEST), _HIGHEST)
        n = np.floor(y * _LOG2E + _HALF)
        r = (y - n * _LN2_HIGH) - n * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        bits[i] = (np.int32(n) + _BIAS) << np.int32(23)
        x[i] = _ZERO if x[i] < _LOWEST else p * r * r + r + _ONE
    for i in range(x.size):
        x[i] *= powers[i]


@compiled_with(fastmath=_SUMS)
def _dot_rows(matrix: Array, x: Array, out: Array) -> None:
    """out = matrix x, four rows at a time."""
    whole = out.size - out.size % 4
    for i in range(0, whole, 4):
        a, b, c, d = _ZERO, _ZERO, _ZERO, _ZERO
        for j in range(x.size):
            a += matrix[i, j] * x[j]
            b += matrix[i + 1, j] * x[j]
            c += matrix[i + 2, j] * x[j]
            d += matrix[i + 3, j] * x[j]
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
    for i in range(whole, out.size):
        a = _ZERO
        for j in range(x.size):
            a += matrix[i, j] * x[j]
        out[i] = a


@compiled_with(fastmath=_SUMS)
def _sum_rows(weights: Array, matrix: Array, out: Array) -> None:
    """out += weights matrix, four rows at a time."""
    n = weights.size
    whole = n - n % 4
    for i in range(0, whole, 4):
        a, b, c, d = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for e in range(out.size):
            out[e] += a * matrix[i, e] + b * matrix[i + 1, e] + c * matrix[i + 2, e] + d * matrix[i + 3, e]
    for i in range(whole, n):
        for e in range(out.size):
            out[e] += weights[i] * matrix[i, e]


@compiled_with()
def _turn_angles(turned: int, frequency: Array, cos: Array, sin: Array) -> None:
    """Cosines and sines of -p f: in float32 an angle of 8,192 radians has lost 5e-4 of one."""
    for i in range(frequency.size):
        angle = -np.float64(turned) * frequency[i]
        cos[i], sin[i] = np.float32(np.cos(angle)), np.float32(np.sin(angle))


@compiled_with()
def _see(x: Array, cos: Array, sin: Array, maps: Maps, seen: Array) -> None:
    """What the maps see of a vector: itself, and behind it R_-p x where they undo the rotation."""
    d = x.size
    for i in range(d):
        seen[i] = x[i]
    if seen.size > d:
        for i in range(d):
            seen[d + i] = x[i] * cos[i] + maps.sign[i] * x[maps.partner[i]] * sin[i]


@compiled_with()
def _log_features(weight: Array, bias: Array, seen: Array, out: Array) -> None:
    _dot_rows(weight, seen, out)
    for i in range(out.size):
        out[i] += bias[i]


@compiled_with()
def _key_features(x: Array, turned: int, head: int, maps: Maps, angles: Array, seen: Array, out: Array) -> None:
    """Log-features of a key that rotary embedding has turned by so many positions."""
    if seen.size > x.size:
        _turn_angles(turned, maps.frequency, angles[0], angles[1])
    _see(x, angles[0], angles[1], maps, seen)
    _log_features(maps.key_weight[head], maps.key_bias[head], seen, out)


@compiled_with()
def _ordinal_of(exact: Exact, b: int, position: int) -> int:
    """How manieth key of its sequence the key at a position of the ring is, -1 for padding."""
    if exact.counts.size == 0:
        return position
    return int(exact.ordinals[b, position % exact.ordinals.shape[1]])


@compiled_with()
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


@compiled_with()
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


@compiled_with()
def _capped(scores: Array, rule: Rule) -> None:
    if rule.softcap > 0:
        for i in range(scores.size):
            scores[i] = np.tanh(scores[i] / rule.softcap) * rule.softcap


@compiled_with(fastmath=_SUMS)
def _softmax(scores: Array, shown: Array, rule: Rule, head: int, bits: Array) -> tuple[Any, Any, Any]:
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
    _exponentials(scores, bits)
    total, recent = _ZERO, _ZERO
    for i in range(scores.size):
        total += scores[i]
        recent += scores[i] if shown[i] == 2 else _ZERO
    if rule.logits.size and total > 0:
        total += np.exp(rule.logits[head] - top)
    return top, total, recent


@compiled_with()
def _vote(step: Step, exact: Exact, far: Far, b: int, n: int, weights: Array, shown: Array, total: Any) -> None:
    """Add the attention that recent keys receive from one query to what they have received before."""
    ring = exact.keys.shape[2] - step.sinks
    for i in range(ring):
        if shown[step.sinks + i] == 2:
            since = (step.length - i) % ring
            far.pending[b, n, step.recent - 1 - since] += weights[step.sinks + i] / total


@compiled_with()
def _next_priority(step: Step, far: Far, b: int, n: int) -> Any:
    """The priority of the key that leaves the window; those of the others move up."""
    first = far.pending[b, n, 0]
    for i in range(step.recent - 1):
        far.pending[b, n, i] = far.pending[b, n, i + 1]
    far.pending[b, n, step.recent - 1] = _ZERO
    return first


@compiled_with()
def _exchange_far(
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


@compiled_with(fastmath=_SUMS)
def _add_far(step: Step, far: Far, b: int, n: int, query: Array, rule: Rule, sums: Array, answer: Array,
             room: _Scratch) -> None:  # fmt: skip
    """Add the far keys to a query's sums: ``sums`` are its top, total and recent mass."""
    weights = room.weights
    for i in range(query.size):
        room.query[i] = query[i] * step.scale
    _dot_rows(far.keys[b, n], room.query, weights)
    _capped(weights, rule)
    top = sums[0]
    for i in range(weights.size):
        if not far.priorities[b, n, i] > 0:
            weights[i] = -_INFINITE
        top = max(top, weights[i])
    own = np.exp(sums[0] - top)
    for i in range(weights.size):
        weights[i] -= top
    _exponentials(weights, room.bits)
    for e in range(answer.size):
        answer[e] *= own
    _sum_rows(weights, far.values[b, n], answer)
    sums[1] *= own
    sums[2] *= own
    for i in range(weights.size):
        sums[1] += weights[i]
    sums[0] = top


@compiled_with(fastmath=_SUMS)
def _add_to_state(carried: Carried, unit: int, key: Array, value: Array, rate: Array, work: Array, bits: Array) -> None:
    """Add a key's log-features to the state."""
    sums, totals, scale, age = carried.sums[unit], carried.totals[unit], carried.scale[unit], carried.age[unit]
    falls = work[1]
    for i in range(key.size):
        work[0, i] = scale[i] - rate[i] * age[i]
        falls[i] = -abs(key[i] - work[0, i])
    _exponentials(falls, bits)
    for i in range(key.size):
        age[i] += _ONE
        if key[i] <= _PRESENT:
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


@compiled_with()
def _age(carried: Carried, unit: int, rate: Array) -> None:
    """The same where no key comes."""
    for i in range(rate.size):
        carried.age[unit, i] += _ONE


@compiled_with()
def _add_to_chunk(chunk: Array, first: bool, rate: Array, key: Array) -> None:
    """Add a key's log-features to the newest chunk, whose sum is counted to this position."""
    for i in range(key.size):
        older = _ABSENT if first else chunk[i] - rate[i]
        high, low = max(older, key[i]), min(older, key[i])
        chunk[i] = high if low <= _PRESENT else high + np.log1p(np.exp(low - high))


@compiled_with(fastmath=_SUMS)
def _sum_recent(step: Step, recent: Recent, b: int, j: int, rate: Array, work: Array, bits: Array) -> None:
    """z of the recent keys as work[2] * exp(work[3])."""
    c, chunks = recent.edge.shape[2], recent.chunks.shape[2]
    t, first = step.length, max(0, step.length - step.recent + 1)
    whole = -(-first // c)
    total, top, term = work[2], work[3], work[1]
    for i in range(rate.size):
        total[i], top[i] = _ZERO, _ABSENT
    for turn in range(2):
        for position in range(first, whole * c):
            _add_row(recent.edge[b, j, position % c], rate, np.float32(t - position), turn, total, top, term, bits)
        for chunk in range(whole, t // c + 1):
            distance = np.float32(t - min(t, (chunk + 1) * c - 1))
            _add_row(recent.chunks[b, j, chunk % chunks], rate, distance, turn, total, top, term, bits)


@compiled_with()
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
        if row[i] <= _PRESENT:
            term[i] = -_INFINITE
    _exponentials(term, bits)
    for i in range(row.size):
        total[i] += term[i]


@compiled_with()
def _fill_edge(step: Step, exact: Exact, recent: Recent, b: int, j: int, n: int, origin: int, at: int, maps: Maps,
               room: _Scratch) -> None:  # fmt: skip
    """Log-features of the keys of a chunk that begins to leave, from the position ``at`` on."""
    c = recent.edge.shape[2]
    ring = exact.keys.shape[2] - step.sinks
    for position in range(at, min(step.length + 1, (at // c + 1) * c)):
        row = recent.edge[b, j, position % c]
        ordinal = _ordinal_of(exact, b, position)
        if ordinal < 0:
            row[:] = _ABSENT
        else:
            key = exact.keys[b, n, step.sinks + position % ring]
            _key_features(key, ordinal + origin, j, maps, room.angles, room.seen, row)


@compiled_with()
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
                ordinal = _ordinal_of(exact, b, position)
                logs[:] = _ABSENT
                if ordinal >= 0:
                    key = exact.keys[b, n, step.sinks + position % ring]
                    _key_features(key, ordinal + origin[b], j, maps, angles, seen, logs)
                if position < -(-first // c) * c:
                    recent.edge[b, j, position % c] = logs
                else:
                    _add_to_chunk(recent.chunks[b, j, position // c % chunks], position % c == 0, maps.rate[j], logs)


@compiled_with()
def _scratch(exact: Exact, far: Far, maps: Maps, heads: int, dim: int, value_dim: int) -> _Scratch:
    features, slots, n_far = maps.rate.shape[1], exact.keys.shape[2], far.priorities.shape[2]
    kv_heads = exact.keys.shape[1]
    single = np.float32
    return _Scratch(
        np.empty((2, dim), single),
        np.empty(max(dim, maps.key_weight.shape[2]), single),
        np.empty(1, np.int64),
        np.empty(features, single),
        np.empty((4, features), single),
        np.empty(max(features, slots, n_far), np.int32),
        np.zeros(slots, np.int8),
        np.empty(slots, single),
        np.empty(n_far, single),
        np.empty((kv_heads, dim), single),
        np.empty((kv_heads, value_dim), single),
        np.empty(dim, single),
        np.empty((heads, 3), single),
        np.zeros((heads, value_dim), single),
        np.empty(value_dim, single),
    )


@compiled_with()
def _map_queries(q: Array, heads: Array, maps: Maps, turned: Array, room: _Scratch, logs: Array) -> None:
    for b in range(q.shape[0]):
        if maps.key_weight.shape[2] > q.shape[2]:
            _turn_angles(turned[b], maps.frequency, room.angles[0], room.angles[1])
        for h in range(heads.size):
            _see(q[b, heads[h]], room.angles[0], room.angles[1], maps, room.seen)
            _log_features(maps.query_weight[h], maps.query_bias[h], room.seen, logs[b, h])


@compiled_with()
def _move_window(step: Step, exact: Exact, recent: Recent, maps: Maps, b: int, ordinal: int, origin: int,
                 kv_heads: Array, k: Array, v: Array, room: _Scratch) -> None:  # fmt: skip
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
                _fill_edge(step, exact, recent, b, j, n, origin, at, maps, room)
    room.leaving[0] = _ordinal_of(exact, b, at) if at >= 0 else -1
    _append(step, exact, b, ordinal, kv_heads, k, v)
    _shown(step, exact, b, room.shown)


@compiled_with()
def _ask_exact(step: Step, exact: Exact, far: Far, rule: Rule, b: int, n: int, h: int, query: Array, ordinal: int,
               room: _Scratch) -> None:  # fmt: skip
    """The softmax sums of one query over sinks and recent keys, and its vote for far keys."""
    for i in range(query.size):
        room.query[i] = query[i] * step.scale
    _dot_rows(exact.keys[b, n], room.query, room.scores)
    _capped(room.scores, rule)
    top, total, near = _softmax(room.scores, room.shown, rule, h, room.bits)
    room.sums[h, 0], room.sums[h, 1], room.sums[h, 2] = top, total, near
    room.answers[h] = _ZERO
    _sum_rows(room.scores, exact.values[b, n], room.answers[h])
    if far.priorities.shape[2] and ordinal >= 0:
        _vote(step, exact, far, b, n, room.scores, room.shown, total)


@compiled_with()
def _leave_window(step: Step, exact: Exact, far: Far, carried: Carried, recent: Recent, maps: Maps, b: int, n: int,
                  priority: Any, origin: int, room: _Scratch) -> None:  # fmt: skip
    """Move the key that leaves the window to the far keys, or into the state."""
    at = step.length - step.recent
    ordinal = room.leaving[0]
    present, late, turned = ordinal >= step.sinks, 0, ordinal
    other = False
    if present and far.priorities.shape[2]:
        taken, present_old, old_at, old_ordinal = _exchange_far(
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
            _age(carried, unit, maps.rate[j])
            continue
        if other:
            _key_features(room.keys[n], turned + origin, j, maps, room.angles, room.seen, room.logs)
            for i in range(room.logs.size):
                room.logs[i] -= maps.rate[j, i] * np.float32(late)
        else:
            room.logs[:] = recent.edge[b, j, at % recent.edge.shape[2]]
        _add_to_state(carried, unit, room.logs, room.values[n], maps.rate[j], room.work, room.bits)


@compiled_with()
def _answer_group(step: Step, carried: Carried, recent: Recent, maps: Maps, readout: Readout, b: int, n: int,
                  turned: int, ordinal: int, inputs: Inputs, places: Places, logs: Array, room: _Scratch,
                  out: Array) -> None:  # fmt: skip
    """Join exact keys and state for the queries of one KV head, and write their outputs."""
    heads, kv_heads = places[0], places[1]
    group = heads.size // kv_heads.size
    features = maps.rate.shape[1]
    copies = maps.rate.shape[0] // kv_heads.size if features else 1
    for j in range(n * copies, (n + 1) * copies):
        if features:
            room.logs[:] = _ABSENT
            if ordinal >= 0:
                _key_features(inputs[1][b, kv_heads[n]], turned, j, maps, room.angles, room.seen, room.logs)
            if step.recent == 0:
                _append_alone(carried, b, j, inputs[2][b, kv_heads[n]], ordinal, maps, room)
            else:
                c = recent.edge.shape[2]
                chunk = recent.chunks[b, j, step.length // c % recent.chunks.shape[2]]
                _add_to_chunk(chunk, step.length % c == 0, maps.rate[j], room.logs)
                _sum_recent(step, recent, b, j, maps.rate[j], room.work, room.bits)
        first = n * group + (j - n * copies) * group // copies
        for h in range(first, first + group // copies):
            if features:
                _add_tail(step, carried, maps, b, j, h, logs[b, h], room)
            _write(readout, h, room.sums[h, 1], room.answers[h], room.answer, out[b, heads[h]])


@compiled_with()
def _append_alone(carried: Carried, b: int, j: int, value: Array, ordinal: int, maps: Maps, room: _Scratch) -> None:
    """A state without a window takes the new key at once."""
    unit = b * maps.rate.shape[0] + j
    if ordinal >= 0:
        _add_to_state(carried, unit, room.logs, value, maps.rate[j], room.work, room.bits)
    else:
        _age(carried, unit, maps.rate[j])


@compiled_with(fastmath=_SUMS)
def _add_tail(step: Step, carried: Carried, maps: Maps, b: int, j: int, h: int, logs: Array, room: _Scratch) -> None:
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
    _exponentials(term, room.bits)
    total = _ZERO
    for i in range(logs.size):
        total += term[i] * carried.totals[unit, i]
    if not total > 0:
        if step.recent == 0:
            room.sums[h, 1] = _ZERO
            room.answers[h] = _ZERO
        return
    room.answer[:] = _ZERO
    _sum_rows(term, carried.sums[unit], room.answer)
    if step.recent == 0:
        room.sums[h, 1] = total
        room.answers[h] = room.answer
        return
    if near_top <= _PRESENT:
        return
    for i in range(logs.size):
        logs[i] += room.work[3, i] - near_top
    _exponentials(logs, room.bits)
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


@compiled_with(fastmath=_SUMS)
def _write(readout: Readout, h: int, total: Any, answer: Array, room: Array, out: Array) -> None:
    """The output of one head: its sums divided, and corrected where there is a correction."""
    factor = _ONE / total if total > 0 else _ZERO
    if readout.weight.size == 0:
        for e in range(out.size):
            out[e] = answer[e] * factor
        return
    for e in range(answer.size):
        answer[e] *= factor
    _dot_rows(readout.weight[h], answer, room)
    for e in range(out.size):
        out[e] = room[e] + readout.bias[h, e]


@compiled_with()
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
    room = _scratch(exact, far, maps, heads.size, q.shape[2], v.shape[2])
    turned, ordinals = np.empty(batch, np.int64), np.empty(batch, np.int64)
    for b in range(batch):
        count = step.length if exact.counts.size == 0 else exact.counts[b]
        ordinals[b] = count if valid[b] else -1
        turned[b] = max(0, ordinals[b]) + origin[b]
    logs = np.empty((batch, heads.size, features), np.float32)
    if features:
        _map_queries(q, heads, maps, turned, room, logs)
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
                        _add_far(step, far, b, n, q[b, heads[h]], rule, room.sums[h], room.answers[h], room)
            _answer_group(step, carried, recent, maps, readout, b, n, turned[b], ordinals[b], inputs, places, logs,
                          room, out)  # fmt: skip

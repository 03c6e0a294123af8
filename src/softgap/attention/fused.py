"""Compute linear attention and compare it with the model's output in one compiled pass.

The chunked form is fastest where its output is wanted. A recording wants only the distance of that output from another
one, and then the passes over memory (output, quotient, differences, norms) cost more than the products. Here each
position updates the state S += phi(k) v^T, z += phi(k), asks it with every query head of its group, and is compared at
once. The state is a plain running sum, so results do not depend on how positions come in blocks.

Only for the plain case: CPU, float32, all keys before a query visible, features that are not logarithms and do not
decay, weights that are divided by a positive sum, and few features, so that the state stays in the first-level cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

from softgap.attention.mechanism import Mechanism

__all__ = ["MOST_FEATURES", "compare_positions", "supports"]

# 128 features of 64 values are 32 KiB.
MOST_FEATURES = 128

Array = np.ndarray[Any, Any]


def supports(mechanism: Mechanism, d: int) -> bool:
    """Whether the pass can compute a mechanism for vectors of dimension d."""
    features = mechanism.feature_dim(d) if mechanism.kind == "features" else None
    plain = not mechanism.log and mechanism.rate is None and mechanism.normaliser == "sum"
    return (
        plain and not mechanism.signed and not mechanism.cancels and features is not None and features <= MOST_FEATURES
    )


Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(**options: Any) -> Callable[[Function], Function]:
    """Machine code on one thread, kept on disk where there is a folder for it."""

    def compiled(function: Function) -> Function:
        try:
            return cast(Function, numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function))
        except RuntimeError:  # a read-only install without a user cache
            return cast(Function, numba.njit(nogil=True, error_model="numpy", **options)(function))

    return compiled


# Sums may be reordered, so that they run in vector registers; NaN and infinities keep their meaning.
_SUMS = {"reassoc", "contract", "nsz", "arcp"}


@_compiled(fastmath=_SUMS)
def _append(k: Array, v: Array, sums: Array, totals: Array) -> None:
    for r in range(k.size):
        totals[r] += k[r]
        for e in range(v.size):
            sums[r, e] += k[r] * v[e]


@_compiled(fastmath=_SUMS)
def _append_two(k: Array, v: Array, next_k: Array, next_v: Array, sums: Array, totals: Array) -> None:
    for r in range(k.size):
        totals[r] += k[r] + next_k[r]
        for e in range(v.size):
            sums[r, e] += k[r] * v[e] + next_k[r] * next_v[e]


@_compiled(fastmath=_SUMS)
def _ask(q: Array, sums: Array, totals: Array, answer: Array) -> np.float32:
    """Write phi(q)^T S to ``answer`` and return phi(q)^T z."""
    denominator = np.float32(0)
    for r in range(q.size):
        denominator += q[r] * totals[r]
    answer[:] = 0
    for r in range(q.size):
        for e in range(answer.size):
            answer[e] += q[r] * sums[r, e]
    return denominator


@_compiled(fastmath=_SUMS)
def _ask_two(
    q: Array, other: Array, sums: Array, totals: Array, answer: Array, other_answer: Array
) -> tuple[np.float32, np.float32]:
    """The same for two queries at once, four rows of the state at a time: fewer loads and stores per product."""
    whole = q.size - q.size % 4
    denominator, other_denominator = np.float32(0), np.float32(0)
    for r in range(q.size):
        denominator += q[r] * totals[r]
        other_denominator += other[r] * totals[r]
    answer[:] = 0
    other_answer[:] = 0
    for r in range(0, whole, 4):
        for e in range(answer.size):
            first, second, third, fourth = sums[r, e], sums[r + 1, e], sums[r + 2, e], sums[r + 3, e]
            answer[e] += q[r] * first + q[r + 1] * second + q[r + 2] * third + q[r + 3] * fourth
            other_answer[e] += other[r] * first + other[r + 1] * second + other[r + 2] * third + other[r + 3] * fourth
    for r in range(whole, q.size):
        for e in range(answer.size):
            answer[e] += q[r] * sums[r, e]
            other_answer[e] += other[r] * sums[r, e]
    return denominator, other_denominator


@_compiled(fastmath=_SUMS)
def _add_key(q: Array, k: Array, v: Array, answer: Array) -> np.float32:
    """Add one key that the state does not hold yet, and return its weight."""
    weight = np.float32(0)
    for r in range(q.size):
        weight += q[r] * k[r]
    for e in range(v.size):
        answer[e] += weight * v[e]
    return weight


@_compiled(fastmath=_SUMS)
def _compare(o: Array, answer: Array, denominator: float, out: Array) -> None:
    """Divergence, relative L2 and norm ratio of o and answer / denominator, as in divergence.py."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    n, m = np.float32(0), np.float32(0)
    for e in range(o.size):
        n += o[e] * o[e]
        m += answer[e] * answer[e]
    n, m = np.sqrt(n), np.sqrt(m)
    if abs(denominator) <= tiny or m == 0:
        # A zero vector: the cosine with it is 0, and two zero vectors agree.
        out[0] = 0 if n == 0 else 1
        out[1] = np.nan if n == 0 else 1
        out[2] = np.nan if n == 0 else 0
        return
    if n == 0:
        out[0], out[1], out[2] = 1, np.nan, np.nan
        return
    scale, apart = n / m, np.float32(0)
    for e in range(o.size):
        difference = o[e] - answer[e] * scale
        apart += difference * difference
    value = min(apart / (n * n) / np.float32(2), np.float32(2))
    ratio = m / denominator / n
    out[0] = value
    out[1] = np.sqrt((ratio - 1) * (ratio - 1) + 2 * ratio * value)
    out[2] = ratio


@_compiled()
def compare_positions(
    q: Array, k: Array, v: Array, valid: Array, o: Array, state: tuple[Array, Array], out: Array
) -> None:
    """Walk through the positions of every batch row and KV head, and move the state on.

    Shapes, time before heads as models have it: q [batch, time, query_head, r], k [batch, time, kv_head, r], v
    [batch, time, kv_head, e], valid [batch, time], o [batch, time, head, e]; state ([batch * kv_head, r, e],
    [batch * kv_head, r]); out [batch, head, time, 3]. Query heads are as many as heads, or one per KV head where a
    mechanism ignores the query.
    """
    heads, time = out.shape[1:3]
    groups = k.shape[2]
    n_queries, per_group = q.shape[2] // groups, heads // groups
    answers = np.empty((2 * n_queries, v.shape[3]), np.float32)
    denominators = np.empty(2 * n_queries, np.float32)
    for unit in range(len(state[0])):
        b, g = unit // groups, unit % groups
        sums, totals = state[0][unit], state[1][unit]
        # Two positions at a time: both ask the state before them, and get the keys of the pair by themselves.
        for start in range(0, time, 2):
            stop = min(time, start + 2)
            _ask_state(q, b, g, start, stop, sums, totals, answers, denominators)
            for t in range(start, stop):
                for h in range(n_queries):
                    i = (t - start) * n_queries + h
                    for seen in range(start, t + 1):
                        if valid[b, seen]:
                            query = q[b, t, g * n_queries + h]
                            denominators[i] += _add_key(query, k[b, seen, g], v[b, seen, g], answers[i])
            if stop - start == 2 and valid[b, start] and valid[b, start + 1]:
                _append_two(k[b, start, g], v[b, start, g], k[b, start + 1, g], v[b, start + 1, g], sums, totals)
            else:
                for t in range(start, stop):
                    if valid[b, t]:
                        _append(k[b, t, g], v[b, t, g], sums, totals)
            for t in range(start, stop):
                for h in range(per_group):
                    i = (t - start) * n_queries + min(h, n_queries - 1)
                    _compare(o[b, t, g * per_group + h], answers[i], denominators[i], out[b, g * per_group + h, t])


@_compiled()
def _ask_state(
    q: Array, b: int, g: int, start: int, stop: int, sums: Array, totals: Array, answers: Array, denominators: Array
) -> None:
    """Ask with the queries of one KV head at some positions, two of them at a time."""
    n_queries = answers.shape[0] // 2
    count = (stop - start) * n_queries
    for i in range(0, count - 1, 2):
        # Whole arrays are indexed, not sliced: a slice would lose the knowledge that its numbers lie side by side.
        query = q[b, start + i // n_queries, g * n_queries + i % n_queries]
        other = q[b, start + (i + 1) // n_queries, g * n_queries + (i + 1) % n_queries]
        denominators[i], denominators[i + 1] = _ask_two(query, other, sums, totals, answers[i], answers[i + 1])
    if count % 2:
        last = count - 1
        query = q[b, start + last // n_queries, g * n_queries + last % n_queries]
        denominators[last] = _ask(query, sums, totals, answers[last])

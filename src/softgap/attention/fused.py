"""Compute linear attention and compare it with the model's output in one compiled pass.

The chunked form is fastest where its output is wanted. A recording wants only the distance of that output from another
one, and then the passes over memory (features, output, quotient, differences, norms) cost more than the products. Here
each position updates the state S += phi(k) v^T, z += phi(k), asks it with every query head of its group, and is
compared at once. The state is a plain running sum, so results do not depend on how positions come in blocks.

Only for the plain case: CPU, float32, all keys before a query visible, features that are not logarithms and do not
decay, weights that are divided by a positive sum, and few features, so that the state stays in the first-level cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from softgap.attention import feature_maps
from softgap.attention.mechanism import Mechanism
from softgap.attention.simd import LANES, compiled, elu1, fill, load, multiply_add, spread, store, total

__all__ = [
    "GIVEN",
    "MOST_FEATURES",
    "ONES",
    "Rows",
    "compare_positions",
    "compare_with_mean",
    "map_in_pass",
    "supports",
]

# 128 features of 64 values are 32 KiB.
MOST_FEATURES = 128

# What the pass makes of queries and keys: nothing, because they are features already; elu + 1; a single one.
GIVEN, ELU1, ONES = 0, 1, 2

Array = np.ndarray[Any, Any]


def supports(mechanism: Mechanism, d: int) -> bool:
    """Whether the pass can compute a mechanism for vectors of dimension d."""
    features = mechanism.feature_dim(d) if mechanism.kind == "features" else None
    plain = not mechanism.log and mechanism.rate is None and mechanism.normaliser == "sum"
    return (
        plain and not mechanism.signed and not mechanism.cancels and features is not None and features <= MOST_FEATURES
    )


def map_in_pass(mechanism: Mechanism) -> int:
    """The feature map that the pass computes by itself; GIVEN where features must be handed over."""
    maps = (mechanism.query_map, mechanism.key_map)
    if maps == (feature_maps.ones, feature_maps.ones) and mechanism.query_free:
        return ONES
    return ELU1 if maps == (feature_maps.elu1, feature_maps.elu1) and mechanism.scale == "none" else GIVEN


class Rows(NamedTuple):
    """The numbers of a tensor ``[batch, head, time, dim]`` as they lie in memory, and the steps of its first axes."""

    numbers: Array
    steps: tuple[int, int, int]

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """Without a copy where the numbers of a row lie side by side."""
        x = x.detach().float()
        x = x if x.stride(-1) == 1 else x.contiguous()
        span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        batch, head, time, _ = x.stride()
        return cls(torch.as_strided(x, (span,), (1,)).numpy(), (batch, head, time))


@compiled
def _copy_row(source: Array, at: int, n: int, row: Array, to: int, feature_map: int) -> None:
    """Copy n numbers, or their features, with zeros behind them up to whole vectors."""
    whole = n - n % LANES
    for i in range(0, whole, LANES):
        x = load(source, at + i)
        if feature_map == ELU1:
            x = elu1(x)
        store(row, to + i, x)
    if whole < n:
        store(row, to + whole, fill(np.float32(0)))
        for i in range(whole, n):
            row[to + i] = source[at + i]
        if feature_map == ELU1:
            store(row, to + whole, elu1(load(row, to + whole)))
            for i in range(n, whole + LANES):
                row[to + i] = 0


@compiled
def _append_and_ask(k: Array, v: Array, q: Array, at: int, state: Array, answers: Array) -> None:
    """S += k v^T, and q^T S for three queries, of which the first is number ``at``; a key of zeros adds nothing."""
    wide, r, long = v.size, state.size // v.size, k.size
    for e in range(0, wide, LANES):
        value = load(v, e)
        first, second, third = fill(np.float32(0)), fill(np.float32(0)), fill(np.float32(0))
        for i in range(r):
            row = multiply_add(spread(k, i), value, load(state, i * wide + e))
            store(state, i * wide + e, row)
            first = multiply_add(spread(q, at * long + i), row, first)
            second = multiply_add(spread(q, (at + 1) * long + i), row, second)
            third = multiply_add(spread(q, (at + 2) * long + i), row, third)
        store(answers, at * wide + e, first)
        store(answers, (at + 1) * wide + e, second)
        store(answers, (at + 2) * wide + e, third)


@compiled
def _ask(q: Array, at: int, state: Array, wide: int, answers: Array) -> None:
    """q^T S for three queries, of which the first is number ``at``."""
    r = state.size // wide
    long = _padded(r)
    for e in range(0, wide, LANES):
        first, second, third = fill(np.float32(0)), fill(np.float32(0)), fill(np.float32(0))
        for i in range(r):
            row = load(state, i * wide + e)
            first = multiply_add(spread(q, at * long + i), row, first)
            second = multiply_add(spread(q, (at + 1) * long + i), row, second)
            third = multiply_add(spread(q, (at + 2) * long + i), row, third)
        store(answers, at * wide + e, first)
        store(answers, (at + 1) * wide + e, second)
        store(answers, (at + 2) * wide + e, third)


@compiled
def _append(k: Array, totals: Array) -> None:
    """z += k."""
    for i in range(0, k.size, LANES):
        store(totals, i, multiply_add(load(k, i), fill(np.float32(1)), load(totals, i)))


@compiled
def _product(a: Array, at: int, b: Array) -> Any:
    """a^T b, where a begins at an index."""
    terms = fill(np.float32(0))
    for i in range(0, b.size, LANES):
        terms = multiply_add(load(a, at + i), load(b, i), terms)
    return total(terms)


@compiled
def _compare(o: Array, answers: Array, at: int, denominator: float, out: Array, b: int, h: int, t: int) -> None:
    """Divergence, relative L2 and norm ratio of o and answer / denominator, as in ``compare_outputs``."""
    tiny = np.float32(np.finfo(np.float32).tiny)
    squares, answer_squares = fill(np.float32(0)), fill(np.float32(0))
    for e in range(0, o.size, LANES):
        output, answer = load(o, e), load(answers, at + e)
        squares = multiply_add(output, output, squares)
        answer_squares = multiply_add(answer, answer, answer_squares)
    n, m = np.sqrt(total(squares)), np.sqrt(total(answer_squares))
    if abs(denominator) <= tiny or m == 0:
        # A zero vector: the cosine with it is 0, and two zero vectors agree.
        out[0, b, h, t] = 0 if n == 0 else 1
        out[1, b, h, t] = np.nan if n == 0 else 1
        out[2, b, h, t] = np.nan if n == 0 else 0
        return
    if n == 0:
        out[0, b, h, t], out[1, b, h, t], out[2, b, h, t] = 1, np.nan, np.nan
        return
    scale, apart = fill(-n / m), fill(np.float32(0))
    for e in range(0, o.size, LANES):
        difference = multiply_add(load(answers, at + e), scale, load(o, e))
        apart = multiply_add(difference, difference, apart)
    value = min(total(apart) / (n * n) / np.float32(2), np.float32(2))
    ratio = m / denominator / n
    out[0, b, h, t] = value
    out[1, b, h, t] = np.sqrt((ratio - 1) * (ratio - 1) + 2 * ratio * value)
    out[2, b, h, t] = ratio


@compiled
def _place(rows: Rows, b: int, h: int, t: int) -> int:
    """Where a row of numbers begins."""
    return b * rows.steps[0] + h * rows.steps[1] + t * rows.steps[2]


@compiled
def _padded(n: int) -> int:
    """n numbers as whole vectors."""
    return (n + LANES - 1) // LANES * LANES


@compiled
def compare_positions(
    feature_map: int,
    asked: int,
    q: Rows,
    k: Rows,
    v: Rows,
    v_heads: int,
    o: Rows,
    valid: Array,
    sums: Array,
    totals: Array,
    out: Array,
    first: int,
    last: int,
) -> None:
    """Walk through the positions of every batch row and KV head, and move the state on.

    Of these units those from ``first`` to before ``last`` are computed; threads may share them out.

    The state is sums ``[batch * kv_head, r, e]`` and totals ``[batch * kv_head, r]``; valid is ``[batch, time]``, out
    ``[quantity, batch, head, time]``. Each KV head is asked with so many queries: as many as it serves heads, or one
    where a mechanism ignores the query.
    """
    _, batch, heads, time = out.shape
    units, r, e = sums.shape
    groups = units // batch
    per_group, long, wide = heads // groups, _padded(r), _padded(e)
    threes = (asked + 2) // 3  # queries come in threes, with zeros for those that are missing
    state, seen = np.zeros(r * wide, np.float32), np.zeros(long, np.float32)
    key, value, output = np.zeros(long, np.float32), np.zeros(wide, np.float32), np.zeros(wide, np.float32)
    queries, answers = np.zeros(3 * threes * long, np.float32), np.zeros(3 * threes * wide, np.float32)
    for unit in range(first, last):
        b, g = unit // groups, unit % groups
        state.reshape(r, wide)[:, :e] = sums[unit]
        seen[:r] = totals[unit]
        for t in range(time):
            if valid[b, t]:
                _copy_row(k.numbers, _place(k, b, g, t), r, key, 0, feature_map)
                _copy_row(v.numbers, _place(v, b, g * v_heads // groups, t), e, value, 0, GIVEN)
            else:
                # Whatever lies there, NaN included, must not reach the state.
                key[:] = 0
                value[:] = 0
            for h in range(asked):
                _copy_row(q.numbers, _place(q, b, g * asked + h, t), r, queries, h * long, feature_map)
            _append(key, seen)
            _append_and_ask(key, value, queries, 0, state, answers)
            for three in range(1, threes):
                _ask(queries, 3 * three, state, wide, answers)
            for h in range(per_group):
                i = min(h, asked - 1)
                _copy_row(o.numbers, _place(o, b, g * per_group + h, t), e, output, 0, GIVEN)
                denominator = _product(queries, i * long, seen)
                _compare(output, answers, i * wide, denominator, out, b, g * per_group + h, t)
        sums[unit] = state.reshape(r, wide)[:, :e]
        totals[unit] = seen[:r]


@compiled
def compare_with_mean(v: Rows, o: Rows, valid: Array, sums: Array, totals: Array, out: Array, first: int,
                      last: int) -> None:  # fmt: skip
    """The same for the one feature 1: S is the sum of the values, z their number, and every query gets their mean."""
    _, batch, heads, time = out.shape
    units, e = sums.shape[0], sums.shape[2]
    groups = units // batch
    per_group, wide = heads // groups, _padded(e)
    state, value, output = np.zeros(wide, np.float32), np.zeros(wide, np.float32), np.zeros(wide, np.float32)
    for unit in range(first, last):
        b, g = unit // groups, unit % groups
        state[:e] = sums[unit, 0]
        count = totals[unit, 0]
        for t in range(time):
            if valid[b, t]:
                _copy_row(v.numbers, _place(v, b, g, t), e, value, 0, GIVEN)
                _append(value, state)
                count += np.float32(1)
            for h in range(per_group):
                _copy_row(o.numbers, _place(o, b, g * per_group + h, t), e, output, 0, GIVEN)
                _compare(output, state, 0, count, out, b, g * per_group + h, t)
        sums[unit, 0] = state[:e]
        totals[unit, 0] = count

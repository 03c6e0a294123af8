"""The hybrid: exact softmax on sinks and recent keys, another mechanism on the keys between, under one normaliser.

With E_t the exact set of query t, R_t its recent keys and a_j the mechanism's weights up to a factor per row,

    w_j = exp(s_j) on E_t,    w_j = f c_t a_j elsewhere,    c_t = sum_{R_t} exp(s_j) / sum_{R_t} a_j,

and the output is sum_j w_j v_j / sum_j w_j. The factor c_t matches both sides on the recent keys, so the mechanism's
scale per row, which a fit on normalised weights leaves open, does not matter. f shrinks the tail, 0 <= f <= 1: f = 0 is
the window alone. With no sinks and f = 1 this is the joint normaliser of LoLCATs (arXiv:2410.10254, eq. 6) with its
learned factor replaced by c_t. Where the mechanism gives the recent keys nothing, c_t is set to 0 and the row flagged.

The tail ``mean_key`` is RazorAttention's compensation token (arXiv:2407.15891): one more key, the mean of the dropped
ones, whose logit is raised by the log of their number, with their mean value. It needs no c_t.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention.chunked import PRESENT, Carry, empty_carry
from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.far_keys import Dropped, FarKeys, Span
from softgap.attention.feature_maps import LOG_ZERO, Features, featurise
from softgap.attention.mechanism import Mechanism
from softgap.attention.outputs import Attention, compare_heads
from softgap.attention.registry import resolve
from softgap.attention.sliding import recent_feature_sums
from softgap.attention.streaming import BLOCK_POSITIONS, Sums, carry_bytes, join_carries, split_carry, weighted_sums
from softgap.attention.window import NO_ORDINAL, ExactSums, WindowState
from softgap.errors import ShapeError, UnsupportedError

__all__ = ["HybridState"]

# New keys at a time where far keys are chosen: candidates are compared in pairs.
FAR_POSITIONS = 64
# Positions that are worth a compiled pass, those of a block of it, and features whose state stays in a near cache.
FEWEST = 4
PASS_POSITIONS = 1024
# Positions of a segment of the pass: some of them for each of few KV heads, so that all threads have work.
SEGMENT_POSITIONS = 282
MOST_FEATURES = 256


class HybridState:
    """A growing sequence of keys and values in constant space: an exact set of keys, and a state of all others.

    A key enters the state when it leaves the window. For a window without a tail there is nothing but the exact set.

    Parameters
    ----------
    mechanism
        A window or a hybrid, such as ``elu1+window:w=60,sinks=4``, whose tail has a state.
    window
        Positions that the model's own attention sees; only a window without a tail can follow that.
    scale, rule, dtype
        As for ``WindowState``.
    origin
        As in ``Visible``: the position of the first key, where it is not 0.
    """

    def __init__(
        self,
        mechanism: str | Mechanism,
        *,
        window: int | None = None,
        scale: float | None = None,
        rule: ScoreRule | None = None,
        dtype: torch.dtype = torch.float32,
        origin: Int[Tensor, "#batch"] | None = None,
    ) -> None:
        self.mechanism = resolve(mechanism)
        self.dtype = dtype
        self._scale = scale
        exact, tail = ExactSet.of(self.mechanism.options), self.mechanism.tail_with_parameters()
        if (tail is not None or exact.far) and window is not None:
            raise UnsupportedError(
                f"mechanism '{self.mechanism.name}' has no state under a sliding window of the model; use "
                "attend(..., form='quadratic')"
            )
        self._window = WindowState(exact, window=window, scale=scale, rule=rule, dtype=dtype)
        self._far = FarKeys(exact) if exact.far else None
        self._tail: _MeanTail | _FeatureTail | None = None
        if tail is not None:
            self._tail = _MeanTail(rule) if tail.kind == "mean_key" else _FeatureTail(tail, exact.recent, origin)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        return sum(part.nbytes for part in (self._window, self._far, self._tail) if part is not None)

    @property
    def length(self) -> int:
        """Keys appended so far."""
        return self._window.length

    def compare(
        self,
        q: Float[Tensor, "batch head time dim"],
        k: Float[Tensor, "batch kv_head time dim"],
        v: Float[Tensor, "batch kv_head time value_dim"],
        output: Float[Tensor, "batch head time value_dim"],
        key_valid: Bool[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "quantity batch head time"]:
        """Append keys and compare the answers with ``output``, as ``compare_outputs`` does."""
        return compare_heads(output, self.attend(q, k, v, key_valid).output)

    def append(self, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None = None) -> None:
        """Take in keys that no query of this block asks about."""
        self.attend(k[:, :, :0], k, v, key_valid)

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
    ) -> Attention:
        """Append keys, then answer the queries, which stand at the last of these keys."""
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        if self._tail is None and self._far is None:
            return self._window.attend(q, k, v, key_valid)
        ahead = k.shape[2] - q.shape[2]
        if ahead < 0:
            raise ShapeError(f"queries stand at the last appended keys: got {q.shape[2]} queries for {k.shape[2]} keys")
        parts = []
        # Blocks are short, so that what their features take does not grow with the text.
        step = BLOCK_POSITIONS if self._far is None else FAR_POSITIONS
        if (self._far is not None or isinstance(self._tail, _FeatureTail)) and _suits_pass(q, k, v):
            step = PASS_POSITIONS
        bounds = [*range(0, ahead, step), *range(ahead, k.shape[2], step), k.shape[2]]
        for start, stop in itertools.pairwise(bounds):
            valid = None if key_valid is None else key_valid[:, start:stop]
            queries = q[:, :, max(0, start - ahead) : max(0, stop - ahead)]
            parts.append(self._block(queries, k[:, :, start:stop], v[:, :, start:stop], valid))
        output, seen, flagged = (
            parts[0] if len(parts) == 1 else (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
        )
        valid_rows = seen.any(dim=1)[..., 0]
        return Attention(output, valid_rows, flagged[..., 0] & valid_rows[:, None])

    def _block(self, q: Tensor, k: Tensor, v: Tensor, key_valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs of one block, which of them see anything, and which lack a normaliser for the tail."""
        if key_valid is not None:
            k, v = (x.masked_fill(~key_valid[:, None, :, None], 0) for x in (k, v))
        if self._far is None and self.length + k.shape[2] <= self._window.exact.recent:  # nothing has left the window
            return _alone(self._window.sums(q, k, v, key_valid))
        span = self._span(k, v, key_valid)
        in_pass = _suits_pass(q, k, v)
        if self._far is not None and in_pass:
            self._window.append(k, v, key_valid)
            exact, dropped = self._far.take_in_pass(q, span, self._window)
        else:
            exact, dropped = self._window.sums(q, k, v, key_valid), span.dropped
        if self._far is not None and not in_pass:
            total = exact.scale + exact.totals.log()
            scores, values, dropped = self._far.take(q, span, self._window.scores, total)
            exact = _add_exact(exact, scores, values)
        if self._tail is None:
            return _alone(exact)
        scale = q.shape[-1] ** -0.5 if self._scale is None else self._scale
        if isinstance(self._tail, _FeatureTail) and in_pass:
            joined = self._tail.add_in_pass(q, span, dropped, exact, scale, self.mechanism.tail_factor(q))
            if joined is not None:
                return joined
        far, recent = self._tail.sums(q, span, dropped, scale)
        if q.shape[2] == 0:
            return exact.values, exact.totals > 0, exact.totals > 0
        return _join(exact, far, recent, self.mechanism.tail_factor(q))

    def _span(self, k: Tensor, v: Tensor, key_valid: Tensor | None) -> Span:
        """The new keys behind those of the window: as many leave it as come."""
        buffer, exact, n = self._window.buffer, self._window.exact, k.shape[2]
        start = buffer.length
        ordinals = buffer.ordinals_of(n, key_valid, k.device, k.shape[0]).expand(k.shape[0], -1)
        before = min(start, exact.recent)
        if before:
            old_k, old_v, old_ordinals = buffer.recent(before)
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
            ordinals = torch.cat([old_ordinals.expand(len(ordinals), -1), ordinals], dim=1)
        missing = exact.recent - before
        k, v = (functional.pad(x, (0, 0, missing, 0)) for x in (k, v))
        ordinals = functional.pad(ordinals, (missing, 0), value=NO_ORDINAL)
        positions = torch.arange(start - exact.recent, start + n, device=k.device)
        return Span(k, v, ordinals, positions, leaving=n, sinks=exact.sinks)

    @classmethod
    def stacked(cls, states: Sequence[HybridState], mechanism: Mechanism) -> HybridState:
        """States of several layers as one, along the batch; ``mechanism`` carries the parameters of all of them."""
        first = states[0]
        window = first._window
        whole = cls(mechanism, window=window.window, scale=first._scale, rule=window.rule, dtype=first.dtype)
        whole._window = WindowState.stacked([state._window for state in states])
        if first._far is not None:
            whole._far = FarKeys.stacked([state._far for state in states if state._far is not None])
        if whole._tail is not None:
            rows = 0 if first._window.buffer.keys is None else len(first._window.buffer.keys)
            whole._tail.join([state._tail for state in states], rows)
        return whole

    def split_into(self, states: Sequence[HybridState]) -> None:
        """Hand each part of a stacked state back to the state it came from."""
        self._window.split_into([state._window for state in states])
        if self._far is not None:
            self._far.split_into([state._far for state in states if state._far is not None])
        if self._tail is not None:
            self._tail.split_into([state._tail for state in states])


def _suits_pass(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the compiled pass takes these tensors: as many queries as keys, and no gradient."""
    plain = q.dtype == torch.float32 and q.device.type == "cpu" and q.shape[2] == k.shape[2] >= FEWEST
    return plain and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def _alone(exact: ExactSums) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs of an exact set without a tail."""
    return exact.output, exact.totals > 0, torch.zeros_like(exact.totals, dtype=torch.bool)


def _add_exact(
    exact: ExactSums,
    scores: Float[Tensor, "batch head query key"],
    values: Float[Tensor, "batch kv_head key value_dim"],
) -> ExactSums:
    """The sums with more keys in the exact set, which are not recent; scores of -inf count nothing."""
    if scores.shape[2] == 0:
        return exact
    top = torch.maximum(exact.scale, scores.amax(dim=-1, keepdim=True))
    weights, own = (scores - top).exp(), (exact.scale - top).exp()
    grouped = weights.unflatten(1, (values.shape[1], -1)).flatten(2, 3)
    added = (grouped @ values).reshape(*weights.shape[:3], values.shape[-1])
    totals = exact.totals * own + weights.sum(dim=-1, keepdim=True)
    return ExactSums(exact.values * own + added, totals, exact.recent * own, top)


def _join(exact: ExactSums, far: Sums, recent: Sums | None, factor: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exact and other keys under one normaliser, all relative to the larger of the two scales."""
    zero = torch.zeros_like(exact.scale)
    far_scale = zero if far.scale is None else far.scale
    lost = torch.zeros_like(exact.totals, dtype=torch.bool)
    mass: Tensor | float = 1.0
    if recent is not None:
        lost = recent.totals.abs() <= torch.finfo(recent.totals.dtype).tiny
        mass = exact.recent / recent.totals.masked_fill(lost, torch.inf)
        # exp(s_j) are relative to exact.scale, so c_t brings it along.
        far_scale = far_scale - (zero if recent.scale is None else recent.scale) + exact.scale
    top = torch.maximum(exact.scale, far_scale.masked_fill(far.totals == 0, -torch.inf))
    own, other = (exact.scale - top).exp(), (far_scale - top).clamp(max=80).exp() * mass * factor
    values = exact.values * own + far.values * other
    totals = exact.totals * own + far.totals * other
    seen = exact.totals > 0
    return values / totals.masked_fill(totals == 0, 1), seen, lost & (far.totals > 0)


class _MeanTail:
    """The compensation token: sums of the keys and values that were dropped, and their number."""

    def __init__(self, rule: ScoreRule | None) -> None:
        self._rule = rule or ScoreRule()
        self._sums: Float[Tensor, "batch kv_head numbers"] | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._sums is None else self._sums.nbytes

    def sums(self, q: Tensor, span: Span, dropped: Dropped, scale: float) -> tuple[Sums, None]:
        """Weight and weighted value of the compensation token for each query."""
        d, k, v = q.shape[-1], dropped.k, dropped.v
        each = torch.cat([k, v, torch.ones_like(k[..., :1])], dim=-1) * dropped.present[..., None].to(k.dtype)
        running = each.cumsum(dim=2)
        if self._sums is not None:
            running = running + self._sums[:, :, None]
        self._sums = running[:, :, -1].clone()
        group = q.shape[1] // running.shape[1]
        running = running[:, :, running.shape[2] - q.shape[2] :]
        count = running[..., -1:]
        mean = running[..., :-1] / count.clamp(min=1)
        mean, count = (x.repeat_interleave(group, dim=1) for x in (mean, count))
        logit = self._rule.cap((q * mean[..., :d]).sum(dim=-1, keepdim=True) * scale) + count.clamp(min=1).log()
        present = (count > 0).to(q.dtype)
        return Sums(mean[..., d:] * present, present, logit), None

    def join(self, tails: Sequence[Any], rows: int) -> None:
        parts = [tail._sums for tail in tails if tail._sums is not None]
        self._sums = torch.cat(parts) if parts else None

    def split_into(self, tails: Sequence[Any]) -> None:
        for i, tail in enumerate(tails):
            tail._sums = None if self._sums is None else self._sums.chunk(len(tails))[i]


class _FeatureTail:
    """The state of a factorable mechanism over the keys that were dropped."""

    def __init__(self, mechanism: Mechanism, recent: int, origin: Int[Tensor, "#batch"] | None) -> None:
        self._mechanism = mechanism
        self._recent = recent
        self._origin = origin
        self._carry: Carry | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._carry is None else carry_bytes(self._carry)

    def sums(self, q: Tensor, span: Span, dropped: Dropped, scale: float) -> tuple[Sums, Sums | None]:
        """The mechanism's sums over the dropped keys and, without values, over the recent ones."""
        features = self._features(q, span, scale)
        key = features.key[:, :, : span.leaving] if dropped.late is None else self._late(dropped, features.rate, scale)
        present = dropped.present
        if present.shape[1] not in (1, key.shape[1]):  # one key map per query head
            present = present.repeat_interleave(key.shape[1] // present.shape[1], dim=1)
        key = key.masked_fill(~present[..., None], LOG_ZERO if features.log else 0.0)
        query = features.query
        if features.rate is not None and q.shape[2]:
            # The state counts distances from the newest dropped key.
            group = query.shape[1] // key.shape[1]
            query = query - self._recent * features.rate.repeat_interleave(group, dim=1)[:, :, None]
        far, self._carry = weighted_sums(replace(features, query=query, key=key), dropped.v, self._carry)
        if q.shape[2] == 0:
            return far, None
        return _per_head(far, q.shape[1]), _per_head(self._recent_sums(features, span), q.shape[1])

    def add_in_pass(
        self, q: Tensor, span: Span, dropped: Dropped, exact: ExactSums, scale: float, factor: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """What ``_join`` makes of ``sums``, in one compiled pass; None for features that it does not know."""
        # Here, since it loads numba.
        from softgap.attention.simd import share_out
        from softgap.attention.tail_kernel import Answers, Block, TailState, add_tail

        features = self._features(q, span, scale)
        query, key = features.query.contiguous(), features.key.contiguous()
        suited = features.log and query.shape[1] == q.shape[1] and key.shape[-1] <= MOST_FEATURES
        if not suited or query.requires_grad or key.requires_grad:
            return None
        batch, heads, n, _ = q.shape
        rows, r, e = batch * key.shape[1], key.shape[-1], span.v.shape[-1]
        carry = self._carry or empty_carry(rows, r, e, key, log=True)
        rate = key.new_zeros(batch, key.shape[1], r) if features.rate is None else features.rate.contiguous()
        leaving = key[:, :, :n] if dropped.late is None else self._late(dropped, features.rate, scale)
        enters = dropped.present.expand(batch, span.k.shape[1], -1)
        length = self._recent * max(1, SEGMENT_POSITIONS // self._recent)
        state = _states_before(carry, leaving, dropped.v, enters, rate.flatten(0, 1), length)
        flagged = torch.zeros(batch, heads, n, dtype=torch.bool)
        output = exact.values.contiguous()
        totals, recent, top = (x[..., 0].contiguous().numpy() for x in (exact.totals, exact.recent, exact.scale))
        each = torch.as_tensor(factor, dtype=q.dtype).expand(batch, heads, 1, 1).contiguous().flatten(1)
        block = Block(*(x.contiguous().numpy() for x in (query, key, leaving, dropped.v, enters, rate)))
        answers = Answers(output.numpy(), totals, recent, top, flagged.numpy())
        shared = (self._recent, length, block, TailState(*(x.numpy() for x in state)), answers, each.numpy())
        share_out(lambda first, last: add_tail(*shared, first, last), rows * len(state[0]))
        last = (x[-1].clone() for x in state)
        self._carry = replace(carry, **dict(zip(("sums", "totals", "scale", "age"), last, strict=True)))
        return output, exact.totals > 0, flagged[..., None]

    def _late(self, dropped: Dropped, rate: Tensor | None, scale: float) -> Tensor:
        """Features of keys that enter the state late, decayed as if they had entered when they left the window."""
        turned = dropped.ordinals
        if self._origin is not None:
            turned = turned + self._origin.to(turned.device)[:, None, None]
        features = featurise(
            self._mechanism,
            dropped.k[:, :, :0],
            dropped.k,
            scale=scale,
            query_positions=dropped.positions[0, 0, :0],
            key_positions=dropped.positions,
            key_turned=turned,
        )
        if rate is None or dropped.late is None:
            return features.key
        late = dropped.late.repeat_interleave(rate.shape[1] // dropped.late.shape[1], dim=1)
        return features.key - rate[:, :, None] * late[..., None]

    def _recent_sums(self, features: Features, span: Span) -> Sums:
        """Sums over the window of each query: what came before the block is carried by its features."""
        before, first = self._recent - 1, self._recent
        n = features.query.shape[2]
        found = recent_feature_sums(features.key, features.rate, first) if features.log and n > 1 else None
        if found is not None:
            # Every query head of a key head asks the same sums.
            terms = features.query.unflatten(1, (found.shape[1], -1)) + found[:, :, None, -n:]
            scale = terms.amax(dim=-1, keepdim=True)
            totals = (terms - scale).exp_().sum(dim=-1, keepdim=True).mul_(scale > PRESENT)
            totals, scale = totals.flatten(1, 2), scale.flatten(1, 2)
            return Sums(totals[..., :0], totals, scale)
        flat = features.key.flatten(0, 1)
        empty = empty_carry(len(flat), flat.shape[-1], 0, flat, log=features.log, window=self._recent)
        carry = replace(empty, tail_key=flat[:, 1:first], tail_value=flat.new_zeros(len(flat), before, 0))
        block = replace(features, key=features.key[:, :, first:])
        return weighted_sums(block, span.v[:, :, first:, :0], carry, self._recent)[0]

    def _features(self, q: Tensor, span: Span, scale: float) -> Features:
        """Features of the queries, which stand at the last of the keys, and of all keys."""
        turned = span.ordinals.clamp(min=0)
        if self._origin is not None:
            turned = turned + self._origin.to(turned.device)[:, None]
        first_query = len(span.positions) - q.shape[2]
        return featurise(
            self._mechanism,
            q,
            span.k,
            scale=scale,
            query_positions=span.positions[first_query:],
            key_positions=span.positions.clamp(min=0),
            query_turned=turned[:, first_query:],
            key_turned=turned,
            key_valid=span.ordinals >= 0,
            share_heads=True,
        )

    def join(self, tails: Sequence[Any], rows: int) -> None:
        carries = [tail._carry for tail in tails if tail._carry is not None]
        self._carry = join_carries(carries) if carries else None
        origins = [tail._origin for tail in tails if tail._origin is not None]
        self._origin = torch.cat([origin.expand(rows) for origin in origins]) if origins else None

    def split_into(self, tails: Sequence[Any]) -> None:
        for i, tail in enumerate(tails):
            tail._carry = None if self._carry is None else split_carry(self._carry, i, len(tails))


def _states_before(
    carry: Carry,
    leaving: Float[Tensor, "batch key_head key feature"],
    values: Float[Tensor, "batch kv_head key value_dim"],
    enters: Bool[Tensor, "batch kv_head key"],
    rate: Float[Tensor, "row feature"],
    length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums, totals, scale and age of a state before each segment of so many keys, of which some enter it."""
    if carry.scale is None or carry.age is None:
        raise AssertionError("the pass has logarithms of features")
    copies = leaving.shape[1] // values.shape[1]
    values, enters = (x.repeat_interleave(copies, dim=1).flatten(0, 1) for x in (values, enters))
    leaving = leaving.flatten(0, 1)
    states = [(carry.sums, carry.totals, carry.scale, carry.age)]
    for start in range(0, leaving.shape[1] - length, length):
        part = slice(start, start + length)
        # How long before the segment's end each key has entered.
        since = torch.arange(length, 0, -1, dtype=leaving.dtype)[:, None]
        logs = (leaving[:, part] - rate[:, None] * since).masked_fill_(~enters[:, part, None], LOG_ZERO)
        sums, totals, scale, age = states[-1]
        carried = scale - rate * (age + length)
        top = torch.maximum(carried, logs.amax(dim=1))
        own, weights = (carried - top).exp_(), (logs - top[:, None]).exp_().mul_(logs > PRESENT)
        sums = torch.baddbmm(sums * own[:, :, None], weights.transpose(1, 2), values[:, part])
        states.append((sums, totals * own + weights.sum(dim=1), top, torch.zeros_like(top)))
    return tuple(torch.stack(column) for column in zip(*states, strict=True))  # type: ignore[return-value]


def _per_head(sums: Sums, heads: int) -> Sums:
    """Sums per query head: a mechanism that ignores queries gives them once per KV head."""
    group = heads // sums.values.shape[1]
    if group == 1:
        return sums
    values, totals = (x.repeat_interleave(group, dim=1) for x in (sums.values, sums.totals))
    return Sums(values, totals, None if sums.scale is None else sums.scale.repeat_interleave(group, dim=1))

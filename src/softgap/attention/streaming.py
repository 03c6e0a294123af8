"""The streaming state of a factorable mechanism: append keys and ask queries, in blocks of any size."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.chunked import (
    PRESENT,
    Carry,
    apply_decay,
    block_sums,
    empty_carry,
    masked_product,
    prefix_sums,
)
from softgap.attention.feature_maps import Features, featurise
from softgap.attention.mechanism import Mechanism
from softgap.attention.outputs import Attention, compare_heads, divide
from softgap.attention.registry import resolve
from softgap.errors import ShapeError, UnsupportedError

__all__ = ["LinearState", "Sums", "weighted_sums"]

# Features of this many numbers per head are held at once; longer blocks are cut, so memory does not grow with T r.
BLOCK_NUMBERS = 2**17
BLOCK_POSITIONS = 512


class Sums(NamedTuple):
    """Weighted sums per query: of the values, and of ones; times exp(scale) where there is one."""

    values: Float[Tensor, "batch query_head query value_dim"]
    totals: Float[Tensor, "batch query_head query 1"]
    scale: Float[Tensor, "batch query_head query 1"] | None


class LinearState:
    """A growing sequence of keys and values, held as a state whose size does not depend on its length.

    Without a window the state is S = sum_j phi(k_j) v_j^T and z = sum_j phi(k_j) (r x (d_v + 1) numbers per KV head);
    with a window of w it is the features and values of the last w - 1 keys.

    Parameters
    ----------
    mechanism
        Any mechanism whose weights factor, by name or as a ``Mechanism``.
    window
        Number of positions a query sees, itself included; None for all.
    scale
        The model's scaling; None is 1 / sqrt(d).
    dtype
        float32, or float64.
    origin
        As in ``Visible``: the position of the first key, where it is not 0.
    """

    def __init__(
        self,
        mechanism: str | Mechanism,
        *,
        window: int | None = None,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        origin: Int[Tensor, "#batch"] | None = None,
    ) -> None:
        self.mechanism = resolve(mechanism)
        self.window = window
        self.dtype = dtype
        self.length = 0
        self._scale = scale
        self._carries: dict[str, Carry] = {}
        self._seen: Bool[Tensor, " batch"] | None = None
        self._tail_valid: Bool[Tensor, "batch tail"] | None = None
        # Position that rotary embedding gives the next key of each row; None while it is the length.
        self._next = origin

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        rows = sum(x.nbytes for x in (self._seen, self._tail_valid, self._next) if x is not None)
        return rows + sum(map(carry_bytes, self._carries.values()))

    @classmethod
    def stacked(cls, states: Sequence[LinearState], mechanism: Mechanism) -> LinearState:
        """Several states of one length as one, along the batch; ``mechanism`` carries the parameters of all of them."""
        first = states[0]
        whole = cls(mechanism, window=first.window, scale=first._scale, dtype=first.dtype)
        whole.length = first.length
        whole._carries = {name: join_carries([state._carries[name] for state in states]) for name in first._carries}
        whole._seen = _cat([state._seen for state in states])
        whole._tail_valid = _cat([state._tail_valid for state in states])
        rows = [len(state._next) for state in states if state._next is not None]
        whole._next = torch.cat([state._next_of(rows[0]) for state in states]) if rows else None
        return whole

    def split_into(self, states: Sequence[LinearState]) -> None:
        """Hand each part of a stacked state back to the state it came from."""
        n = len(states)
        for i, state in enumerate(states):
            state.length = self.length
            state._carries = {name: split_carry(carry, i, n) for name, carry in self._carries.items()}
            state._seen = None if self._seen is None else self._seen.chunk(n)[i]
            state._tail_valid = None if self._tail_valid is None else self._tail_valid.chunk(n)[i]
            state._next = None if self._next is None else self._next.chunk(n)[i]

    def append(
        self,
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
    ) -> None:
        """Take in keys that no query of this block asks about."""
        self.attend(k[:, :, :0], k, v, key_valid)

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
        *,
        shared: bool = False,
    ) -> Attention:
        """Append keys, then answer the queries, which stand at the last of these keys.

        ``shared`` answers once per KV head where the mechanism ignores the query, and leaves the repeating to you.
        """
        outputs, valids, flags = [], [], []
        for sums, seen in self._blocks(q, k, v, key_valid):
            output, flagged = self._output(sums, None if shared else q.shape[1])
            outputs.append(output)
            flags.append(flagged)
            valids.append(seen)
        if not outputs:
            batch, heads = q.shape[:2]
            nothing = q.new_zeros(batch, heads, 0, v.shape[-1], dtype=self.dtype)
            return Attention(nothing, nothing.new_zeros(batch, 0).bool(), nothing[..., 0].bool())
        valid_rows = torch.cat(valids, dim=1)
        # A row that sees nothing is padding: not valid, and no anomaly of the mechanism.
        return Attention(torch.cat(outputs, dim=2), valid_rows, torch.cat(flags, dim=2) & valid_rows[:, None])

    def _blocks(
        self, q: Tensor, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None
    ) -> Iterator[tuple[dict[str, Sums], Bool[Tensor, "batch query"]]]:
        """Block by block, the sums of the queries and which of them see any key."""
        self._check(q, k)
        ahead = k.shape[2] - q.shape[2]
        r = self.mechanism.feature_dim(k.shape[-1]) or 1
        step = max(64, min(BLOCK_POSITIONS, BLOCK_NUMBERS // r), self.window or 0)
        bounds = [*range(0, ahead, step), *range(ahead, k.shape[2], step), k.shape[2]]
        for start, stop in itertools.pairwise(bounds):
            part = slice(start, stop)
            valid = None if key_valid is None else key_valid[:, part]
            queries = q[:, :, max(0, start - ahead) : max(0, stop - ahead)]
            sums = self._block(queries, k[:, :, part], v[:, :, part], valid)
            seen = self._advance(k.shape[0], stop - start, valid, k.device)
            if start >= ahead:
                yield sums, seen

    def compare(
        self,
        q: Float[Tensor, "batch head time dim"],
        k: Float[Tensor, "batch kv_head time dim"],
        v: Float[Tensor, "batch kv_head time value_dim"],
        output: Float[Tensor, "batch head time value_dim"],
        key_valid: Bool[Tensor, "batch time"] | None = None,
    ) -> Float[Tensor, "quantity batch head time"]:
        """Append keys and compare the answers to their queries with ``output``: divergence, relative L2, norm ratio.

        The same as ``attend`` and then ``compare_outputs``, in one pass over memory where that is possible.
        """
        # Here, since it loads numba.
        from softgap.attention.fused import supports

        self._check(q, k)
        plain = self.window is None and self.dtype == torch.float32 and k.device.type == "cpu"
        if not plain or not supports(self.mechanism, k.shape[-1]):
            return compare_heads(output, self.attend(q, k, v, key_valid, shared=True).output)
        return self._compare_features(q, k, v, output, key_valid)

    def _compare_features(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, key_valid: Bool[Tensor, "batch time"] | None
    ) -> Float[Tensor, "quantity batch head time"]:
        from softgap.attention.fused import GIVEN, ONES, Rows, compare_positions, compare_with_mean, map_in_pass
        from softgap.attention.simd import share_out

        feature_map = map_in_pass(self.mechanism)
        if feature_map == GIVEN:
            features = self._features(q, k, key_valid)
            q, k = features.query, features.key
        batch, kv_heads, t, r = k.shape
        carry = self._carries.get("weights")
        if carry is None:
            carry = empty_carry(batch * kv_heads, 1 if feature_map == ONES else r, v.shape[-1], v.float(), log=False)
        self._carries["weights"] = carry  # the pass writes into it
        valid = torch.ones(batch, t, dtype=torch.bool) if key_valid is None else key_valid.contiguous()
        quantities = torch.empty(3, batch, output.shape[1], t)
        state = (valid.numpy(), carry.sums.numpy(), carry.totals.numpy(), quantities.numpy())
        values, outputs = Rows.of(v), Rows.of(output)
        if feature_map == ONES:
            share_out(lambda a, b: compare_with_mean(values, outputs, *state, a, b), batch * kv_heads)
        else:
            place = (feature_map, q.shape[1] // kv_heads, Rows.of(q), Rows.of(k), values, v.shape[1], outputs)
            share_out(lambda a, b: compare_positions(*place, *state, a, b), batch * kv_heads)
        self._advance(batch, t, key_valid, k.device)
        return quantities

    def _check(self, q: Tensor, k: Tensor) -> None:
        if not self.mechanism.factorable(k.shape[-1]):
            raise UnsupportedError(
                f"mechanism '{self.mechanism.name}' has no state and cannot be streamed; "
                "use attend(..., form='quadratic')"
            )
        if q.shape[2] > k.shape[2]:
            raise ShapeError(f"queries stand at the last appended keys: got {q.shape[2]} queries for {k.shape[2]} keys")

    def _block(self, q: Tensor, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None) -> dict[str, Sums]:
        """The weighted sums that the output of one block needs, by name."""
        features = self._features(q, k, key_valid)
        v = v.to(self.dtype)
        values = v if key_valid is None else v.masked_fill(~key_valid[:, None, :, None], 0)
        sums = {"weights": self._sums("weights", features, values)}
        if self.mechanism.normaliser == "centred":
            query, key = (x.new_ones(*x.shape[:-1], 1) for x in (features.query, features.key))
            if key_valid is not None:
                key = key.masked_fill(~key_valid[:, None, :, None], 0)
            sums["count"] = self._sums("count", Features(query, key, rate=None, log=False), values)
        elif self.mechanism.signed or self.mechanism.cancels:
            absolute = Features(features.query.abs(), features.key.abs(), rate=None, log=False)
            sums["terms"] = self._sums("terms", absolute, values[..., :0])
        return sums

    def _features(self, q: Tensor, k: Tensor, key_valid: Bool[Tensor, "batch key"] | None) -> Features:
        positions = torch.arange(self.length, self.length + k.shape[2], device=k.device)
        turned_by = self._turned_by(positions, key_valid)
        return featurise(
            self.mechanism,
            q.to(self.dtype),
            k.to(self.dtype),
            scale=k.shape[-1] ** -0.5 if self._scale is None else self._scale,
            query_positions=positions[k.shape[2] - q.shape[2] :],
            key_positions=positions,
            query_turned=turned_by[:, k.shape[2] - q.shape[2] :],
            key_turned=turned_by,
            key_valid=key_valid,
            share_heads=True,
        )

    def _turned_by(
        self, positions: Int[Tensor, " key"], key_valid: Bool[Tensor, "batch key"] | None
    ) -> Int[Tensor, "#batch key"]:
        """The position by which rotary embedding has turned each key of a block; of no meaning at padding."""
        if key_valid is None and self._next is None:
            return positions[None]
        before = self.length if self._next is None else self._next.to(positions.device)[:, None]
        inside = (positions - self.length)[None] if key_valid is None else key_valid.long().cumsum(dim=1) - 1
        return before + inside

    def _next_of(self, rows: int) -> Int[Tensor, " batch"]:
        return torch.full((rows,), self.length) if self._next is None else self._next.expand(rows)

    def _sums(
        self,
        name: str,
        features: Features,
        values: Float[Tensor, "batch kv_head key value_dim"],
    ) -> Sums:
        """The block's weighted sums of values and of ones, carrying the state of this name forward."""
        sums, self._carries[name] = weighted_sums(features, values, self._carries.get(name), self.window)
        return sums

    def _output(
        self, sums: dict[str, Sums], heads: int | None
    ) -> tuple[Float[Tensor, "batch head query value_dim"], Bool[Tensor, "batch head query"]]:
        weighted, total, _ = sums["weights"]
        if "count" in sums:
            count = sums["count"].totals.clamp(min=1)
            mean = sums["count"].values / count
            output = mean + (weighted - total * mean) / count
            return output, torch.zeros_like(output[..., 0], dtype=torch.bool)
        output, flagged = divide(weighted, total, sums["terms"].totals if "terms" in sums else None)
        group = 1 if heads is None else heads // output.shape[1]
        if group == 1:
            return output, flagged
        return output.repeat_interleave(group, dim=1), flagged.repeat_interleave(group, dim=1)

    def _advance(
        self, batch: int, t: int, key_valid: Bool[Tensor, "batch key"] | None, device: torch.device
    ) -> Bool[Tensor, "batch key"]:
        """Move on by t positions; whether each of them sees at least one key."""
        if key_valid is not None:
            self._next = self._next_of(batch).to(device) + key_valid.sum(dim=1)
        elif self._next is not None:
            self._next = self._next + t
        self.length += t
        valid = torch.ones(batch, t, dtype=torch.bool, device=device) if key_valid is None else key_valid
        if self.window is None:
            seen = valid if key_valid is None else valid.long().cumsum(dim=1) > 0
            if self._seen is not None:
                seen = seen | self._seen[:, None]
            self._seen = seen[:, -1]
            return seen
        before = valid.new_zeros(batch, self.window - 1) if self._tail_valid is None else self._tail_valid
        whole = torch.cat([before, valid], dim=1)
        self._tail_valid = whole[:, whole.shape[1] - (self.window - 1) :]
        count = torch.nn.functional.pad(whole.long().cumsum(dim=1), (1, 0))
        return count[:, self.window :] > count[:, :t]


def weighted_sums(
    features: Features,
    values: Float[Tensor, "batch kv_head key value_dim"],
    carry: Carry | None,
    window: int | None = None,
) -> tuple[Sums, Carry]:
    """sum_j w_tj v_j and sum_j w_tj of a block whose queries and keys stand at the same positions, behind a carry."""
    batch, heads, t, r = features.key.shape
    if heads > values.shape[1]:  # one key map per query head: every head has its own state
        values = values.repeat_interleave(heads // values.shape[1], dim=1)
    has_queries = features.query.shape[2] > 0
    group = features.query.shape[1] // heads if has_queries else 0
    query = features.query if has_queries else features.key[:, :0]
    key, value = features.key.reshape(-1, t, r), values.reshape(batch * heads, t, values.shape[-1])
    if carry is None:
        carry = empty_carry(batch * heads, r, value.shape[-1], key, log=features.log, window=window)
    query = query.reshape(batch * heads, group, t, r)
    rate = None if features.rate is None else features.rate.reshape(-1, r)
    scale: Tensor | None
    if r == 1 and not features.log and window is None:
        sums, totals, scale, carry = prefix_sums(query, key, value, carry)
    elif t != 1:
        sums, totals, scale, carry = block_sums(query, key, value, carry, rate=rate, log=features.log, window=window)
    elif window is None:
        sums, totals, scale, carry = _one_step(query[:, :, 0], key[:, 0], value[:, 0], carry, rate, features.log)
    else:
        sums, totals, scale, carry = _one_step_in_window(query, key, value, carry, rate, features.log, window)
    shape = (batch, heads * group, t)
    scale = None if scale is None else scale.reshape(*shape, 1)
    return Sums(sums.reshape(*shape, value.shape[-1]), totals.reshape(*shape, 1), scale), carry


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def carry_bytes(carry: Carry) -> int:
    """Bytes of memory that a carry holds."""
    tensors = [getattr(carry, f.name) for f in fields(Carry)]
    return sum(x.nbytes for x in tensors if x is not None)


def join_carries(carries: Sequence[Carry]) -> Carry:
    """Carries of several layers as one, along the batch."""
    values: dict[str, Any] = {f.name: _cat([getattr(carry, f.name) for carry in carries]) for f in fields(Carry)}
    return Carry(**values)


def split_carry(carry: Carry, i: int, n: int) -> Carry:
    """Part i of a carry that joins n."""
    values = {f.name: getattr(carry, f.name) for f in fields(Carry)}
    parts: dict[str, Any] = {name: None if x is None else x.chunk(n)[i] for name, x in values.items()}
    return Carry(**parts)


def _one_step(
    query: Float[Tensor, "n g r"],
    key: Float[Tensor, "n r"],
    value: Float[Tensor, "n e"],
    carry: Carry,
    rate: Float[Tensor, "n r"] | None,
    log: bool,
) -> tuple[Float[Tensor, "n g 1 e"], Float[Tensor, "n g 1 1"], Float[Tensor, "n g 1 1"] | None, Carry]:
    """The sums of a single position: generation appends one token at a time, where chunks would be all overhead."""
    scale: Tensor | None = None
    if not log or carry.scale is None or carry.age is None:
        states, totals = torch.baddbmm(carry.sums, key[:, :, None], value[:, None]), carry.totals + key
        after = replace(carry, sums=states, totals=totals)
    else:
        carried = carry.scale if rate is None else carry.scale - rate * carry.age
        top = torch.maximum(carried, key)
        carried_weight, new = (carried - top).exp_(), (key - top).exp_().mul_(key > PRESENT)
        states = torch.baddbmm(carry.sums * carried_weight[:, :, None], new[:, :, None], value[:, None])
        totals = carry.totals * carried_weight + new
        # The larger of the two sets the scale, and its age is counted to the position behind this one.
        newer = key > carried
        after = replace(
            carry,
            sums=states,
            totals=totals,
            scale=torch.where(newer, key, carry.scale),
            age=torch.where(newer, 0.0, carry.age).add_(1),
        )
        query = query + top[:, None]
        scale = query.amax(-1, keepdim=True)
        query = (query - scale).exp_()
        scale = scale[:, :, None]
    return (query @ states)[:, :, None], (query @ totals[:, :, None])[:, :, None], scale, after


def _one_step_in_window(
    query: Float[Tensor, "n g 1 r"],
    key: Float[Tensor, "n 1 r"],
    value: Float[Tensor, "n 1 e"],
    carry: Carry,
    rate: Float[Tensor, "n r"] | None,
    log: bool,
    window: int,
) -> tuple[Float[Tensor, "n g 1 e"], Float[Tensor, "n g 1 1"], Float[Tensor, "n g 1 1"] | None, Carry]:
    """The sums of a single position under a window: one row of weights."""
    key, value = torch.cat([carry.tail_key, key], dim=1), torch.cat([carry.tail_value, value], dim=1)
    oldest = max(0, key.shape[1] - (window - 1))
    carry = replace(carry, tail_key=key[:, oldest:], tail_value=value[:, oldest:])
    distance = torch.arange(key.shape[1] - 1, -1, -1, device=key.device, dtype=key.dtype)[:, None]
    keys = apply_decay(key, rate, distance, -1)
    seen = torch.ones(1, key.shape[1], dtype=torch.bool, device=key.device)
    sums, totals, scale = masked_product(query[:, None], keys[:, None], value[:, None], seen, log)
    return sums.transpose(1, 2), totals.transpose(1, 2), None if scale is None else scale.transpose(1, 2), carry

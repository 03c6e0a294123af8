"""Exact softmax on a few keys: the first tokens (attention sinks) and the most recent ones, in constant space.

    E_t = {j < s} and {t - w < j <= t},        o_t = sum_{j in E_t} exp(s_j) v_j / sum_{j in E_t} exp(s_j)

(StreamingLLM, arXiv:2309.17453). Keys stay at their own positions, after rotary embedding. Padding does not count: the
sinks are the first s keys of each sequence. A model's softcap, learned sinks and sliding window apply as in its own
attention, so a window that is as long as the text equals the model's softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.outputs import Attention
from softgap.attention.sliding import attend_recent, can_tile
from softgap.errors import ShapeError

__all__ = ["NO_ORDINAL", "ExactSums", "KeyBuffer", "WindowState"]

# Rows whose scores are held at once: short, so that few scores outside of the window are computed.
BLOCK_ROWS = 64
NO_ORDINAL = -1


class ExactSums(NamedTuple):
    """Sums over the exact set, each to be multiplied by exp(scale); ``recent`` are those of the recent keys alone."""

    values: Float[Tensor, "batch head query value_dim"]
    totals: Float[Tensor, "batch head query 1"]
    recent: Float[Tensor, "batch head query 1"]
    scale: Float[Tensor, "batch head query 1"]

    @property
    def output(self) -> Float[Tensor, "batch head query value_dim"]:
        """The softmax over the exact set; zero where it is empty."""
        return self.values / self.totals.masked_fill(self.totals == 0, 1)


class KeyBuffer:
    """The keys and values that an exact set needs of a growing sequence: its sinks, and the most recent ones in a ring.

    Slot i of the first ``sinks`` holds sink i; the key at position p lies in slot ``sinks + p % recent``. While a
    sequence is short the ring is shorter too, and doubles.
    """

    def __init__(self, exact: ExactSet) -> None:
        self.exact = exact
        self.length = 0
        self.keys: Float[Tensor, "batch kv_head slot dim"] | None = None
        self.values: Float[Tensor, "batch kv_head slot value_dim"] | None = None
        # How manieth key of its sequence each recent one is, -1 for padding; None while there was no padding.
        self.ordinals: Int[Tensor, "batch recent"] | None = None
        self.counts: Int[Tensor, " batch"] | None = None
        self.sink_positions: Int[Tensor, "batch sink"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the buffer holds."""
        tensors = (self.keys, self.values, self.ordinals, self.counts, self.sink_positions)
        return sum(x.nbytes for x in tensors if x is not None)

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        """All keys and values that are held, sinks first."""
        if self.keys is None or self.values is None:
            raise AssertionError("an empty buffer has no keys")  # callers append first
        return self.keys, self.values

    @property
    def ring(self) -> int:
        """Slots of the ring."""
        return 0 if self.keys is None else self.keys.shape[2] - self.exact.sinks

    def recent(self, n: int) -> tuple[Tensor, Tensor, Int[Tensor, "#batch n"]]:
        """The last n keys and values in the order of their positions, and their ordinals."""
        keys, values = self.slots
        positions = torch.arange(self.length - n, self.length, device=keys.device)
        slots = self.exact.sinks + positions % self.ring
        ordinals = positions[None] if self.ordinals is None else self.ordinals[:, positions % self.ring]
        return keys[:, :, slots], values[:, :, slots], ordinals

    def ordinals_of(
        self, n: int, valid: Bool[Tensor, "batch key"] | None, device: torch.device, batch: int
    ) -> Int[Tensor, "#batch n"]:
        """Ordinals of the next n keys."""
        if valid is None and self.counts is None:
            return torch.arange(self.length, self.length + n, device=device)[None]
        before = torch.full((batch,), self.length, device=device) if self.counts is None else self.counts
        if valid is None:
            return before[:, None] + torch.arange(n, device=device)
        return torch.where(valid, before[:, None] + valid.long().cumsum(dim=1) - 1, NO_ORDINAL)

    def append(self, k: Tensor, v: Tensor, ordinals: Int[Tensor, "#batch key"], padded: bool) -> None:
        """Take in new keys and values."""
        batch, heads, n, _ = k.shape
        self._reserve(batch, heads, min(self.exact.recent, self.length + n), k, v)
        self._leave_inference_mode()
        keys, values = self.slots
        if padded and self.counts is None:
            self._begin_ordinals(batch, k.device)
        self._append_sinks(k, v, ordinals)
        last = min(n, self.ring)
        positions = torch.arange(self.length + n - last, self.length + n, device=k.device)
        if last == 1:
            slot = self.exact.sinks + (self.length + n - 1) % self.ring
            keys[:, :, slot], values[:, :, slot] = k[:, :, -1], v[:, :, -1]
        else:
            slots = self.exact.sinks + positions % self.ring
            keys[:, :, slots], values[:, :, slots] = k[:, :, -last:], v[:, :, -last:]
        if self.ordinals is not None and self.counts is not None:
            self.ordinals[:, positions % self.ring] = ordinals[:, -last:].expand(batch, -1)
            self.counts = self.counts + (ordinals != NO_ORDINAL).sum(dim=1)
        self.length += n

    def _leave_inference_mode(self) -> None:
        """Tensors that were made in inference mode cannot be written to outside of it: copy them."""
        if self.keys is None or torch.is_inference_mode_enabled() or not self.keys.is_inference():
            return
        for name in _BUFFER_TENSORS:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.clone())

    def _append_sinks(self, k: Tensor, v: Tensor, ordinals: Int[Tensor, "#batch key"]) -> None:
        sinks, (keys, values) = self.exact.sinks, self.slots
        if self.sink_positions is None:
            count = min(sinks - self.length, k.shape[2])
            if count > 0:
                new = slice(self.length, self.length + count)
                keys[:, :, new], values[:, :, new] = k[:, :, :count], v[:, :, :count]
            return
        for i in range(sinks):
            match = ordinals == i
            rows = match.any(dim=1).nonzero()[:, 0]
            if len(rows):
                at = match[rows].int().argmax(dim=1)
                keys[rows, :, i], values[rows, :, i] = k[rows, :, at], v[rows, :, at]
                self.sink_positions[rows, i] = at + self.length

    def _reserve(self, batch: int, heads: int, ring: int, k: Tensor, v: Tensor) -> None:
        """Make the ring at least so long; it is full length as soon as it would have to turn."""
        if ring <= self.ring:
            return
        slots = min(self.exact.recent, max(ring, 2 * self.ring)) + self.exact.sinks
        for name, x in (("keys", k), ("values", v)):
            old = getattr(self, name)
            new = x.new_zeros(batch, heads, slots, x.shape[-1])
            if old is not None:
                new[:, :, : old.shape[2]] = old
            setattr(self, name, new)
        if self.ordinals is not None:
            wider = self.ordinals.new_full((batch, slots - self.exact.sinks), NO_ORDINAL)
            wider[:, : self.ordinals.shape[1]] = self.ordinals
            self.ordinals = wider

    def _begin_ordinals(self, batch: int, device: torch.device) -> None:
        """Padding comes: from now on positions do not say how manieth key a key is."""
        positions = torch.arange(self.ring, device=device)
        turns = (self.length - 1 - positions).clamp(min=-1).div(max(1, self.ring), rounding_mode="floor")
        self.ordinals = (positions + turns * self.ring).expand(batch, -1).clone()
        self.counts = torch.full((batch,), self.length, device=device)
        sinks = torch.arange(self.exact.sinks, device=device)
        self.sink_positions = torch.where(sinks < self.length, sinks, 2**62).expand(batch, -1).clone()

    def filled_sinks(self, device: torch.device) -> Int[Tensor, "#batch sink"]:
        """Positions of the sinks; beyond any text where there is none yet."""
        if self.sink_positions is not None:
            return self.sink_positions
        sinks = torch.arange(self.exact.sinks, device=device)
        return torch.where(sinks < self.length, sinks, 2**62)[None]

    @classmethod
    def stacked(cls, buffers: Sequence[KeyBuffer]) -> KeyBuffer:
        """The buffers of several layers, which have seen equally many keys, along the batch."""
        whole = cls(buffers[0].exact)
        whole.length = buffers[0].length
        for name in _BUFFER_TENSORS:
            parts = [getattr(buffer, name) for buffer in buffers]
            setattr(whole, name, None if parts[0] is None else torch.cat(parts))
        return whole

    def split_into(self, buffers: Sequence[KeyBuffer]) -> None:
        """Hand each part of a stacked buffer back."""
        for i, buffer in enumerate(buffers):
            buffer.length = self.length
            for name in _BUFFER_TENSORS:
                whole = getattr(self, name)
                setattr(buffer, name, None if whole is None else whole.chunk(len(buffers))[i])


_BUFFER_TENSORS = ("keys", "values", "ordinals", "counts", "sink_positions")


class WindowState:
    """Softmax over sinks and recent keys of a growing sequence, in constant space.

    Parameters
    ----------
    exact
        Sinks and recent keys.
    window
        Positions that the model's own attention sees, the query's included; None for all.
    scale
        The model's scaling; None is 1 / sqrt(d).
    rule
        The model's softcap and learned sinks.
    dtype
        float32, or float64.
    """

    def __init__(
        self,
        exact: ExactSet,
        *,
        window: int | None = None,
        scale: float | None = None,
        rule: ScoreRule | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.exact = exact
        self.window = window
        self.dtype = dtype
        self.rule = rule or ScoreRule()
        self.buffer = KeyBuffer(exact)
        self._scale = scale

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        return self.buffer.nbytes

    @property
    def length(self) -> int:
        """Keys appended so far."""
        return self.buffer.length

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
    ) -> Attention:
        """Append keys, then answer the queries, which stand at the last of these keys."""
        sums = self.sums(q, k, v, key_valid)
        seen = (sums.totals > 0)[..., 0]
        return Attention(sums.output, seen.any(dim=1), torch.zeros_like(seen))

    def append(self, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None = None) -> None:
        """Take in keys that no query of this block asks about."""
        ordinals = self.buffer.ordinals_of(k.shape[2], key_valid, k.device, k.shape[0])
        self.buffer.append(k.to(self.dtype), v.to(self.dtype), ordinals, key_valid is not None)

    def sums(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
    ) -> ExactSums:
        """Append keys; the sums over the exact set of each query, which ``attend`` divides."""
        if q.shape[2] > k.shape[2]:
            raise ShapeError(f"queries stand at the last appended keys: got {q.shape[2]} queries for {k.shape[2]} keys")
        q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        if key_valid is not None:
            k, v = (x.masked_fill(~key_valid[:, None, :, None], 0) for x in (k, v))
        if q.shape[2] == 1 == k.shape[2] and key_valid is None and self.buffer.counts is None:
            return self._step(q, k, v)
        # Only what the queries see: keys ahead of their windows are appended without being scored.
        ahead = max(0, k.shape[2] - q.shape[2] - self.exact.recent + 1)
        if ahead:
            self.append(k[:, :, :ahead], v[:, :, :ahead], None if key_valid is None else key_valid[:, :ahead])
            k, v = k[:, :, ahead:], v[:, :, ahead:]
            key_valid = None if key_valid is None else key_valid[:, ahead:]
        return self._block(q, k, v, key_valid)

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> ExactSums:
        """One new position without padding: every slot of the buffer is visible, in whatever order."""
        buffer, sinks = self.buffer, self.exact.sinks
        position = self.length
        buffer.append(k, v, torch.tensor([[position]]), padded=False)
        keys, values = buffer.slots
        if self.window is not None and position + 1 > self.window:
            return self._masked_step(q, position)
        # A sink is in the ring too until it leaves the window; its own slot counts from then on.
        gone = min(sinks, max(0, position + 1 - self.exact.recent))
        start = 0 if gone else sinks
        seen = slice(start, sinks + min(position + 1, buffer.ring))
        scores = self.scores(q, keys[:, :, seen])
        if gone < sinks and start == 0:
            scores[..., gone:sinks] = -torch.inf
        return self._reduce(scores, values[:, :, seen], scores[..., sinks - start :])

    def _masked_step(self, q: Tensor, position: int) -> ExactSums:
        """The same where the model's own window hides keys."""
        n = min(position + 1, self.exact.recent)
        keys, values, ordinals = self.buffer.recent(n)
        positions = torch.arange(position + 1 - n, position + 1, device=q.device)
        rows = torch.tensor([position], device=q.device)
        return self._rows(q, rows, keys, values, positions, ordinals)

    def _block(self, q: Tensor, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None) -> ExactSums:
        """A block of queries at the last of the new keys, a few rows at a time."""
        buffer, n = self.buffer, k.shape[2]
        start = self.length
        before = min(start, self.exact.recent - 1)
        ordinals = buffer.ordinals_of(n, key_valid, k.device, k.shape[0])
        keys, values = k, v
        if before:
            old_keys, old_values, old_ordinals = buffer.recent(before)
            keys, values = torch.cat([old_keys, k], dim=2), torch.cat([old_values, v], dim=2)
            batch = max(len(old_ordinals), len(ordinals))
            ordinals = torch.cat([old_ordinals.expand(batch, -1), ordinals.expand(batch, -1)], dim=1)
        buffer.append(k, v, ordinals[:, before:], key_valid is not None)
        positions = torch.arange(start - before, start + n, device=k.device)
        if self.window is None and self.rule.softcap is None and can_tile(q, keys, values):
            seen = None if buffer.counts is None else ordinals.expand(len(k), -1) >= 0
            recent = attend_recent(q, keys, values, self.exact.recent, self.scaling(q), seen)
            return self._with_sinks(q, positions[before + n - q.shape[2] :], *recent)
        parts = []
        for rows, part in self._pieces(q.shape[2], n, before):
            parts.append(
                self._rows(
                    q[:, :, rows],
                    positions[before + n - q.shape[2] :][rows],
                    keys[:, :, part],
                    values[:, :, part],
                    positions[part],
                    ordinals[:, part],
                )
            )
        if not parts:
            nothing = q.new_zeros(*q.shape[:3], v.shape[-1])
            return ExactSums(nothing, nothing[..., :1], nothing[..., :1], nothing[..., :1])
        return ExactSums(*(torch.cat(column, dim=2) for column in zip(*parts, strict=True)))

    def _pieces(self, queries: int, n: int, before: int) -> Iterator[tuple[slice, slice]]:
        """Rows of queries, and the range of keys that their windows hold."""
        step = max(BLOCK_ROWS, min(self.exact.recent, 4 * BLOCK_ROWS))
        first = before + n - queries
        for a in range(0, queries, step):
            b = min(queries, a + step)
            yield slice(a, b), slice(max(0, first + a - self.exact.recent + 1), first + b)

    def _rows(
        self,
        q: Tensor,
        rows: Int[Tensor, " query"],
        keys: Tensor,
        values: Tensor,
        positions: Int[Tensor, " key"],
        ordinals: Int[Tensor, "#batch key"],
    ) -> ExactSums:
        """Sums of some rows over these keys, each within its window, and over the sinks."""
        sinks = self.exact.sinks
        distance = rows[:, None] - positions
        inside = (distance >= 0) & (distance < min(self.exact.recent, self.window or self.exact.recent))
        # A sink is counted in its own slot, so it is left out here.
        recent = inside[None] & (ordinals >= sinks)[:, None]
        scores = self.scores(q, keys).masked_fill(~recent[:, None], -torch.inf)
        recent_scores = scores
        if sinks:
            sink_keys, sink_values = (x[:, :, :sinks] for x in self.buffer.slots)
            where = self.buffer.filled_sinks(q.device)
            apart = rows[:, None] - where[:, None]
            shown = apart >= 0
            if self.window is not None:
                shown = shown & (apart < self.window)
            first = self.scores(q, sink_keys).masked_fill(~shown[:, None], -torch.inf)
            near = shown & (apart < self.exact.recent)
            recent_scores = torch.cat([first.masked_fill(~near[:, None], -torch.inf), scores], dim=-1)
            scores = torch.cat([first, scores], dim=-1)
            values = torch.cat([sink_values, values], dim=2)
        return self._reduce(scores, values, recent_scores)

    def _with_sinks(
        self,
        q: Tensor,
        rows: Int[Tensor, " query"],
        output: Float[Tensor, "batch head query value_dim"],
        recent: Float[Tensor, "batch head query 1"],
    ) -> ExactSums:
        """The softmax over recent keys and the logarithm of its sum, with the sinks that lie before them."""
        where = self.buffer.filled_sinks(q.device)
        sink_keys, sink_values = (x[:, :, : self.exact.sinks] for x in self.buffer.slots)
        shown = rows[:, None] - where[:, None] >= self.exact.recent
        first = self.scores(q, sink_keys).masked_fill(~shown[:, None], -torch.inf)
        logits = self.rule.sink_column(first)
        top = recent if self.exact.sinks == 0 else torch.maximum(recent, first.amax(dim=-1, keepdim=True))
        top = top if logits is None else torch.maximum(top, logits)
        top = top.masked_fill(top == -torch.inf, 0)
        near, weights = (recent - top).exp(), (first - top).exp()
        totals = near + weights.sum(dim=-1, keepdim=True)
        if logits is not None:
            totals = totals + (logits - top).exp() * (totals > 0)
        grouped = weights.unflatten(1, (sink_values.shape[1], -1)).flatten(2, 3)
        values = torch.addcmul((grouped @ sink_values).view(output.shape), output, near)
        return ExactSums(values, totals, near, top)

    def scaling(self, q: Tensor) -> float:
        """What scores are multiplied by."""
        return float(q.shape[-1] ** -0.5) if self._scale is None else self._scale

    def scores(self, q: Tensor, keys: Tensor) -> Float[Tensor, "batch head query key"]:
        """Scores after the softcap."""
        # Of queries and keys, the fewer are scaled: there is a single query, or there are many and a few sinks.
        scale, few = self.scaling(q), keys.shape[2] < q.shape[2]
        grouped = (q if few else q * scale).unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        scores = (grouped @ (keys * scale if few else keys).transpose(-1, -2)).reshape(*q.shape[:3], keys.shape[2])
        return self.rule.cap(scores)

    def _reduce(self, scores: Tensor, values: Tensor, recent: Tensor) -> ExactSums:
        top = scores.amax(dim=-1, keepdim=True)
        logits = self.rule.sink_column(scores)
        if logits is not None:
            top = torch.maximum(top, logits)
        top = top.masked_fill(top == -torch.inf, 0)
        weights = (scores - top).exp()
        totals = weights.sum(dim=-1, keepdim=True)
        if logits is not None:
            totals = totals + (logits - top).exp() * (totals > 0)
        near = weights if recent is scores else (recent - top).exp()
        grouped = weights.unflatten(1, (values.shape[1], -1)).flatten(2, 3)
        weighted = (grouped @ values).reshape(*weights.shape[:3], values.shape[-1])
        return ExactSums(weighted, totals, near.sum(dim=-1, keepdim=True), top)

    @classmethod
    def stacked(cls, states: Sequence[WindowState]) -> WindowState:
        """States of several layers as one, along the batch."""
        first = states[0]
        whole = cls(first.exact, window=first.window, scale=first._scale, rule=first.rule, dtype=first.dtype)
        whole.buffer = KeyBuffer.stacked([state.buffer for state in states])
        return whole

    def split_into(self, states: Sequence[WindowState]) -> None:
        """Hand each part of a stacked state back to the state it came from."""
        self.buffer.split_into([state.buffer for state in states])

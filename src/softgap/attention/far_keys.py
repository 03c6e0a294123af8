"""Exact far keys: a constant number of keys that stay exact after they have left the sliding window.

A key gets its priority while it is in the window: the attention that it receives there,

    p_j = sum a_tj   over j <= t < j + w and the query heads of the KV head,

with a_tj the softmax over sinks and window. Of the rules that ``experiments/far_keys.py`` compares, this one costs the
least loss. H2O (arXiv:2306.14048) sums over the whole text instead.

When a key leaves the window, nothing about the future is known. The far keys of query t are the ``far`` keys with the
largest p_j among those that have left the window and are no sinks; of equal ones the earlier. A key that others
displace goes to the tail of the hybrid, as does one that was never far. Queries of padding have no say.

``far_rows`` finds the far keys of every query from all scores at once; ``FarKeys`` follows a growing sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.visible import Visible
from softgap.attention.window import ExactSums, WindowState

__all__ = ["Dropped", "FarKeys", "Span", "far_priorities", "far_rows"]

BLOCK_ROWS = 128

Scores = Callable[[slice, slice], Float[Tensor, "batch head query key"]]


def far_priorities(
    scores: Scores, exact: ExactSet, visible: Visible, rule: ScoreRule, shape: tuple[int, int, int], kv_heads: int
) -> Float[Tensor, "batch kv_head key"]:
    """p_j of every key; 0 where no query had a say.

    Parameters
    ----------
    scores
        The scores after the softcap of some queries with some keys.
    rule
        The model's learned sinks take part in the softmax.
    shape
        Batch, queries and keys.
    """
    batch, n_queries, n_keys = shape
    priorities = scores(slice(0, 0), slice(0, 0)).new_zeros(batch, kv_heads, n_keys)
    device = priorities.device
    for start in range(0, n_queries, BLOCK_ROWS):
        rows = slice(start, min(n_queries, start + BLOCK_ROWS))
        keys = slice(*visible.key_range(rows.start, rows.stop, n_keys))
        sets = exact.rows(visible, rows.start, rows.stop, (keys.start, keys.stop), device)
        raw = scores(rows, keys).masked_fill(~sets.exact, -torch.inf)
        column = rule.sink_column(raw)
        total = raw.logsumexp(dim=-1, keepdim=True)
        total = total if column is None else torch.logaddexp(total, column)
        own = visible.positions(rows.start, rows.stop, device)[:, None] == torch.arange(
            keys.start, keys.stop, device=device
        )
        asked = sets.recent & (sets.seen & own).any(dim=-1, keepdim=True)
        received = (raw - total).masked_fill(~asked, -torch.inf).exp().sum(dim=2)
        priorities[:, :, keys] += _by_kv_head(received, kv_heads)
    return priorities


def far_rows(
    priorities: Float[Tensor, "batch kv_head key"],
    exact: ExactSet,
    left: Bool[Tensor, "batch head query key"],
    heads: int,
) -> Bool[Tensor, "batch head query key"]:
    """The far keys of some queries; ``left`` are the visible keys outside of window and sinks, axes may be 1."""
    kv_heads = priorities.shape[1]
    left = left.unflatten(1, (kv_heads, -1)).any(dim=2) if left.shape[1] > 1 else left
    ranked = priorities[:, :, None].masked_fill(~left, 0)
    best = ranked.sort(dim=-1, descending=True, stable=True).indices[..., : exact.far]
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, best, True)
    return (chosen & (ranked > 0)).repeat_interleave(heads // kv_heads, dim=1)


def _by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """Summed over the query heads of each KV head."""
    summed: Tensor = x.unflatten(1, (kv_heads, -1)).sum(dim=2)
    return summed


class Span(NamedTuple):
    """Consecutive keys and values: the window before a block of new keys, then the block.

    The first ``leaving`` of them leave the window while the block comes, one for each new key. ``ordinals`` count the
    keys of a sequence without its padding, where they are -1.
    """

    k: Float[Tensor, "batch kv_head key dim"]
    v: Float[Tensor, "batch kv_head key value_dim"]
    ordinals: Int[Tensor, "batch key"]
    positions: Int[Tensor, " key"]
    leaving: int
    sinks: int

    @property
    def dropped(self) -> Dropped:
        """The keys that leave the exact set with each new key, where nothing keeps far keys."""
        k, v = (x[:, :, : self.leaving] for x in (self.k, self.v))
        ordinals, positions = self.ordinals[:, None, : self.leaving], self.positions[: self.leaving]
        return Dropped(k, v, ordinals >= self.sinks, ordinals, positions)


class Dropped(NamedTuple):
    """One key for each new key: the one that leaves the exact set then, where ``present``.

    The axis of KV heads is 1 where all are alike. ``late`` says by how many positions it is behind the key that leaves
    the window; None where it is that key.
    """

    k: Float[Tensor, "batch kv_head leaving dim"]
    v: Float[Tensor, "batch kv_head leaving value_dim"]
    present: Bool[Tensor, "batch kv_head leaving"]
    ordinals: Int[Tensor, "batch kv_head leaving"]
    positions: Int[Tensor, "*kv_heads leaving"]
    late: Int[Tensor, "batch kv_head leaving"] | None = None


class FarKeys:
    """The far keys of a growing sequence, and the priorities of the keys in its window."""

    def __init__(self, exact: ExactSet) -> None:
        self.exact = exact
        self.keys: Float[Tensor, "batch kv_head far dim"] | None = None
        self.values: Float[Tensor, "batch kv_head far value_dim"] | None = None
        # 0 marks a slot that is empty.
        self.priorities: Float[Tensor, "batch kv_head far"] | None = None
        self.positions: Int[Tensor, "batch kv_head far"] | None = None
        self.ordinals: Int[Tensor, "batch kv_head far"] | None = None
        self.pending: Float[Tensor, "batch kv_head recent"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it holds."""
        return sum(x.nbytes for x in self._tensors() if x is not None)

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, name) for name in _TENSORS]

    def take(
        self,
        q: Float[Tensor, "batch head query dim"],
        span: Span,
        score: Callable[[Tensor, Tensor], Tensor],
        total: Float[Tensor, "batch head query 1"],
    ) -> tuple[
        Float[Tensor, "batch head query candidate"], Float[Tensor, "batch kv_head candidate value_dim"], Dropped
    ]:
        """Let the keys of a block leave the window.

        Parameters
        ----------
        score
            The scores after the softcap of queries with keys.
        total
            The logarithm of each query's sum over sinks and window.

        Returns
        -------
        scores
            Of each query with its far keys; -inf for candidates that are not far.
        values
            The values of the candidates.
        dropped
            The keys that leave the exact set.
        """
        n, far = span.leaving, self.exact.far
        self.reserve(len(span.k), span.k.shape[1], span.k, span.v)
        scores = score(q, span.k) if q.shape[2] else None
        priorities = self._vote(span, scores, total)
        candidates = self._candidates(span, priorities[..., :n])
        members = _members(candidates, far, n)
        dropped = _dropped(candidates, members, span, far)
        found = q.new_zeros(*q.shape[:3], far + n)
        if scores is not None and self.keys is not None:
            found = torch.cat([score(q, self.keys), scores[..., :n]], dim=-1)
            found = found.masked_fill(~members.repeat_interleave(q.shape[1] // members.shape[1], dim=1), -torch.inf)
        self._keep(candidates, members[:, :, -1])
        self.pending = priorities[..., n:].clone()
        return found, candidates.values, dropped

    def take_in_pass(
        self, q: Float[Tensor, "batch head query dim"], span: Span, window: WindowState
    ) -> tuple[ExactSums, Dropped]:
        """Answer queries over all exact keys, and let the keys of the block leave the window, in one compiled pass.

        The window has taken in the block's keys already.
        """
        # Here, since these load numba.
        from softgap.attention.decode_arrays import Far
        from softgap.attention.exact_kernel import Leaving, Sinks, Sums, Text, ask_exact_keys
        from softgap.attention.simd import share_out

        batch, heads, n, _ = q.shape
        kv_heads, buffer, rule = span.k.shape[1], window.buffer, window.rule
        self.reserve(batch, kv_heads, span.k, span.v)
        for name in _TENSORS:
            setattr(self, name, getattr(self, name).contiguous())
        sink_keys, sink_values = (x[:, :, : span.sinks].contiguous().numpy() for x in buffer.slots)
        places = buffer.filled_sinks(q.device).expand(batch, -1).contiguous().numpy()
        logits = q.new_zeros(batch, 0) if rule.sink_logits is None else rule.sink_logits.to(q.dtype).expand(batch, -1)
        queries, keys, values, ordinals = (x.contiguous().numpy() for x in (q, span.k, span.v, span.ordinals))
        out = [q.new_empty(batch, heads, n, span.v.shape[-1]), *(q.new_empty(batch, heads, n) for _ in range(3))]
        left = [span.k.new_empty(batch, kv_heads, n, x.shape[-1]) for x in (span.k, span.v)]
        left += [torch.empty(batch, kv_heads, n, dtype=torch.bool)]
        left += [torch.empty(batch, kv_heads, n, dtype=torch.int64) for _ in range(3)]
        shared = (
            np.float32(window.scaling(q)),
            Text(queries, keys, values, ordinals, int(span.positions[0])),
            Sinks(sink_keys, sink_values, places),
            Far(*(x.numpy() for x in self._tensors() if x is not None)),
            np.float32(rule.softcap or 0),
            logits.contiguous().numpy(),
            Sums(*(x.numpy() for x in out)),
            Leaving(*(x.numpy() for x in left)),
        )
        share_out(lambda start, stop: ask_exact_keys(*shared, start, stop), batch * kv_heads)
        return ExactSums(out[0], *(x[..., None] for x in out[1:])), Dropped(*left)

    def reserve(self, batch: int, heads: int, k: Tensor, v: Tensor) -> None:
        """Make room for keys and values like these, where there is none yet."""
        if self.keys is not None:
            return
        size = (batch, heads, self.exact.far)
        self.keys, self.values = k.new_zeros(*size, k.shape[-1]), v.new_zeros(*size, v.shape[-1])
        self.priorities = k.new_zeros(size)
        self.pending = k.new_zeros(batch, heads, self.exact.recent)
        whole = torch.int64 if k.dtype == torch.float64 else torch.int32
        self.positions, self.ordinals = (torch.zeros(size, dtype=whole, device=k.device) for _ in range(2))

    def _vote(self, span: Span, scores: Tensor | None, total: Tensor) -> Float[Tensor, "batch kv_head key"]:
        """Priorities of the keys of a span, after the queries of its block."""
        n, recent, pending = span.leaving, self.exact.recent, self.pending
        if pending is None:
            raise AssertionError("far keys reserve their memory first")
        priorities = torch.cat([pending, pending.new_zeros(*pending.shape[:2], n)], dim=-1)
        if scores is None:
            return priorities
        # Row r stands at key recent + r of the span; its window are the keys r + 1 .. r + recent.
        apart = torch.arange(recent + n, device=scores.device) - torch.arange(n, device=scores.device)[:, None]
        valid = span.ordinals >= 0
        asked = (apart >= 1) & (apart <= recent) & valid[:, None] & valid[:, recent:, None]
        received = (scores - total).masked_fill(~asked[:, None], -torch.inf).exp().sum(dim=2)
        return priorities + _by_kv_head(received, priorities.shape[1])

    def _candidates(self, span: Span, priorities: Float[Tensor, "batch kv_head leaving"]) -> _Candidates:
        n, heads = span.leaving, span.k.shape[1]
        whole = None if self.positions is None else self.positions.dtype
        ordinals = span.ordinals[:, None, :n].expand(-1, heads, -1).to(whole)
        positions = span.positions[:n].expand(len(ordinals), heads, -1).to(whole)
        priorities = priorities.masked_fill(ordinals < span.sinks, 0)
        new = (span.k[:, :, :n], span.v[:, :, :n], priorities, positions, ordinals)
        old = (self.keys, self.values, self.priorities, self.positions, self.ordinals)
        return _Candidates(*(torch.cat([a, b], dim=2) for a, b in zip(old, new, strict=True) if a is not None))

    def _keep(self, candidates: _Candidates, members: Bool[Tensor, "batch kv_head candidate"]) -> None:
        chosen = members.int().topk(self.exact.far, dim=-1).indices
        there = members.gather(2, chosen)
        self.keys, self.values = (_gather(x, chosen) for x in candidates[:2])
        self.priorities = candidates.priorities.gather(2, chosen).masked_fill(~there, 0)
        self.positions, self.ordinals = (x.gather(2, chosen) for x in candidates[3:])

    @classmethod
    def stacked(cls, parts: Sequence[FarKeys]) -> FarKeys:
        """Those of several layers as one, along the batch."""
        whole = cls(parts[0].exact)
        for name in _TENSORS:
            tensors = [x for part in parts if (x := getattr(part, name)) is not None]
            setattr(whole, name, torch.cat(tensors) if tensors else None)
        return whole

    def split_into(self, parts: Sequence[FarKeys]) -> None:
        """Hand each part back to where it came from."""
        for name in _TENSORS:
            whole = getattr(self, name)
            for i, part in enumerate(parts):
                setattr(part, name, None if whole is None else whole.chunk(len(parts))[i])


_TENSORS = ("keys", "values", "priorities", "positions", "ordinals", "pending")


class _Candidates(NamedTuple):
    """Far keys before a block, then the keys that leave the window during it."""

    keys: Float[Tensor, "batch kv_head candidate dim"]
    values: Float[Tensor, "batch kv_head candidate value_dim"]
    priorities: Float[Tensor, "batch kv_head candidate"]
    positions: Int[Tensor, "batch kv_head candidate"]
    ordinals: Int[Tensor, "batch kv_head candidate"]


def _members(candidates: _Candidates, far: int, n: int) -> Bool[Tensor, "batch kv_head new candidate"]:
    """Which candidates are far keys once each of the n new keys has come."""
    p, at = candidates.priorities, candidates.positions
    eligible = p > 0
    earlier = at[..., :, None] < at[..., None, :]
    ahead = (p[..., :, None] > p[..., None, :]) | ((p[..., :, None] == p[..., None, :]) & earlier)
    ahead = ahead & eligible[..., :, None]
    # How many candidates that are there already have the larger priority.
    rank = ahead[:, :, :far].sum(dim=2, keepdim=True) + ahead[:, :, far:].int().cumsum(dim=2)
    come = torch.arange(-far, n, device=p.device) <= torch.arange(n, device=p.device)[:, None]
    return come & eligible[:, :, None] & (rank < far)


def _dropped(candidates: _Candidates, members: Tensor, span: Span, far: int) -> Dropped:
    """The candidate that goes with each new key: the one that leaves the window, or a far key that it displaces."""
    n = span.leaving
    before = (candidates.priorities > 0) & (torch.arange(far + n, device=members.device) < far)
    before = torch.cat([before[:, :, None], members[:, :, :-1]], dim=2)
    leaves = torch.arange(-far, n, device=members.device) == torch.arange(n, device=members.device)[:, None]
    leaves = leaves & (candidates.ordinals >= span.sinks)[:, :, None]
    gone = (before | leaves) & ~members
    which = gone.int().argmax(dim=-1)
    k, v = (_gather(x, which) for x in candidates[:2])
    positions, ordinals = (x.gather(2, which).long() for x in candidates[3:])
    late = span.positions[:n] - positions
    present = gone.any(dim=-1)
    return Dropped(k, v, present, ordinals.clamp(min=0), positions, late.masked_fill(~present, 0))


def _gather(x: Tensor, index: Int[Tensor, "batch kv_head n"]) -> Tensor:
    return x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[-1]))

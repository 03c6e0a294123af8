"""What a step of the fit looks at: blocks of query rows, each with a sample of the keys it sees.

A row at position t sees t + 1 keys, and a fit that looked at all of them would cost more with every token of context.
So the first keys (sink tokens) and the near ones are taken as they are, and the far ones by a stratified sample in
which each key stands for as many as it was drawn from. The softmax weights and the fitted ones are normalised over the
same sample, so that their difference is estimated at a cost that does not depend on the length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention.rotation import TurnTable

__all__ = ["LayerText", "RowPlan", "Rows", "sample_rows"]


@dataclass(frozen=True, eq=False)
class LayerText:
    """Queries and keys of one layer over one text, after rotary embedding; ``start`` is its first position."""

    query: Float[Tensor, "head time dim"]
    key: Float[Tensor, "kv_head time dim"]
    start: int = 0

    @property
    def length(self) -> int:
        """Positions of the text."""
        return self.key.shape[1]


@dataclass(frozen=True)
class RowPlan:
    """How rows and keys are drawn.

    Attributes
    ----------
    blocks, rows
        Blocks per step, and consecutive rows in each.
    sinks, near, far
        First keys, keys right before the block, and keys sampled in between.
    start
        Rows before this position are never drawn: they see few keys, and any mechanism does well there.
    """

    blocks: int = 8
    rows: int = 8
    sinks: int = 4
    near: int = 64
    far: int = 64
    start: int = 16


@dataclass(frozen=True, eq=False)
class Rows:
    """Blocks of query rows with the keys drawn for them.

    Attributes
    ----------
    query_seen, key_seen
        What features are made of: queries and keys, and behind each the same vector before rotary embedding where the
        fit knows it.
    from_middle, key_from_middle
        Positions counted from the middle of each block: decay is measured from there, so that no power of it is large.
    log_count
        Logarithm of the number of keys that each stands for.
    seen
        Which keys each row sees.
    """

    query: Float[Tensor, "block kv_head group row dim"]
    key: Float[Tensor, "block kv_head key dim"]
    query_seen: Float[Tensor, "block kv_head group row seen"]
    key_seen: Float[Tensor, "block kv_head key seen"]
    from_middle: Float[Tensor, "block row"]
    key_from_middle: Float[Tensor, "block key"]
    log_count: Float[Tensor, "block key"]
    seen: Bool[Tensor, "block row key"]


def sample_rows(
    texts: Sequence[LayerText],
    plan: RowPlan,
    *,
    window: int | None = None,
    turns: TurnTable | None = None,
    rng: np.random.Generator,
) -> Rows:
    """Draw blocks of rows, texts in proportion to their length and places within them evenly.

    ``turns`` lets features see vectors before rotary embedding too.
    """
    lengths = np.array([text.length for text in texts], dtype=float)
    chosen = rng.choice(len(texts), size=plan.blocks, p=lengths / lengths.sum())
    drawn = [_block(texts[i], plan, rng) for i in chosen]
    query, key, row, column, log_count = (torch.stack(part) for part in zip(*drawn, strict=True))
    distance = row[:, :, None] - column[:, None, :]
    seen = (distance >= 0) & (log_count > -torch.inf)[:, None, :]
    if window is not None:
        seen = seen & (distance < window)
    middle = row.mean(dim=1, keepdim=True)
    query_seen, key_seen = query, key
    if turns is not None:
        start = torch.tensor([texts[i].start for i in chosen])[:, None]
        query_seen = torch.cat([query, turns.before(query, start + row.long())], dim=-1)
        key_seen = torch.cat([key, turns.before(key, start + column.long())], dim=-1)
    return Rows(query, key, query_seen, key_seen, row - middle, column - middle, log_count, seen)


def _block(text: LayerText, plan: RowPlan, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One block: its queries, keys, row positions, key positions and logarithms of counts."""
    rows = min(plan.rows, text.length)
    first = int(rng.integers(min(plan.start, text.length - rows), text.length - rows + 1))
    near = np.arange(first - plan.near, first + rows)
    sinks = np.arange(plan.sinks)
    sinks = np.where(sinks < near[0], sinks, -1)
    far, log_count = _far_keys(plan.sinks, max(plan.sinks, int(near[0])), plan.far, rng)
    position = np.concatenate([sinks, far, near])
    count = np.concatenate([np.zeros(len(sinks)), np.full(len(far), log_count), np.zeros(len(near))])
    count = np.where(position >= 0, count, -np.inf)
    at = torch.from_numpy(np.maximum(position, 0))
    query = text.query[:, first : first + rows]
    return (
        query.unflatten(0, (text.key.shape[0], -1)),
        text.key[:, at],
        torch.arange(first, first + rows, dtype=query.dtype),
        at.to(query.dtype),
        torch.from_numpy(count).to(query.dtype),
    )


def _far_keys(start: int, stop: int, n: int, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """``n`` positions out of start..stop-1, one from each of n equal strata, and the log of what each stands for.

    Where there are no more than n, all of them are taken, and the places left over are -1.
    """
    length = stop - start
    if length <= n:
        return np.concatenate([np.arange(start, stop), np.full(n - length, -1)]), 0.0
    stratum = length / n
    places = start + np.floor((np.arange(n) + rng.random(n)) * stratum).astype(int)
    return np.minimum(places, stop - 1), math.log(stratum)

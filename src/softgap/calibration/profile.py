"""The content-free opponent of a fitted map: a head's mean weight on the first token, and by distance on the others."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["ProfileSums"]

# Rows of each text that the means are taken over; every row of a long text would cost more than the model itself.
ROWS = 128
# Distances up to this one stand alone; beyond it they are averaged in bins that grow by a tenth.
EXACT = 64
GROWTH = 1.1


class ProfileSums:
    """Running sums of softmax weights by distance, over a sample of rows."""

    def __init__(self, heads: int, distances: int) -> None:
        self._weight = torch.zeros(heads, distances, dtype=torch.float64)
        self._pairs = torch.zeros(distances, dtype=torch.float64)
        self._first = torch.zeros(heads, dtype=torch.float64)
        self._rows = 0

    def add(
        self,
        q: Float[Tensor, "head time dim"],
        k: Float[Tensor, "kv_head time dim"],
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> None:
        """Take in evenly spaced rows of one text."""
        t = q.shape[1]
        rows = torch.linspace(0, t - 1, min(ROWS, t), device=q.device).round().long()
        grouped = q[:, rows].unflatten(0, (k.shape[0], -1)).flatten(1, 2)
        scores = (grouped @ k.transpose(-1, -2) * scale).reshape(q.shape[0], len(rows), t)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        distance = rows[:, None] - torch.arange(t, device=q.device)
        seen = (distance >= 0) & (distance < (t if window is None else window))
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1).cpu()
        seen, distance = seen.cpu(), distance.cpu()
        first = seen & (seen.cumsum(dim=-1) == 1)
        self._first += (weights * first).sum(dim=(1, 2), dtype=torch.float64)
        self._rows += len(rows)
        # The first key has a weight of its own; the last distance serves all beyond.
        other = seen & ~first
        at = distance[other].clamp(max=len(self._pairs) - 1)
        self._weight.index_add_(1, at, weights[:, other].double())
        self._pairs.index_add_(0, at, torch.ones(len(at), dtype=torch.float64))

    def result(self) -> tuple[Float[Tensor, " head"], Float[Tensor, "head distance"]]:
        """The mean weight on the first token, and by distance, smooth where single distances have few rows."""
        by_distance = torch.zeros_like(self._weight)
        for start, stop in _bins(self._weight.shape[1]):
            pairs = self._pairs[start:stop].sum().clamp(min=1)
            by_distance[:, start:stop] = (self._weight[:, start:stop].sum(dim=1) / pairs)[:, None]
        return self._first / max(1, self._rows), by_distance


def _bins(distances: int) -> list[tuple[int, int]]:
    bins = [(i, i + 1) for i in range(min(EXACT, distances))]
    start = len(bins)
    while start < distances:
        stop = min(distances, max(start + 1, int(start * GROWTH)))
        bins.append((start, stop))
        start = stop
    return bins

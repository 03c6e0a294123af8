"""Steps that wait for their block, and how those of several layers become one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

__all__ = ["Run", "joined", "stacked_runs"]


@dataclass
class Run:
    """Neighbouring positions of one layer that wait to be reduced: as many as ``n``, the last ones of ``k`` and ``v``.

    Queries and outputs come call by call. Keys and values are a copy of theirs alone, or all the last call saw: the
    tensors that the cache itself holds until its next step.
    """

    q: list[Tensor]
    o: list[Tensor]
    k: Tensor
    v: Tensor
    n: int
    valid: Bool[Tensor, "batch time"] | None
    by_reference: bool = False


Stacked = tuple[Tensor, Tensor, Tensor, Tensor, Bool[Tensor, "batch time"] | None]


def stacked_runs(layers: Sequence[Sequence[Run]]) -> Stacked:
    """Queries, keys, values and outputs of all positions, heads before time, and which of them are no padding.

    Layers are stacked along the batch, layer-major; they have runs of equal shapes.
    """
    q = joined([joined([q for run in runs for q in run.q], dim=2) for runs in layers], dim=0)
    k = joined([joined([run.k[:, :, run.k.shape[2] - run.n :] for run in runs], dim=2) for runs in layers], dim=0)
    v = joined([joined([run.v[:, :, run.v.shape[2] - run.n :] for run in runs], dim=2) for runs in layers], dim=0)
    o = joined([joined([o for run in runs for o in run.o], dim=1) for runs in layers], dim=0)
    return q, k, v, o.transpose(1, 2), _valid(layers[0], len(layers))


def _valid(runs: Sequence[Run], repeat: int) -> Bool[Tensor, "batch time"] | None:
    example = next((run.valid for run in runs if run.valid is not None), None)
    if example is None:
        return None
    rows = [
        torch.ones(len(example), run.n, dtype=torch.bool, device=example.device) if run.valid is None else run.valid
        for run in runs
    ]
    return torch.cat(rows, dim=1).repeat(repeat, 1)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """Tensors one behind the other; a single one as it is, without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

"""What the article advises a head to do to focus: scale its queries, spread its keys, shift the bias of its keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism, Visible, attention_weights
from softgap.theory.focus.concentration import row_sparsity

__all__ = ["AMOUNTS", "Effect", "intervene", "intervened"]

AMOUNTS: dict[str, tuple[float, ...]] = {
    "scale q": (0.5, 1.0, 2.0, 4.0),
    "spread keys": (0.5, 1.0, 2.0, 4.0),
    "shift bias": (1.0, 0.0, -1.0, -2.0, -4.0),
}


@dataclass(frozen=True)
class Effect:
    """One mechanism after one change; means over heads and queries.

    Attributes
    ----------
    sparsity
        Mean S of rows with any weight.
    empty
        Share of rows whose weights are all zero: such a query gets no output at all.
    """

    change: str
    amount: float
    mechanism: str
    sparsity: float
    empty: float


def intervene(
    change: str,
    amount: float,
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
) -> tuple[Float[Tensor, "head query dim"], Float[Tensor, "kv_head key dim"]]:
    """Changed queries and keys.

    ``scale q`` multiplies queries; ``spread keys`` multiplies the keys' deviations from their mean; ``shift bias`` adds
    one vector to all keys of a KV head, along the mean of its group's queries, so long that scores move by ``amount``
    of their standard deviation on average. Softmax ignores that last change: it adds one number to a row of scores.
    """
    if change == "scale q":
        return amount * query, key
    centre = key.mean(dim=1, keepdim=True)
    if change == "spread keys":
        return query, centre + amount * (key - centre)
    groups = query.unflatten(0, (key.shape[0], -1)).flatten(1, 2)
    direction = groups.mean(dim=1)
    deviation = (groups @ (key - centre).transpose(-1, -2)).std(dim=-1).mean(dim=-1)
    tiny = torch.finfo(key.dtype).tiny
    step = amount * deviation / direction.square().sum(dim=-1).clamp(min=tiny)
    return query, key + (step[:, None] * direction)[:, None]


def intervened(
    mechanisms: Sequence[Mechanism],
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
    *,
    scale: float,
    visible: Visible | None = None,
) -> list[Effect]:
    """Every change at every amount for every mechanism; the queries are the last of the keys' positions."""
    even = attention_weights("uniform", query[None, :1], key[None, :1], visible=visible, scale=scale)
    n = (even[0, 0] > 0).sum(dim=-1)
    found = []
    for change, amounts in AMOUNTS.items():
        for amount in amounts:
            q, k = intervene(change, amount, query, key)
            for mechanism in mechanisms:
                s = row_sparsity(attention_weights(mechanism, q[None], k[None], visible=visible, scale=scale)[0], n)
                empty = s.isnan().float().mean().item()
                found.append(Effect(change, amount, mechanism.name, s.nanmean().item(), empty))
    return found

"""What one block of positions of the chunked form leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention.features import LOG_ZERO

__all__ = ["Carry", "carry_after", "empty_carry"]


@dataclass(frozen=True, eq=False)
class Carry:
    """What one block of positions leaves for the next.

    Without a window: ``sums``, the state of all keys so far, relative to ``exp(scale - rate * age)`` per feature. The
    scale stays as the largest key set it and only its age grows: subtracting the rate at every step would add up 8192
    roundings. With a window of w: the features and values of the last w - 1 keys.
    """

    sums: Float[Tensor, "n r e"]
    totals: Float[Tensor, "n r"]
    scale: Float[Tensor, "n r"] | None
    age: Float[Tensor, "n r"] | None
    tail_key: Float[Tensor, "n tail r"]
    tail_value: Float[Tensor, "n tail e"]


def empty_carry(n: int, r: int, e: int, like: Tensor, *, log: bool, window: int | None = None) -> Carry:
    """The carry before the first key."""
    stated = r if window is None else 0
    scale = like.new_full((n, stated), LOG_ZERO) if log else None
    age = like.new_zeros(n, stated) if log else None
    return Carry(
        like.new_zeros(n, stated, e),
        like.new_zeros(n, stated),
        scale,
        age,
        like.new_zeros(n, 0, r),
        like.new_zeros(n, 0, e),
    )


def carry_after(carry: Carry, states: Float[Tensor, "n rows r e"], totals: Float[Tensor, "n rows r"]) -> Carry:
    """The carry behind a block: a copy, since a slice would keep the states of the whole block alive."""
    sums, total = (x[:, -1].clone(memory_format=torch.contiguous_format) for x in (states, totals))
    return replace(carry, sums=sums, totals=total)

"""What any form of attention returns, and the one rule by which weighted sums become outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["Attention", "divided"]

# A signed sum this small against its terms is rounding: it may even have the wrong sign, which flips the cosine.
CANCELLED = 1e-6


@dataclass(frozen=True, eq=False)
class Attention:
    """Outputs per query and head.

    Attributes
    ----------
    output
        The zero vector where ``valid`` is False or the denominator is zero.
    valid
        Whether the query sees any key at all (padding rows do not).
    flagged
        Whether the denominator was zero (all features off), or a sum of signed terms cancelled to less than 1e-6 of
        sum_j sum_r |phi(q)_r phi(k_j)_r|: the output's direction then means nothing.
    """

    output: Float[Tensor, "batch head query value_dim"]
    valid: Bool[Tensor, "batch query"]
    flagged: Bool[Tensor, "batch head query"]


def divided(
    numerator: Float[Tensor, "*rows value_dim"],
    denominator: Float[Tensor, "*rows 1"],
    terms: Float[Tensor, "*rows 1"] | None,
) -> tuple[Float[Tensor, "*rows value_dim"], Bool[Tensor, "*rows"]]:
    """numerator / denominator, in its place, and the flag; ``terms`` are the absolute terms of a signed denominator."""
    # Below the smallest normal number a sum of positive terms has lost its digits.
    flagged = denominator.abs() <= torch.finfo(denominator.dtype).tiny
    output = numerator.div_(denominator.masked_fill(flagged, torch.inf))
    if terms is not None:
        flagged = flagged | (denominator.abs() < CANCELLED * terms)
    return output, flagged[..., 0]

"""Attention outputs, and measures of the distance between two outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.errors import ShapeError

__all__ = [
    "Attention",
    "OutputComparison",
    "compare_heads",
    "compare_outputs",
    "divergence",
    "divide",
    "norm_ratio",
    "relative_l2",
]


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


def divide(
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


Vectors = Float[Tensor, "*rows value_dim"]


Numbers = Float[Tensor, "*rows"]


@dataclass(frozen=True, eq=False)
class OutputComparison:
    """The three quantities for outputs o (softmax) and l (linear), always reported together.

    Attributes
    ----------
    divergence
        1 - cos(o, l), in [0, 2]: 1 where one of them is zero, 0 where both are.
    relative_l2
        |l - o| / |o|; NaN where o is zero.
    norm_ratio
        |l| / |o|; NaN where o is zero.
    flagged
        Where o is zero, so that two of the three mean nothing.
    """

    divergence: Numbers
    relative_l2: Numbers
    norm_ratio: Numbers
    flagged: Bool[Tensor, "*rows"]


def compare_outputs(softmax_output: Vectors, linear_output: Vectors) -> OutputComparison:
    """Divergence, relative L2 and norm ratio of two outputs, at least in float32.

    With r = |l| / |o| the ratio of norms,

        1 - cos(o, l) = |o - l / r|^2 / (2 |o|^2),        |l - o|^2 / |o|^2 = (r - 1)^2 + 2 r (1 - cos(o, l)):

    sums of squares only, so the divergence keeps its digits where o and l nearly agree (1 - o.l / (|o| |l|) loses them
    all below 1e-7) and at any ratio of norms. relative_l2 is as exact as the norms: to about 2e-7 (1 + r) in float32.

    Parameters
    ----------
    softmax_output
        o, vectors along the last axis.
    linear_output
        l, of the same shape.

    Returns
    -------
    OutputComparison
        ``divergence``, ``relative_l2`` and ``norm_ratio``, one number per vector.

    Examples
    --------
    >>> import softgap, torch
    >>> softmax, linear = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])  # at right angles
    >>> comparison = softgap.compare_outputs(softmax, linear)
    >>> round(comparison.divergence.item(), 6), comparison.norm_ratio.item()
    (1.0, 2.0)
    """
    if softmax_output.shape != linear_output.shape:
        raise ShapeError(
            f"outputs must have one shape, got {list(softmax_output.shape)} and {list(linear_output.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(softmax_output.dtype, linear_output.dtype), torch.float32)
    o, l = softmax_output.to(dtype), linear_output.to(dtype)  # noqa: E741
    n, m = torch.linalg.vector_norm(o, dim=-1), torch.linalg.vector_norm(l, dim=-1)
    no_o, no_l = n == 0, m == 0
    ratio = m / n
    apart = torch.linalg.vector_norm(torch.addcmul(o, l, (n / m)[..., None], value=-1), dim=-1) / n
    cosine_part = (apart.square() / 2).clamp_(max=2)
    # The cosine with a zero vector is 0; two zero vectors agree.
    value = cosine_part.masked_fill_(no_o | no_l, 1).masked_fill_(no_o & no_l, 0)
    distance = torch.hypot(ratio - 1, (2 * ratio * value).sqrt_())
    return OutputComparison(
        divergence=value,
        relative_l2=distance.masked_fill_(no_o, torch.nan),
        norm_ratio=ratio.masked_fill_(no_o, torch.nan),
        flagged=no_o,
    )


def compare_heads(
    softmax_output: Float[Tensor, "batch head time value_dim"],
    linear_output: Float[Tensor, "batch linear_head time value_dim"],
) -> Float[Tensor, "quantity batch head time"]:
    """The three quantities of every head, stacked; a mechanism that ignores the query may answer once per KV head."""
    grouped = softmax_output.unflatten(1, (linear_output.shape[1], -1))
    comparison = compare_outputs(grouped, linear_output[:, :, None].expand_as(grouped))
    return torch.stack([comparison.divergence, comparison.relative_l2, comparison.norm_ratio]).flatten(2, 3)


def divergence(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """1 - cos(o, l); see ``OutputComparison`` for zero vectors."""
    return compare_outputs(softmax_output, linear_output).divergence


def relative_l2(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """|l - o| / |o|; NaN where o is zero."""
    return compare_outputs(softmax_output, linear_output).relative_l2


def norm_ratio(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """|l| / |o|; NaN where o is zero."""
    return compare_outputs(softmax_output, linear_output).norm_ratio

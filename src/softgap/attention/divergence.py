"""How far two attention outputs lie apart: cosine divergence, relative L2 and the ratio of norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.errors import ShapeError

__all__ = ["Comparison", "compare_outputs", "divergence", "norm_ratio", "relative_l2"]

Vectors = Float[Tensor, "*rows value_dim"]
Numbers = Float[Tensor, "*rows"]


@dataclass(frozen=True, eq=False)
class Comparison:
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


def compare_outputs(softmax_output: Vectors, linear_output: Vectors) -> Comparison:
    """Divergence, relative L2 and norm ratio of two outputs, at least in float32.

    With n = |o|, m = |l| and e = |l - o|,

        1 - cos(o, l) = (e^2 - (m - n)^2) / (2 m n) = (e - (m - n)) (e + (m - n)) / (2 m n),

    which keeps its digits where o and l nearly agree; 1 - o.l / (m n) loses them all below 1e-7.
    """
    if softmax_output.shape != linear_output.shape:
        raise ShapeError(
            f"outputs must have one shape, got {list(softmax_output.shape)} and {list(linear_output.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(softmax_output.dtype, linear_output.dtype), torch.float32)
    o, m_vector = softmax_output.to(dtype), linear_output.to(dtype)
    n = torch.linalg.vector_norm(o, dim=-1)
    m = torch.linalg.vector_norm(m_vector, dim=-1)
    e = torch.linalg.vector_norm(m_vector - o, dim=-1)
    cosine_part = (e - (m - n)) * (e + (m - n)) / (2 * m * n)
    apart = torch.where((n == 0) & (m == 0), 0.0, 1.0).to(dtype)
    value = torch.where((n == 0) | (m == 0), apart, cosine_part.clamp(0, 2))
    nothing = n == 0
    return Comparison(
        divergence=value,
        relative_l2=(e / n).masked_fill(nothing, torch.nan),
        norm_ratio=(m / n).masked_fill(nothing, torch.nan),
        flagged=nothing,
    )


def divergence(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """1 - cos(o, l); see :class:`Comparison` for zero vectors."""
    return compare_outputs(softmax_output, linear_output).divergence


def relative_l2(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """|l - o| / |o|; NaN where o is zero."""
    return compare_outputs(softmax_output, linear_output).relative_l2


def norm_ratio(softmax_output: Vectors, linear_output: Vectors) -> Numbers:
    """|l| / |o|; NaN where o is zero."""
    return compare_outputs(softmax_output, linear_output).norm_ratio

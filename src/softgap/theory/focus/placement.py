"""How much of an attention matrix is a function of absolute position alone (columns), or of distance alone."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.errors import ShapeError

__all__ = ["column_share", "distance_share"]


def column_share(weights: Float[Tensor, "head query key"]) -> Float[Tensor, " head"]:
    """Share of a causal matrix's deviation from uniform that a function of the key's position explains, per head.

    1 - min |A - B|^2 / |A - U|^2 over t >= j, where b_tj = c_j + h_j / (t + 1), c_j h_j >= 0, and U is uniform. A sink
    is a constant c_j; weights spread over all keys shrink as 1 / (t + 1), which holds U (h = 1), so the share is never
    negative. Of opposite signs the two would make a slope, and with a free factor per row even decay would pass for
    columns: lambda^(t - j) = lambda^t lambda^(-j). NaN where A = U.
    """
    _check(weights)
    return _share(weights.double().tril())


def distance_share(weights: Float[Tensor, "head query key"]) -> Float[Tensor, " head"]:
    """The same for functions of the distance, b_tj = c_(t-j) + h_(t-j) / (t + 1): Toeplitz matrices such as decay."""
    _check(weights)
    position = torch.arange(weights.shape[1])
    # Row t read backwards from the diagonal: column m holds a_(t, t-m).
    back = (position[:, None] - position).clamp(min=0).expand(weights.shape[0], -1, -1)
    return _share(weights.double().gather(-1, back).tril())


def _check(weights: Float[Tensor, "head query key"]) -> None:
    if weights.dim() != 3 or weights.shape[1] != weights.shape[2]:
        raise ShapeError(f"weights must be [head, query, key] with as many queries as keys, got {list(weights.shape)}")


def _share(a: Float[Tensor, "head row column"]) -> Float[Tensor, " head"]:
    """Least squares in every column by itself, over the rows from the diagonal down."""
    length = a.shape[1]
    shown = torch.ones(length, length, dtype=a.dtype).tril()
    inverse = 1 / torch.arange(1, length + 1, dtype=a.dtype)
    basis = torch.stack([torch.ones_like(inverse), inverse])
    gram = torch.einsum("it,kt,tj->jik", basis, basis, shown)
    onto = torch.einsum("it,htj->hji", basis, a)
    # The last column has a single row: its two numbers are not determined, their sum is.
    both = (onto[:, :, None] @ torch.linalg.pinv(gram, hermitian=True))[:, :, 0]
    alone = (onto.square() / gram.diagonal(dim1=-2, dim2=-1)).amax(dim=-1)
    explained = torch.where(both.prod(dim=-1) >= 0, (both * onto).sum(dim=-1), alone)
    energy = a.square().sum(dim=(-1, -2))
    spread = (a - shown * inverse[:, None]).square().sum(dim=(-1, -2))
    share = 1 - (energy - explained.sum(dim=-1)).clamp(min=0) / spread
    return torch.where(spread > 1e-12 * energy, share, torch.nan)

"""Rank of attention matrices: the whole, and the off-diagonal blocks that a fixed number of features limits.

Causal weights have a positive diagonal, so the whole matrix has full rank whatever the mechanism. A block
A[t > t0, s <= t0] of an r-feature linear attention is D phi(Q) phi(K)^T with D its row normaliser: rank at most r. By
Eckart and Young no such attention comes nearer to a softmax block than the tail of the block's singular values. This
bounds weights, not outputs: values of dimension d_v may hide any error of the weights.

The column of the first key, the sink token, holds most of the energy of many heads and has rank 1. A rank by energy
that includes it describes the sink. Leave it out (``without_sink``) to describe the rest.

Effective State-Size (Parnichkun et al. 2025, arXiv:2504.19561) is a relative: the rank of A[t >= i, s < i] at every
position i, of the operator of a layer, by a tolerance on singular values or by their entropy. It measures how much
memory a layer uses. Here ranks are of softmax weights per head, by energy at several thresholds, over disjoint dyadic
blocks, with the sink left out; and what is asked is how they grow with the length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from softgap.errors import ShapeError, ValueInputError

__all__ = [
    "ENERGIES",
    "BlockSpectra",
    "RankGrowth",
    "block_error",
    "block_spectra",
    "capacity_exponent",
    "dyadic_blocks",
    "numerical_rank",
    "rank_growth",
    "without_sink",
]

ENERGIES = (0.9, 0.99, 0.999)
"""Shares of the energy that ranks are given for: one threshold alone says little about a spectrum."""


def dyadic_blocks(length: int, smallest: int = 16) -> list[tuple[slice, slice]]:
    """Disjoint off-diagonal blocks (rows, columns) of a causal matrix, halving from the whole down to ``smallest``.

    The block of one node of the binary tree takes the queries of its second half and the keys of its first: together
    they cover everything below the diagonal except triangles smaller than 2 * smallest.
    """
    if smallest < 1:
        raise ValueInputError(f"smallest must be at least 1, got {smallest}; it is the size of a block")
    blocks, nodes = [], [(0, length)]
    while nodes:
        start, size = nodes.pop(0)
        half = size // 2
        if half < smallest:
            continue
        blocks.append((slice(start + half, start + 2 * half), slice(start, start + half)))
        nodes += [(start, half), (start + half, half)]
    return blocks


@dataclass(frozen=True, eq=False)
class BlockSpectra:
    """Singular values of the dyadic off-diagonal blocks of some heads.

    Attributes
    ----------
    sizes
        Size of each block.
    values
        One array ``[head, size]`` per block, largest first.
    """

    sizes: tuple[int, ...]
    values: tuple[Float[NDArray[np.float64], "head value"], ...]

    def floor(self, rank: int) -> Float[NDArray[np.float64], " head"]:
        """Least relative error over all blocks of any attention with ``rank`` features (docs/theory/focus.md, Rank)."""
        left = np.sum([np.square(v[:, rank:]).sum(axis=1) for v in self.values], axis=0)
        return np.asarray(np.sqrt(left / np.sum([np.square(v).sum(axis=1) for v in self.values], axis=0)))

    def needed(self, error: float) -> NDArray[np.int64]:
        """The smallest number of features whose floor is at most ``error``, per head."""
        if not 0 < error < 1:
            raise ValueInputError(f"error must lie between 0 and 1, got {error:g}; 0.1 is a tenth of the weights' norm")
        top = max(self.sizes)
        floors = np.stack([self.floor(rank) for rank in range(top + 1)])
        return np.asarray((floors > error).sum(axis=0))

    def energy_rank(self, size: int, lost: float) -> Float[NDArray[np.float64], " head"]:
        """r*: the smallest rank that holds 1 - lost of the energy of the blocks of one size, per head."""
        if not 0 < lost < 1:
            raise ValueInputError(f"lost must lie between 0 and 1, got {lost:g}; 0.01 keeps 99 % of the energy")
        some = [v for v, s in zip(self.values, self.sizes, strict=True) if s == size]
        if not some:
            raise ValueInputError(
                f"there is no block of size {size}, only {', '.join(map(str, sorted(set(self.sizes))))}"
            )
        energy = np.sum([np.square(v) for v in some], axis=0)
        cumulative = np.cumsum(energy, axis=1) / energy.sum(axis=1, keepdims=True)
        return np.asarray((cumulative < 1 - lost).sum(axis=1) + 1, float)


def block_spectra(weights: Float[Tensor, "head query key"], smallest: int = 16) -> BlockSpectra:
    """Singular values of every dyadic off-diagonal block, in float64."""
    if weights.dim() != 3 or weights.shape[1] != weights.shape[2]:
        raise ShapeError(f"weights must be [head, query, key] with as many queries as keys, got {list(weights.shape)}")
    blocks = dyadic_blocks(weights.shape[1], smallest)
    if not blocks:
        raise ValueInputError(
            f"a text of {weights.shape[1]} tokens has no off-diagonal block of {smallest}; read at least {2 * smallest}"
        )
    a = weights.double()
    values = tuple(torch.linalg.svdvals(a[:, rows, columns]).cpu().numpy() for rows, columns in blocks)
    return BlockSpectra(tuple(rows.stop - rows.start for rows, _ in blocks), values)


def block_error(
    weights: Float[Tensor, "head query key"], exact: Float[Tensor, "head query key"], smallest: int = 16
) -> Float[NDArray[np.float64], " head"]:
    """Relative Frobenius error of some weights over the dyadic off-diagonal blocks of the exact ones, per head."""
    lost, whole = (torch.zeros(len(exact), dtype=torch.float64, device=exact.device) for _ in range(2))
    for rows, columns in dyadic_blocks(exact.shape[1], smallest):
        block = exact[:, rows, columns].double()
        lost += (weights[:, rows, columns] - block).square().sum(dim=(-1, -2))
        whole += block.square().sum(dim=(-1, -2))
    return np.asarray((lost / whole).sqrt().cpu().numpy())


def without_sink(weights: Float[Tensor, "head query key"]) -> Float[Tensor, "head query key"]:
    """The weights with the column of the first key set to 0."""
    rest = weights.clone()
    rest[..., 0] = 0
    return rest


@dataclass(frozen=True)
class RankGrowth:
    """How the rank of the off-diagonal blocks of softmax grows with their size, over many heads.

    Attributes
    ----------
    energy
        Share of the energy that the rank holds.
    sink
        Whether the column of the first key is counted.
    ranks
        Median over heads for each size.
    exponent
        Slope of log rank in log size: the 10 %, 50 % and 90 % points over heads; None with one size only.
    """

    energy: float
    sink: bool
    ranks: tuple[float, ...]
    exponent: tuple[float, float, float] | None


def rank_growth(spectra: Sequence[BlockSpectra], energy: float, *, sink: bool) -> RankGrowth:
    """The growth over all heads of some layers; ``sink`` says which weights the spectra are of."""
    sizes = sorted(set(spectra[0].sizes))
    ranks = np.stack([np.concatenate([x.energy_rank(size, 1 - energy) for x in spectra]) for size in sizes])
    exponent = None
    if len(sizes) > 1:
        low, middle, high = np.quantile(capacity_exponent(sizes, ranks), [0.1, 0.5, 0.9]).tolist()
        exponent = (low, middle, high)
    return RankGrowth(energy, sink, tuple(np.median(ranks, axis=1).tolist()), exponent)


def capacity_exponent(sizes: Sequence[int], ranks: Float[NDArray[np.float64], "size head"]) -> NDArray[np.float64]:
    """Slope of log r* in log block size, per head, by least squares: 0 for a constant state, 1 for softmax itself."""
    if len(sizes) < 2 or len(sizes) != len(ranks):
        raise ValueInputError(f"an exponent needs ranks at two sizes or more, got {len(sizes)}; read a longer text")
    x = np.log(np.asarray(sizes, float))
    x -= x.mean()
    y = np.log(ranks)
    return np.asarray(x @ (y - y.mean(axis=0)) / (x @ x))


def numerical_rank(matrix: Float[Tensor, "... row column"], tolerance: float = 1e-10) -> NDArray[np.int64]:
    """Singular values above ``tolerance`` times the largest, in float64."""
    values = torch.linalg.svdvals(matrix.double())
    return np.asarray((values > tolerance * values[..., :1]).sum(dim=-1).cpu().numpy())

"""A small seeded head, and how far each mechanism lies from softmax and from the mean of values on it.

Queries, keys and values are standard normal, so the scores s_j are close to N(0, 1). Theory then gives one value to
check against: with values of zero mean the expected cosine of softmax and `uniform` is the sparsity of the softmax
weights, and their divergence tends to 1 - exp(-1/2) = 0.39 as the number of visible keys grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import attend, mechanisms
from softgap.attention.outputs import compare_outputs
from softgap.errors import ValueInputError
from softgap.inputs import as_items

__all__ = ["Measurement", "SyntheticHead", "measure", "synthetic_head"]


@dataclass(frozen=True, eq=False)
class SyntheticHead:
    """Query, key and value of one causal head, with the seed that drew them."""

    query: Float[Tensor, "1 1 query dim"]
    key: Float[Tensor, "1 1 query dim"]
    value: Float[Tensor, "1 1 query dim"]
    seed: int

    @property
    def length(self) -> int:
        """Number of queries, and of keys."""
        return self.query.shape[-2]

    @property
    def dim(self) -> int:
        """Dimension of queries, keys and values."""
        return self.query.shape[-1]


@dataclass(frozen=True)
class Measurement:
    """Mean divergences of one mechanism over the queries of a head.

    Attributes
    ----------
    from_softmax, from_uniform
        Mean of 1 - cos between its output and that of softmax, and of the mean of the visible values.
    flagged
        Queries whose denominator was zero or too close to it to trust.
    """

    mechanism: str
    from_softmax: float
    from_uniform: float
    flagged: int


def synthetic_head(*, length: int = 256, dim: int = 64, seed: int = 0) -> SyntheticHead:
    """One head of standard normal queries, keys and values, the same for the same seed."""
    if length < 1 or dim < 1:
        raise ValueInputError(f"length and dim must be at least 1, got length {length} and dim {dim}")
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 1, length, dim, generator=generator)
    return SyntheticHead(query, key, value, seed)


def measure(head: SyntheticHead, names: Iterable[str] | None = None) -> tuple[Measurement, ...]:
    """Measure the named mechanisms on a head, by default each one that waits for no parameters."""
    registry = mechanisms()
    selected = (
        as_items(names)
        if names is not None
        else [name for name, mechanism in registry.items() if not mechanism.missing]
    )
    softmax, uniform = (_attend_head(head, name)[0] for name in ("softmax", "uniform"))
    rows = []
    for name in selected:
        output, flagged = _attend_head(head, name)
        from_softmax = compare_outputs(softmax, output).divergence.mean().item()
        from_uniform = compare_outputs(uniform, output).divergence.mean().item()
        rows.append(Measurement(name, from_softmax, from_uniform, flagged))
    return tuple(rows)


def _attend_head(head: SyntheticHead, name: str) -> tuple[Float[Tensor, "1 1 query dim"], int]:
    result = attend(name, head.query, head.key, head.value, scale=1 / math.sqrt(head.dim))
    return result.output, int(result.flagged.sum())

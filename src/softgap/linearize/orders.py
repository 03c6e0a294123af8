"""In which order heads go: by a score, at random, and as whole KV groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from softgap.errors import ValueInputError
from softgap.linearize.heads import Head, heads_of_group
from softgap.probe.layout import attention_layers
from softgap.probe.models import Model

__all__ = ["UNITS", "Unit", "ordered", "random_order", "taken", "units_of"]

UNITS = ("heads", "groups")
Unit = tuple[Head, ...]
"""Heads that go together: one, or all query heads of a KV head."""


def units_of(model: Model, by: str) -> list[Unit]:
    """All heads one by one, or all KV groups of a model."""
    if by not in UNITS:
        raise ValueInputError(f"by must be 'heads' or 'groups', got '{by}'")
    layers = [layer for layer in attention_layers(model) if not layer.shared]
    if by == "heads":
        return [((layer.number, head),) for layer in layers for head in range(layer.heads)]
    return [tuple(heads_of_group(model, x.number, group)) for x in layers for group in range(x.kv_heads)]


def ordered(units: Sequence[Unit], heads: Sequence[Head], score: Float[np.ndarray, " head"]) -> list[Unit]:
    """Units by the sum of their heads' scores, the cheapest first; units with heads that have no score are left out."""
    known = dict(zip(heads, map(float, score), strict=True))
    scored = [(sum(known[head] for head in unit), unit) for unit in units if all(head in known for head in unit)]
    return [unit for _, unit in sorted(scored)]


def random_order(units: Sequence[Unit], *, rng: np.random.Generator) -> list[Unit]:
    """Units in any order."""
    return [units[i] for i in rng.permutation(len(units))]


def taken(order: Sequence[Unit], n: int) -> list[Head]:
    """The heads of the first n units."""
    return sorted(head for unit in order[:n] for head in unit)

"""The temperature of sampling: what a model's logits can be divided by."""

from __future__ import annotations

import math

from softgap.errors import ValueInputError

__all__ = ["COLDEST", "checked_temperature"]

COLDEST = 0.001
"""Logits divided by much less leave float32, and no token could be drawn."""


def checked_temperature(value: float, name: str = "temperature") -> float:
    """The temperature, if a model can sample at it; ``name`` begins the sentence about one that is not."""
    if not (math.isfinite(value) and value >= COLDEST):
        raise ValueInputError(
            f"{name} must be a number from {COLDEST:g}, got {value:g}; leave it and the seed out for greedy search"
        )
    return value

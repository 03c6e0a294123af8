"""Means over numbers of which some are missing."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

__all__ = ["mean"]


def mean(values: Float[np.ndarray, ...], axis: int | tuple[int, ...] | None = None) -> Float[np.ndarray, ...]:
    """Mean in float64 over the numbers that are there; NaN, without a warning, where there are none."""
    wide = np.asarray(values, dtype=np.float64)
    counted = np.count_nonzero(~np.isnan(wide), axis=axis)
    total = np.nansum(wide, axis=axis)
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan)

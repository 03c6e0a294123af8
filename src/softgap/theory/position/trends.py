"""Slopes of many series on the logarithm of position, with intervals that allow for neighbours being alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from softgap.errors import ValueInputError

__all__ = ["Slopes", "log_slopes"]

_REPLICATES = 499


@dataclass(frozen=True, eq=False)
class Slopes:
    """Least-squares slope of each series per doubling of position.

    Attributes
    ----------
    value, low, high
        The slope and its 95 % interval.
    drawn
        The resampled slopes, the same draws for all series, so that sums and ratios can be formed draw by draw.
    """

    value: Float64[np.ndarray, "*series"]
    low: Float64[np.ndarray, "*series"]
    high: Float64[np.ndarray, "*series"]
    drawn: Float64[np.ndarray, "*series replicate"]

    @property
    def trending(self) -> np.ndarray:
        """Where the interval excludes 0."""
        return np.asarray((self.low > 0) | (self.high < 0))


def log_slopes(
    series: Float64[np.ndarray, "*series step"],
    positions: Float64[np.ndarray, " step"],
    *,
    rng: np.random.Generator,
    replicates: int = _REPLICATES,
) -> Slopes:
    """Slopes on log2(position), with a circular block bootstrap of what the line leaves (Politis and Romano 1992).

    Blocks hold 2 T^(1/3) steps. Slopes are linear in a series: those of terms that sum to a series sum to its slope, in
    the estimate and in every draw.
    """
    steps = series.shape[-1]
    if steps < 16 or positions.shape != (steps,):
        raise ValueInputError(f"a trend needs at least 16 steps with a position each, got {steps}; read a longer text")
    x = np.log2(positions)
    weight = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    flat = series.reshape(-1, steps).astype(np.float64)
    value = flat @ weight
    left = flat - flat.mean(axis=1, keepdims=True) - np.outer(value, x - x.mean())
    block = 2 * math.ceil(steps ** (1 / 3))
    starts = rng.integers(0, steps, (replicates, -(-steps // block)))
    # A slope weighs steps; drawing steps anew is weighing them anew, so that all draws are one product.
    weights = np.empty((steps, replicates))
    for i, begin in enumerate(starts):
        index = ((begin[:, None] + np.arange(block)) % steps).ravel()[:steps]
        weights[:, i] = np.bincount(index, weight, minlength=steps)
    drawn = value[:, None] + left @ weights
    low, high = np.quantile(drawn, [0.025, 0.975], axis=1)
    shape = series.shape[:-1]
    return Slopes(value.reshape(shape), low.reshape(shape), high.reshape(shape), drawn.reshape(*shape, -1))

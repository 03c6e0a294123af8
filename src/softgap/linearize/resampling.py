"""Intervals over texts: the percentile bootstrap of a mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

__all__ = ["Interval", "interval_of", "resampled"]

RESAMPLES = 999


@dataclass(frozen=True)
class Interval:
    """A mean over texts with the middle 95 % over resampled texts (equal to it where there is one text only)."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of the interval's length: how far the mean may be off."""
        return (self.high - self.low) / 2

    def __str__(self) -> str:
        return f"{self.value:+.3f} ({self.low:+.3f} to {self.high:+.3f})"


def resampled(
    values: Float[np.ndarray, "*units text"], *, rng: np.random.Generator, resamples: int = RESAMPLES
) -> Float[np.ndarray, "*units resample"]:
    """Means over texts that are drawn with replacement, the same texts for all units."""
    n = values.shape[-1]
    counts = rng.multinomial(n, np.full(n, 1 / n), size=resamples)
    found: np.ndarray = values @ counts.T / n
    return found


def interval_of(values: Float[np.ndarray, " text"], *, rng: np.random.Generator) -> Interval:
    """The mean of one value per text."""
    low, high = np.quantile(resampled(values, rng=rng), [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))

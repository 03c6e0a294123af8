"""Slopes of many series on the logarithm of position, over several texts, with false discoveries under control.

Neighbouring steps of one text resemble each other, and a text has a course of its own: no number of steps says whether
a head rises on other texts. The texts are therefore the sample. Each text gives one slope, the interval is that of
Student's t over texts, and the q-values correct for the number of heads (Benjamini and Hochberg 1995).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64
from scipy import stats

from softgap.errors import ValueInputError

__all__ = ["FALSE_DISCOVERIES", "Slopes", "log_slopes"]

FALSE_DISCOVERIES = 0.05
"""Expected share of heads without a trend among those that are said to have one, at most."""


@dataclass(frozen=True, eq=False)
class Slopes:
    """Mean over texts of the least-squares slope of each series per doubling of position.

    Attributes
    ----------
    value, low, high
        The mean and its 95 % t interval over texts, each by itself. One text has no interval: NaN.
    p
        Two-sided p-value of the t test against 0.
    texts
        How many there are.
    """

    value: Float64[np.ndarray, "*series"]
    low: Float64[np.ndarray, "*series"]
    high: Float64[np.ndarray, "*series"]
    p: Float64[np.ndarray, "*series"]
    texts: int

    @property
    def q(self) -> Float64[np.ndarray, "*series"]:
        """p-values after Benjamini and Hochberg, over all series of this object."""
        if np.isnan(self.p).any():
            return np.full_like(self.p, np.nan)
        return np.asarray(stats.false_discovery_control(self.p, axis=None)).reshape(self.p.shape)

    @property
    def trending(self) -> np.ndarray:
        """Where q is at most 0.05; nowhere with one text."""
        return np.asarray(self.q <= FALSE_DISCOVERIES)

    def __getitem__(self, where: int | slice) -> Slopes:
        """Some of the series; their q-values count only them."""
        return Slopes(self.value[where], self.low[where], self.high[where], self.p[where], self.texts)


def log_slopes(series: Float64[np.ndarray, "text *series step"], positions: Float64[np.ndarray, " step"]) -> Slopes:
    """Slopes on log2(position), one per text, with their mean and t interval over texts.

    Slopes are linear in a series: those of terms that sum to a series sum to its slope.
    """
    texts, steps = series.shape[0], series.shape[-1]
    if steps < 16 or positions.shape != (steps,):
        raise ValueInputError(f"a trend needs at least 16 steps with a position each, got {steps}; read a longer text")
    x = np.log2(positions) - np.log2(positions).mean()
    by_text = series.astype(np.float64) @ x / (x @ x)
    value = by_text.mean(axis=0)
    if texts < 2:
        unknown = np.full_like(value, np.nan)
        return Slopes(value, unknown, unknown, unknown, texts)
    error = by_text.std(axis=0, ddof=1) / np.sqrt(texts)
    half = stats.t.ppf(0.975, texts - 1) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        # Texts that agree exactly leave no doubt about a slope, and none about a slope of 0.
        score = np.where(value == 0, 0.0, np.abs(value) / error)
    return Slopes(value, value - half, value + half, np.asarray(2 * stats.t.sf(score, texts - 1)), texts)

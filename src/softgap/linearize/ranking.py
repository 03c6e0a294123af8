"""Measure how well a score ranks heads by the cost of their swap.

Measured costs are noisy: two halves of the texts rank heads differently. If both halves agree with correlation c, the
whole has the reliability R = 2 c / (1 + c) (Spearman and Brown), and even the true costs would correlate with the
measured ones no better than sqrt(R), the ceiling. The disattenuated correlation is the measured one over the ceiling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.stats import rankdata

from softgap.intervals import Interval

__all__ = ["Ranking", "rank_agreement", "split_half"]

SPLITS = 100
RESAMPLES = 999


@dataclass(frozen=True)
class Ranking:
    """Spearman's correlation of a score with measured costs.

    Attributes
    ----------
    correlation
        With its middle 95 % over resampled heads. Texts stay: drawing them anew would add their noise once more, and
        what it does is what the ceiling says.
    half
        Correlation of the costs measured on two halves of the texts, mean over random splits.
    ceiling
        What the true costs would reach: sqrt(2 half / (1 + half)); 0 where the halves do not agree at all.
    disattenuated
        correlation / ceiling; NaN where there is no ceiling.
    """

    correlation: Interval
    half: float
    ceiling: float
    disattenuated: float


def rank_agreement(
    score: Float[np.ndarray, " head"], costs: Float[np.ndarray, "head text"], *, rng: np.random.Generator
) -> Ranking:
    """How well a score, taken elsewhere, ranks the costs measured on these texts."""
    measured = costs.mean(axis=-1)
    draws = rng.integers(len(score), size=(RESAMPLES, len(score)))
    low, high = np.nanquantile([_spearman(score[rows], measured[rows]) for rows in draws], [0.025, 0.975])
    value = _spearman(score, measured)
    half, ceiling = split_half(costs, rng=rng)
    corrected = value / ceiling if ceiling > 0 else float("nan")
    return Ranking(Interval(value, float(low), float(high)), half, ceiling, corrected)


def split_half(costs: Float[np.ndarray, "head text"], *, rng: np.random.Generator) -> tuple[float, float]:
    """Mean correlation of two halves of the texts over random splits, and the ceiling that follows."""
    texts = costs.shape[1]
    if texts < 2:
        return float("nan"), 0.0
    correlations = []
    for _ in range(SPLITS):
        order = rng.permutation(texts)
        first, second = order[: texts // 2], order[texts // 2 :]
        correlations.append(_spearman(costs[:, first].mean(axis=-1), costs[:, second].mean(axis=-1)))
    half = float(np.mean(correlations))
    return half, float(np.sqrt(2 * half / (1 + half))) if half > 0 else 0.0


def _spearman(a: Float[np.ndarray, " head"], b: Float[np.ndarray, " head"]) -> float:
    x, y = rankdata(a), rankdata(b)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])

"""What predicts a quantity of heads: rank correlations and cross-validated regressions, with layers as the units.

Heads of one layer are not independent. Intervals are over resampled layers, and regressions predict heads of layers
that they have not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import norm, rankdata

from softgap.intervals import Interval

RESAMPLES = 999
FOLDS, REPEATS = 10, 20


def layer_interval(layers: np.ndarray, statistic: Callable[[np.ndarray], float]) -> Interval:
    """A statistic of the heads at some places, with its middle 95 % over resampled layers."""
    rng, names = np.random.default_rng(0), np.unique(layers)
    places = {layer: np.flatnonzero(layers == layer) for layer in names}
    draws = [
        statistic(np.concatenate([places[layer] for layer in rng.choice(names, len(names))])) for _ in range(RESAMPLES)
    ]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Interval(statistic(np.arange(len(layers))), float(low), float(high))


def spearman(layers: np.ndarray, x: np.ndarray, y: np.ndarray, given: np.ndarray | None = None) -> Interval:
    """Spearman's correlation; where ``given`` is given, the partial one."""

    def statistic(at: np.ndarray) -> float:
        a, b = rankdata(x[at]), rankdata(y[at])
        if given is not None:
            design = np.column_stack([np.ones(len(at)), rankdata(given[at])])
            a, b = (z - design @ np.linalg.lstsq(design, z, rcond=None)[0] for z in (a, b))
        return float(np.corrcoef(a, b)[0, 1])

    return layer_interval(layers, statistic)


def normal_scores(values: np.ndarray) -> np.ndarray:
    """Quantiles of the normal distribution at the ranks of values."""
    scores: np.ndarray = norm.ppf((rankdata(values) - 0.5) / len(values))
    return scores


def squared_errors(layers: np.ndarray, columns: Sequence[np.ndarray], target: np.ndarray) -> np.ndarray:
    """Errors of a linear regression in heads of layers that it has not seen, predictions averaged over random folds."""
    design = np.column_stack([np.ones(len(target)), *columns])
    # A little ridge, not on the intercept: a rare category may be missing from the other layers.
    penalty = np.diag([0.0, *np.ones(len(columns))])
    rng, predicted = np.random.default_rng(0), np.zeros(len(target))
    for _ in range(REPEATS):
        for fold in np.array_split(rng.permutation(np.unique(layers)), FOLDS):
            test = np.isin(layers, fold)
            train = design[~test]
            weights = np.linalg.solve(train.T @ train + penalty, train.T @ target[~test])
            predicted[test] += design[test] @ weights / REPEATS
    errors: np.ndarray = (target - predicted) ** 2
    return errors

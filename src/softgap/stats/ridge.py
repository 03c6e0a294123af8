"""Ridge regression on labels over baselines and the best of many units, all chosen on the training samples alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

__all__ = ["Choice", "best_choice", "fitted_scores"]

Samples = Int64[np.ndarray, " chosen"]


@dataclass(frozen=True)
class Choice:
    """How many units are taken, and the strength of the ridge."""

    units: int
    ridge: float


def best_choice(
    baselines: Float64[np.ndarray, "sample baseline"],
    values: Float64[np.ndarray, "sample unit"],
    y: Float64[np.ndarray, " sample"],
    splits: Sequence[tuple[Samples, Samples]],
    sizes: Sequence[int],
    ridges: Sequence[float],
) -> tuple[Choice, Choice]:
    """The choice with the least squared error on held-out samples: for baselines alone, and with units.

    Of equal errors the first counts, so that the fewest units win.
    """
    errors = np.zeros((len(sizes), len(ridges)))
    for train, held in splits:
        design, other, mean, _ = _standard_columns(baselines, values, y, train, held, max(sizes))
        target = y[held] - mean
        for i, size in enumerate(sizes):
            width = baselines.shape[1] + size
            gram, moment = design[:, :width].T @ design[:, :width], design[:, :width].T @ (y[train] - mean)
            for j, ridge in enumerate(ridges):
                weights = np.linalg.solve(gram + ridge * len(train) * np.eye(width), moment)
                errors[i, j] += ((target - other[:, :width] @ weights) ** 2).sum()
    best = divmod(int(np.argmin(errors)), len(ridges))
    alone = int(np.argmin(errors[sizes.index(0)]))
    return Choice(0, ridges[alone]), Choice(sizes[best[0]], ridges[best[1]])


def fitted_scores(
    baselines: Float64[np.ndarray, "sample baseline"],
    values: Float64[np.ndarray, "sample unit"],
    y: Float64[np.ndarray, " sample"],
    train: Samples,
    held: Samples,
    choice: Choice,
) -> tuple[Float64[np.ndarray, " held"], Int64[np.ndarray, " taken"]]:
    """Scores of held-out samples, and the units that were taken.

    Scores are centred and scaled by those of the training samples and carry no intercept: its share of positive labels
    would tell, against the truth, which fold a sample is in.
    """
    design, other, mean, units = _standard_columns(baselines, values, y, train, held, choice.units)
    gram = design.T @ design + choice.ridge * len(train) * np.eye(design.shape[1])
    weights = np.linalg.solve(gram, design.T @ (y[train] - mean))
    spread = float((design @ weights).std())
    scores = other @ weights / spread if spread > 0 else np.zeros(len(held))
    return scores, units


def _standard_columns(
    baselines: np.ndarray, values: np.ndarray, y: np.ndarray, train: Samples, held: Samples, count: int
) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
    """Baselines and the best units, scaled by the training samples: of these and of the others; mean label; units."""
    units = _ranked_units(baselines, values, y, train)[:count] if count else np.empty(0, np.int64)
    columns = np.concatenate([baselines, values[:, units]], axis=1)
    mean, deviation = columns[train].mean(axis=0), columns[train].std(axis=0)
    scaled = (columns - mean) / np.where(deviation > 0, deviation, 1.0)
    return scaled[train], scaled[held], float(y[train].mean()), units


def _ranked_units(baselines: np.ndarray, values: np.ndarray, y: np.ndarray, train: Samples) -> np.ndarray:
    """Units by the size of their partial correlation with the label, given the baselines, on the training samples."""
    basis, _ = np.linalg.qr(np.concatenate([np.ones((len(train), 1)), baselines[train]], axis=1))
    target = y[train] - basis @ (basis.T @ y[train])
    chosen = values[train]
    moment = target @ chosen  # the residual of y sees only the residual of x
    left = (chosen**2).sum(axis=0) - ((basis.T @ chosen) ** 2).sum(axis=0)
    size = np.abs(moment) / np.sqrt(np.maximum(left, 1e-12 * (chosen**2).sum(axis=0) + 1e-300))
    return np.argsort(-size, kind="stable")

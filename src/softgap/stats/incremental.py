"""Measure what units add to baselines: ridge regression in nested cross-validation, selection included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64

from softgap.deprecation import DeprecatedAttribute
from softgap.errors import ValueInputError
from softgap.inputs import check_count, check_rng
from softgap.stats.auroc import Auroc, AurocDifference, auroc, auroc_difference
from softgap.stats.design import cluster_folds, row_exchange
from softgap.stats.permutation import Null, null_of
from softgap.stats.validation import check_codes, check_labels, check_values

__all__ = ["Incremental", "incremental_auroc"]


Samples = Int64[np.ndarray, " chosen"]


@dataclass(frozen=True)
class Hyperparameters:
    """How many units are taken, and the strength of the ridge."""

    units: int
    ridge: float


def best_hyperparameters(
    baselines: Float64[np.ndarray, "sample baseline"],
    values: Float64[np.ndarray, "sample unit"],
    y: Float64[np.ndarray, " sample"],
    splits: Sequence[tuple[Samples, Samples]],
    sizes: Sequence[int],
    ridges: Sequence[float],
) -> tuple[Hyperparameters, Hyperparameters]:
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
    return Hyperparameters(0, ridges[alone]), Hyperparameters(sizes[best[0]], ridges[best[1]])


def fitted_scores(
    baselines: Float64[np.ndarray, "sample baseline"],
    values: Float64[np.ndarray, "sample unit"],
    y: Float64[np.ndarray, " sample"],
    train: Samples,
    held: Samples,
    choice: Hyperparameters,
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
    training_rows = values[train]
    moment = target @ training_rows  # the residual of y sees only the residual of x
    left = (training_rows**2).sum(axis=0) - ((basis.T @ training_rows) ** 2).sum(axis=0)
    size = np.abs(moment) / np.sqrt(np.maximum(left, 1e-12 * (training_rows**2).sum(axis=0) + 1e-300))
    return np.argsort(-size, kind="stable")


_INNER = 3


@dataclass(frozen=True, eq=False)
class Incremental:
    """AUROC of baselines alone and with units, on samples that took no part in the choice.

    Attributes
    ----------
    baseline, combined, difference
        With intervals for the samples at hand; the training of the models is taken as given.
    null
        The difference when the units' own part is exchanged among samples, selection and all repeated; one-sided.
    fold_counts
        In how many outer folds each unit was selected.
    baseline_scores, combined_scores, fold
        Of each sample, from the models of the other folds.
    """

    baseline: Auroc
    combined: Auroc
    difference: AurocDifference
    null: Null
    fold_counts: Int64[np.ndarray, "*unit"]
    baseline_scores: Float[np.ndarray, " sample"]
    combined_scores: Float[np.ndarray, " sample"]
    fold: Int64[np.ndarray, " sample"]

    chosen = DeprecatedAttribute("fold_counts")


@dataclass(frozen=True, eq=False)
class _FoldScores:
    baseline: Float64[np.ndarray, " sample"]
    combined: Float64[np.ndarray, " sample"]
    fold_counts: Int64[np.ndarray, " unit"]


# Training samples, held-out samples, and the inner splits of the training samples.
_Outer = tuple[Samples, Samples, list[tuple[Samples, Samples]]]


def incremental_auroc(
    values: Any,
    labels: Any,
    *,
    rng: np.random.Generator,
    baselines: Any = None,
    clusters: Any = None,
    first: Any = None,
    folds: int = 5,
    sizes: Sequence[int] = (0, 1, 2, 4, 8, 16),
    ridges: Sequence[float] = (0.001, 0.01, 0.1, 1.0),
    permutations: int = 199,
    replicates: int = 1999,
    level: float = 0.95,
) -> Incremental:
    """How much better baselines with selected units tell the groups apart than baselines alone.

    In each outer fold the number of units, the units (by partial correlation with the label given the baselines) and
    the ridge are chosen by inner cross-validation on the other folds; both models are fitted there and score the fold.
    No units is among the choices. Clusters are never divided between folds.

    The null: values = baselines' least-squares part + rest, and the rest changes places among samples (Freedman and
    Lane 1983), whole clusters with others of their size. So units keep what they share with the baselines and lose what
    they know beyond them.

    Parameters
    ----------
    baselines
        [sample, baseline]: length, entropies, perplexity and the like; None compares with guessing.
    sizes, ridges
        Numbers of units and strengths of the ridge (times the number of samples) to choose from.

    Notes
    -----
    Baselines enter linearly. If one acts by its square, give the square too, or units that follow it will seem to add.
    """
    table, shape = check_values(values)
    in_first, _ = check_labels(labels, len(table), first)
    free = np.empty((len(table), 0)) if baselines is None else check_values(baselines, "baselines")[0]
    if len(free) != len(table):
        raise ValueInputError(
            f"baselines must have one row per sample, got {len(free)} for {len(table)} samples; "
            "give each sample its own row"
        )
    sizes = sorted({0, *(check_count("each of sizes", size, least=0) for size in sizes if size <= table.shape[1])})
    check_count("folds", folds, least=2)
    count = check_count("permutations", permutations, least=19)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    plan = _outer_folds(in_first, codes, folds, check_rng(rng))
    y = np.where(in_first, 1.0, -1.0)
    table = _standardise(table)
    free = _standardise(free)
    scored = _cross_validate(free, table, y, plan, sizes, list(ridges))
    observed = _difference(scored, in_first)
    basis, _ = np.linalg.qr(np.concatenate([np.ones((len(table), 1)), free], axis=1))
    shared = basis @ (basis.T @ table)
    sample = np.empty(count)
    for i in range(count):
        exchanged = shared + (table - shared)[row_exchange(in_first, codes, rng)]
        sample[i] = _difference(_cross_validate(free, exchanged, y, plan, sizes, list(ridges)), in_first)
    return _summary(scored, null_of(observed, sample), in_first, codes, plan, shape, rng, replicates, level)


def _summary(
    scored: _FoldScores,
    null: Null,
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    plan: list[_Outer],
    shape: tuple[int, ...],
    rng: np.random.Generator,
    replicates: int,
    level: float,
) -> Incremental:
    order = np.concatenate([np.flatnonzero(labels), np.flatnonzero(~labels)])
    ordered_clusters = None if clusters is None else clusters[order]

    def area(scores: np.ndarray) -> Auroc:
        return auroc(
            scores[labels], scores[~labels], level=level, clusters=ordered_clusters, replicates=replicates, rng=rng
        )

    fold = np.empty(len(labels), np.int64)
    for number, (_, held, _) in enumerate(plan):
        fold[held] = number
    return Incremental(
        baseline=area(scored.baseline),
        combined=area(scored.combined),
        difference=auroc_difference(
            scored.combined, scored.baseline, labels, level=level, clusters=clusters, replicates=replicates, rng=rng
        ),
        null=null,
        fold_counts=scored.fold_counts.reshape(shape),
        baseline_scores=scored.baseline,
        combined_scores=scored.combined,
        fold=fold,
    )


def _outer_folds(
    labels: Bool[np.ndarray, " sample"],
    clusters: Int64[np.ndarray, " sample"] | None,
    folds: int,
    rng: np.random.Generator,
) -> list[_Outer]:
    """Outer and inner splits; they depend on labels and clusters, never on values."""
    fold = cluster_folds(labels, clusters, folds, rng)
    plan = []
    for number in range(folds):
        train, held = np.flatnonzero(fold != number), np.flatnonzero(fold == number)
        codes = None if clusters is None else np.unique(clusters[train], return_inverse=True)[1].astype(np.int64)
        inner = cluster_folds(labels[train], codes, _INNER, rng)
        splits = [(train[inner != part], train[inner == part]) for part in range(_INNER)]
        plan.append((train, held, splits))
    return plan


def _cross_validate(
    free: Float64[np.ndarray, "sample baseline"],
    table: Float64[np.ndarray, "sample unit"],
    y: Float64[np.ndarray, " sample"],
    plan: list[_Outer],
    sizes: list[int],
    ridges: list[float],
) -> _FoldScores:
    baseline, combined = np.empty(len(y)), np.empty(len(y))
    selections = np.zeros(table.shape[1], np.int64)
    for train, held, splits in plan:
        alone, best = best_hyperparameters(free, table, y, splits, sizes, ridges)
        baseline[held], _ = fitted_scores(free, table, y, train, held, alone)
        combined[held], units = fitted_scores(free, table, y, train, held, best)
        selections[units] += 1
    return _FoldScores(baseline, combined, selections)


def _standardise(table: Float64[np.ndarray, "sample column"]) -> Float64[np.ndarray, "sample column"]:
    """Columns of mean 0 and deviation 1, so that no sum of squares drowns in a mean; equal columns become 0."""
    centred = table - table.mean(axis=0)
    deviation = centred.std(axis=0)
    equal = deviation <= 1e-13 * np.abs(table).max(axis=0, initial=0)
    return np.where(equal, 0.0, centred / np.where(equal, 1.0, deviation))


def _difference(scored: _FoldScores, labels: Bool[np.ndarray, " sample"]) -> float:
    return auroc_difference(scored.combined, scored.baseline, labels).value

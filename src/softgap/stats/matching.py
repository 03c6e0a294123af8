"""Match samples on confounders that must not explain a difference, such as the generated length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from scipy import stats
from scipy.optimize import linear_sum_assignment

from softgap.deprecation import DeprecatedAttribute
from softgap.errors import UnsupportedError, ValueInputError, unknown_name
from softgap.inputs import check_count
from softgap.stats.design import design_of, mixed_clusters
from softgap.stats.effects import centred_rows, weights_of
from softgap.stats.validation import check_codes, check_labels, check_strata, check_values

__all__ = ["MATCHINGS", "JointControl", "MatchedSamples", "joint_control", "match"]

MATCHINGS = ("caliper", "coarsened")
"""Ways to match, by name: one sample to one, or all samples of a bin."""

# Of a joint control: how far a pair may differ in each confounder, in deviations of its normal scores; pairs for each
# function of a confounder; and functions of one confounder at the most.
_CALIPER, _PAIRS_PER_FUNCTION, _MOST_FUNCTIONS = 0.25, 10, 5
# Candidate pairs held at once.
_PAIRS = 25_000_000
_FORBIDDEN = 1e9


@dataclass(frozen=True, eq=False)
class MatchedSamples:
    """Samples that have a counterpart in the other group.

    Attributes
    ----------
    indices, stratum
        Indices of the samples with a counterpart, and the pair or bin of each: hand ``values[indices]``,
        ``labels[indices]`` and ``strata=stratum`` (and ``clusters[indices]``) to a comparison.
    before, after
        Standardised mean difference of every covariate: all samples, and within pairs or bins. Both are divided by the
        deviation before, so that a smaller number is a smaller difference.
    method, dropped
        How it was done, and the samples without a counterpart.
    """

    indices: Int64[np.ndarray, " matched"]
    stratum: Int64[np.ndarray, " matched"]
    before: Float[np.ndarray, " covariate"]
    after: Float[np.ndarray, " covariate"]
    method: str
    dropped: int

    kept = DeprecatedAttribute("indices")

    @property
    def imbalance(self) -> float:
        """The largest difference that is left in any covariate, in standard deviations; 0.1 is commonly accepted."""
        return float(np.abs(self.after).max())


def match(
    labels: Any,
    on: Any,
    *,
    clusters: Any = None,
    strata: Any = None,
    method: str = "caliper",
    caliper: float = 0.1,
    bins: int = 10,
    first: Any = None,
) -> MatchedSamples:
    """Match the two groups on one covariate [sample] or several [sample, covariate].

    "caliper" makes pairs of one sample from each group that differ by at most ``caliper`` standard deviations in
    every covariate: as many pairs as possible, and among those the ones with the smallest sum of distances.
    "coarsened" cuts each covariate at its quantiles into ``bins`` and keeps the cells that hold both groups (Iacus,
    King and Porro 2012): it keeps more samples and leaves the differences within a bin.

    Where clusters are given and each holds one label, whole clusters are matched on their means; where labels vary
    within clusters, samples are matched within their own cluster only. With ``strata`` (one factor, or several by name)
    samples are matched within their stratum only.
    """
    if method not in MATCHINGS:
        raise unknown_name("matching", method, MATCHINGS)
    covariates = check_values(on, "the covariates")[0]
    in_first, _ = check_labels(labels, len(covariates), first)
    if not caliper > 0:
        raise ValueInputError(
            f"caliper must be a positive number of standard deviations, got {caliper!r}; 0.1 is usual"
        )
    check_count("bins", bins, least=2)
    codes = np.arange(len(in_first)) if clusters is None else check_codes("clusters", clusters, len(in_first))
    within = bool(mixed_clusters(in_first, codes).any())
    matching_unit = np.arange(len(in_first)) if within else codes
    size = np.bincount(matching_unit)
    means = np.stack([np.bincount(matching_unit, weights=column) / size for column in covariates.T], axis=1)
    leading = np.unique(matching_unit, return_index=True)[1]
    stratum_of = check_strata(strata, len(in_first))
    if (stratum_of[leading][matching_unit] != stratum_of).any():
        raise ValueInputError(
            "a cluster must lie in one stratum where whole clusters are matched, got clusters in several; use strata "
            "that describe clusters"
        )
    label, allowed = in_first[leading], stratum_of[leading]
    if within:
        allowed = np.unique(np.stack([codes[leading], allowed]), axis=1, return_inverse=True)[1].reshape(-1)
    spread = _pooled_deviation(covariates, in_first)
    stratum = _pairs(means / spread, label, allowed, caliper) if method == "caliper" else _cells(means, allowed, bins)
    return _complete_strata(
        stratum[matching_unit], in_first, codes if clusters is not None else None, covariates / spread, method
    )


def _pooled_deviation(covariates: np.ndarray, labels: np.ndarray) -> np.ndarray:
    squares = sum(((x - x.mean(axis=0)) ** 2).sum(axis=0) for x in (covariates[labels], covariates[~labels]))
    deviation = np.sqrt(squares / (len(labels) - 2))
    return np.where(deviation > 0, deviation, 1.0)


def _pairs(
    x: Float64[np.ndarray, "thing covariate"],
    labels: Bool[np.ndarray, " thing"],
    allowed: Int64[np.ndarray, " thing"],
    caliper: float,
) -> Int64[np.ndarray, " thing"]:
    """A pair's number for each thing that has a partner, -1 for the others."""
    stratum = np.full(len(labels), -1, np.int64)
    n_pairs = 0
    for part in np.unique(allowed):
        rows, columns = (np.flatnonzero((allowed == part) & side) for side in (labels, ~labels))
        if len(rows) * len(columns) > _PAIRS:
            raise UnsupportedError(
                f"caliper matching weighs every pair, at most {_PAIRS:,}, got {len(rows) * len(columns):,}; "
                "use method 'coarsened'"
            )
        distance = np.abs(x[rows][:, None] - x[columns][None])
        # A hair more than the caliper, so that equal steps of whole numbers are not cut by rounding.
        cost = np.where((distance <= caliper * (1 + 1e-9)).all(axis=-1), distance.sum(axis=-1), _FORBIDDEN)
        i, j = linear_sum_assignment(cost)
        near = cost[i, j] < _FORBIDDEN
        number = n_pairs + np.arange(int(near.sum()))
        stratum[rows[i[near]]] = stratum[columns[j[near]]] = number
        n_pairs += len(number)
    return stratum


def _cells(
    means: Float64[np.ndarray, "thing covariate"], allowed: Int64[np.ndarray, " thing"], bins: int
) -> Int64[np.ndarray, " thing"]:
    cell = allowed
    for column in means.T:
        edges = np.quantile(column, np.linspace(0, 1, bins + 1)[1:-1])
        place = np.searchsorted(edges, column, side="right")
        cell = np.unique(cell * (bins + 1) + place, return_inverse=True)[1]
    return cell.astype(np.int64)


def _complete_strata(
    stratum: np.ndarray, labels: np.ndarray, clusters: np.ndarray | None, scaled: np.ndarray, method: str
) -> MatchedSamples:
    known = stratum >= 0
    size = np.bincount(stratum[known], minlength=1)
    first = np.bincount(stratum[known], weights=labels[known], minlength=1)
    useful = (first > 0) & (first < size)
    samples = np.flatnonzero(known & useful[np.maximum(stratum, 0)])
    if len(samples) == 0:
        raise ValueInputError(
            "matching needs samples of both groups that are alike, got none; widen the caliper or use fewer covariates"
        )
    codes = np.unique(stratum[samples], return_inverse=True)[1].astype(np.int64)
    before = scaled[labels].mean(axis=0) - scaled[~labels].mean(axis=0)
    members = None if clusters is None else np.unique(clusters[samples], return_inverse=True)[1].astype(np.int64)
    design = design_of(labels[samples], members, codes)
    weights = weights_of(design)
    after = (design.labels - weights.share) @ centred_rows(design.reduce(scaled[samples]), design) / weights.total
    return MatchedSamples(samples, codes, before, after, method, len(labels) - len(samples))


@dataclass(frozen=True, eq=False)
class JointControl:
    """Every named confounder held fixed at once.

    Attributes
    ----------
    indices, stratum
        The samples that are compared, and the pair or stratum of each.
    covariates
        Functions of the confounders whose effect within pairs is removed; None where there are only strata.
    imbalance
        The largest standardised difference in any confounder that matching leaves; the covariates remove it.
    """

    indices: Int64[np.ndarray, " matched"]
    stratum: Int64[np.ndarray, " matched"]
    covariates: Float64[np.ndarray, "matched function"] | None
    imbalance: float

    kept = DeprecatedAttribute("indices")


def joint_control(
    labels: Any, confounders: Mapping[str, Any], *, strata: Any = None, clusters: Any = None, first: Any = None
) -> JointControl:
    """Hold any number of confounders fixed: pairs that are alike in all of them, and regression within the pairs.

    Samples are paired within their stratum if they differ by at most a quarter of a deviation in the normal scores of
    every confounder (ranks, so that a skewed confounder is matched in its bulk as well as in its tail). What is left of
    the differences within pairs is removed by regression on smooth functions of the confounders: the value itself and a
    natural cubic spline of its normal scores, and products of two. Either alone is not enough: a head that is the
    length plus 5 % noise shows the smallest difference in length, and regression alone extrapolates where groups do not
    overlap (Rubin 1973; Ho, Imai, King and Stuart 2007).

    Hand ``values[indices]``, ``labels[indices]``, ``strata=stratum`` and ``covariates`` to ``compare_table``.

    Parameters
    ----------
    labels
        Two different values, one for each sample.
    confounders
        Numbers by name, one for each sample.
    strata
        Samples are paired within a stratum only.
    clusters
        What belongs together, one entry for each sample.
    first
        The group whose effect is positive; by default the larger value.

    Returns
    -------
    JointControl
        Which samples are kept, their pairs, the covariates, and the imbalance that is left.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.stats import joint_control
    >>> rng = np.random.default_rng(0)
    >>> length = rng.integers(10, 60, 200)
    >>> labels = rng.random(200) < length / 60
    >>> control = joint_control(labels, {"length": length})
    >>> bool(control.imbalance < 0.25)
    True
    """
    in_first, _ = check_labels(labels, len(np.asarray(labels)), first)
    codes = check_strata(strata, len(in_first))
    if not confounders:
        return JointControl(np.arange(len(in_first)), codes, None, 0.0)
    columns = [check_values(values, f"the confounder '{name}'")[0][:, 0] for name, values in confounders.items()]
    scores = np.stack([_normal_scores(column) for column in columns], axis=1)
    matched = match(in_first, scores, clusters=clusters, strata=codes, caliper=_CALIPER)
    pairs = int(matched.stratum.max()) + 1
    functions = _functions([column[matched.indices] for column in columns], scores[matched.indices], pairs)
    return JointControl(matched.indices, matched.stratum, functions, matched.imbalance)


def _normal_scores(values: Float64[np.ndarray, " sample"]) -> Float64[np.ndarray, " sample"]:
    """Quantiles of the normal distribution at the ranks; equal values have equal scores."""
    return np.asarray(stats.norm.ppf((stats.rankdata(values) - 0.5) / len(values)))


def _functions(
    columns: list[Float64[np.ndarray, " matched"]], scores: Float64[np.ndarray, "kept confounder"], pairs: int
) -> Float64[np.ndarray, "matched function"]:
    """As many functions of the confounders as the pairs allow: scores first, then values and splines, then products."""
    allowed = min(_MOST_FUNCTIONS, max(1, pairs // (_PAIRS_PER_FUNCTION * len(columns))))
    functions = []
    for column, score in zip(columns, scores.T, strict=True):
        functions.append(score[:, None])
        if allowed > 1:
            scale = column.std()
            functions.append(((column - column.mean()) / (scale if scale > 0 else 1.0))[:, None])
            functions.append(_natural_spline(score, allowed - 2))
    table = np.concatenate(functions, axis=1)
    crossed = [scores[:, i] * scores[:, j] for i, j in combinations(range(len(columns)), 2)]
    if crossed and table.shape[1] + len(crossed) <= pairs // _PAIRS_PER_FUNCTION:
        table = np.concatenate([table, np.stack(crossed, axis=1)], axis=1)
    return table


def _natural_spline(x: Float64[np.ndarray, " matched"], count: int) -> Float64[np.ndarray, "matched function"]:
    """Up to ``count`` cubic functions that are linear beyond the outermost knots (Hastie et al. 2009, eq. 5.4)."""
    knots = np.unique(np.quantile(x, np.linspace(0.05, 0.95, count + 2)))
    if count < 1 or len(knots) < 3:
        return np.zeros((len(x), 0))

    def cubic(k: int) -> np.ndarray:
        last = knots[-1]
        return np.asarray((np.maximum(x - knots[k], 0) ** 3 - np.maximum(x - last, 0) ** 3) / (last - knots[k]))

    return np.stack([cubic(k) - cubic(len(knots) - 2) for k in range(len(knots) - 2)], axis=1)

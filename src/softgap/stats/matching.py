"""Compare like with like: samples matched on what must not explain the difference, such as the generated length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from scipy.optimize import linear_sum_assignment

from softgap.errors import UnsupportedError, ValueInputError, unknown_name
from softgap.stats.checked import checked_codes, checked_count, checked_labels, checked_values
from softgap.stats.contrast import centred_rows, weights_of
from softgap.stats.design import design_of, mixed_clusters

__all__ = ["MATCHINGS", "Matched", "match"]

MATCHINGS = ("caliper", "coarsened")
"""Ways to match, by name: one sample to one, or all samples of a bin."""

# Candidate pairs held at once.
_PAIRS = 25_000_000
_FORBIDDEN = 1e9


@dataclass(frozen=True, eq=False)
class Matched:
    """Samples that have a counterpart in the other group.

    Attributes
    ----------
    kept, stratum
        Indices of the samples with a counterpart, and the pair or bin of each: hand ``values[kept]``,
        ``labels[kept]`` and ``strata=stratum`` (and ``clusters[kept]``) to a comparison.
    before, after
        Standardised mean difference of every covariate: all samples, and within pairs or bins. Both are divided by the
        deviation before, so that a smaller number is a smaller difference.
    method, dropped
        How it was done, and the samples without a counterpart.
    """

    kept: Int64[np.ndarray, " kept"]
    stratum: Int64[np.ndarray, " kept"]
    before: Float[np.ndarray, " covariate"]
    after: Float[np.ndarray, " covariate"]
    method: str
    dropped: int

    @property
    def imbalance(self) -> float:
        """The largest difference that is left in any covariate, in standard deviations; 0.1 is commonly accepted."""
        return float(np.abs(self.after).max())


def match(
    labels: Any,
    on: Any,
    *,
    clusters: Any = None,
    method: str = "caliper",
    caliper: float = 0.1,
    bins: int = 10,
    first: Any = None,
) -> Matched:
    """Match the two groups on one covariate [sample] or several [sample, covariate].

    "caliper" makes pairs of one sample from each group that differ by at most ``caliper`` standard deviations in
    every covariate: as many pairs as possible, and among those the ones with the smallest sum of distances.
    "coarsened" cuts each covariate at its quantiles into ``bins`` and keeps the cells that hold both groups (Iacus,
    King and Porro 2012): it keeps more samples and leaves the differences within a bin.

    Where clusters are given and each holds one label, whole clusters are matched on their means; where labels vary
    within clusters, samples are matched within their own cluster only.
    """
    if method not in MATCHINGS:
        raise unknown_name("matching", method, MATCHINGS)
    covariates = checked_values(on, "the covariates")[0]
    chosen, _ = checked_labels(labels, len(covariates), first)
    if not caliper > 0:
        raise ValueInputError(
            f"caliper must be a positive number of standard deviations, got {caliper!r}; 0.1 is usual"
        )
    checked_count("bins", bins, least=2)
    codes = np.arange(len(chosen)) if clusters is None else checked_codes("clusters", clusters, len(chosen))
    within = bool(mixed_clusters(chosen, codes).any())
    thing = np.arange(len(chosen)) if within else codes
    size = np.bincount(thing)
    means = np.stack([np.bincount(thing, weights=column) / size for column in covariates.T], axis=1)
    leading = np.unique(thing, return_index=True)[1]
    label, allowed = chosen[leading], codes[leading] if within else np.zeros(len(leading), np.int64)
    spread = _pooled_deviation(covariates, chosen)
    stratum = _pairs(means / spread, label, allowed, caliper) if method == "caliper" else _cells(means, allowed, bins)
    return _kept(stratum[thing], chosen, codes if clusters is not None else None, covariates / spread, method)


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
    found = 0
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
        number = found + np.arange(int(near.sum()))
        stratum[rows[i[near]]] = stratum[columns[j[near]]] = number
        found += len(number)
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


def _kept(
    stratum: np.ndarray, labels: np.ndarray, clusters: np.ndarray | None, scaled: np.ndarray, method: str
) -> Matched:
    known = stratum >= 0
    size = np.bincount(stratum[known], minlength=1)
    first = np.bincount(stratum[known], weights=labels[known], minlength=1)
    useful = (first > 0) & (first < size)
    kept = np.flatnonzero(known & useful[np.maximum(stratum, 0)])
    if len(kept) == 0:
        raise ValueInputError(
            "matching needs samples of both groups that are alike, got none; widen the caliper or use fewer covariates"
        )
    codes = np.unique(stratum[kept], return_inverse=True)[1].astype(np.int64)
    before = scaled[labels].mean(axis=0) - scaled[~labels].mean(axis=0)
    members = None if clusters is None else np.unique(clusters[kept], return_inverse=True)[1].astype(np.int64)
    design = design_of(labels[kept], members, codes)
    weights = weights_of(design)
    after = (design.labels - weights.share) @ centred_rows(design.reduce(scaled[kept]), design) / weights.total
    return Matched(kept, codes, before, after, method, len(labels) - len(kept))

"""The area under the ROC curve with an interval (DeLong or cluster bootstrap), and the difference of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64
from scipy import stats
from scipy.special import expit

from softgap.errors import ShapeError, ValueInputError
from softgap.inputs import check_count, check_rng, check_share
from softgap.stats.design import bootstrap_weights, percentile_interval
from softgap.stats.validation import check_codes, check_groups, check_labels, check_values

__all__ = ["Auroc", "AurocDifference", "auroc", "auroc_difference"]


@dataclass(frozen=True, eq=False)
class Auroc:
    """The chance that a sample of a scores above one of b, ties counting half, for each unit.

    ``standard_error`` is DeLong's, or the deviation of the bootstrap replicates in ``sample`` (None without drawing).
    """

    value: Float[np.ndarray, "*unit"]
    low: Float[np.ndarray, "*unit"]
    high: Float[np.ndarray, "*unit"]
    standard_error: Float[np.ndarray, "*unit"]
    level: float
    method: str
    sample: Float[np.ndarray, "replicate ..."] | None


@dataclass(frozen=True, eq=False)
class AurocDifference:
    """AUROC of one score minus that of another on the same samples, between ``low`` and ``high``."""

    value: float
    low: float
    high: float
    standard_error: float
    level: float
    method: str
    sample: Float[np.ndarray, " replicate"] | None


def auroc(
    a: Any,
    b: Any,
    *,
    level: float = 0.95,
    clusters: Any = None,
    replicates: int = 1999,
    rng: np.random.Generator | None = None,
) -> Auroc:
    """AUROC of each unit of [sample, *unit] with an interval.

    Without clusters, DeLong's variance (DeLong, DeLong and Clarke-Pearson 1988, eqs. 5 to 7, from ranks as in Sun and
    Xu 2014) on the logit scale, so that the interval stays within 0 and 1. With ``clusters`` (an entry for each sample
    of a, then of b; needs ``rng``) samples depend on each other and DeLong's interval is too short: clusters are drawn
    with replacement instead, and the middle of the replicates is taken.

    Notes
    -----
    Where every pair agrees, DeLong's variance is 0 and says nothing. The smaller group then makes k independent pairs
    that all agree, so that (tail)^(1/k) bounds the AUROC: exact, if wide.
    """
    table, labels, shape = check_groups(a, b)
    level = check_share("level", level, 0.95)
    first, second = _placements(table, labels)
    value = first.mean(axis=0)
    if clusters is None:
        error = np.sqrt(first.var(axis=0, ddof=1) / len(first) + second.var(axis=0, ddof=1) / len(second))
        low, high = _logit_interval(value, error, level, min(len(first), len(second)))
        value, low, high, error = (x.reshape(shape) for x in (value, low, high, error))
        return Auroc(value, low, high, error, level, "DeLong", None)
    codes = check_codes("clusters", clusters, len(table))
    weights = bootstrap_weights(
        labels, codes, check_count("replicates", replicates, least=99), _check_bootstrap_rng(rng)
    )
    sample = np.stack([_weighted_auroc(column, labels, weights) for column in table.T], axis=1)
    low, high = percentile_interval(sample, level)
    value, low, high, error = (x.reshape(shape) for x in (value, low, high, sample.std(axis=0, ddof=1)))
    return Auroc(value, low, high, error, level, "cluster bootstrap", sample.reshape(-1, *shape))


def auroc_difference(
    score: Any,
    other: Any,
    labels: Any,
    *,
    first: Any = None,
    level: float = 0.95,
    clusters: Any = None,
    replicates: int = 1999,
    rng: np.random.Generator | None = None,
) -> AurocDifference:
    """AUROC of ``score`` minus that of ``other``, both [sample], for the group ``first`` against the rest.

    The two are measured on the same samples, and the interval takes their correlation into account: DeLong's
    covariance, or with ``clusters`` the middle of cluster-bootstrap replicates (needs ``rng``).
    """
    columns = [check_values(x, name)[0] for x, name in ((score, "score"), (other, "other score"))]
    if columns[0].shape != columns[1].shape or columns[0].shape[1] != 1:
        raise ShapeError(
            f"both scores must have one number per sample, got {list(np.shape(score))} and {list(np.shape(other))}"
        )
    in_first, _ = check_labels(labels, len(columns[0]), first)
    level = check_share("level", level, 0.95)
    codes = None if clusters is None else check_codes("clusters", clusters, len(in_first))
    paired_scores = np.concatenate(columns, axis=1)
    if codes is not None:
        check_count("replicates", replicates, least=99)
        weights = bootstrap_weights(in_first, codes, replicates, _check_bootstrap_rng(rng))
        sample = _weighted_auroc(paired_scores[:, 0], in_first, weights) - _weighted_auroc(
            paired_scores[:, 1], in_first, weights
        )
    positive, negative = _placements(paired_scores, in_first)
    value = float(positive[:, 0].mean() - positive[:, 1].mean())
    if codes is not None:
        low, high = percentile_interval(sample, level)
        error = float(sample.std(ddof=1))
        return AurocDifference(value, float(low), float(high), error, level, "cluster bootstrap", sample)
    differences = [x[:, 0] - x[:, 1] for x in (positive, negative)]
    error = float(np.sqrt(sum(d.var(ddof=1) / len(d) for d in differences)))
    reach = float(stats.norm.ppf((1 + level) / 2)) * error
    return AurocDifference(value, max(-1.0, value - reach), min(1.0, value + reach), error, level, "DeLong", None)


def _check_bootstrap_rng(rng: np.random.Generator | None) -> np.random.Generator:
    if rng is None:
        raise ValueInputError("an interval over clusters is drawn at random, got rng None; give rng")
    return check_rng(rng)


def _placements(
    table: Float64[np.ndarray, "sample unit"], labels: Bool[np.ndarray, " sample"]
) -> tuple[Float64[np.ndarray, "first unit"], Float64[np.ndarray, "second unit"]]:
    """Of each sample, the share of the other group on its right side, ties half; both means are the AUROC."""
    ranks = stats.rankdata(table, axis=0)
    first, second = (ranks[part] - stats.rankdata(table[part], axis=0) for part in (labels, ~labels))
    return first / (~labels).sum(), 1 - second / labels.sum()


def _weighted_auroc(
    score: Float64[np.ndarray, " sample"],
    labels: Bool[np.ndarray, " sample"],
    weights: Float64[np.ndarray, "replicate sample"],
) -> Float64[np.ndarray, " replicate"]:
    """AUROC of weighted samples, a row of weights per replicate."""
    codes: Int64[np.ndarray, " sample"] = np.unique(score, return_inverse=True)[1]
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    first, second = (np.add.reduceat((weights * part)[:, order], starts, axis=1) for part in (labels, ~labels))
    below = second.cumsum(axis=1) - second / 2
    return np.asarray((first * below).sum(axis=1) / (first.sum(axis=1) * second.sum(axis=1)))


def _logit_interval(value: np.ndarray, error: np.ndarray, level: float, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    inside = (value > 0) & (value < 1)
    safe = np.where(inside, value, 0.5)
    logit, reach = np.log(safe / (1 - safe)), stats.norm.ppf((1 + level) / 2) * error / (safe * (1 - safe))
    low, high = expit(logit - reach), expit(logit + reach)
    bound = ((1 - level) / 2) ** (1 / pairs)
    low = np.where(value == 1, bound, np.where(value == 0, 0.0, low))
    high = np.where(value == 0, 1 - bound, np.where(value == 1, 1.0, high))
    return low, high

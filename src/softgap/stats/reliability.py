"""Reliability of labels: agreement of two scorers, and the effect of wrong labels on a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64
from scipy import stats

from softgap.deprecation import DeprecatedAttribute, deprecated_keywords
from softgap.errors import ShapeError, ValueInputError, unknown_name
from softgap.inputs import check_count, check_rng, check_share
from softgap.stats.design import mixed_clusters
from softgap.stats.validation import check_codes, check_labels
from softgap.stats.verdict import OUTCOMES, Verdict

__all__ = ["Kappa", "LabelNoise", "cohens_kappa", "label_noise"]


@dataclass(frozen=True, eq=False)
class Kappa:
    """Agreement of two scorers beyond chance.

    ``agreement`` is the share of samples they agree on, ``chance`` what two scorers with these frequencies would agree
    on by lot, ``value`` = (agreement - chance) / (1 - chance). ``table`` counts [first scorer, second scorer] over
    ``categories``.
    """

    value: float
    low: float
    high: float
    standard_error: float
    level: float
    agreement: float
    chance: float
    table: Int64[np.ndarray, "category category"]
    categories: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class LabelNoise:
    """A verdict, with all that belongs to it, repeated with labels flipped at random.

    Attributes
    ----------
    rates
        How often a label was flipped.
    outcomes, p
        Of every draw at every rate: the verdict, and p for any difference in its first comparison.
    replication_rate
        Per rate, the share of the verdict's units with the given labels that are among its units again; NaN if it had
        none.
    """

    rates: Float64[np.ndarray, " rate"]
    outcomes: tuple[tuple[str, ...], ...]
    p: Float64[np.ndarray, "rate draw"]
    replication_rate: Float64[np.ndarray, " rate"]

    kept = DeprecatedAttribute("replication_rate")

    def share(self, outcome: str) -> Float64[np.ndarray, " rate"]:
        """The share of draws with this verdict, per rate."""
        if outcome not in OUTCOMES:
            raise unknown_name("outcome", outcome, OUTCOMES)
        return np.array([outcomes.count(outcome) / len(outcomes) for outcomes in self.outcomes])


@deprecated_keywords(one="first_labels", other="second_labels")
def cohens_kappa(first_labels: Any, second_labels: Any, *, level: float = 0.95) -> Kappa:
    """Cohen's kappa of two columns of labels for the same samples, with its large-sample interval.

    The standard error is that of Fleiss, Cohen and Everitt (1969, eq. 13). It is 0 where the two agree everywhere;
    the agreement is then bounded by the exact binomial interval instead.
    """
    first, second = np.asarray(first_labels), np.asarray(second_labels)
    if first.ndim != 1 or first.shape != second.shape:
        raise ShapeError(
            f"both scorers must label the same samples, got {list(first.shape)} and {list(second.shape)} labels; "
            "leave out samples that one of them skipped"
        )
    level = check_share("level", level, 0.95)
    n = len(first)
    codes = check_codes("labels", np.concatenate([first, second]), 2 * n)
    categories = np.unique(np.concatenate([first, second]))
    if len(categories) < 2:
        raise ValueInputError(
            f"agreement beyond chance needs two categories, got only '{categories[0]}'; label samples of both kinds"
        )
    k = len(categories)
    table = np.bincount(codes[:n] * k + codes[n:], minlength=k * k).reshape(k, k)
    share = table / n
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    agreement, chance = float(np.trace(share)), float(rows @ columns)
    value = (agreement - chance) / (1 - chance)
    error = _kappa_error(share, value, chance, n)
    reach = float(stats.norm.ppf((1 + level) / 2)) * error
    low, high = max(-1.0, value - reach), min(1.0, value + reach)
    if agreement == 1:
        low = (((1 - level) / 2) ** (1 / n) - chance) / (1 - chance)
    names = tuple(str(name) for name in categories.tolist())
    return Kappa(value, low, high, error, level, agreement, chance, table, names)


@deprecated_keywords(judge="decide")
def label_noise(
    decide: Callable[[Bool[np.ndarray, " sample"]], Verdict],
    labels: Any,
    *,
    rng: np.random.Generator,
    rates: Sequence[float] = (0.02, 0.05, 0.1, 0.2),
    draws: int = 20,
    first: Any = None,
    clusters: Any = None,
) -> LabelNoise:
    """Decide again and again with each label flipped at a rate: how wrong may labels be before the verdict changes.

    ``decide`` makes the whole verdict from labels (True for the group ``first``), whatever controls belong to it: what
    depends on labels, such as the pairs of a matching, must be made anew from those it is given. Labels that are
    constant within clusters are flipped a cluster at a time. The labels at hand are taken as the truth that is spoilt;
    if they already hold errors, the finding is weaker than without them and this shows how fast.
    """
    values = np.asarray(labels)
    in_first, _ = check_labels(values, len(values) if values.ndim else 0, first)
    check_rng(rng)
    check_count("draws", draws)
    for rate in rates:
        check_share("each of rates", rate, 0.1)
    codes = np.arange(len(in_first)) if clusters is None else check_codes("clusters", clusters, len(in_first))
    clusters_to_flip = np.arange(len(in_first)) if mixed_clusters(in_first, codes).any() else codes
    observed_units = set(decide(in_first).units)
    p, replication_rates = np.empty((len(rates), draws)), np.empty((len(rates), draws))
    outcomes = [[""] * draws for _ in rates]
    for i, rate in enumerate(rates):
        for j in range(draws):
            noisy_verdict = decide(_flip_labels(in_first, clusters_to_flip, rate, rng))
            p[i, j], outcomes[i][j] = noisy_verdict.steps[0].p, noisy_verdict.outcome
            replication_rates[i, j] = (
                len(observed_units & set(noisy_verdict.units)) / len(observed_units) if observed_units else math.nan
            )
    return LabelNoise(np.asarray(rates, np.float64), tuple(map(tuple, outcomes)), p, replication_rates.mean(axis=1))


def _flip_labels(
    labels: Bool[np.ndarray, " sample"], codes: Int64[np.ndarray, " sample"], rate: float, rng: np.random.Generator
) -> Bool[np.ndarray, " sample"]:
    for _ in range(100):
        flipped = np.asarray(labels ^ (rng.random(int(codes.max()) + 1) < rate)[codes])
        if min(len(np.unique(codes[flipped])), len(np.unique(codes[~flipped]))) >= 2:
            return flipped
    raise ValueInputError(
        f"flipped labels must leave 2 of each group, got fewer in 100 draws at rate {rate:g}; use more samples"
    )


def _kappa_error(share: np.ndarray, value: float, chance: float, n: int) -> float:
    rows, columns = share.sum(axis=1), share.sum(axis=0)
    diagonal = np.diag(share)
    agree = (diagonal * (1 - (rows + columns) * (1 - value)) ** 2).sum()
    # Entry [i, j] meets the frequency of i with the second scorer and of j with the first.
    cross = share * (columns[:, None] + rows[None, :]) ** 2
    disagree = (1 - value) ** 2 * (cross.sum() - np.trace(cross))
    variance = (agree + disagree - (value - chance * (1 - value)) ** 2) / (n * (1 - chance) ** 2)
    return math.sqrt(max(0.0, float(variance)))

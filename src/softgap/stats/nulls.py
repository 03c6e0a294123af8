"""Values beside what they are under relabelling, and what follows for many tests at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64
from scipy import stats

from softgap.stats.relabelling import THRESHOLDS, Relabelled, tail_counts

__all__ = ["Null", "Omnibus", "null_of", "omnibus_of"]

# Single precision moves a statistic by less, which must not decide a tie with the null.
SLACK = 1e-5


@dataclass(frozen=True, eq=False)
class Null:
    """A statistic, its values under relabelling, and p = (k + 1) / (n + 1), k of n values being at least as large."""

    value: float
    sample: Float64[np.ndarray, " relabelling"]
    p: float

    def critical(self, alpha: float) -> float:
        """What a value has to exceed for p <= ``alpha``; infinite where the sample is too small for that."""
        allowed = math.floor(alpha * (len(self.sample) + 1) + 1e-9)
        return float(np.sort(self.sample)[-allowed]) if allowed else math.inf


@dataclass(frozen=True, eq=False)
class Omnibus:
    """Tests for many small effects: whether the units together differ, not which of them.

    Attributes
    ----------
    mean_t
        |mean over units of t|: all units move a little in one direction.
    asymmetry
        |share of units with positive t - share of others|: most units move in one direction, however little.
    criticism
        Higher criticism: max over thresholds c of (N(c) - m(c)) / d(c), N(c) the number of units with |t| >= c, m and
        d its mean and standard deviation under relabelling. Thresholds that not one unit reaches on average are left
        out. Donoho and Jin (2004) take m and d of independent units; heads are not independent.
    any
        The smallest p of these three and of max-T, with its own null: one p for "is there any difference at all". Its
        value and sample are 1 - p.
    """

    mean_t: Null
    asymmetry: Null
    criticism: Null
    any: Null


def null_of(value: float, sample: Float[np.ndarray, " relabelling"]) -> Null:
    """A null whose larger values are the more extreme ones."""
    reached = int((sample >= value - SLACK * abs(value)).sum())
    return Null(float(value), np.asarray(sample, np.float64), (reached + 1) / (len(sample) + 1))


def omnibus_of(t: Float64[np.ndarray, " unit"], largest: Null, relabelled: Relabelled) -> Omnibus:
    """The omnibus tests of observed ``t`` beside the relabelled ones."""
    mean = null_of(abs(float(t.mean())), np.abs(relabelled.mean))
    lean = abs(2 * int(np.count_nonzero(t > 0)) - t.size) / t.size
    asymmetry = null_of(lean, np.abs(relabelled.asymmetry) / t.size)
    values = _criticism(np.concatenate([tail_counts(np.abs(t)[None]), relabelled.tails]))
    criticism = null_of(values[0], values[1:])
    tests = (largest, mean, asymmetry, criticism)
    return Omnibus(mean, asymmetry, criticism, _smallest_p(tests))


def _criticism(counts: np.ndarray) -> np.ndarray:
    """Higher criticism of each row; the observed row counts in mean and deviation, so that all rows are alike."""
    mean, deviation = counts.mean(axis=0), counts.std(axis=0)
    used = (mean >= 1) & (deviation > 0)
    if not used.any():
        used = (np.arange(len(THRESHOLDS)) == 0) & (deviation > 0)
    if not used.any():
        return np.zeros(len(counts))
    return np.asarray(((counts[:, used] - mean[used]) / deviation[used]).max(axis=1))


def _smallest_p(tests: Sequence[Null]) -> Null:
    """The null of the smallest p of several tests: each relabelling is ranked among all of them and the data."""
    smallest = np.ones(len(tests[0].sample) + 1)
    for test in tests:
        values = np.append(test.sample, test.value - SLACK * abs(test.value))
        np.minimum(smallest, stats.rankdata(-values, method="max") / len(values), out=smallest)
    return null_of(float(1 - smallest[-1]), 1 - smallest[:-1])

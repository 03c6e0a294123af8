"""Permutation tests of many statistics at once: corrected p-values, omnibus tests, and recurrence across modes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32, Float64, Int64
from scipy import stats

from softgap.errors import ShapeError
from softgap.inputs import check_count, check_rng
from softgap.stats.design import Design, design_of
from softgap.stats.effects import LEAST_RESIDUAL, centred_rows, contrast_of, weights_of
from softgap.stats.validation import check_codes, check_labels, check_strata, check_values

__all__ = [
    "THRESHOLDS",
    "Null",
    "Omnibus",
    "Recurrence",
    "StatisticTerms",
    "null_of",
    "numerator_and_error",
    "omnibus_of",
    "permute",
    "recurrence",
    "statistic_terms",
    "tail_counts",
]


THRESHOLDS = 1 + 0.25 * np.arange(21)


"""Values of |t| above which units are counted, for the higher criticism."""


# Permutations and units of one block: 2 MiB per array, so that a block stays in the second-level cache.
_PERMUTATIONS = 512


_UNITS = 1024


# Random numbers drawn at a time for the orders of a block of permutations.
_RANDOM_NUMBERS = 2**22


@dataclass(frozen=True, eq=False)
class StatisticTerms:
    """A table made ready: x, its squares times (f - g), x times k, all in float32, and what is constant."""

    x: Float32[np.ndarray, "row unit"]
    square: Float32[np.ndarray, "row unit"] | None
    linear: Float32[np.ndarray, "row unit"] | None
    offset: Float32[np.ndarray, " unit"]
    slope: float
    curvature: float
    total: float
    scale: Float64[np.ndarray, " unit"]

    @property
    def units(self) -> int:
        """Units of the table."""
        return int(self.x.shape[1])


@dataclass(frozen=True, eq=False)
class PermutationSample:
    """What is kept of all permutations.

    Per permutation: the largest |t|, the mean t, the number of positive t minus that of others, and how many |t| reach
    each of ``THRESHOLDS``. Per unit: how many permutations reach its observed |t|.
    """

    largest: Float64[np.ndarray, " permutation"]
    mean: Float64[np.ndarray, " permutation"]
    asymmetry: Int64[np.ndarray, " permutation"]
    tails: Int64[np.ndarray, "permutation threshold"]
    reached: Int64[np.ndarray, " unit"]


def statistic_terms(rows: Float64[np.ndarray, "row unit"], design: Design) -> StatisticTerms:
    """Centre in blocks, scale to mean square 1, and fold all weights into the table."""
    weights = weights_of(design)
    centred = centred_rows(rows, design)
    scale = np.sqrt((centred**2).mean(axis=0))
    x = centred / scale
    tilt = weights.first - weights.second
    k = weights.first * (1 - weights.share) + weights.second * weights.share
    y = design.labels - weights.share
    curvature = float((np.where(design.labels, weights.first, weights.second) * y**2).sum())
    constant = np.ptp(k) <= 1e-12 * k.max()
    return StatisticTerms(
        x=x.astype(np.float32),
        square=None if np.abs(tilt).max() <= 1e-12 * k.max() else (tilt[:, None] * x**2).astype(np.float32),
        linear=None if constant else (k[:, None] * x).astype(np.float32),
        offset=(weights.second @ x**2).astype(np.float32),
        slope=float(k[0]) if constant else 0.0,
        curvature=curvature,
        total=weights.total,
        scale=scale,
    )


def numerator_and_error(
    prepared: StatisticTerms, labels: Float32[np.ndarray, "permutation row"], units: slice
) -> tuple[Float32[np.ndarray, "permutation unit"], Float32[np.ndarray, "permutation unit"]]:
    """``s`` and the square root below it, of some units: t is their quotient."""
    s = labels @ prepared.x[:, units]
    total = prepared.total
    q: np.ndarray = prepared.offset[units]
    if prepared.square is not None:
        q = labels @ prepared.square[:, units] + q
    if prepared.linear is None:
        variance = s * s
        variance *= np.float32(prepared.curvature / total**2 - 2 * prepared.slope / total)
    else:
        variance = labels @ prepared.linear[:, units]
        variance *= np.float32(-2 / total)
        variance += s * np.float32(prepared.curvature / total**2)
        variance *= s
    variance += q
    # Where nothing is left but rounding, t would be arbitrary.
    np.maximum(variance, q * np.float32(LEAST_RESIDUAL), out=variance)
    return s, np.sqrt(variance, out=variance)


def permute(
    prepared: StatisticTerms,
    design: Design,
    bars: Float64[np.ndarray, " unit"],
    count: int,
    rng: np.random.Generator,
) -> PermutationSample:
    """Reduce ``count`` permutations, a block of them and of the units at a time; ``bars`` are what |t| has to reach."""
    largest, mean = np.zeros(count), np.zeros(count)
    asymmetry = np.zeros(count, np.int64)
    tails = np.zeros((count, len(THRESHOLDS)), np.int64)
    reached = np.zeros(prepared.units, np.int64)
    bar = bars.astype(np.float32)
    for where, labels in _label_blocks(design, count, rng):
        for start in range(0, prepared.units, _UNITS):
            units = slice(start, min(start + _UNITS, prepared.units))
            t, root = numerator_and_error(prepared, labels, units)
            t /= root
            mean[where] += t.sum(axis=1)
            asymmetry[where] += 2 * np.count_nonzero(t > 0, axis=1) - t.shape[1]
            np.abs(t, out=t)
            np.maximum(largest[where], t.max(axis=1), out=largest[where])
            reached[units] += np.count_nonzero(t >= bar[units], axis=0)
            tails[where] += tail_counts(t)
    return PermutationSample(largest, mean / prepared.units, asymmetry, tails, reached)


def tail_counts(size: Float64[np.ndarray, "permutation unit"]) -> Int64[np.ndarray, "permutation threshold"]:
    """How many of each row reach each of ``THRESHOLDS``."""
    bins = len(THRESHOLDS) + 1
    place = np.clip((size - THRESHOLDS[0].astype(size.dtype)) * 4 + 1, 0, bins - 1).astype(np.int64)
    place += bins * np.arange(len(size))[:, None]
    counts = np.bincount(place.ravel(), minlength=bins * len(size)).reshape(len(size), bins)
    return counts[:, :0:-1].cumsum(axis=1)[:, ::-1].astype(np.int64)


def _label_blocks(design: Design, count: int, rng: np.random.Generator) -> Iterator[tuple[slice, np.ndarray]]:
    step = max(1, min(_PERMUTATIONS, _RANDOM_NUMBERS // design.rows))
    for start in range(0, count, step):
        where = slice(start, min(start + step, count))
        yield where, design.permuted_labels(where.stop - where.start, rng)


# Single precision moves a statistic by less, which must not decide a tie with the null.
SLACK = 1e-5


@dataclass(frozen=True, eq=False)
class Null:
    """A statistic, its values under permutation, and p = (k + 1) / (n + 1), k of n values being at least as large."""

    value: float
    sample: Float64[np.ndarray, " permutation"]
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
        d its mean and standard deviation under permutation. Thresholds that not one unit reaches on average are left
        out. Donoho and Jin (2004) take m and d of independent units; heads are not independent.
    any
        The smallest p of these three and of max-T, with its own null: one p for "is there any difference at all". Its
        value and sample are 1 - p.
    """

    mean_t: Null
    asymmetry: Null
    criticism: Null
    any: Null


def null_of(value: float, sample: Float[np.ndarray, " permutation"]) -> Null:
    """A null whose larger values are the more extreme ones."""
    reached = int((sample >= value - SLACK * abs(value)).sum())
    return Null(float(value), np.asarray(sample, np.float64), (reached + 1) / (len(sample) + 1))


def omnibus_of(t: Float64[np.ndarray, " unit"], largest: Null, permuted: PermutationSample) -> Omnibus:
    """The omnibus tests of observed ``t`` beside the permuted ones."""
    mean = null_of(abs(float(t.mean())), np.abs(permuted.mean))
    lean = abs(2 * int(np.count_nonzero(t > 0)) - t.size) / t.size
    asymmetry = null_of(lean, np.abs(permuted.asymmetry) / t.size)
    values = _criticism(np.concatenate([tail_counts(np.abs(t)[None]), permuted.tails]))
    criticism = null_of(values[0], values[1:])
    tests = (largest, mean, asymmetry, criticism)
    return Omnibus(mean, asymmetry, criticism, _smallest_p(tests))


def _criticism(counts: np.ndarray) -> np.ndarray:
    """Higher criticism of each row; the observed row counts in mean and deviation, so that all rows are alike."""
    mean, deviation = counts.mean(axis=0), counts.std(axis=0)
    usable = (mean >= 1) & (deviation > 0)
    if not usable.any():
        usable = (np.arange(len(THRESHOLDS)) == 0) & (deviation > 0)
    if not usable.any():
        return np.zeros(len(counts))
    return np.asarray(((counts[:, usable] - mean[usable]) / deviation[usable]).max(axis=1))


def _smallest_p(tests: Sequence[Null]) -> Null:
    """The null of the smallest p of several tests: each permutation is ranked among all of them and the data."""
    smallest = np.ones(len(tests[0].sample) + 1)
    for test in tests:
        values = np.append(test.sample, test.value - SLACK * abs(test.value))
        np.minimum(smallest, stats.rankdata(-values, method="max") / len(values), out=smallest)
    return null_of(float(1 - smallest[-1]), 1 - smallest[:-1])


# Values of t held at once.
_BLOCK = 2**22


@dataclass(frozen=True, eq=False)
class Recurrence:
    """In how many modes each head is among the first ``top`` by |t|.

    Attributes
    ----------
    counts
        Of each head.
    p_head
        Of each head: the chance that any head recurs as often (permuted, largest count).
    recurring, p_recurring
        Entry r - 1: how many heads are on top in at least r modes, and the chance of so many.
    null
        ``recurring`` of every permutation.
    """

    counts: Int64[np.ndarray, " head"]
    p_head: Float64[np.ndarray, " head"]
    recurring: Int64[np.ndarray, " mode"]
    p_recurring: Float64[np.ndarray, " mode"]
    null: Int64[np.ndarray, "permutation mode"]
    top: int


def recurrence(
    values: Any,
    labels: Any,
    *,
    rng: np.random.Generator,
    top: int = 5,
    clusters: Any = None,
    strata: Any = None,
    exchange: str = "auto",
    first: Any = None,
    permutations: int = 1999,
) -> Recurrence:
    """Count the modes of a table [sample, mode, head] in which each head is among the first ``top``.

    Modes (mechanisms, orders, transforms) are measured on the same samples and resemble each other, so heads recur
    without any effect: far more often than if each mode drew its heads by lot. Each permutation is therefore applied to
    all modes together, which keeps their resemblance, and the whole count is made anew.
    """
    table, shape = check_values(values)
    if len(shape) != 2:
        raise ShapeError(f"values must be [sample, mode, head], got {1 + len(shape)} axes; put other axes into one")
    modes, heads = shape
    check_count("top", top, least=1, most=max(1, heads - 1), remedy="with all heads on top nothing can recur")
    count = check_count("permutations", permutations, least=19)
    check_rng(rng)
    in_first, groups = check_labels(labels, len(table), first)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    design = design_of(in_first, codes, check_strata(strata, len(table)), exchange)
    rows = design.reduce(table)
    observed = contrast_of(rows, design, groups, shape, 0.95).t
    counts = _on_top(np.abs(observed)[None].astype(np.float32), top)[0]
    prepared = statistic_terms(rows, design)
    null = np.empty((count, modes), np.int64)
    step = max(1, _BLOCK // (modes * heads))
    for start in range(0, count, step):
        size = min(step, count - start)
        s, root = numerator_and_error(prepared, design.permuted_labels(size, rng), slice(None))
        null[start : start + size] = _recurring(_on_top(np.abs(s / root).reshape(size, modes, heads), top), modes)
    recurring = _recurring(counts[None], modes)[0]
    # A head that is on top in r modes is matched by a permutation in which any head is.
    p_any = ((null > 0).sum(axis=0) + 1) / (count + 1)
    return Recurrence(
        counts=counts,
        p_head=np.where(counts > 0, p_any[np.maximum(counts, 1) - 1], 1.0),
        recurring=recurring,
        p_recurring=((null >= recurring).sum(axis=0) + 1) / (count + 1),
        null=null,
        top=top,
    )


def _on_top(size: Float32[np.ndarray, "permutation mode head"], top: int) -> Int64[np.ndarray, "permutation head"]:
    first = np.argpartition(-size, top - 1, axis=-1)[..., :top]
    counts = np.zeros((size.shape[0], size.shape[2]), np.int64)
    np.add.at(counts, (np.arange(len(size))[:, None, None], first), 1)
    return counts


def _recurring(counts: Int64[np.ndarray, "permutation head"], modes: int) -> Int64[np.ndarray, "permutation mode"]:
    return np.stack([(counts >= least).sum(axis=1) for least in range(1, modes + 1)], axis=1)

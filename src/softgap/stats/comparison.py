"""Compare two groups over all units at once: effects, permutation tests, max-T, omnibus tests, false discoveries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
from jaxtyping import Float, Float64
from scipy import stats

from softgap.deprecation import DeprecatedAttribute
from softgap.inputs import check_count, check_rng, check_share
from softgap.stats.design import Design, design_of
from softgap.stats.effects import LEAST_RESIDUAL, Contrast, check_covariates, contrast_of, label_share, residual_rows
from softgap.stats.equivalence import Power, detectable
from softgap.stats.permutation import SLACK, Null, Omnibus, StatisticTerms, omnibus_of, permute, statistic_terms
from softgap.stats.validation import check_codes, check_groups, check_labels, check_strata, check_values

__all__ = ["Comparison", "ComparisonOptions", "compare", "compare_table"]


class ComparisonOptions(TypedDict, total=False):
    """What every comparison takes by name; see ``compare_table``."""

    clusters: Any
    strata: Any
    covariates: Any
    exchange: str
    permutations: int
    alpha: float
    power: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two groups compared over all units.

    Attributes
    ----------
    contrast
        Effects with their intervals, per unit.
    p
        Of each unit by itself: (k + 1) / (n + 1), k the permutations of n whose |t| reaches the observed one.
    p_max
        The same with the largest |t| of all units: adjusted for all units together (max-T), so that the chance of any
        false finding is at most ``alpha``.
    q
        p after Benjamini and Hochberg: among units with q <= 0.05, at most 5 % are false on average.
    maximum
        The largest |t| with its null.
    omnibus
        Tests of all units together.
    power
        The smallest effect that this study would have found.
    alpha
        The error rate that ``significant_units`` and ``critical`` keep.
    """

    contrast: Contrast
    p: Float[np.ndarray, "*unit"]
    p_max: Float[np.ndarray, "*unit"]
    q: Float[np.ndarray, "*unit"]
    maximum: Null
    omnibus: Omnibus
    power: Power
    alpha: float

    found = DeprecatedAttribute("significant_units")

    @property
    def critical(self) -> float:
        """What |t| has to reach in this family of units."""
        return self.power.critical

    @property
    def effect(self) -> Float[np.ndarray, "*unit"]:
        """Mean of the first group minus that of the second."""
        return self.contrast.effect

    def significant_units(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the units that differ after max-T, the largest |t| first."""
        where = np.argwhere(np.atleast_1d(self.p_max <= self.alpha))
        size = np.atleast_1d(np.abs(self.contrast.t))
        units = sorted((tuple(int(i) for i in unit) for unit in where), key=lambda unit: -size[unit])
        return tuple(units) if self.p_max.ndim else tuple(() for _ in units)


def compare(a: Any, b: Any, *, rng: np.random.Generator, **options: Unpack[ComparisonOptions]) -> Comparison:
    """Compare two groups of samples, each [sample, *unit]; the effect is mean(a) - mean(b).

    Parameters
    ----------
    a, b
        Values of each group ``[sample, *unit]``; the units must be the same.
    rng
        The generator that draws the permutations.
    **options
        ``clusters``, ``strata``, ``covariates``, ``exchange``, ``permutations``, ``alpha`` and ``power``, as in
        ``compare_table``; ``clusters`` and ``strata`` have an entry for each sample of a, then of b.

    Returns
    -------
    Comparison
        Effects with intervals, p-values per unit and over all units (max-T), and the power of the test.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.stats import compare
    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.standard_normal((40, 3)), rng.standard_normal((50, 3))
    >>> a[:, 1] += 2  # the groups differ in the second unit
    >>> (compare(a, b, rng=rng, permutations=999).p_max <= 0.01).tolist()
    [False, True, False]
    """
    table, labels, shape = check_groups(a, b)
    return _compare_rows(table, labels, ("a", "b"), shape, rng, **options)


def compare_table(
    values: Any,
    labels: Any,
    *,
    rng: np.random.Generator,
    first: Any = None,
    **options: Unpack[ComparisonOptions],
) -> Comparison:
    """Compare two groups of a table [sample, *unit] by permutation, over all units at once.

    The units are everything that was looked at: heads, features, mechanisms, orders, transforms, segments, as any
    number of axes. The family of max-T is exactly what is handed over, so hand over all of it.

    Parameters
    ----------
    values
        Numbers ``[sample, *unit]``.
    labels, first
        Two different values; ``first`` names the group whose effect is positive, by default the larger value.
    rng
        The generator that draws the permutations.
    clusters, strata, exchange
        What belongs together, what must not be exchanged across, and how: ``softgap.stats.design.design_of``.
    covariates
        Numbers [sample, covariate] whose linear effect within blocks is removed from values and labels first.
    permutations
        Random permutations; no p is smaller than 1 / (permutations + 1).
    alpha
        Chance of any false finding that ``Comparison.significant_units`` keeps.
    power
        Chance with which the smallest detectable effect would have been found.

    Returns
    -------
    Comparison
        Effects with intervals, p-values per unit and over all units (max-T), and the power of the test.

    Notes
    -----
    Exact where labels are exchangeable in their blocks, whatever the distribution; and since t is studentised, right
    in large samples also where the groups differ in spread and not in mean (Janssen 1997; Chung and Romano 2013). In
    small samples with clearly unequal spread, p is made larger (``Contrast.unequal``). With covariates the values
    are residuals, and p is right in large samples (Freedman and Lane 1983).
    Max-T: Westfall and Young (1993), single step. p = (k + 1) / (n + 1): Phipson and Smyth (2010).

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.stats import compare_table
    >>> rng = np.random.default_rng(0)
    >>> labels = np.repeat(["right", "wrong"], 40)
    >>> values = rng.standard_normal((80, 2, 3))  # sample, layer, head
    >>> values[labels == "wrong", 1, 2] += 2
    >>> comparison = compare_table(values, labels, first="wrong", rng=rng, permutations=999)
    >>> np.argwhere(comparison.p_max <= 0.05).tolist()
    [[1, 2]]
    """
    table, shape = check_values(values)
    in_first, groups = check_labels(labels, len(table), first)
    return _compare_rows(table, in_first, groups, shape, rng, **options)


def _compare_rows(
    table: Float64[np.ndarray, "sample unit"],
    labels: np.ndarray,
    groups: tuple[str, str],
    shape: tuple[int, ...],
    rng: np.random.Generator,
    *,
    clusters: Any = None,
    strata: Any = None,
    covariates: Any = None,
    exchange: str = "auto",
    permutations: int = 9999,
    alpha: float = 0.05,
    power: float = 0.8,
) -> Comparison:
    check_rng(rng)
    count = check_count("permutations", permutations, least=19, remedy="fewer could never reach p = 0.05")
    alpha, power = check_share("alpha", alpha, 0.05), check_share("power", power, 0.8)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    design = design_of(labels, codes, check_strata(strata, len(table)), exchange)
    rows, basis = design.reduce(table), check_covariates(covariates, design, len(table))
    contrast = contrast_of(rows, design, groups, shape, 1 - alpha, basis)
    prepared = statistic_terms(rows if basis is None else residual_rows(rows, design, basis), design)
    left = 1.0 if basis is None else label_share(design, basis)
    t = _adjusted_t(contrast).ravel()
    bars = _thresholds(t, prepared, design)
    permuted = permute(prepared, design, bars, count, rng)
    p = (permuted.reached + 1) / (count + 1)
    p_max = (count - np.searchsorted(np.sort(permuted.largest), bars, side="left") + 1) / (count + 1)
    maximum = Null(float(np.abs(t).max()), permuted.largest, float(p_max.min()))
    return Comparison(
        contrast=contrast,
        p=p.reshape(shape),
        p_max=p_max.reshape(shape),
        q=np.asarray(stats.false_discovery_control(p)).reshape(shape),
        maximum=maximum,
        omnibus=omnibus_of(t, maximum, permuted),
        power=detectable(prepared, design, maximum.critical(alpha), power, rng, label_share=left),
        alpha=alpha,
    )


def _adjusted_t(contrast: Contrast) -> np.ndarray:
    """The observed t as it is held against permuted ones: made smaller where the groups differ in spread.

    Permuted samples have equal spread in both groups, so that their t has shorter tails than Welch's. Where the
    spread is clearly unequal, t becomes the normal deviate with Welch's p. It never grows: a test that was exact stays
    valid.
    """
    size = np.abs(contrast.t)
    p = stats.t.sf(size, contrast.df)
    with np.errstate(divide="ignore"):
        deviate = np.minimum(size, stats.norm.isf(p))
    return np.asarray(np.sign(contrast.t) * np.where(contrast.unequal & (p > 0), deviate, size))


def _thresholds(t: np.ndarray, prepared: StatisticTerms, design: Design) -> np.ndarray:
    """What |t| has to reach to count as large as observed: less by what single precision may have moved it.

    The variance is a difference, so its error grows as the share of it that is left shrinks.
    """
    size, labels = np.abs(t), design.labels.astype(np.float64)
    whole = prepared.offset + (0 if prepared.square is None else labels @ prepared.square)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = (labels @ prepared.x / size) ** 2 / whole
    share = np.clip(np.where(size > 0, left, 1.0), LEAST_RESIDUAL, 1.0)
    return np.asarray(size * (1 - SLACK / share))

"""Differences between two groups, their standard errors, and Hedges' g with an interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy import stats
from scipy.special import gammaln, nctdtr

from softgap.errors import ShapeError, ValueInputError
from softgap.inputs import check_count, check_rng, check_share
from softgap.stats.design import Design, bootstrap_weights, design_of, percentile_interval
from softgap.stats.validation import check_codes, check_groups, check_labels, check_strata, check_values

__all__ = [
    "Contrast",
    "EffectSize",
    "centred_rows",
    "check_covariates",
    "contrast_of",
    "contrast_table",
    "hedges_g",
    "label_share",
    "residual_rows",
    "weights_of",
]


# Residual variance below this share of the total is rounding, in single precision: the statistic stops growing there.
LEAST_RESIDUAL = 1e-3


# The groups differ in spread: Welch's degrees of freedom are below this share of those with equal spread, and the
# variances differ at this level.
_UNEQUAL, _SPREAD_LEVEL = 0.8, 0.01


_EQUAL = 1e-13


# A covariate column adds nothing if less than this share of its length is left beside the others.
_COLLINEAR = 1e-8


# One minus leverage is no smaller: a row that covariates fit exactly has no residual to divide.
_LEAST_FREEDOM = 1e-6


@dataclass(frozen=True, eq=False)
class Contrast:
    """How much larger the first group is than the second, per unit.

    Attributes
    ----------
    effect, standard_error, df
        Difference of the group means, adjusted for blocks, in the unit's own scale; its standard error; and the
        degrees of freedom of the t distribution that goes with it.
    low, high, level
        Interval of the effect at ``level``, for each unit by itself.
    deviation
        Standard deviation within groups (and blocks), pooled: what an effect is divided by.
    g
        Hedges' g: effect / deviation, times the small-sample factor.
    t
        The studentised effect that permutation is applied to: effect over its heteroscedastic standard error.
    unequal
        Whether the groups differ so much in spread that the null of permuted samples has shorter tails than ``t``.
    groups, sizes
        Names of the first and second group, and their rows.
    kind, blocks, dropped, arrangements
        How labels may be exchanged (``softgap.stats.design.design_of``), in how many blocks, how many samples
        were left out since their block holds one label only, and how many permutations there are.
    """

    effect: Float[np.ndarray, "*unit"]
    standard_error: Float[np.ndarray, "*unit"]
    df: Float[np.ndarray, "*unit"]
    low: Float[np.ndarray, "*unit"]
    high: Float[np.ndarray, "*unit"]
    level: float
    deviation: Float[np.ndarray, "*unit"]
    g: Float[np.ndarray, "*unit"]
    t: Float[np.ndarray, "*unit"]
    unequal: Bool[np.ndarray, "*unit"]
    groups: tuple[str, str]
    sizes: tuple[int, int]
    kind: str
    blocks: int
    dropped: int
    arrangements: float


@dataclass(frozen=True, eq=False)
class Weights:
    """What the statistic needs of a design; no exchange of labels changes it.

    Per row: ``share`` of the first group in its block, and the factors of a squared residual in the variance if the
    row is in the first group (``first``) or not (``second``). ``total`` is sum_s n1 n0 / n over blocks.
    """

    share: Float64[np.ndarray, " row"]
    first: Float64[np.ndarray, " row"]
    second: Float64[np.ndarray, " row"]
    total: float


def weights_of(design: Design) -> Weights:
    """The factors of HC2: squared residuals over one minus leverage, times the squared regressor."""
    starts = design.block_starts
    size = np.bincount(design.block).astype(np.float64)
    count = np.add.reduceat(design.labels.astype(np.float64), starts)
    share = count / size
    total = float((count * (size - count) / size).sum())
    leverage = (1 / size + (1 - share) ** 2 / total, 1 / size + share**2 / total)
    first, second = (1 - share) ** 2 / (1 - leverage[0]), share**2 / (1 - leverage[1])
    return Weights(share[design.block], first[design.block], second[design.block], total)


def centred_rows(rows: Float64[np.ndarray, "row unit"], design: Design) -> Float64[np.ndarray, "row unit"]:
    """Rows minus the mean of their block."""
    size = np.bincount(design.block)
    means = np.add.reduceat(rows, design.block_starts, axis=0) / size[:, None]
    return np.asarray(rows - means[design.block])


def covariate_basis(
    covariates: Float64[np.ndarray, "sample covariate"], design: Design
) -> Float64[np.ndarray, "row dimension"]:
    """An orthonormal basis of what covariates vary in within blocks; collinear columns are dropped."""
    centred = centred_rows(design.reduce(covariates), design)
    scale = np.sqrt((centred**2).sum(axis=0))
    moving = scale > _EQUAL * np.maximum(np.abs(covariates).max(axis=0), 1e-300) * math.sqrt(design.rows)
    if not moving.any():
        return np.zeros((design.rows, 0))
    basis, singular, _ = np.linalg.svd(centred[:, moving] / scale[moving], full_matrices=False)
    return np.asarray(basis[:, singular > _COLLINEAR * singular[0]])


def residual_rows(
    rows: Float64[np.ndarray, "row unit"], design: Design, basis: Float64[np.ndarray, "row dimension"]
) -> Float64[np.ndarray, "row unit"]:
    """Rows minus their block's mean and minus what the covariates explain within blocks, by least squares."""
    centred = centred_rows(rows, design)
    return np.asarray(centred - basis @ (basis.T @ centred))


def label_share(design: Design, basis: Float64[np.ndarray, "row dimension"]) -> float:
    """The share of the labels' variation within blocks that the covariates leave."""
    y = residual_rows(design.labels[:, None].astype(np.float64), design, basis)[:, 0]
    return float(y @ y) / weights_of(design).total


def contrast_table(
    values: Any,
    labels: Any,
    *,
    clusters: Any = None,
    strata: Any = None,
    covariates: Any = None,
    exchange: str = "auto",
    first: Any = None,
    level: float = 0.95,
) -> Contrast:
    """The difference between two groups of a table [sample, *unit], without a test.

    The effect is the coefficient beta of the label y in x = alpha_block + beta y + e, by least squares:

        beta = sum_s w_s (mean1_s - mean0_s) / sum_s w_s,   w_s = n1_s n0_s / n_s   over blocks s,
        V(beta) = sum_i yc_i^2 e_i^2 / (1 - h_i) / (sum_s w_s)^2,

    yc_i the label minus its block's mean and h_i the leverage of row i (HC2; MacKinnon and White 1985, eq. 12). With
    one block this is Welch's t exactly, with pairs as blocks it is the paired t exactly; both are tested. Degrees of
    freedom are Welch's, and no more than rows minus blocks minus 1 where there are several blocks. With covariates z
    the model is x = alpha_block + beta y + gamma z + e: yc and e are residuals of both, and h counts z too.

    Parameters
    ----------
    labels
        Two different values, one per sample. The effect is that of the larger one (True, 1, the last in the
        alphabet), or of ``first`` if given, minus the other.
    clusters
        What samples belong together, such as a question's id.
    strata
        A blocking factor, or several by name (a mapping), crossed.
    covariates
        Numbers [sample, covariate] whose linear effect within blocks is removed.
    exchange
        What clusters mean for the labels: see ``softgap.stats.design.design_of``. Under "whole" the standard
        error sums residuals over clusters (CR1), while ``t`` stays the statistic above.
    """
    table, shape = check_values(values)
    in_first, groups = check_labels(labels, len(table), first)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    design = design_of(in_first, codes, check_strata(strata, len(table)), exchange)
    basis = check_covariates(covariates, design, len(table))
    return contrast_of(design.reduce(table), design, groups, shape, check_share("level", level, 0.95), basis)


def check_covariates(covariates: Any, design: Design, samples: int) -> Float64[np.ndarray, "row dimension"] | None:
    """The basis of the covariates of a table, or None without any; refused where it leaves no residual."""
    if covariates is None:
        return None
    columns = check_values(covariates, "the covariates")[0]
    if len(columns) != samples:
        raise ShapeError(f"covariates must have one row per sample, got {len(columns)} for {samples} samples")
    basis = covariate_basis(columns, design)
    if design.rows - design.blocks - 1 - basis.shape[1] < 2:
        raise ValueInputError(
            f"covariates must leave degrees of freedom, got {basis.shape[1]} independent ones for {design.rows} rows "
            f"in {design.blocks} blocks; use fewer covariates or more samples"
        )
    return basis


def contrast_of(
    rows: Float64[np.ndarray, "row unit"],
    design: Design,
    groups: tuple[str, str],
    shape: tuple[int, ...],
    level: float,
    basis: Float64[np.ndarray, "row dimension"] | None = None,
) -> Contrast:
    """The contrast of reduced rows, beside covariates where their basis is given."""
    weights = weights_of(design)
    if basis is None:
        basis = np.zeros((design.rows, 0))
    centred = residual_rows(rows, design, basis)
    _raise_if_equal(rows, centred, shape)
    y = residual_rows(design.labels[:, None].astype(np.float64), design, basis)[:, 0]
    total = float(y @ y)
    if total < LEAST_RESIDUAL * weights.total:
        raise ValueInputError(
            "the covariates explain the labels completely within blocks, so that no difference is left to measure; "
            "use fewer covariates or samples that overlap"
        )
    effect = y @ centred / total
    squared = (centred - y[:, None] * effect) ** 2
    leverage = 1 / np.bincount(design.block)[design.block] + (basis**2).sum(axis=1) + y**2 / total
    factor = y**2 / np.maximum(1 - leverage, _LEAST_FREEDOM)
    parts = [(side * factor) @ squared for side in (design.labels, ~design.labels)]
    variance, size = (parts[0] + parts[1]) / total**2, design.sizes
    left = design.rows - design.blocks - 1 - basis.shape[1]
    most = math.inf if design.blocks == 1 and not basis.shape[1] else left
    df = np.minimum(_satterthwaite(parts, size, left), most)
    equal = [np.atleast_1d(float(y[side] @ y[side])) for side in (design.labels, ~design.labels)]
    whole = factor @ centred**2 / total**2
    t = effect / np.sqrt(np.maximum(variance, LEAST_RESIDUAL * whole))
    unequal = df < _UNEQUAL * min(float(_satterthwaite(equal, size, left)[0]), most)
    unequal &= _spread_p(squared, design) < _SPREAD_LEVEL
    error = np.sqrt(variance)
    if design.kind == "whole":
        error, df = _cluster_robust(centred - y[:, None] * effect, y, design, total)
    deviation = np.sqrt(squared.sum(axis=0) / left)
    reach = stats.t.ppf((1 + level) / 2, df) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        g = effect / deviation * small_sample_factor(float(left))
    arrays = (effect, error, df, effect - reach, effect + reach, deviation, g, t, unequal)
    effect, error, df, low, high, deviation, g, t, unequal = (array.reshape(shape) for array in arrays)
    return Contrast(
        effect, error, df, low, high, level, deviation, g, t, unequal,
        groups, size, design.kind, design.blocks, design.dropped, design.arrangements,
    )  # fmt: skip


def _satterthwaite(parts: list[np.ndarray], size: tuple[int, int], otherwise: float) -> np.ndarray:
    """Welch's degrees of freedom from the two groups' parts of the variance."""
    first, second = parts
    with np.errstate(divide="ignore", invalid="ignore"):
        df = (first + second) ** 2 / (first**2 / (size[0] - 1) + second**2 / (size[1] - 1))
    return np.where(np.isfinite(df), df, otherwise)


def _spread_p(squared: np.ndarray, design: Design) -> np.ndarray:
    """Two-sided p of the F test of equal variances of the residuals in both groups."""
    freedom = [max(size - 1, 1) for size in design.sizes]
    first, second = (
        squared[side].sum(axis=0) / n for side, n in zip((design.labels, ~design.labels), freedom, strict=True)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(second > 0, first / second, math.inf)
    return np.asarray(2 * np.minimum(stats.f.sf(ratio, *freedom), stats.f.cdf(ratio, *freedom)))


def small_sample_factor(df: float) -> float:
    """J = Gamma(m / 2) / (sqrt(m / 2) Gamma((m - 1) / 2)), which takes the bias from a standardised difference."""
    if df <= 1:  # no unbiased estimate exists
        return math.nan
    return float(np.exp(gammaln(df / 2) - gammaln((df - 1) / 2)) / np.sqrt(df / 2))


def _cluster_robust(residual: np.ndarray, y: np.ndarray, design: Design, total: float) -> tuple[np.ndarray, np.ndarray]:
    starts = np.flatnonzero(np.diff(design.cluster, prepend=-1))
    scores = np.add.reduceat(y[:, None] * residual, starts, axis=0)
    n = len(starts)
    if n < 2:
        raise ValueInputError(f"exchange 'whole' needs at least 2 clusters, got {n}; use 'within'")
    return np.sqrt((scores**2).sum(axis=0) * n / (n - 1)) / total, np.full(residual.shape[1], n - 1.0)


def _raise_if_equal(rows: np.ndarray, centred: np.ndarray, shape: tuple[int, ...]) -> None:
    equal = np.abs(centred).max(axis=0) <= _EQUAL * np.abs(rows).max(axis=0)
    if equal.any():
        unit = tuple(int(i) for i in np.unravel_index(int(np.flatnonzero(equal)[0]), shape)) if shape else ()
        where = f"at unit {unit} ({int(equal.sum())} such units)" if shape else "in all of them"
        raise ValueInputError(
            f"a unit must vary among the samples compared, got all equal values {where}; leave such units out"
        )


_BISECTIONS = 60


@dataclass(frozen=True, eq=False)
class EffectSize:
    """Hedges' g of each unit between ``low`` and ``high``; ``sample`` are its replicates, None without drawing."""

    value: Float[np.ndarray, "*unit"]
    low: Float[np.ndarray, "*unit"]
    high: Float[np.ndarray, "*unit"]
    level: float
    method: str
    sample: Float[np.ndarray, "replicate ..."] | None


def hedges_g(
    a: Any,
    b: Any,
    *,
    level: float = 0.95,
    clusters: Any = None,
    replicates: int = 1999,
    rng: np.random.Generator | None = None,
) -> EffectSize:
    """How far apart two groups are, in standard deviations within groups, for each unit of [sample, *unit].

    g = J(m) (mean(a) - mean(b)) / s, s^2 the pooled variance, m = n_a + n_b - 2 (Hedges 1981, eq. 6e). Without
    ``rng`` the interval holds all noncentralities lambda under which the observed t is not in either tail of the
    noncentral t distribution, divided by sqrt(n_a n_b / (n_a + n_b)): exact for normal groups of equal spread. With
    ``rng`` it is the middle of the values of g in bootstrap replicates, which asks for neither.

    Parameters
    ----------
    a, b
        Values of each group ``[sample, *unit]``.
    level
        Coverage of the interval.
    clusters
        What belongs together, an entry for each sample of a, then of b. Drawn as a whole; needs ``rng``.
    replicates
        Bootstrap replicates, with ``rng``.
    rng
        The generator of the bootstrap; None gives the exact interval of normal groups.

    Returns
    -------
    EffectSize
        ``value``, ``low`` and ``high``, per unit.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.stats import hedges_g
    >>> rng = np.random.default_rng(0)
    >>> effect = hedges_g(rng.standard_normal(60) + 1, rng.standard_normal(60))
    >>> bool(effect.low < 1 < effect.high)
    True
    """
    table, labels, shape = check_groups(a, b)
    level = check_share("level", level, 0.95)
    _raise_if_equal_within_groups(table, labels, shape)
    value = _g(table, labels.astype(np.float64)[None], (~labels).astype(np.float64)[None])[0]
    if rng is None:
        if clusters is not None:
            raise ValueInputError("an interval over clusters is drawn at random, got rng None; give rng")
        low, high = _noncentral_interval(value, labels, level)
        return EffectSize(value.reshape(shape), low.reshape(shape), high.reshape(shape), level, "noncentral t", None)
    codes = None if clusters is None else check_codes("clusters", clusters, len(table))
    weights = bootstrap_weights(labels, codes, check_count("replicates", replicates, least=99), check_rng(rng))
    sample = _g(table, weights * labels, weights * ~labels)
    low, high = percentile_interval(sample, level)
    name = "bootstrap" if codes is None else "cluster bootstrap"
    return EffectSize(
        value.reshape(shape), low.reshape(shape), high.reshape(shape), level, name, sample.reshape(-1, *shape)
    )


def _g(
    table: Float64[np.ndarray, "sample unit"],
    first: Float64[np.ndarray, "replicate sample"],
    second: Float64[np.ndarray, "replicate sample"],
) -> Float64[np.ndarray, "replicate unit"]:
    """Hedges' g of weighted samples, a row of weights per replicate."""
    centred = table - table.mean(axis=0)
    moments = []
    for weights in (first, second):
        n = weights.sum(axis=1, keepdims=True)
        mean = weights @ centred / n
        moments.append((n, mean, np.maximum(weights @ centred**2 - n * mean**2, 0)))
    (n1, mean1, square1), (n0, mean0, square0) = moments
    df = n1 + n0 - 2
    deviation = np.sqrt((square1 + square0) / df)
    factor = np.array([[small_sample_factor(float(m))] for m in df[:, 0]])
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(factor * (mean1 - mean0) / deviation)


def _raise_if_equal_within_groups(table: np.ndarray, labels: np.ndarray, shape: tuple[int, ...]) -> None:
    equal = (np.ptp(table[labels], axis=0) == 0) & (np.ptp(table[~labels], axis=0) == 0)
    if equal.any():
        unit = tuple(int(i) for i in np.unravel_index(int(np.flatnonzero(equal)[0]), shape)) if shape else ()
        where = f"at unit {unit} ({int(equal.sum())} such units)" if shape else "in all of them"
        raise ValueInputError(f"a unit must vary within groups, got all equal values {where}; leave such units out")


def _noncentral_interval(
    g: Float64[np.ndarray, " unit"], labels: Bool[np.ndarray, " sample"], level: float
) -> tuple[np.ndarray, np.ndarray]:
    n1, n0 = int(labels.sum()), int((~labels).sum())
    df, root = n1 + n0 - 2, np.sqrt(n1 * n0 / (n1 + n0))
    t = g / small_sample_factor(float(df)) * root
    ends = []
    for share in ((1 + level) / 2, (1 - level) / 2):
        # The distribution function falls as the noncentrality grows.
        below, above = t - 8 - 4 * np.abs(t), t + 8 + 4 * np.abs(t)
        for _ in range(_BISECTIONS):
            middle = (below + above) / 2
            larger = nctdtr(df, middle, t) > share
            below, above = np.where(larger, middle, below), np.where(larger, above, middle)
        ends.append((below + above) / 2 / root)
    return ends[0], ends[1]

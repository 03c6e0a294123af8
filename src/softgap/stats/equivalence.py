"""Equivalence tests, and power by simulation: what a null result may claim."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy import stats

from softgap.errors import ValueInputError
from softgap.inputs import check_share
from softgap.stats.design import Design
from softgap.stats.effects import LEAST_RESIDUAL, Contrast
from softgap.stats.permutation import StatisticTerms, numerator_and_error

__all__ = ["Equivalence", "Power", "detectable", "equivalence"]


@dataclass(frozen=True, eq=False)
class Equivalence:
    """Whether effects lie within plus and minus a margin.

    Attributes
    ----------
    margin, standardized
        The margin, in standard deviations within groups if ``standardized``, else in the units' own scale.
    p
        Of each unit: the larger p of the two one-sided tests. At or below ``alpha`` the unit is ``equivalent``.
    p_all
        For the claim that every unit lies within the margin: the largest p of all.
    bound
        Per unit, the smallest margin that it would be equivalent within; ``bound_all`` is the largest of these:
        "no effect is larger than ``bound_all``".
    """

    margin: float
    standardized: bool
    p: Float[np.ndarray, "*unit"]
    equivalent: Bool[np.ndarray, "*unit"]
    p_all: float
    bound: Float[np.ndarray, "*unit"]
    bound_all: float
    alpha: float


def equivalence(contrast: Contrast, margin: float, *, standardized: bool = True, alpha: float = 0.05) -> Equivalence:
    """Two one-sided Welch tests (TOST; Schuirmann 1987) of every unit of a contrast.

    p = max(P(T > (effect + margin) / error), P(T < (effect - margin) / error)), T of the contrast's degrees of
    freedom. A unit is equivalent exactly if its interval at level 1 - 2 alpha lies within the margin. The claim about
    all units needs no correction: it is made only if every single one is (Berger 1982).

    Parameters
    ----------
    contrast
        Effects and their errors, from ``compare`` or ``compare_table``.
    margin
        The smallest effect that would matter.
    standardized
        Whether the margin is in standard deviations; False takes it in the units of the values.
    alpha
        Chance of a false claim of equivalence.

    Returns
    -------
    Equivalence
        p-values, and which units are equivalent.

    Notes
    -----
    A margin in standard deviations is multiplied by the deviation that was estimated, as if that were known.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.stats import compare, equivalence
    >>> rng = np.random.default_rng(0)
    >>> a, b = rng.standard_normal((400, 2)), rng.standard_normal((400, 2))
    >>> a[:, 1] += 1
    >>> found = equivalence(compare(a, b, rng=rng, permutations=199).contrast, margin=0.5)
    >>> found.equivalent.tolist()
    [True, False]
    """
    alpha = check_share("alpha", alpha, 0.05)
    if not (np.isfinite(margin) and margin > 0):
        raise ValueInputError(f"margin must be a positive number, got {margin!r}; 0.2 standard deviations are small")
    scale = contrast.deviation if standardized else np.ones_like(contrast.deviation)
    error, df = contrast.standard_error, contrast.df
    with np.errstate(divide="ignore"):
        p = np.maximum(
            stats.t.sf((contrast.effect + margin * scale) / error, df),
            stats.t.cdf((contrast.effect - margin * scale) / error, df),
        )
        bound = (np.abs(contrast.effect) + stats.t.ppf(1 - alpha, df) * error) / scale
    return Equivalence(
        margin=float(margin),
        standardized=standardized,
        p=np.asarray(p),
        equivalent=np.asarray(p <= alpha),
        p_all=float(np.max(p)),
        bound=np.asarray(bound),
        bound_all=float(np.max(bound)),
        alpha=alpha,
    )


# Simulated studies, and units that the effect is planted in, one at a time.
_STUDIES, _UNITS = 400, 256


@dataclass(frozen=True, eq=False)
class Power:
    """What a study could have found.

    Attributes
    ----------
    smallest
        The smallest effect in one unit, in standard deviations within groups, that max-T finds with chance ``target``.
    target, critical
        That chance, and what |t| has to reach.
    needed
        The null sample behind it: for each simulated study, the least effect that would have been found there.
    """

    smallest: float
    target: float
    critical: float
    needed: Float64[np.ndarray, " simulation"]

    def at(self, effect: float) -> float:
        """The chance of finding an effect of so many standard deviations."""
        return float((self.needed <= effect).mean())


def detectable(
    prepared: StatisticTerms,
    design: Design,
    critical: float,
    target: float,
    rng: np.random.Generator,
    *,
    label_share: float = 1.0,
) -> Power:
    """Plant effects in permuted data and see from what size on max-T finds them.

    Permuted data hold no effect but all else: the distributions, the sizes of groups, blocks and clusters. An effect
    d in one unit moves t by d / standard error and leaves the residuals as they are, so that the least d with
    t + d / error >= critical is known for each permutation without trying. The quantile of those is the answer.
    ``label_share`` is the share of the labels' variation that covariates leave: the error grows by its square root.
    """
    sampled_units = rng.permutation(prepared.units)[:_UNITS]
    subset = StatisticTerms(
        x=prepared.x[:, sampled_units],
        square=None if prepared.square is None else prepared.square[:, sampled_units],
        linear=None if prepared.linear is None else prepared.linear[:, sampled_units],
        offset=prepared.offset[sampled_units],
        slope=prepared.slope,
        curvature=prepared.curvature,
        total=prepared.total,
        scale=prepared.scale[sampled_units],
    )
    s, root = (
        x.astype(np.float64) for x in numerator_and_error(subset, design.permuted_labels(_STUDIES, rng), slice(None))
    )
    total, left = prepared.total, design.rows - design.blocks - 1
    # x has mean square 1, so that its residual sum of squares is rows - s^2 / total.
    deviation = np.sqrt(np.maximum(design.rows - s**2 / total, LEAST_RESIDUAL * design.rows) / left)
    sign = rng.choice([-1.0, 1.0], size=s.shape)
    error = root / total / math.sqrt(label_share)
    needed = np.sort(np.maximum((critical - sign * s / root) * error / deviation, 0).ravel())
    return Power(float(needed[math.ceil(target * len(needed)) - 1]), target, critical, needed)

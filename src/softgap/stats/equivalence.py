"""Equivalence: "no effect larger than this" as a result, and not the lack of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float
from scipy import stats

from softgap.errors import ValueInputError
from softgap.stats.checked import checked_share
from softgap.stats.contrast import Contrast

__all__ = ["Equivalence", "equivalence"]


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

    Notes
    -----
    A margin in standard deviations is multiplied by the deviation that was estimated, as if that were known.
    """
    alpha = checked_share("alpha", alpha, 0.05)
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

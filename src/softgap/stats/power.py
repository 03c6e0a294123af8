"""Power by simulation: the smallest effect a study would have found."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from softgap.stats.contrast import LEAST_RESIDUAL
from softgap.stats.design import Design
from softgap.stats.relabelling import Prepared, parts

__all__ = ["Power", "detectable"]

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
    prepared: Prepared,
    design: Design,
    critical: float,
    target: float,
    rng: np.random.Generator,
    *,
    label_share: float = 1.0,
) -> Power:
    """Plant effects in relabelled data and see from what size on max-T finds them.

    Relabelled data hold no effect but all else: the distributions, the sizes of groups, blocks and clusters. An effect
    d in one unit moves t by d / standard error and leaves the residuals as they are, so that the least d with
    t + d / error >= critical is known for each relabelling without trying. The quantile of those is the answer.
    ``label_share`` is the share of the labels' variation that covariates leave: the error grows by its square root.
    """
    chosen = rng.permutation(prepared.units)[:_UNITS]
    subset = Prepared(
        x=prepared.x[:, chosen],
        square=None if prepared.square is None else prepared.square[:, chosen],
        linear=None if prepared.linear is None else prepared.linear[:, chosen],
        offset=prepared.offset[chosen],
        slope=prepared.slope,
        curvature=prepared.curvature,
        total=prepared.total,
        scale=prepared.scale[chosen],
    )
    s, root = (x.astype(np.float64) for x in parts(subset, design.relabelled(_STUDIES, rng), slice(None)))
    total, left = prepared.total, design.rows - design.blocks - 1
    # x has mean square 1, so that its residual sum of squares is rows - s^2 / total.
    deviation = np.sqrt(np.maximum(design.rows - s**2 / total, LEAST_RESIDUAL * design.rows) / left)
    sign = rng.choice([-1.0, 1.0], size=s.shape)
    error = root / total / math.sqrt(label_share)
    needed = np.sort(np.maximum((critical - sign * s / root) * error / deviation, 0).ravel())
    return Power(float(needed[math.ceil(target * len(needed)) - 1]), target, critical, needed)

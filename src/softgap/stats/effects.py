"""Hedges' g with an interval: from the noncentral t distribution, or from drawn clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64
from scipy.special import nctdtr

from softgap.errors import ValueInputError
from softgap.stats.checked import checked_codes, checked_count, checked_groups, checked_rng, checked_share
from softgap.stats.contrast import small_sample_factor
from softgap.stats.resampling import drawn_weights, percentile_interval

__all__ = ["EffectSize", "hedges_g"]

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
    clusters
        What belongs together, an entry for each sample of a, then of b. Drawn as a whole; needs ``rng``.
    """
    table, labels, shape = checked_groups(a, b)
    level = checked_share("level", level, 0.95)
    _raise_if_equal(table, labels, shape)
    value = _g(table, labels.astype(np.float64)[None], (~labels).astype(np.float64)[None])[0]
    if rng is None:
        if clusters is not None:
            raise ValueInputError("an interval over clusters is drawn at random, got rng None; give rng")
        low, high = _noncentral_interval(value, labels, level)
        return EffectSize(value.reshape(shape), low.reshape(shape), high.reshape(shape), level, "noncentral t", None)
    codes = None if clusters is None else checked_codes("clusters", clusters, len(table))
    drawn = drawn_weights(labels, codes, checked_count("replicates", replicates, least=99), checked_rng(rng))
    sample = _g(table, drawn * labels, drawn * ~labels)
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


def _raise_if_equal(table: np.ndarray, labels: np.ndarray, shape: tuple[int, ...]) -> None:
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

"""Verdicts of the position lab, each read from the numbers of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.theory.lab import Claim, Verdict
from softgap.theory.position.drift import FALSE_DISCOVERIES, TERMS

if TYPE_CHECKING:
    from softgap.theory.position.lab import MechanismTrend, Position

__all__ = ["position_claims"]

_SAD = "navi-SAD, capacity gap"


# Rounding of a float64 cosine; a real effect of the normaliser would be many orders above.
_ROUNDING = 1e-9


_ONE_TEXT = "one text says nothing about other texts; give a longer file with --text, so that it holds 8 texts or more"


def position_claims(lab: Position) -> tuple[Claim, ...]:
    """One claim after the other, all about the first mechanism."""
    trend = lab.trends[0]
    return (_has_trend(trend), _normaliser(trend), _running_mean(trend), _concentration(trend), _winner(trend))


def _has_trend(trend: MechanismTrend) -> Claim:
    slope, heads, texts = trend.slopes.value, trend.trending, trend.slopes.texts
    rising, falling = int((heads & (slope > 0)).sum()), int((heads & (slope < 0)).sum())
    verdict: Verdict = "holds" if heads.all() else "does not hold" if not heads.any() else "holds only when"
    condition = ""
    if texts < 2:
        verdict, condition = "not decided", _ONE_TEXT
    elif verdict == "holds only when":
        condition = f"the head is one of {rising} that rise or {falling} that fall, of {heads.size}"
    return Claim(
        name="position trend",
        source=_SAD,
        statement=f"The divergence from {trend.mechanism} has a trend with position.",
        verdict=verdict,
        condition=condition,
        numbers={
            "rising": rising,
            "falling": falling,
            "heads": heads.size,
            "texts": texts,
            "false discoveries at most": FALSE_DISCOVERIES,
            "mean_slope": float(slope.mean()),
            "median_size": float(np.median(np.abs(slope))),
        },
    )


def _normaliser(trend: MechanismTrend) -> Claim:
    verdict: Verdict = "not decided"
    condition = f"{trend.mechanism} has no plain normaliser to multiply by"
    if np.isfinite(trend.normaliser_change):
        verdict = "does not hold" if trend.normaliser_change < _ROUNDING else "holds"
        condition = "the cosine does not change when a vector is multiplied by a positive number"
    return Claim(
        name="normaliser",
        source=_SAD,
        statement="The growing normaliser z is the source of the position trend.",
        verdict=verdict,
        condition=condition,
        numbers={
            "change_when_multiplied_by_z": trend.normaliser_change,
            "growth_exponent_of_z": trend.normaliser_growth,
        },
    )


def _running_mean(trend: MechanismTrend) -> Claim:
    map_share = trend.shares[TERMS.index("map")]
    verdict: Verdict = "not decided"
    if np.isfinite(map_share.value):
        # The trend is that of the running mean where what the mechanism adds is a minor part of it, interval included.
        verdict = "holds" if max(abs(map_share.low), abs(map_share.high)) < 0.2 else "does not hold"
    return Claim(
        name="running mean",
        source="softgap",
        statement=f"The trend is that of the divergence from the running mean; {trend.mechanism} adds little to it.",
        verdict=verdict,
        condition="beside it, the share that is left with queries of random direction",
        numbers={
            "share_of_map": map_share.value,
            "low": map_share.low,
            "high": map_share.high,
            "share_with_random_queries": trend.random_share.value,
            "random_low": trend.random_share.low,
            "random_high": trend.random_share.high,
        },
    )


def _concentration(trend: MechanismTrend) -> Claim:
    shares = dict(zip(TERMS, trend.shares, strict=True))
    mean, spread = shares["running mean"], shares["concentration"]
    verdict: Verdict = "not decided"
    if np.isfinite(mean.value):
        verdict = (
            "holds" if spread.low > max(mean.high, 0.0) else "does not hold" if mean.low > spread.high else verdict
        )
    return Claim(
        name="concentration",
        source="softgap",
        statement="The trend comes from a change of softmax's concentration more than from the settling mean.",
        verdict=verdict,
        numbers={
            f"{name}_{key}": getattr(share, key)
            for name, share in (("concentration", spread), ("settling", mean), ("values", shares["values"]))
            for key in ("value", "low", "high")
        },
    )


def _winner(trend: MechanismTrend) -> Claim:
    ordered = sorted(trend.corrections, key=lambda correction: correction.trend_left)
    verdict: Verdict = "not decided"
    if ordered:
        verdict = "holds" if ordered[0].trend_left < 0.5 else "does not hold"
    return Claim(
        name="correction",
        source="softgap",
        statement="Subtracting what explains it removes most of the trend.",
        verdict=verdict,
        condition=f"the winner is '{ordered[0].name}', keeping {ordered[0].variance_left:.1%} of the variance around "
        "the trend; minus uniform is the transform 'control' of `softgap analyze`"
        if ordered
        else "no head has a trend"
        if trend.slopes.texts > 1
        else _ONE_TEXT,
        numbers={
            f"{correction.name}: {key}": value
            for correction in ordered
            for key, value in correction.to_json().items()
            if key != "name"
        },
    )

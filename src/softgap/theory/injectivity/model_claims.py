"""Verdicts of the injectivity lab inside a model, each read from the numbers of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from softgap.theory.lab import Claim, Verdict
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from softgap.theory.injectivity.model import Correlation, ModelInjectivity

__all__ = ["model_claims"]

_SAD = "navi-SAD, capacity gap"


def model_claims(lab: ModelInjectivity) -> tuple[Claim, ...]:
    """One claim after the other."""
    return (
        _rank(lab),
        _distinguishable(lab),
        _confusion_counts(lab),
        *_central(lab),
        _calibration_predicts(lab),
        _matters(lab),
    )


def _rank(lab: ModelInjectivity) -> Claim:
    holds = lab.first > 0
    verdict: Verdict = "does not hold"
    if holds.all():
        verdict = "holds only when"
    elif holds.any():
        verdict = "not decided"
    reached = lab.first[holds]
    condition = f"{int(reached.max())} keys are visible, {int(reached.min())} in the first head" if holds.any() else ""
    return Claim(
        name="rank condition",
        source=_SAD,
        statement="The rank condition of softmax holds in the heads of a trained model.",
        verdict=verdict,
        condition=condition if holds.all() else f"heads that never reach it: {int((~holds).sum())}",
        numbers={
            "d_plus_1": lab.dim + 1,
            "first_position_min": float(reached.min()) - 1 if holds.any() else np.nan,
            "first_position_median": float(np.median(reached)) - 1 if holds.any() else np.nan,
            "first_position_max": float(reached.max()) - 1 if holds.any() else np.nan,
            "log_margin_min": float(lab.margin[..., -1].min()),
            "log_margin_median": float(np.median(lab.margin[..., -1])),
        },
    )


def _distinguishable(lab: ModelInjectivity) -> Claim:
    # Weights are float32: a change of q by its own size moves them by no more than the margin, unseen below this.
    seen = lab.weight_margin > np.finfo(np.float32).eps
    verdict: Verdict = "holds" if seen.all() else "does not hold" if not seen.any() else "holds only when"
    return Claim(
        name="distinguishable",
        source="softgap",
        statement="Where softmax is injective, float32 weights tell queries apart in every direction.",
        verdict=verdict,
        condition=f"the weight margin is above float32 precision, as in {float(seen.mean()):.0%} of the heads"
        if verdict == "holds only when"
        else "",
        numbers={
            "weight_margin_min": float(lab.weight_margin.min()),
            "weight_margin_median": float(np.median(lab.weight_margin)),
            "log_margin_median": float(np.median(lab.margin[..., lab.common])),
        },
    )


def _confusion_counts(lab: ModelInjectivity) -> Claim:
    """Whether linear maps confuse more queries than softmax, over all heads."""
    rate = lab.rate
    known = {
        name: lab.confused[i]
        for i, name in enumerate(lab.mechanisms)
        if lab.linear[i] and np.isfinite(lab.confused[i].value)
    }
    worse = [name for name, difference in known.items() if difference.sign > 0]
    verdict: Verdict = "not decided"
    if known:
        verdict = "holds" if len(worse) == len(known) else "does not hold" if not worse else "holds only when"
    return Claim(
        name="semantic confusion",
        source=_SAD,
        statement="Linear attention confuses queries of a real text that softmax tells apart.",
        verdict=verdict,
        condition=f"the map is one of: {', '.join(worse)}" if verdict == "holds only when" else "",
        numbers={
            name: float(np.nanmean(rate[i])) for i, name in enumerate(lab.mechanisms) if np.isfinite(rate[i]).any()
        },
    )


def _central(lab: ModelInjectivity) -> tuple[Claim, ...]:
    by_measure = {c.measure: c for c in lab.correlations if c.mechanism == "elu1"}
    fine, unmet = by_measure["softmax confusion"], by_measure["elu1 confusion - softmax confusion"]
    none_lost = not np.nanmax(lab.rate[lab.of("elu1")]) > 0
    return (
        Claim(
            name="fine distinctions",
            source=_SAD,
            statement="Heads that need fine distinctions (low softmax confusion) show high divergence from elu1.",
            verdict=_verdict_of_sign(fine, -1),
            condition=_at_equal_focus(fine),
            numbers=_numbers(fine),
        ),
        Claim(
            name="lost distinctions",
            source=_SAD,
            statement="Heads whose distinctions elu1 loses (confusion above that of softmax) show high divergence.",
            verdict="not decided" if none_lost else _verdict_of_sign(unmet, 1),
            condition="elu1 confuses no two queries in any head; raise near" if none_lost else _at_equal_focus(unmet),
            numbers=_numbers(unmet),
        ),
        Claim(
            name="margins",
            source="softgap",
            statement="Heads in which softmax tells queries apart firmly (large weight margin) show high divergence.",
            verdict=_verdict_of_sign(by_measure["weight margin"], 1),
            condition=_at_equal_focus(by_measure["weight margin"]),
            numbers={
                **_numbers(by_measure["weight margin"]),
                "log_margin": by_measure["log margin"].plain.value,
                "log_margin_low": by_measure["log margin"].plain.low,
                "log_margin_high": by_measure["log margin"].plain.high,
            },
        ),
    )


def _calibration_predicts(lab: ModelInjectivity) -> Claim:
    correlations = [c for c in lab.correlations if c.mechanism == "fitted" and c.measure == "softmax confusion"]
    return Claim(
        name="calibrated divergence",
        source="softgap",
        statement="Heads that need fine distinctions show high divergence from a linear attention fitted to them.",
        verdict=_verdict_of_sign(correlations[0], -1) if correlations else "not decided",
        condition="" if correlations else "the mechanism 'fitted' with the parameters of a calibration was not given",
        numbers=_numbers(correlations[0]) if correlations else {},
    )


def _matters(lab: ModelInjectivity) -> Claim:
    nearer = lab.nearer
    verdict: Verdict = "not decided"
    if lab.collision.exact and nearer.sign:
        verdict = "does not hold" if nearer.sign > 0 else "holds"
    mean = {name: float(lab.divergence[lab.of(name)].mean()) for name in ("relu2_scores", "taylor2", "elu1", BASELINE)}
    return Claim(
        name="injectivity matters",
        source=_SAD,
        statement="It is injectivity that brings a mechanism near to softmax: taylor2 (injective) is nearer than "
        "relu2_scores (q and 7 q collide).",
        verdict=verdict,
        numbers={
            **mean,
            "difference": nearer.value,
            "low": nearer.low,
            "high": nearer.high,
            "level": nearer.level,
            "collision_distance": lab.collision.distance,
        },
    )


def _verdict_of_sign(correlation: Correlation, expected: int) -> Verdict:
    sign = correlation.plain.sign
    return "not decided" if sign == 0 else "holds" if sign == expected else "does not hold"


def _at_equal_focus(correlation: Correlation) -> str:
    partial = correlation.at_equal_focus
    return f"at equal concentration {partial.value:.2f} [{partial.low:.2f}, {partial.high:.2f}]"


def _numbers(correlation: Correlation) -> dict[str, float]:
    plain = correlation.plain
    return {
        "spearman": plain.value,
        "low": plain.low,
        "high": plain.high,
        "level": plain.level,
        "heads": plain.heads,
        "kv_groups": plain.clusters,
    }

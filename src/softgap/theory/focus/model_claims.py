"""Verdicts of the focus lab inside a model, each read from the numbers of the run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from softgap.theory.focus.concentration import FAMILIES, FamilyPoint, closes_gap
from softgap.theory.lab import Claim, Verdict
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from softgap.theory.focus.concentration import Effect
    from softgap.theory.focus.model import Capacity, MechanismFocus, Prediction, PredictionFailure

__all__ = ["all_claims"]

_ARTICLE = "Su 2023"
_NEAR = 0.1


def all_claims(
    predictions: Sequence[Prediction],
    failure: PredictionFailure,
    without: NDArray[np.float64],
    mechanisms: Sequence[MechanismFocus],
    capacity: Capacity,
    ranks: Mapping[tuple[str, str], NDArray[np.int64]],
    effects: Sequence[Effect],
    family_points: Sequence[FamilyPoint],
    corner: int,
) -> tuple[Claim, ...]:
    """One verdict per statement, in the order of the lab's page."""
    table = {mechanism.name: mechanism for mechanism in mechanisms}
    return (
        gaussian_theory(predictions),
        first_key(predictions, failure),
        general_formula(mechanisms),
        near_uniform(table["elu1"], table[BASELINE]),
        classical_divergence(table["elu1"], table[BASELINE]),
        divergence_is_focus(table["elu1"], table["softmax"], without),
        floor_below(mechanisms),
        constant_state(capacity),
        rank_argument(ranks, corner),
        *focusing(effects),
        absolute_positions(mechanisms),
        more_features(family_points),
    )


def gaussian_theory(predictions: Sequence[Prediction]) -> Claim:
    """How near each rung comes, and which assumption costs most."""
    rungs = predictions[:4]
    best = min(rungs, key=lambda rung: rung.error)
    steps = {after.name: before.error - after.error for before, after in itertools.pairwise(rungs)}
    helped = max(steps, key=lambda name: steps[name])
    verdict: Verdict = (
        "holds" if rungs[0].error < _NEAR else "holds only when" if best.error < _NEAR else "does not hold"
    )
    numbers = {f"{rung.name}: median log error": rung.error for rung in predictions}
    numbers |= {f"{rung.name}: predicted / measured": rung.ratio for rung in rungs}
    numbers |= {f"{rung.name}: rank correlation": rung.correlation.value for rung in (rungs[0], best)}
    condition = {
        "holds": "",
        "holds only when": f"it is corrected: {best.name}",
        "does not hold": f"the step that helps most is '{helped}'",
    }[verdict]
    return Claim(
        "Gaussian theory",
        _ARTICLE,
        "S of a real head equals exp(-gamma^2 / 2) for Gaussian keys within a tenth, in the median.",
        verdict,
        condition,
        numbers,
    )


def first_key(predictions: Sequence[Prediction], failure: PredictionFailure) -> Claim:
    """Whether the first key, an outlier among the scores, is what the Gaussian theory fails on."""
    whole, without = predictions[2].error, predictions[3].error
    helps, follows = without < whole, failure.with_first.sign > 0
    thirds = np.array_split(np.arange(len(failure.error)), min(3, len(failure.error)))
    return Claim(
        "why the theory fails",
        "softgap",
        "The Gaussian theory fails where the first key stands out: leaving it out helps, and the error grows with it.",
        "holds" if helps and follows else "does not hold",
        "what is left goes with the skewness of the other scores" if failure.with_skewness.sign > 0 else "",
        {
            "error": whole,
            "error without the first key": without,
            "rank correlation with its standing out": failure.with_first.value,
            "low": failure.with_first.low,
            "high": failure.with_first.high,
            "of what is left with skewness": failure.with_skewness.value,
            **{f"error, layers {x[0]} to {x[-1]}": float(np.median(failure.error[x])) for x in thirds},
        },
    )


def general_formula(mechanisms: Sequence[MechanismFocus]) -> Claim:
    """Exactness on real features."""
    gaps = {mechanism.name: mechanism.gap for mechanism in mechanisms if np.isfinite(mechanism.gap)}
    return Claim(
        "general formula",
        _ARTICLE,
        "S of each non-negative linear map follows from mean and covariance of its features in every head.",
        "holds" if gaps and max(gaps.values()) < 1e-3 else "does not hold" if gaps else "not decided",
        "an identity; differences are float32 rounding of the weights" if gaps else "no such map was asked for",
        {f"largest difference, {name}": gap for name, gap in gaps.items()},
    )


def near_uniform(elu1: MechanismFocus, uniform: MechanismFocus) -> Claim:
    """S of elu1 and the distance of its output from the mean of values."""
    s, far = float(np.nanmean(elu1.sparsity)), float(np.nanmean(elu1.from_uniform))
    return Claim(
        "elu1 is nearly uniform",
        "softgap",
        "elu1 weights are nearly uniform (S above .98), so its output is nearly the mean of the visible values.",
        "holds" if s > 0.98 and far < 0.01 else "does not hold",
        numbers={
            "S measured": s,
            "S by the general formula": float(np.nanmean(elu1.general)),
            "S by the i.i.d. formula": float(np.nanmean(elu1.iid)),
            "lowest head": float(np.nanmin(elu1.sparsity)),
            "1 - cos to the mean of values": far,
        },
    )


def classical_divergence(elu1: MechanismFocus, uniform: MechanismFocus) -> Claim:
    """Divergence from elu1 against divergence from uniform."""
    difference = np.abs(elu1.from_softmax - uniform.from_softmax)
    same = _spearman(elu1.from_softmax, uniform.from_softmax)
    return Claim(
        "classical divergence is distance to the mean",
        "softgap",
        "The divergence from elu1 is, head by head, the divergence from the mean of the visible values.",
        "holds" if same > 0.95 and float(np.mean(difference)) < 0.02 else "does not hold",
        numbers={
            "mean divergence from elu1": float(np.mean(elu1.from_softmax)),
            "mean divergence from uniform": float(np.mean(uniform.from_softmax)),
            "mean difference over heads": float(np.mean(difference)),
            "rank correlation of both": same,
        },
    )


def divergence_is_focus(elu1: MechanismFocus, softmax: MechanismFocus, without: NDArray[np.float64]) -> Claim:
    """Whether the classical divergence orders heads as their concentration does, with and without the first key."""
    whole, later_keys = (_spearman(elu1.from_softmax, s) for s in (softmax.sparsity, without))
    return Claim(
        "classical divergence is concentration",
        "softgap",
        "The divergence from elu1 orders heads by how focused their softmax is (rank correlation with S below -.7).",
        "holds" if whole < -0.7 else "holds only when" if later_keys < -0.7 else "does not hold",
        "S is taken without the first key" if whole >= -0.7 > later_keys else "",
        {"rank correlation with S": whole, "with S without the first key": later_keys},
    )


def floor_below(mechanisms: Sequence[MechanismFocus]) -> Claim:
    """The Eckart-Young floor under every mechanism with a feature map."""
    mapped = [mechanism for mechanism in mechanisms if mechanism.features is not None]
    least = min(float(np.min(mechanism.block_error - mechanism.floor)) for mechanism in mapped)
    nearest = min(mapped, key=lambda mechanism: float(np.mean(mechanism.block_error)))
    return Claim(
        "floor of weights",
        "softgap",
        "No map with r features gets closer to the off-diagonal blocks of softmax than their singular values beyond r.",
        "holds" if least > -1e-4 else "does not hold",
        f"nearest: {nearest.name}, with {nearest.features} features",
        {
            "least error above the floor": least,
            "error of the nearest": float(np.mean(nearest.block_error)),
            "its floor": float(np.mean(nearest.floor)),
            "error of elu1": float(np.mean(next(x for x in mapped if x.name == "elu1").block_error)),
        },
    )


def constant_state(capacity: Capacity) -> Claim:
    """The capacity exponent across heads, without the column of the first key; with it beside."""
    if not np.isfinite(capacity.exponent).all():
        return Claim(
            "constant state", "softgap", _STATE, "not decided", "a longer text, for blocks of two sizes or more"
        )
    exponent = capacity.exponent.reshape(len(capacity.energies), -1)
    # A head has a constant state only where every share of the energy has one.
    slow = exponent.max(axis=0) < _SLOW
    flat = float(slow.mean())
    first, last = capacity.sizes[0], capacity.sizes[-1]
    numbers: dict[str, float] = {}
    for i, energy in enumerate(capacity.energies):
        low, middle, high = np.quantile(exponent[i], [0.1, 0.5, 0.9])
        numbers |= {
            f"{energy:.1%} of the energy: exponent, median": float(middle),
            f"{energy:.1%}: p10": float(low),
            f"{energy:.1%}: p90": float(high),
            f"{energy:.1%}: median rank at {first}": float(np.median(capacity.ranks[i, 0])),
            f"{energy:.1%}: median rank at {last}": float(np.median(capacity.ranks[i, -1])),
            f"{energy:.1%} with the sink: exponent, median": float(np.median(capacity.exponent_with_sink[i])),
            f"{energy:.1%} with the sink: median rank at {last}": float(np.median(capacity.ranks_with_sink[i, -1])),
        }
    return Claim(
        "constant state",
        "softgap; compare Effective State-Size, arXiv:2504.19561",
        _STATE,
        "holds" if slow.mean() >= 0.9 else "does not hold" if flat == 0 else "holds only when",
        f"the head is one of the {flat:.0%} whose rank grows slower than length^{_SLOW:g}" if 0 < flat < 0.9 else "",
        {
            **numbers,
            "features for a weight error of .1, median": float(np.median(capacity.needed)),
            "p90 of them": float(np.quantile(capacity.needed, 0.9)),
            "with the sink, median": float(np.median(capacity.needed_with_sink)),
            "with the sink, p90": float(np.quantile(capacity.needed_with_sink, 0.9)),
        },
    )


_SLOW = 0.25
_STATE = (
    "A state of constant size could hold a head's weights however long the text (90, 99 and 99.9 % of the energy of "
    "its blocks, without the column of the first key)."
)


def rank_argument(ranks: Mapping[tuple[str, str], NDArray[np.int64]], corner: int) -> Claim:
    """Rank with the model's mask and with the mask lifted."""
    middle = {f"{name} {mask}": float(np.median(values)) for (name, mask), values in ranks.items()}
    encoder = middle["elu1 bidirectional"] < middle["softmax bidirectional"]
    decoder = middle["elu1 causal"] < middle["softmax causal"]
    blocks = middle["elu1 block"] < middle["softmax block"]
    return Claim(
        "rank bottleneck",
        _ARTICLE,
        "Linear attention falls short because the rank of its matrix is limited.",
        "holds" if encoder and decoder else "holds only when" if encoder and blocks else "does not hold",
        "the mask is lifted, as in an encoder; under the causal mask only off-diagonal blocks show it"
        if encoder and blocks and not decoder
        else "",
        {"tokens": corner, **middle},
    )


def focusing(effects: Sequence[Effect]) -> tuple[Claim, ...]:
    """The three pieces of advice."""
    s = {(effect.change, effect.amount, effect.mechanism): effect for effect in effects}
    names = list(dict.fromkeys(effect.mechanism for effect in effects))

    def sparser_mechanisms(change: str, far: float, near: float) -> list[str]:
        return [n for n in names if s[change, far, n].sparsity < 0.9 * s[change, near, n].sparsity]

    claims = []
    for change, words in (("scale q", "larger queries"), ("spread keys", "keys further apart")):
        better = sparser_mechanisms(change, 4.0, 1.0)
        claims.append(
            Claim(
                change,
                _ARTICLE,
                f"Softmax focuses more with {words}.",
                "holds" if "softmax" in better else "does not hold",
                f"four times also lowers S by a tenth for: {', '.join(x for x in better if x != 'softmax') or 'none'}",
                {f"softmax x {amount:g}": s[change, amount, "softmax"].sparsity for amount in (0.5, 1.0, 2.0, 4.0)},
            )
        )
    relu2 = [s["shift bias", amount, "relu2_scores"] for amount in (1.0, 0.0, -1.0, -2.0, -4.0)]
    still = abs(s["shift bias", -4.0, "softmax"].sparsity - s["shift bias", 0.0, "softmax"].sparsity)
    focuses = relu2[3].sparsity < 0.9 * relu2[1].sparsity
    costs = relu2[3].empty > 0.05
    claims.append(
        Claim(
            "shift bias",
            _ARTICLE,
            "A negative bias of the keys makes relu^2 attention focus, and does nothing to softmax.",
            "does not hold" if not focuses or still > 1e-3 else "holds only when" if costs else "holds",
            f"queries may go without any key: {relu2[3].empty:.0%} of them at two deviations"
            if focuses and costs
            else "",
            {
                **{f"relu2 S at {effect.amount:+g}": effect.sparsity for effect in relu2},
                **{f"relu2 empty at {effect.amount:+g}": effect.empty for effect in relu2[2:]},
                "softmax moves by": still,
            },
        )
    )
    return tuple(claims)


def absolute_positions(mechanisms: Sequence[MechanismFocus]) -> Claim:
    """Columns against distance, for softmax and for linear maps."""
    linear = [
        mechanism
        for mechanism in mechanisms
        if mechanism.features is not None and np.isfinite(mechanism.columns).any() and mechanism.name != "decay"
    ]
    columns = {mechanism.name: float(np.nanmedian(mechanism.columns)) for mechanism in linear}
    distance = {mechanism.name: float(np.nanmedian(mechanism.distance)) for mechanism in linear}
    more = [name for name in columns if columns[name] > distance[name]]
    softmax = next(mechanism for mechanism in mechanisms if mechanism.name == "softmax")
    few = 0 < len(more) < len(columns)
    return Claim(
        "absolute positions",
        _ARTICLE,
        "Linear attention expresses absolute positions (columns) rather than distances.",
        "holds" if len(more) == len(columns) else "holds only when" if few else "does not hold",
        f"the map is one of: {', '.join(more)}" if few else "",
        {
            "softmax columns": float(np.nanmedian(softmax.columns)),
            "softmax distance": float(np.nanmedian(softmax.distance)),
            **{f"{name} columns": value for name, value in columns.items()},
            **{f"{name} distance": value for name, value in distance.items()},
        },
    )


def more_features(family_points: Sequence[FamilyPoint]) -> Claim:
    """What favor and polynomial maps gain on real heads."""
    numbers = {}
    for family in FAMILIES:
        points = [point for point in family_points if point.family == family]
        for point in (points[0], points[-1]):
            numbers[f"{family} {point.setting:g}: weight error"] = point.weight_error
            numbers[f"{family} {point.setting:g}: S"] = point.sparsity
    numbers["softmax: S"] = family_points[-1].sparsity
    closing = [family for family in FAMILIES if closes_gap(family_points, family)]
    return Claim(
        "more features",
        _ARTICLE,
        "More features close the gap to softmax in real heads (the error of the weights at least halves).",
        "holds" if len(closing) == len(FAMILIES) else "holds only when" if closing else "does not hold",
        f"the family is {' or '.join(closing)}" if 0 < len(closing) < len(FAMILIES) else "",
        numbers,
    )


def _spearman(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(x.ravel(), y.ravel(), nan_policy="omit").statistic)

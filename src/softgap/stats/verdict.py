"""The verdict of a comparison: separated, not separated, or not enough data.

The rule, so that it can be written down before the data are seen. Let ``margin`` be the smallest effect in one unit
that would matter, in standard deviations within groups.

1. A comparison is *able* if it finds an effect of the margin with the power it was asked for (``power.smallest`` is at
   most the margin).
2. It is *convincing* if it is able and p for any difference is at most alpha; or if it is not able, but the near end
   of a simultaneous interval, |effect| - critical x error, lies beyond the margin in a unit that the first comparison
   found with the same sign.
3. **Separated**: the first comparison and every control are convincing, and either a unit survives every one of them
   with the same sign, or the controls hold all named confounders fixed at once (``joint``), so that p for any
   difference speaks for the units together. A control that was wanted and could not be made is not convincing.
4. **Not separated**: one of them is able and not convincing, or all are convincing and no unit survives.
5. **Not enough data**: otherwise.

So a small study cannot be believed on a small p alone, and a study that could not have found the effect cannot say that
there is none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from softgap.errors import ShapeError, ValueInputError
from softgap.inputs import as_items
from softgap.stats.comparison import Comparison
from softgap.stats.equivalence import equivalence

__all__ = ["OUTCOMES", "Verdict", "VerdictStep", "verdict"]

OUTCOMES = ("separated", "not separated", "not enough data")
"""All that a verdict can be."""

Unit = tuple[int, ...]


@dataclass(frozen=True)
class VerdictStep:
    """One comparison under the rule.

    ``smallest`` is the effect it could find, ``bound`` the one that no unit exceeds with this ``confidence`` (both in
    standard deviations), ``units`` those that it found and that the first comparison found with the same sign.
    """

    name: str
    able: bool
    convincing: bool
    p: float
    smallest: float
    bound: float
    confidence: float
    units: tuple[Unit, ...]

    def __str__(self) -> str:
        units = f"{_units(self.units)} found" if self.units else "no single unit found"
        reach = "no effect" if math.isinf(self.smallest) else f"effects from {self.smallest:.2f} standard deviations"
        return (
            f"{self.name}: {'convincing' if self.convincing else 'not convincing'}, p = {self.p:.2g} for any "
            f"difference, {units}; it could find {reach}, and with {self.confidence:.0%} confidence no effect is "
            f"larger than {self.bound:.2f}"
        )


@dataclass(frozen=True)
class Verdict:
    """What the comparisons say together; ``steps`` are what it rests on, ``units`` those found in every one of them."""

    outcome: str
    sentence: str
    steps: tuple[VerdictStep, ...]
    units: tuple[Unit, ...]
    margin: float
    alpha: float

    @property
    def caution(self) -> str:
        """Why a small p does not separate the groups, in one sentence; empty where they are, or where no p is small."""
        small = next((step for step in self.steps if step.p <= self.alpha), None)
        if small is None or self.outcome == "separated":
            return ""
        start = f"p = {small.p:.2g} in {small.name} looks significant, but"
        failed = next((step for step in self.steps if not step.convincing), None)
        if failed is None:
            return f"{start} it counts only if every control that was asked for finds the same units."
        if failed.able:
            return f"{start} {failed.name} could have found such a difference and did not (p = {failed.p:.2g})."
        reach = "no effect" if math.isinf(failed.smallest) else f"only effects from {failed.smallest:.2f} on"
        return (
            f"{start} {reach} can be found in {failed.name}, so that a difference counts only if the interval of a "
            f"single unit lies beyond {self.margin:g}; none does."
        )

    def __str__(self) -> str:
        return "\n".join([self.sentence, *filter(None, [self.caution]), *map(str, self.steps)])


def verdict(
    comparison: Comparison,
    *,
    margin: float,
    controls: Mapping[str, Comparison] = MappingProxyType({}),
    impossible: Mapping[str, str] = MappingProxyType({}),
    joint: Collection[str] = (),
) -> Verdict:
    """Apply the rule of this page to a comparison and its controls by name: "length matched", "confirmation", ...

    All comparisons must be of the same units, alpha and power. ``impossible`` are controls that were wanted and could
    not be made, with the reason. ``joint`` names the controls that hold every confounder fixed at once.
    """
    if not (np.isfinite(margin) and margin > 0):
        raise ValueInputError(f"margin must be a positive number, got {margin!r}; 0.5 standard deviations are usual")
    for name, control in controls.items():
        if control.p.shape != comparison.p.shape:
            raise ShapeError(
                f"a control must be of the same units, got {list(control.p.shape)} in '{name}' for "
                f"{list(comparison.p.shape)}; compare the same table"
            )
        if control.alpha != comparison.alpha or control.power.target != comparison.power.target:
            raise ValueInputError(
                f"a control must keep alpha {comparison.alpha:g} and power {comparison.power.target:g}, got "
                f"{control.alpha:g} and {control.power.target:g} in '{name}'; compare with the same options"
            )
    first = _step("all samples", comparison, comparison, margin)
    steps = (first, *(_step(name, control, comparison, margin) for name, control in controls.items()))
    units = tuple(unit for unit in first.units if all(unit in step.units for step in steps))
    joint_names = set(as_items(joint))
    controlled = bool(joint_names) and joint_names <= set(controls)
    outcome = _outcome(steps, survives=bool(units) or not first.units or controlled)
    sentence = _sentence(outcome, steps, units, margin)
    if outcome == "separated" and impossible:
        name, reason = next(iter(impossible.items()))
        outcome, sentence = OUTCOMES[2], f"Not enough data: the control '{name}' could not be made ({reason})."
    return Verdict(outcome, sentence, steps, units, float(margin), comparison.alpha)


def _outcome(steps: tuple[VerdictStep, ...], *, survives: bool) -> str:
    failed = [step for step in steps if not step.convincing]
    if not failed:
        return "separated" if survives else "not separated"
    return "not separated" if any(step.able for step in failed) else "not enough data"


def _step(name: str, comparison: Comparison, first: Comparison, margin: float) -> VerdictStep:
    able = comparison.power.smallest <= margin
    first_units = set(first.significant_units())
    same = np.sign(comparison.effect) == np.sign(first.effect)
    units = tuple(unit for unit in comparison.significant_units() if unit in first_units and bool(same[unit]))
    p = comparison.omnibus.any.p
    if able:
        convincing = p <= comparison.alpha
    else:
        exceeds_margin = _near_end(comparison) >= margin
        units = tuple(unit for unit in units if bool(exceeds_margin[unit]))
        convincing = bool(units)
    bound = equivalence(comparison.contrast, margin, alpha=comparison.alpha).bound_all
    return VerdictStep(name, able, convincing, p, comparison.power.smallest, bound, 1 - comparison.alpha, units)


def _near_end(comparison: Comparison) -> np.ndarray:
    """The near end of the simultaneous interval of each unit's effect, in standard deviations."""
    if math.isinf(comparison.critical):
        return np.full(comparison.p.shape, -np.inf)
    contrast = comparison.contrast
    with np.errstate(divide="ignore", invalid="ignore"):
        near = (np.abs(contrast.effect) - comparison.critical * contrast.standard_error) / contrast.deviation
    return np.where(np.isnan(near), -np.inf, near)


def _units(units: tuple[Unit, ...]) -> str:
    return "1 unit" if len(units) == 1 else f"{len(units)} units"


def _sentence(outcome: str, steps: tuple[VerdictStep, ...], units: tuple[Unit, ...], margin: float) -> str:
    controls = ", ".join(step.name for step in steps[1:])
    after = f" after controls ({controls})" if controls else ", without any control"
    if outcome == "separated":
        subject = _units(units) if units else "the units together"
        return f"Separated: the groups differ in {subject}{after}."
    if outcome == "not separated":
        silent = [step for step in steps if step.able and not step.convincing]
        if not silent:
            step = next((step for step in steps if not step.units), steps[-1])
            return (
                f"Not separated: {step.name} differs as a whole (p = {step.p:.2g}), but not in the "
                f"{_units(steps[0].units)} found in all samples."
            )
        step = silent[0]
        return (
            f"Not separated: {step.name} could have found an effect of {margin:g} standard deviations in one unit and "
            f"did not; with {step.confidence:.0%} confidence no effect there is larger than {step.bound:.2f}."
        )
    step = next(step for step in steps if not step.convincing)
    reach = "no effect at all" if math.isinf(step.smallest) else f"only effects from {step.smallest:.2f} on"
    return (
        f"Not enough data: an effect of {margin:g} standard deviations in one unit would matter, and {step.name} could "
        f"find {reach}; use more samples."
    )

"""The findings of a comparison of two groups, as values and as sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool

from softgap.analysis.comparison_data import BASELINES
from softgap.analysis.features import FeatureTable
from softgap.analysis.preregistration import Preregistration
from softgap.deprecation import DeprecatedAttribute
from softgap.stats import (
    OUTCOMES,
    Comparison,
    Equivalence,
    Incremental,
    Kappa,
    LabelNoise,
    Recurrence,
    Split,
    Verdict,
    auroc,
    hedges_g,
)
from softgap.trajectories.run import Displayed

__all__ = ["ComparisonFindings", "Reliability", "top_units"]

_LISTED = 10


@dataclass(frozen=True, eq=False)
class Reliability:
    """What wrong labels would do, and how far a second scorer agrees."""

    noise: LabelNoise | None
    without_noise: str
    kappa: Kappa | None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        document: dict[str, Any] = {"noise": None, "kappa": None}
        if self.noise is not None:
            shares = {outcome: self.noise.share(outcome).tolist() for outcome in OUTCOMES}
            document["noise"] = {
                "rates": self.noise.rates.tolist(),
                "outcomes": shares,
                "kept": self.noise.replication_rate.tolist(),
            }
        elif self.without_noise:
            document["noise_impossible"] = self.without_noise
        if self.kappa is not None:
            names = ("value", "low", "high", "agreement", "chance")
            document["kappa"] = {name: getattr(self.kappa, name) for name in names}
            document["kappa"] |= {"table": self.kappa.table.tolist(), "categories": list(self.kappa.categories)}
        return document


@dataclass(frozen=True, eq=False)
class ComparisonFindings(Displayed):
    """Everything that a comparison says.

    Attributes
    ----------
    verdict
        First of all: separated, not separated, or not enough data, after which controls.
    status, log_entries
        Planned or exploratory, and the study's log of everything that was tried.
    comparison, controls, impossible
        Of all samples, of each control by name, and what could not be computed, with the reason.
    table, varying
        The family: its modes and heads, and which units vary at all.
    top
        The largest units with Hedges' g and AUROC, both with intervals.
    """

    preregistration: Preregistration
    status: str
    log_entries: tuple[dict[str, Any], ...]
    table: FeatureTable
    varying: Bool[np.ndarray, "mode head"]
    left_out: Mapping[str, int]
    source: Mapping[str, Any]
    split: Split | None
    opened: bool
    reliability: Reliability
    comparison: Comparison
    controls: Mapping[str, Comparison]
    impossible: Mapping[str, str]
    verdict: Verdict
    equivalent: Equivalence
    incremental: Incremental | None
    recurring: Recurrence | None
    top: tuple[dict[str, Any], ...]

    plan = DeprecatedAttribute("preregistration")
    kept = DeprecatedAttribute("varying")
    tried = DeprecatedAttribute("log_entries")
    found = DeprecatedAttribute("surviving_units")

    def __repr__(self) -> str:
        return f"<ComparisonFindings: {self.verdict.sentence}>"

    def unit(self, index: int) -> dict[str, Any]:
        """Where a unit of the family lies: its mode, layer and head."""
        mode, head = (int(i[index]) for i in np.nonzero(self.varying))
        return {
            "mode": str(self.table.modes[mode]),
            "layer": int(self.table.layer[head]),
            "head": int(self.table.head[head]),
        }

    def surviving_units(self) -> list[dict[str, Any]]:
        """Units that differ after max-T and every control."""
        return [self.unit(unit[0]) for unit in self.verdict.units]

    @property
    def equivalence_sentence(self) -> str:
        """How large an effect can still be, with its confidence, and how many units are within the margin."""
        tested = self.equivalent
        return (
            f"With {1 - tested.alpha:.0%} confidence no effect is larger than {tested.bound_all:.2f} standard "
            f"deviations. {int(tested.equivalent.sum()):,} of {tested.equivalent.size:,} units lie within "
            f"{tested.margin:g}, each tested by itself."
        )

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; NaN stays NaN."""
        first = self.comparison
        return {
            "verdict": {
                "outcome": self.verdict.outcome,
                "sentence": self.verdict.sentence,
                "steps": [{**asdict(step), "units": [unit[0] for unit in step.units]} for step in self.verdict.steps],
                "units": self.surviving_units(),
            },
            "status": self.status,
            "plan": self.preregistration.to_json(),
            "plan_hash": self.preregistration.hash,
            "source": dict(self.source),
            "groups": list(first.contrast.groups),
            "sizes": list(first.contrast.sizes),
            "exchange": first.contrast.kind,
            "left_out": dict(self.left_out),
            "family": {
                "modes": [{**asdict(mode), "name": str(mode)} for mode in self.table.modes],
                "skipped": self.table.skipped,
                "heads": len(self.table.layer),
                "collapsed": self.table.collapsed,
                "units": int(self.varying.sum()),
                "all_equal": int((~self.varying).sum()),
                "tie_rate": self.table.tie_rate,
                "unequal_spread": int(first.contrast.unequal.sum()),
            },
            "comparison": _tests(first),
            "controls": {name: _tests(control) for name, control in self.controls.items()},
            "impossible": dict(self.impossible),
            "equivalence": {
                "margin": self.equivalent.margin,
                "confidence": 1 - self.equivalent.alpha,
                "equivalent": int(self.equivalent.equivalent.sum()),
                "p_all": self.equivalent.p_all,
                "bound_all": self.equivalent.bound_all,
            },
            "top": [{**self.unit(row["unit"]), **row} for row in self.top],
            "beyond_baselines": self._beyond(),
            "recurrence": self._recurrence(),
            "reliability": self.reliability.to_json(),
            "confirmation": None
            if self.split is None
            else {"hash": self.split.hash, "fraction": self.split.fraction, "opened": self.opened},
            "tried": list(self.log_entries),
            "units": self._units(),
        }

    def _beyond(self) -> dict[str, Any] | None:
        if self.incremental is None:
            return None
        incremental = self.incremental
        return {
            "baselines": list(BASELINES),
            "baseline": _interval(incremental.baseline),
            "combined": _interval(incremental.combined),
            "difference": _interval(incremental.difference),
            "p": incremental.null.p,
        }

    def _recurrence(self) -> dict[str, Any] | None:
        if self.recurring is None:
            return None
        recurrence = self.recurring
        heads = np.flatnonzero(self.varying.all(axis=0))
        best = np.argsort(-recurrence.counts, kind="stable")[:_LISTED]
        return {
            "top": recurrence.top,
            "modes": len(self.table.modes),
            "recurring": recurrence.recurring.tolist(),
            "p_recurring": recurrence.p_recurring.tolist(),
            "heads": [
                {
                    "layer": int(self.table.layer[heads[i]]),
                    "head": int(self.table.head[heads[i]]),
                    "count": int(recurrence.counts[i]),
                    "p": float(recurrence.p_head[i]),
                }
                for i in best
            ],
        }

    def _units(self) -> dict[str, list[Any]]:
        """A column each, so that a family of thousands stays readable."""
        mode, head = np.nonzero(self.varying)
        contrast = self.comparison.contrast
        columns: dict[str, Any] = {
            "mode": mode,
            "layer": self.table.layer[head],
            "head": self.table.head[head],
            "effect": contrast.effect,
            "low": contrast.low,
            "high": contrast.high,
            "g": contrast.g,
            "t": contrast.t,
            "p": self.comparison.p,
            "p_max": self.comparison.p_max,
            "q": self.comparison.q,
            "bound": self.equivalent.bound,
        }
        return {name: np.asarray(values).tolist() for name, values in columns.items()}


def top_units(
    comparison: Comparison,
    values: np.ndarray,
    first: Bool[np.ndarray, " sample"],
    clusters: np.ndarray | None,
    rng: np.random.Generator,
) -> tuple[dict[str, Any], ...]:
    """The units with the largest |t|: Hedges' g and AUROC of all samples, with intervals that know of clusters."""
    largest = np.argsort(-np.abs(comparison.contrast.t), kind="stable")[:_LISTED]
    a, b = values[first][:, largest], values[~first][:, largest]
    ordered_clusters = None if clusters is None else np.concatenate([clusters[first], clusters[~first]])
    bootstrap: dict[str, Any] = {"clusters": ordered_clusters, "rng": rng} if ordered_clusters is not None else {}
    size, area = hedges_g(a, b, **bootstrap), auroc(a, b, **bootstrap)
    return tuple(
        {
            "unit": int(unit),
            "t": float(comparison.contrast.t[unit]),
            "p_max": float(comparison.p_max[unit]),
            "q": float(comparison.q[unit]),
            "g": {"value": float(size.value[i]), "low": float(size.low[i]), "high": float(size.high[i])},
            "auroc": {"value": float(area.value[i]), "low": float(area.low[i]), "high": float(area.high[i])},
            "interval": area.method,
        }
        for i, unit in enumerate(largest)
    )


def _tests(comparison: Comparison) -> dict[str, Any]:
    omnibus = comparison.omnibus
    return {
        "sizes": list(comparison.contrast.sizes),
        "dropped": comparison.contrast.dropped,
        "critical": comparison.critical,
        "largest_t": comparison.maximum.value,
        "p_max": comparison.maximum.p,
        "p_any": omnibus.any.p,
        "p_mean_t": omnibus.mean_t.p,
        "p_asymmetry": omnibus.asymmetry.p,
        "p_criticism": omnibus.criticism.p,
        "found": len(comparison.significant_units()),
        "discoveries": int((comparison.q <= comparison.alpha).sum()),
        "smallest_detectable": comparison.power.smallest,
        "power": comparison.power.target,
    }


def _interval(estimate: Any) -> dict[str, Any]:
    return {
        "value": float(estimate.value),
        "low": float(estimate.low),
        "high": float(estimate.high),
        "method": estimate.method,
    }

"""The findings of an analysis of dynamics: one row per head, the known systems, and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from softgap.trajectories.run import Displayed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Findings", "HeadFinding", "SystemPoint"]


@dataclass(frozen=True)
class HeadFinding:
    """The dynamics of one head over all samples of a study.

    Attributes
    ----------
    mean, spread, slope
        Of the divergence itself: mean over all steps, standard deviation around each sample's own mean, and least
        squares slope per 100 steps within samples.
    entropy, low, high
        Normalised permutation entropy of the transformed trajectories, all windows of all samples together, with its
        bootstrap interval.
    z, p, q
        Distance of the entropy from white noise of the same lengths under the same transform, in its standard
        deviations; two-sided p; p corrected over all heads for the false discovery rate (Benjamini and Hochberg).
    complexity
        Statistical complexity.
    nearest, distance
        The known system that lies nearest in the complexity-entropy plane.
    windows, tie_rate
        Windows counted, and the share of all windows that hold equal values.
    eligible, reason
        Whether there were windows enough; if not, why, and every number about patterns is NaN.
    """

    layer: int
    head: int
    kv_group: int
    mean: float
    spread: float
    slope: float
    entropy: float
    low: float
    high: float
    z: float
    p: float
    q: float
    complexity: float
    nearest: str
    distance: float
    windows: int
    tie_rate: float
    eligible: bool
    reason: str


@dataclass(frozen=True)
class SystemPoint:
    """Where a known system of the data's length lies in the complexity-entropy plane, after the same transform."""

    name: str
    kind: str
    entropy: float
    complexity: float


@dataclass(frozen=True, eq=False, repr=False)
class Findings(Displayed):
    """The dynamics of a study.

    Attributes
    ----------
    heads
        One per head, by layer.
    systems
        The known systems; without those whose windows are too few once ties are left out.
    noise_entropy, noise_deviation, null_samples
        The null of the z-scores: mean, standard deviation and number of simulated studies of white noise.
    samples, skipped
        Samples used, and those too short for the transform or for a single window.
    steps
        Steps of all used samples together.
    alpha
        The false discovery rate that ``standing_out`` keeps.
    settings
        All that the numbers depend on: mechanism, transform, order, delay, segment, ties, seed.
    source
        Where the trajectories came from: study, model, weights, versions.
    """

    heads: tuple[HeadFinding, ...]
    systems: tuple[SystemPoint, ...]
    noise_entropy: float
    noise_deviation: float
    null_samples: int
    samples: int
    skipped: int
    steps: int
    alpha: float
    settings: Mapping[str, Any]
    source: Mapping[str, Any]

    @property
    def eligible(self) -> tuple[HeadFinding, ...]:
        """Heads with windows enough."""
        return tuple(head for head in self.heads if head.eligible)

    def standing_out(self) -> tuple[HeadFinding, ...]:
        """Heads whose entropy is not that of noise after correction, the furthest below it first."""
        return tuple(sorted((head for head in self.eligible if head.q <= self.alpha), key=lambda head: head.z))

    @property
    def least_q(self) -> float:
        """The smallest q that a head can reach alone: its p is no less than the simulations of noise can resolve."""
        return 2 * len(self.eligible) / (self.null_samples + 1)

    def __repr__(self) -> str:
        tested = f"{len(self.standing_out())} of {len(self.eligible)} heads differ from noise"
        return f"<Findings: {tested} at {self.alpha:g}; samples: {self.samples}, steps: {self.steps:,}>"

    def to_frame(self) -> pd.DataFrame:
        """One row per head."""
        import pandas as pd

        return pd.DataFrame([asdict(head) for head in self.heads])

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; NaN stays NaN."""
        return {
            "source": dict(self.source),
            "settings": dict(self.settings),
            "samples": self.samples,
            "skipped": self.skipped,
            "steps": self.steps,
            "noise": {
                "entropy": self.noise_entropy,
                "deviation": self.noise_deviation,
                "samples": self.null_samples,
            },
            "alpha": self.alpha,
            "standing_out": [[head.layer, head.head] for head in self.standing_out()],
            "systems": [asdict(system) for system in self.systems],
            "heads": [asdict(head) for head in self.heads],
        }

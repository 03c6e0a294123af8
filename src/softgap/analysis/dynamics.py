"""The dynamics of every head of a study: divergence, ordinal patterns against noise, and the nearest known system."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64
from scipy.stats import false_discovery_control

from softgap import __version__
from softgap.analysis.pattern_counts import (
    Geometry,
    HeadPatternCounts,
    Moments,
    SystemPoint,
    count_patterns,
    known_points,
    moments_of,
    noise_entropies,
)
from softgap.analysis.series import Samples, Settings, samples_of
from softgap.progress import Progress, silent
from softgap.signal.complexity import plane
from softgap.signal.nulls import score_against_null
from softgap.trajectories import Study, Trajectories
from softgap.trajectories.run import Displayed

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Findings", "HeadFinding", "analyze"]


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


def analyze(
    study: Study | Trajectories | Iterable[Trajectories],
    *,
    mechanism: str | None = None,
    quantity: str = "divergence",
    transform: str = "diff",
    order: int = 3,
    delay: int = 1,
    segment: str = "full",
    ties: str = "exclude",
    eligibility: str | int = "spread",
    alpha: float = 0.05,
    seed: int = 0,
    progress: Progress | None = None,
) -> Findings:
    """Describe the dynamics of every head over all samples of a study.

    Permutation entropy and complexity are those of the pattern frequencies of all windows of all samples together, so
    that a thousand short generations say as much as one long one. They are compared with studies of white noise of the
    same lengths under the same transform. The interval draws samples with replacement, or, with fewer than 10 of
    them, blocks of neighbouring windows.

    Parameters
    ----------
    study
        A study, one run, or any iterable of runs that can be read more than once.
    mechanism
        Which of the study's mechanisms; its first by default.
    quantity
        ``divergence``, ``relative_l2`` or ``norm_ratio``.
    transform, segment
        What is done to each trajectory before its patterns are taken; the segment is cut from what the transform left.
    order, delay, ties, eligibility
        As everywhere in ``softgap.signal``; eligibility is asked of all windows of a head together.
    alpha
        False discovery rate of the heads that stand out from noise.
    seed
        Random seed of the noise, the intervals and the known systems.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Findings
        One ``HeadFinding`` per head, and the known systems on the same plane.

    Examples
    --------
    ``runs/counts`` is a folder that ``softgap study run`` wrote, with a model of two layers with four heads:

    >>> import softgap
    >>> findings = softgap.analysis.analyze(softgap.open_study("runs/counts"), mechanism="elu1")
    >>> len(findings.heads)
    8
    >>> head = findings.heads[0]
    >>> bool(head.low <= head.entropy <= head.high)
    True
    """
    settings = Settings(mechanism, quantity, transform, order, delay, segment, ties, eligibility, alpha, seed)
    tell = progress or silent
    tell("looking through the study", 0.0)
    samples = samples_of([study] if isinstance(study, Trajectories) else study, settings)
    return _compute_findings(samples, settings, _source(study), tell)


def _compute_findings(samples: Samples, settings: Settings, source: dict[str, Any], tell: Progress) -> Findings:
    rng = np.random.default_rng(settings.seed)
    moments = moments_of(samples, settings.segment)
    counted = count_patterns(samples, settings, rng, tell)
    geometry = Geometry(settings, samples.used_positions())
    tell("simulating noise", 0.0)
    tested = _test_against_noise(counted, geometry, rng)
    tell("placing known systems", 0.0)
    points = known_points(geometry, rng)
    return Findings(
        heads=_head_findings(samples, moments, counted, tested, points),
        systems=points,
        noise_entropy=float(tested.null.mean()),
        noise_deviation=float(tested.null.std(ddof=1)),
        null_samples=len(tested.null),
        samples=sum(samples.eligible),
        skipped=len(samples.eligible) - sum(samples.eligible),
        steps=sum(geometry.lengths),
        alpha=settings.alpha,
        settings=settings.to_json(samples.mechanism),
        source=source,
    )


@dataclass(frozen=True, eq=False)
class _NoiseTest:
    """The null of a head without ties, and every head against noise with as many windows as it has.

    ``least`` is the number of windows from which a head is eligible; z, p and q of the others are NaN.
    """

    null: Float64[np.ndarray, " study"]
    z: Float64[np.ndarray, " head"]
    p: Float64[np.ndarray, " head"]
    q: Float64[np.ndarray, " head"]
    least: int


def _test_against_noise(counted: HeadPatternCounts, geometry: Geometry, rng: np.random.Generator) -> _NoiseTest:
    settings = geometry.settings
    entropy = plane(counted.frequencies())[0]
    eligible = counted.windows >= settings.least
    # Heads that lost about as many windows to ties share a null; half a percent of them moves nothing.
    share_counted = np.round(counted.windows / counted.possible, 2)
    shares = np.unique(share_counted[eligible])
    # So many that one head alone, among all, can stand out: its p, 2 / (studies + 1), is multiplied by their number.
    n_studies = math.ceil(2 * len(entropy) / settings.alpha)
    nulls = len({1.0, *shares})
    null = noise_entropies(geometry, 1.0, rng, n_studies=n_studies, nulls=nulls)
    z, p, q = (np.full(len(entropy), np.nan) for _ in range(3))
    for share in shares:
        values = null if share == 1 else noise_entropies(geometry, float(share), rng, n_studies=n_studies, nulls=nulls)
        heads = (share_counted == share) & eligible
        z[heads], p[heads] = score_against_null(entropy[heads], values)
    if eligible.any():
        q[eligible] = false_discovery_control(p[eligible], method="bh")
    return _NoiseTest(null, z, p, q, settings.least)


def _head_findings(
    samples: Samples, moments: Moments, counted: HeadPatternCounts, tested: _NoiseTest, points: Sequence[SystemPoint]
) -> tuple[HeadFinding, ...]:
    entropy, complexity = plane(counted.frequencies())
    heads = []
    for i, ((layer, head), windows) in enumerate(zip(np.argwhere(samples.real), counted.windows.tolist(), strict=True)):
        eligible = windows >= tested.least
        nearest, distance = _nearest_system(entropy[i], complexity[i], points) if eligible else ("", math.nan)
        measured = [float(x[i]) if eligible else math.nan for x in (entropy, counted.low, counted.high, complexity)]
        heads.append(
            HeadFinding(
                layer=samples.layers[layer],
                head=int(head),
                kv_group=int(samples.kv_group[layer, head]),
                mean=float(moments.mean[i]),
                spread=float(moments.spread[i]),
                slope=float(moments.slope[i]),
                entropy=measured[0],
                low=measured[1],
                high=measured[2],
                z=float(tested.z[i]),
                p=float(tested.p[i]),
                q=float(tested.q[i]),
                complexity=measured[3],
                nearest=nearest,
                distance=distance,
                windows=windows,
                tie_rate=int(counted.tied[i]) / counted.possible,
                eligible=eligible,
                reason="" if eligible else _reason(windows, counted.possible, tested.least),
            )
        )
    return tuple(heads)


def _nearest_system(entropy: float, complexity: float, points: Sequence[SystemPoint]) -> tuple[str, float]:
    distances = [math.hypot(entropy - point.entropy, complexity - point.complexity) for point in points]
    if not distances:
        return "", math.nan
    best = int(np.argmin(distances))
    return points[best].name, distances[best]


def _reason(windows: int, possible: int, least: int) -> str:
    if windows == 0:
        return "all windows hold equal values, as in a constant trajectory; use ties 'stable' or 'jitter'"
    ties = f", {possible - windows} of {possible} were lost to ties" if windows < possible else ""
    return (
        f"{windows} windows are fewer than the {least} asked for{ties}; use longer runs, more samples or a lower order"
    )


def _source(study: Study | Trajectories | Iterable[Trajectories]) -> dict[str, Any]:
    manifest: Any = getattr(study, "manifest", None)
    source: dict[str, Any] = {"study": getattr(study, "path", None), "softgap": __version__, "numpy": np.__version__}
    if manifest is not None:
        names = ("model", "weights", "dtype", "backend", "seed", "inputs", "dropped_sinks")
        source.update({name: getattr(manifest, name) for name in names})
        source["versions"] = dict(manifest.versions)
    return source

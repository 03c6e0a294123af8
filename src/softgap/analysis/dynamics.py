"""The dynamics of every head of a study: divergence, ordinal patterns against noise, and the nearest known system."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64
from scipy.stats import false_discovery_control

from softgap import __version__
from softgap.analysis.dynamics_findings import Findings, HeadFinding, SystemPoint
from softgap.analysis.pattern_counts import (
    Geometry,
    HeadPatternCounts,
    Moments,
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

__all__ = ["analyze"]


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

"""The dynamics of every head of a study: divergence, ordinal patterns against noise, and the nearest known system."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64, Int64
from scipy.stats import false_discovery_control

from softgap import __version__
from softgap.analysis.findings import Findings, HeadFinding, SystemPoint
from softgap.analysis.pooled import (
    Geometry,
    interval_over_samples,
    interval_within_samples,
    known_points,
    noise_entropies,
)
from softgap.analysis.samples import Cut, Samples, controlled, samples_of, transformed
from softgap.errors import ValueInputError
from softgap.signal import ordinal_patterns
from softgap.signal.batch import checked_batch
from softgap.signal.complexity import plane
from softgap.signal.eligibility import least_windows
from softgap.trajectories import Study, Trajectories

__all__ = ["analyze"]

# From so many samples on, an interval draws samples; with fewer it draws blocks of windows within them.
_ENOUGH_SAMPLES = 10
_LEVEL, _REPLICATES = 0.95, 499
# Pattern counts of all samples and heads that are held at once.
_COUNTS = 2**27

Progress = Callable[[str, float], None]


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
    transform, segment
        What is done to each trajectory before its patterns are taken; the segment is cut from what the transform left.
    order, delay, ties, eligibility
        As everywhere in :mod:`softgap.signal`; eligibility is asked of all windows of a head together.
    alpha
        False discovery rate of the heads that stand out from noise.
    seed
        Of the noise, the intervals and the known systems.
    progress
        Called with what is being done and the share of it that is done.
    """
    if not 0 < alpha < 1:
        raise ValueInputError(f"alpha must be between 0 and 1, got {alpha!r}; 0.05 is usual")
    # The checks of the signal room, before anything is read: order, delay and ties by the rules that hold there.
    rng = np.random.default_rng(seed)
    checked_batch(np.zeros(1), order, delay, {"ties": ties, "rng": rng, "eligibility": eligibility}, short=True)
    cut, tell = Cut(transform, segment), progress or (lambda *_: None)
    tell("looking through the study", 0.0)
    samples = samples_of([study] if isinstance(study, Trajectories) else study, mechanism, quantity)
    used = [cut.length(length) > (order - 1) * delay for length in samples.lengths]
    _check_sizes(samples, used, order, delay, transform, segment)
    described = _described(samples, cut)
    counted = _counted(controlled(samples, cut), cut, used, order, delay, ties, rng, tell)
    geometry = Geometry(order, delay, ties, cut, counted.lengths, counted.positions)
    least = least_windows(eligibility, order)
    tell("simulating noise", 0.0)
    null, z, p = _against_noise(counted, geometry, least, rng)
    tell("placing known systems", 0.0)
    points = known_points(geometry, least, rng)
    heads = _findings(samples, described, counted, _Tested(least, z, p, points))
    return Findings(
        heads=heads,
        systems=points,
        noise_entropy=float(null.mean()),
        noise_deviation=float(null.std(ddof=1)),
        null_samples=len(null),
        samples=sum(used),
        skipped=len(used) - sum(used),
        steps=sum(counted.lengths),
        alpha=alpha,
        settings={
            "mechanism": samples.mechanism,
            "quantity": quantity,
            "transform": transform,
            "order": order,
            "delay": delay,
            "segment": segment,
            "ties": ties,
            "eligibility": eligibility,
            "least_windows": least,
            "seed": seed,
        },
        source=_source(study),
    )


@dataclass(frozen=True, eq=False)
class _Described:
    """Mean, spread around each sample's own mean, and slope per 100 steps within samples, of every head."""

    mean: Float64[np.ndarray, " head"]
    spread: Float64[np.ndarray, " head"]
    slope: Float64[np.ndarray, " head"]


@dataclass(frozen=True, eq=False)
class _Counted:
    """What was counted of every head: patterns of all samples together, all windows, and the interval."""

    counts: Int64[np.ndarray, "head pattern"]
    possible: int
    low: Float64[np.ndarray, " head"]
    high: Float64[np.ndarray, " head"]
    lengths: tuple[int, ...]
    positions: tuple[Int64[np.ndarray, " step"], ...]

    @property
    def windows(self) -> Int64[np.ndarray, " head"]:
        """Windows that were counted."""
        return np.asarray(self.counts.sum(axis=1))

    def frequencies(self) -> Float64[np.ndarray, "head pattern"]:
        """Rows that sum to 1; those of a head without windows are even."""
        total = self.windows[:, None]
        return np.asarray(np.where(total > 0, self.counts / np.maximum(total, 1), 1 / self.counts.shape[1]))


@dataclass(frozen=True, eq=False)
class _Tested:
    """What the counts were compared with."""

    least: int
    z: Float64[np.ndarray, " head"]
    p: Float64[np.ndarray, " head"]
    points: tuple[SystemPoint, ...]


def _check_sizes(samples: Samples, used: Sequence[bool], order: int, delay: int, transform: str, segment: str) -> None:
    if not any(used):
        raise ValueInputError(
            f"no sample holds one window of order {order} and delay {delay} after transform '{transform}' and segment "
            f"'{segment}', the longest has {max(samples.lengths)} steps; use longer runs or a lower order"
        )
    size = sum(used) * samples.n_heads * math.factorial(order)
    if size > _COUNTS and sum(used) >= _ENOUGH_SAMPLES:
        raise ValueInputError(
            f"order {order} over {sum(used)} samples of {samples.n_heads} heads makes {size:.2g} pattern counts, at "
            f"most {_COUNTS:.2g} are held; use a lower order or analyse fewer samples"
        )


def _described(samples: Samples, cut: Cut) -> _Described:
    """Of the untransformed quantity, over the segment."""
    n, total = 0, np.zeros(samples.n_heads)
    squares, products, room = np.zeros(samples.n_heads), np.zeros(samples.n_heads), 0.0
    segments = Cut("raw", cut.segment)
    for sample in samples:
        if segments.length(sample.series.shape[-1]) == 0:
            continue
        series = segments([sample.series], [sample.positions])[0]
        steps = series.shape[-1]
        time = np.arange(steps) - (steps - 1) / 2
        centred = series - series.mean(axis=-1, keepdims=True)
        n += steps
        total += series.sum(axis=-1)
        squares += (centred**2).sum(axis=-1)
        products += centred @ time
        room += float((time**2).sum())
    slope = 100 * products / room if room else np.full(samples.n_heads, np.nan)
    return _Described(total / max(n, 1), np.sqrt(squares / max(n, 1)), slope)


def _counted(
    samples: Samples,
    cut: Cut,
    used: Sequence[bool],
    order: int,
    delay: int,
    ties: str,
    rng: np.random.Generator,
    tell: Progress,
) -> _Counted:
    n, heads, patterns = sum(used), samples.n_heads, math.factorial(order)
    by_sample = np.zeros((n if n >= _ENOUGH_SAMPLES else 1, heads, patterns), np.int32)
    indices: list[list[np.ndarray]] = [[] for _ in range(heads)]
    for i, where, series in transformed(samples, cut, used):
        tell("counting patterns", i / n)
        index = ordinal_patterns(series, order, delay, ties=ties, rng=rng).index
        for row, head in enumerate(range(where.start, where.stop)):
            found = index[row]
            by_sample[i if n >= _ENOUGH_SAMPLES else 0, head] += np.bincount(found[found >= 0], minlength=patterns)
            if n < _ENOUGH_SAMPLES:
                indices[head].append(found)
    tell("drawing intervals", 0.0)
    span = (order - 1) * delay
    if n >= _ENOUGH_SAMPLES:
        low, high = interval_over_samples(by_sample, level=_LEVEL, replicates=_REPLICATES, rng=rng)
    else:
        low, high = interval_within_samples(indices, patterns, span, level=_LEVEL, replicates=_REPLICATES, rng=rng)
    lengths = tuple(length for length, use in zip(samples.lengths, used, strict=True) if use)
    possible = sum(cut.length(length) - span for length in lengths)
    # Positions matter to the residual alone, which has read all of them already.
    if cut.transform == "residual":
        positions = tuple(sample.positions for sample, use in zip(samples, used, strict=True) if use)
    else:
        positions = tuple(np.arange(length) for length in lengths)
    return _Counted(by_sample.sum(axis=0, dtype=np.int64), possible, low, high, lengths, positions)


def _against_noise(
    counted: _Counted, geometry: Geometry, least: int, rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " study"], Float64[np.ndarray, " head"], Float64[np.ndarray, " head"]]:
    """The null of a head without ties, and z and two-sided p of every head against noise with as many windows."""
    entropy = plane(counted.frequencies())[0]
    # Heads that lost about as many windows to ties share a null; half a percent of them moves nothing.
    kept = np.round(counted.windows / counted.possible, 2)
    null = noise_entropies(geometry, 1.0, rng)
    z, p = np.full(len(entropy), np.nan), np.full(len(entropy), np.nan)
    for share in np.unique(kept[counted.windows >= least]):
        values = null if share == 1 else noise_entropies(geometry, float(share), rng)
        some = (kept == share) & (counted.windows >= least)
        below = np.searchsorted(np.sort(values), entropy[some] + 1e-12, side="right") + 1
        above = len(values) - np.searchsorted(np.sort(values), entropy[some] - 1e-12, side="left") + 1
        p[some] = np.minimum(1.0, 2 * np.minimum(below, above) / (len(values) + 1))
        z[some] = (entropy[some] - values.mean()) / values.std(ddof=1)
    return null, z, p


def _findings(samples: Samples, described: _Described, counted: _Counted, tested: _Tested) -> tuple[HeadFinding, ...]:
    entropy, complexity = plane(counted.frequencies())
    windows = counted.windows
    tie_rate = 1 - windows / counted.possible
    eligible = windows >= tested.least
    q = np.full(len(windows), np.nan)
    if eligible.any():
        q[eligible] = false_discovery_control(tested.p[eligible], method="bh")
    places = np.argwhere(samples.real)
    heads = []
    for i, (layer, head) in enumerate(places):
        nearest, distance = _nearest(entropy[i], complexity[i], tested.points) if eligible[i] else ("", math.nan)
        shown = [float(x[i]) if eligible[i] else math.nan for x in (entropy, counted.low, counted.high)]
        heads.append(
            HeadFinding(
                layer=samples.layers[layer],
                head=int(head),
                kv_group=int(samples.kv_group[layer, head]),
                mean=float(described.mean[i]),
                spread=float(described.spread[i]),
                slope=float(described.slope[i]),
                entropy=shown[0],
                low=shown[1],
                high=shown[2],
                z=float(tested.z[i]),
                p=float(tested.p[i]),
                q=float(q[i]),
                complexity=float(complexity[i]) if eligible[i] else math.nan,
                nearest=nearest,
                distance=distance,
                windows=int(windows[i]),
                tie_rate=float(tie_rate[i]),
                eligible=bool(eligible[i]),
                reason="" if eligible[i] else _reason(int(windows[i]), float(tie_rate[i]), tested.least),
            )
        )
    return tuple(heads)


def _nearest(entropy: float, complexity: float, points: Sequence[SystemPoint]) -> tuple[str, float]:
    distances = [math.hypot(entropy - point.entropy, complexity - point.complexity) for point in points]
    if not distances:
        return "", math.nan
    best = int(np.argmin(distances))
    return points[best].name, distances[best]


def _reason(windows: int, tie_rate: float, least: int) -> str:
    if windows == 0 and tie_rate == 1:
        return "all windows hold equal values, as in a constant trajectory; use ties 'stable' or 'jitter'"
    ties = f", {tie_rate:.0%} of them were lost to ties" if tie_rate > 0 else ""
    return (
        f"{windows} windows are fewer than the {least} asked for{ties}; use longer runs, more samples or a lower order"
    )


def _source(study: Study | Trajectories | Iterable[Trajectories]) -> dict[str, Any]:
    manifest: Any = getattr(study, "manifest", None)
    found: dict[str, Any] = {"study": getattr(study, "path", None), "softgap": __version__, "numpy": np.__version__}
    if manifest is not None:
        names = ("model", "weights", "dtype", "backend", "seed", "inputs", "dropped_sinks")
        found.update({name: getattr(manifest, name) for name in names})
        found["versions"] = dict(manifest.versions)
    return found

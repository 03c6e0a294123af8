"""Pattern frequencies of all windows of all samples together: their null, their interval, and the known systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64

from softgap.analysis.findings import SystemPoint
from softgap.analysis.samples import Cut
from softgap.signal import pattern_counts, simulate, systems
from softgap.signal.bootstrap import centred_interval
from softgap.signal.complexity import plane
from softgap.signal.kernels import resample_row

__all__ = ["Geometry", "interval_over_samples", "interval_within_samples", "known_points", "noise_entropies"]

# Steps of simulated noise for one null, and how many studies it may make of them.
_NOISE_STEPS = 2**27
_FEWEST, _MOST = 199, 9999
_BLOCK = 2**21
# Series of one known system, and of how many of them one point is pooled.
_GROUPS, _POOLED = 12, 20
_VARIANTS: dict[str, tuple[dict[str, float], ...]] = {
    "fbm": tuple({"hurst": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)),
    "logistic": ({"r": 3.6}, {"r": 3.8}, {"r": 4.0}),
}


@dataclass(frozen=True)
class Geometry:
    """How windows are taken, and of what: order, delay, ties, the cut, and the steps and positions of every sample."""

    order: int
    delay: int
    ties: str
    cut: Cut
    lengths: tuple[int, ...]
    positions: tuple[Int64[np.ndarray, " step"], ...]

    def windows(self, steps: int) -> int:
        """Windows of a sample of so many steps."""
        return max(0, self.cut.length(steps) - (self.order - 1) * self.delay)


def noise_entropies(geometry: Geometry, kept: float, rng: np.random.Generator) -> Float64[np.ndarray, " study"]:
    """Normalised entropy of simulated studies of white noise: the same lengths, the same cut, all windows together.

    ``kept`` is the share of windows that are left where ties were excluded: the noise is shorter by as much.
    """
    span = (geometry.order - 1) * geometry.delay
    total = sum(geometry.lengths)
    studies = min(_MOST, max(_FEWEST, _NOISE_STEPS // total))
    counts = np.zeros((studies, math.factorial(geometry.order)), np.int64)
    for start in range(0, studies, step := max(1, _BLOCK // total)):
        part = counts[start : start + step]
        # Only a residual needs all samples of a study at once.
        whole = geometry.cut.transform == "residual"
        groups = [range(len(geometry.lengths))] if whole else [range(i, i + 1) for i in range(len(geometry.lengths))]
        for group in groups:
            noise = [rng.standard_normal((len(part), geometry.lengths[i])) for i in group]
            for i, series in zip(group, geometry.cut(noise, [geometry.positions[i] for i in group]), strict=True):
                windows = round(kept * geometry.windows(geometry.lengths[i]))
                if windows > 0:
                    part += pattern_counts(series[:, : windows + span], geometry.order, geometry.delay).counts
    return plane(counts / counts.sum(axis=1, keepdims=True))[0]


def interval_over_samples(
    counts: Int[np.ndarray, "sample head pattern"], *, level: float, replicates: int, rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " head"], Float64[np.ndarray, " head"]]:
    """Interval of the pooled entropy from studies whose samples are drawn with replacement."""
    n, heads, _ = counts.shape
    times = rng.multinomial(n, np.full(n, 1 / n), size=replicates).astype(np.float64)
    low, high = np.full(heads, np.nan), np.full(heads, np.nan)
    for head in range(heads):
        resampled = times @ counts[:, head]
        total = resampled.sum(axis=1, keepdims=True)
        pooled = counts[:, head].sum(axis=0)
        if pooled.sum() == 0 or (total == 0).any():
            continue
        entropies, value = plane(resampled / total)[0], plane((pooled / pooled.sum())[None])[0]
        low[head], high[head] = (x[0] for x in centred_interval(value, entropies[None], level, 1.0))
    return low, high


def interval_within_samples(
    indices: Sequence[Sequence[Int[np.ndarray, " window"]]],
    patterns: int,
    span: int,
    *,
    level: float,
    replicates: int,
    rng: np.random.Generator,
) -> tuple[Float64[np.ndarray, " head"], Float64[np.ndarray, " head"]]:
    """Interval of the pooled entropy from blocks of windows: for few samples; ``indices`` are [head][sample]."""
    low, high = np.full(len(indices), np.nan), np.full(len(indices), np.nan)
    largest = math.log(patterns)
    for head, parts in enumerate(indices):
        sequence = np.concatenate([part[part >= 0] for part in parts])
        if sequence.size == 0:
            continue
        block = min(sequence.size, max(math.ceil(sequence.size ** (1 / 3)), 2 * span + 1))
        samples = np.empty(replicates)
        draws = rng.random((replicates, -(-sequence.size // block)))
        resample_row(sequence, patterns, block, draws, samples)
        frequency = np.bincount(sequence, minlength=patterns)[None] / sequence.size
        value = plane(frequency)[0] * largest
        low[head], high[head] = (x[0] / largest for x in centred_interval(value, samples[None], level, largest))
    return low, high


def known_points(geometry: Geometry, least: int, rng: np.random.Generator) -> tuple[SystemPoint, ...]:
    """Every known system at the median length of the data, pooled over as many series as the data has (at most 20)."""
    steps = sorted(geometry.lengths)[len(geometry.lengths) // 2]
    pooled = min(_POOLED, len(geometry.lengths))
    points = []
    for name, system in systems().items():
        for parameters in _VARIANTS.get(name, ({},)):
            series = simulate(name, steps, rng=rng, size=_GROUPS * pooled, **parameters)
            left = geometry.cut([series], [np.arange(steps)])[0]
            ties = "exclude" if geometry.ties == "raise" else geometry.ties  # a sine repeats itself, the data must not
            found = pattern_counts(left, geometry.order, geometry.delay, ties=ties, rng=rng)
            counts = found.counts.reshape(_GROUPS, pooled, -1).sum(axis=1)
            # What ties leave of a series that repeats itself may be too little to place it.
            if (counts.sum(axis=1) < min(least, pooled * geometry.windows(steps))).any():
                continue
            entropy, complexity = (float(x.mean()) for x in plane(counts / counts.sum(axis=1, keepdims=True)))
            label = name + "".join(f" {key}={value:g}" for key, value in parameters.items())
            points.append(SystemPoint(label, system.kind, entropy, complexity))
    return tuple(points)

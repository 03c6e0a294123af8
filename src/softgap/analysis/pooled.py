"""Pattern frequencies of all windows of all samples together: their null, their interval, and the known systems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64

from softgap.analysis.findings import SystemPoint
from softgap.analysis.settings import Settings
from softgap.signal import pattern_counts, simulate, systems
from softgap.signal.bootstrap import centred_interval, resampled_entropies, usual_block
from softgap.signal.complexity import plane
from softgap.signal.kernels import shannon_rows

__all__ = ["Geometry", "interval_over_samples", "interval_within_samples", "known_points", "noise_entropies"]

# Studies of one null: the fewest, and what is usual where they are short. Steps of simulated noise that all nulls of an
# analysis may take together: for the usual number, and for the number that the correction needs.
_FEWEST, _USUAL = 199, 9999
_USUAL_STEPS, _MOST_STEPS = 2**27, 2**30
# Numbers in memory at a time.
_BLOCK = 2**21
# Series of one known system, and of how many of them one point is pooled.
_GROUPS, _POOLED = 12, 20
_VARIANTS: dict[str, tuple[dict[str, float], ...]] = {
    "fbm": tuple({"hurst": h} for h in (0.1, 0.3, 0.5, 0.7, 0.9)),
    "logistic": ({"r": 3.6}, {"r": 3.8}, {"r": 4.0}),
}


@dataclass(frozen=True, eq=False)
class Geometry:
    """How windows are taken, and of what: the positions of every used sample's steps."""

    settings: Settings
    positions: tuple[Int64[np.ndarray, " step"], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Steps of every sample."""
        return tuple(map(len, self.positions))

    def windows(self, kept: float) -> list[int]:
        """Windows of every sample if a share of all is kept; rounded so that those of short samples add up."""
        total = np.cumsum([self.settings.windows(length) for length in self.lengths])
        return [int(windows) for windows in np.diff(np.round(kept * total), prepend=0)]


def noise_entropies(
    geometry: Geometry, kept: float, rng: np.random.Generator, *, wanted: int, nulls: int = 1
) -> Float64[np.ndarray, " study"]:
    """Normalised entropy of simulated studies of white noise: the same lengths, the same cut, all windows together.

    ``kept`` is the share of windows that are left where ties were excluded: the noise is shorter by as much.
    ``wanted`` studies are made if that is not too much noise for one of so many ``nulls``.
    """
    patterns, steps = geometry.settings.patterns, nulls * sum(geometry.lengths)
    usual = min(_USUAL, _USUAL_STEPS // steps)
    entropies = np.empty(max(_FEWEST, usual, min(wanted, _MOST_STEPS // steps)))
    add = _add_residual_noise if geometry.settings.cut.fits_a_trend else _add_noise
    windows = geometry.windows(kept)
    step = max(1, _BLOCK // patterns)
    for start in range(0, len(entropies), step):
        part = entropies[start : start + step]
        counts = np.zeros((len(part), patterns), np.int64)
        add(counts, geometry, windows, rng)
        shannon_rows(counts, part)
    return entropies / math.log(patterns)


def _add_noise(
    counts: Int64[np.ndarray, "study pattern"], geometry: Geometry, windows: Sequence[int], rng: np.random.Generator
) -> None:
    settings = geometry.settings
    for at, left in zip(geometry.positions, windows, strict=True):
        step = max(1, _BLOCK // len(at))
        for start in range(0, len(counts) if left else 0, step):
            part = counts[start : start + step]
            noise = rng.standard_normal((len(part), len(at)))
            part += _counts(settings.cut([noise], [at])[0], left, settings)


def _add_residual_noise(
    counts: Int64[np.ndarray, "study pattern"], geometry: Geometry, windows: Sequence[int], rng: np.random.Generator
) -> None:
    step = max(1, _BLOCK // sum(geometry.lengths))
    for start in range(0, len(counts), step):
        part = counts[start : start + step]
        noise = [rng.standard_normal((len(part), length)) for length in geometry.lengths]
        for series, left in zip(geometry.settings.cut(noise, geometry.positions), windows, strict=True):
            if left:
                part += _counts(series, left, geometry.settings)


def _counts(
    series: Float64[np.ndarray, "series step"], windows: int, settings: Settings
) -> Int64[np.ndarray, "series pattern"]:
    """Of the first windows; noise has no ties worth a policy."""
    return pattern_counts(series[:, : windows + settings.span], settings.order, settings.delay).counts


def interval_over_samples(
    counts: Int[np.ndarray, "sample head pattern"], *, level: float, replicates: int, rng: np.random.Generator
) -> tuple[Float64[np.ndarray, " head"], Float64[np.ndarray, " head"]]:
    """Interval of the pooled entropy from studies whose samples are drawn with replacement."""
    n, heads, patterns = counts.shape
    times = rng.multinomial(n, np.full(n, 1 / n), size=replicates).astype(np.float64)
    low, high = np.full(heads, np.nan), np.full(heads, np.nan)
    for head in range(heads):
        drawn = times @ counts[:, head]
        if (drawn.sum(axis=1) > 0).all():
            pooled = counts[:, head].sum(axis=0, dtype=np.int64)
            low[head], high[head] = _interval(pooled, _entropies(drawn), level, patterns)
    return low, high


def interval_within_samples(
    sequences: Sequence[Int[np.ndarray, " window"]],
    patterns: int,
    span: int,
    *,
    level: float,
    replicates: int,
    rng: np.random.Generator,
) -> tuple[Float64[np.ndarray, " head"], Float64[np.ndarray, " head"]]:
    """Interval of the pooled entropy of each head's pattern sequence from blocks of windows: for few samples."""
    low, high = np.full(len(sequences), np.nan), np.full(len(sequences), np.nan)
    for head, sequence in enumerate(sequences):
        if sequence.size:
            block = usual_block(sequence.size, span)
            resampled = resampled_entropies(sequence, patterns, block, replicates, rng)
            pooled = np.bincount(sequence, minlength=patterns)
            low[head], high[head] = _interval(pooled, resampled, level, patterns)
    return low, high


def _interval(
    pooled: Int64[np.ndarray, " pattern"], resampled: Float64[np.ndarray, " replicate"], level: float, patterns: int
) -> tuple[float, float]:
    """Of the normalised entropy, from resampled ones in nats."""
    largest = math.log(patterns)
    low, high = centred_interval(_entropies(pooled[None]), resampled[None], level, largest)
    return float(low[0]) / largest, float(high[0]) / largest


def _entropies(counts: np.ndarray) -> Float64[np.ndarray, " row"]:
    """In nats, of rows of counts."""
    entropies = np.empty(len(counts))
    shannon_rows(counts, entropies)
    return entropies


def known_points(geometry: Geometry, rng: np.random.Generator) -> tuple[SystemPoint, ...]:
    """Every known system at the median length of the data, pooled over as many series as the data has (at most 20)."""
    settings, lengths = geometry.settings, sorted(geometry.lengths)
    steps, pooled = lengths[len(lengths) // 2], min(_POOLED, len(lengths))
    ties = "exclude" if settings.ties == "raise" else settings.ties  # a sine repeats itself, the data must not
    points = []
    for name, system in systems().items():
        for parameters in _VARIANTS.get(name, ({},)):
            series = simulate(name, steps, rng=rng, size=_GROUPS * pooled, **parameters)
            left = settings.cut([series], [np.arange(steps)])[0]
            found = pattern_counts(left, settings.order, settings.delay, ties=ties, rng=rng)
            counts = found.counts.reshape(_GROUPS, pooled, -1).sum(axis=1)
            # What ties leave of a series that repeats itself may be too little to place it.
            if (counts.sum(axis=1) < min(settings.least, pooled * settings.windows(steps))).any():
                continue
            entropy, complexity = (float(x.mean()) for x in plane(counts / counts.sum(axis=1, keepdims=True)))
            label = name + "".join(f" {key}={value:g}" for key, value in parameters.items())
            points.append(SystemPoint(label, system.kind, entropy, complexity))
    return tuple(points)

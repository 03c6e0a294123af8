"""Pattern counts of every head: pooled over samples, with their null, their interval and the known systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64

from softgap.analysis.series import Cut, Samples, Settings, transform_series
from softgap.progress import Progress
from softgap.signal import ordinal_patterns, pattern_counts, simulate, systems
from softgap.signal.complexity import plane
from softgap.signal.estimates import centred_interval, resampled_entropies, usual_block
from softgap.signal.kernels import shannon_rows

__all__ = [
    "HELD_VALUES",
    "Geometry",
    "HeadPatternCounts",
    "Moments",
    "SystemPoint",
    "count_patterns",
    "known_points",
    "moments_of",
    "noise_entropies",
]


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

    def windows(self, share: float) -> list[int]:
        """Windows of every sample if a share of all is kept; rounded so that those of short samples add up."""
        total = np.cumsum([self.settings.windows(length) for length in self.lengths])
        return [int(windows) for windows in np.diff(np.round(share * total), prepend=0)]


def noise_entropies(
    geometry: Geometry, share: float, rng: np.random.Generator, *, n_studies: int, nulls: int = 1
) -> Float64[np.ndarray, " study"]:
    """Normalised entropy of simulated studies of white noise: the same lengths, the same cut, all windows together.

    ``share`` is the share of windows that are left where ties were excluded: the noise is shorter by as much.
    ``wanted`` studies are made if that is not too much noise for one of so many ``nulls``.
    """
    patterns, steps = geometry.settings.patterns, nulls * sum(geometry.lengths)
    usual = min(_USUAL, _USUAL_STEPS // steps)
    entropies = np.empty(max(_FEWEST, usual, min(n_studies, _MOST_STEPS // steps)))
    add = _add_residual_noise if geometry.settings.cut.fits_a_trend else _add_noise
    windows = geometry.windows(share)
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
        resampled = times @ counts[:, head]
        if (resampled.sum(axis=1) > 0).all():
            pooled = counts[:, head].sum(axis=0, dtype=np.int64)
            low[head], high[head] = _interval(pooled, _entropies(resampled), level, patterns)
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


@dataclass(frozen=True)
class SystemPoint:
    """Where a known system of the data's length lies in the complexity-entropy plane, after the same transform."""

    name: str
    kind: str
    entropy: float
    complexity: float


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
            patterns = pattern_counts(left, settings.order, settings.delay, ties=ties, rng=rng)
            counts = patterns.counts.reshape(_GROUPS, pooled, -1).sum(axis=1)
            # What ties leave of a series that repeats itself may be too little to place it.
            if (counts.sum(axis=1) < min(settings.least, pooled * settings.windows(steps))).any():
                continue
            entropy, complexity = (float(x.mean()) for x in plane(counts / counts.sum(axis=1, keepdims=True)))
            label = name + "".join(f" {key}={value:g}" for key, value in parameters.items())
            points.append(SystemPoint(label, system.kind, entropy, complexity))
    return tuple(points)


# From so many samples on, an interval draws samples; with fewer it draws blocks of windows within them.
_ENOUGH_SAMPLES = 10


_LEVEL, _REPLICATES = 0.95, 499


# Numbers of a study that are held at once where a trend is fitted over all its samples (float64: 256 MiB), and
# pattern counts of all its samples (int32: 256 MiB). Where the heads need more, the study is read again for the next.
HELD_VALUES = 2**25


_COUNTS = 2**26


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean, spread around each sample's own mean, and slope per 100 steps within samples, of every head."""

    mean: Float64[np.ndarray, " head"]
    spread: Float64[np.ndarray, " head"]
    slope: Float64[np.ndarray, " head"]


@dataclass(frozen=True, eq=False)
class HeadPatternCounts:
    """The patterns of all samples of every head together, with the interval of their entropy.

    ``tied`` windows hold equal values, whether they were counted or not; ``possible`` is the number of all windows.
    """

    counts: Int64[np.ndarray, "head pattern"]
    tied: Int64[np.ndarray, " head"]
    possible: int
    low: Float64[np.ndarray, " head"]
    high: Float64[np.ndarray, " head"]

    @property
    def windows(self) -> Int64[np.ndarray, " head"]:
        """Windows that were counted."""
        return np.asarray(self.counts.sum(axis=1))

    def frequencies(self) -> Float64[np.ndarray, "head pattern"]:
        """Rows that sum to 1; those of a head without windows are even."""
        total = self.windows[:, None]
        return np.asarray(np.where(total > 0, self.counts / np.maximum(total, 1), 1 / self.counts.shape[1]))


def moments_of(samples: Samples, segment: str) -> Moments:
    """Of the untransformed quantity, over the segment."""
    n, total = 0, np.zeros(samples.n_heads)
    squares, products, room = np.zeros(samples.n_heads), np.zeros(samples.n_heads), 0.0
    cut = Cut("raw", segment)
    for sample in samples:
        if cut.length(sample.series.shape[-1]) == 0:
            continue
        series = cut([sample.series], [sample.positions])[0]
        steps = series.shape[-1]
        time = np.arange(steps) - (steps - 1) / 2
        centred = series - series.mean(axis=-1, keepdims=True)
        n += steps
        total += series.sum(axis=-1)
        squares += (centred**2).sum(axis=-1)
        products += centred @ time
        room += float((time**2).sum())
    slope = 100 * products / room if room else np.full(samples.n_heads, np.nan)
    return Moments(total / max(n, 1), np.sqrt(squares / max(n, 1)), slope)


def count_patterns(samples: Samples, settings: Settings, rng: np.random.Generator, tell: Progress) -> HeadPatternCounts:
    """Count the windows of all used samples, some heads at a time where all would not fit into memory."""
    counts = np.zeros((samples.n_heads, settings.patterns), np.int64)
    tied = np.zeros(samples.n_heads, np.int64)
    low, high = np.full(samples.n_heads, np.nan), np.full(samples.n_heads, np.nan)
    count = _count_by_sample if sum(samples.eligible) >= _ENOUGH_SAMPLES else _count_by_window
    step = _heads_at_once(samples, settings)
    for start in range(0, samples.n_heads, step):
        heads = slice(start, min(samples.n_heads, start + step))

        def told(share: float, heads: slice = heads) -> None:
            done = heads.start + share * (heads.stop - heads.start)
            tell("counting patterns", done / samples.n_heads)

        counts[heads], tied[heads], low[heads], high[heads] = count(samples, settings, heads, rng, told)
    possible = sum(settings.windows(len(at)) for at in samples.used_positions())
    return HeadPatternCounts(counts, tied, possible, low, high)


def _heads_at_once(samples: Samples, settings: Settings) -> int:
    room = samples.n_heads
    if settings.cut.fits_a_trend:
        room = min(room, HELD_VALUES // sum(map(len, samples.used_positions())))
    if sum(samples.eligible) >= _ENOUGH_SAMPLES:
        room = min(room, _COUNTS // (sum(samples.eligible) * settings.patterns))
    return max(1, room)


# Counts, tied windows, and the two ends of the interval, of some heads.
Tally = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _count_by_sample(
    samples: Samples, settings: Settings, heads: slice, rng: np.random.Generator, report: Callable[[float], None]
) -> Tally:
    n = sum(samples.eligible)
    counts = np.empty((n, heads.stop - heads.start, settings.patterns), np.int32)
    tied = np.zeros(heads.stop - heads.start, np.int64)
    for i, series in enumerate(transform_series(samples, settings.cut, heads)):
        report(i / n)
        patterns = pattern_counts(series, settings.order, settings.delay, ties=settings.ties, rng=rng)
        counts[i] = patterns.counts
        tied += _tied_windows(patterns.tie_rate, series, settings)
    # Every group of heads is judged by the same drawn samples, however many groups there are.
    draws = np.random.default_rng([settings.seed, n])
    low, high = interval_over_samples(counts, level=_LEVEL, replicates=_REPLICATES, rng=draws)
    return counts.sum(axis=0, dtype=np.int64), tied, low, high


def _count_by_window(
    samples: Samples, settings: Settings, heads: slice, rng: np.random.Generator, report: Callable[[float], None]
) -> Tally:
    n = sum(samples.eligible)
    indices: list[Int[np.ndarray, "head window"]] = []
    tied = np.zeros(heads.stop - heads.start, np.int64)
    for i, series in enumerate(transform_series(samples, settings.cut, heads)):
        report(i / n)
        patterns = ordinal_patterns(series, settings.order, settings.delay, ties=settings.ties, rng=rng)
        indices.append(patterns.index)
        tied += _tied_windows(patterns.tie_rate, series, settings)
    sequences = [np.concatenate([part[part >= 0] for part in parts]) for parts in zip(*indices, strict=True)]
    counts = np.stack([np.bincount(sequence, minlength=settings.patterns) for sequence in sequences])
    low, high = interval_within_samples(
        sequences, settings.patterns, settings.span, level=_LEVEL, replicates=_REPLICATES, rng=rng
    )
    return counts, tied, low, high


def _tied_windows(
    rate: Float64[np.ndarray, " head"], series: Float64[np.ndarray, "head step"], settings: Settings
) -> Int64[np.ndarray, " head"]:
    return np.asarray(np.rint(rate * (series.shape[-1] - settings.span)), np.int64)

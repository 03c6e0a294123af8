"""What is counted of every head: the moments of its trajectories, its patterns, and the interval of their entropy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int64

from softgap.analysis.cuts import Cut
from softgap.analysis.pooled import interval_over_samples, interval_within_samples
from softgap.analysis.samples import Samples, transformed
from softgap.analysis.settings import Settings
from softgap.signal import ordinal_patterns, pattern_counts

__all__ = ["HELD", "Counted", "Moments", "Progress", "count_patterns", "moments_of"]

# From so many samples on, an interval draws samples; with fewer it draws blocks of windows within them.
_ENOUGH_SAMPLES = 10
_LEVEL, _REPLICATES = 0.95, 499
# Numbers of a study that are held at once where a trend is fitted over all its samples (float64: 256 MiB), and
# pattern counts of all its samples (int32: 256 MiB). Where the heads need more, the study is read again for the next.
HELD = 2**25
_COUNTS = 2**26

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean, spread around each sample's own mean, and slope per 100 steps within samples, of every head."""

    mean: Float64[np.ndarray, " head"]
    spread: Float64[np.ndarray, " head"]
    slope: Float64[np.ndarray, " head"]


@dataclass(frozen=True, eq=False)
class Counted:
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


def count_patterns(samples: Samples, settings: Settings, rng: np.random.Generator, tell: Progress) -> Counted:
    """Count the windows of all used samples, some heads at a time where all would not fit into memory."""
    counts = np.zeros((samples.n_heads, settings.patterns), np.int64)
    tied = np.zeros(samples.n_heads, np.int64)
    low, high = np.full(samples.n_heads, np.nan), np.full(samples.n_heads, np.nan)
    count = _counted_by_sample if sum(samples.used) >= _ENOUGH_SAMPLES else _counted_by_window
    step = _heads_at_once(samples, settings)
    for start in range(0, samples.n_heads, step):
        heads = slice(start, min(samples.n_heads, start + step))

        def told(share: float, heads: slice = heads) -> None:
            done = heads.start + share * (heads.stop - heads.start)
            tell("counting patterns", done / samples.n_heads)

        counts[heads], tied[heads], low[heads], high[heads] = count(samples, settings, heads, rng, told)
    possible = sum(settings.windows(len(at)) for at in samples.used_positions())
    return Counted(counts, tied, possible, low, high)


def _heads_at_once(samples: Samples, settings: Settings) -> int:
    room = samples.n_heads
    if settings.cut.fits_a_trend:
        room = min(room, HELD // sum(map(len, samples.used_positions())))
    if sum(samples.used) >= _ENOUGH_SAMPLES:
        room = min(room, _COUNTS // (sum(samples.used) * settings.patterns))
    return max(1, room)


# Counts, tied windows, and the two ends of the interval, of some heads.
Tally = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _counted_by_sample(
    samples: Samples, settings: Settings, heads: slice, rng: np.random.Generator, told: Callable[[float], None]
) -> Tally:
    n = sum(samples.used)
    counts = np.empty((n, heads.stop - heads.start, settings.patterns), np.int32)
    tied = np.zeros(heads.stop - heads.start, np.int64)
    for i, series in enumerate(transformed(samples, settings.cut, heads)):
        told(i / n)
        found = pattern_counts(series, settings.order, settings.delay, ties=settings.ties, rng=rng)
        counts[i] = found.counts
        tied += _tied(found.tie_rate, series, settings)
    # Every group of heads is judged by the same drawn samples, however many groups there are.
    draws = np.random.default_rng([settings.seed, n])
    low, high = interval_over_samples(counts, level=_LEVEL, replicates=_REPLICATES, rng=draws)
    return counts.sum(axis=0, dtype=np.int64), tied, low, high


def _counted_by_window(
    samples: Samples, settings: Settings, heads: slice, rng: np.random.Generator, told: Callable[[float], None]
) -> Tally:
    n = sum(samples.used)
    indices: list[Int[np.ndarray, "head window"]] = []
    tied = np.zeros(heads.stop - heads.start, np.int64)
    for i, series in enumerate(transformed(samples, settings.cut, heads)):
        told(i / n)
        found = ordinal_patterns(series, settings.order, settings.delay, ties=settings.ties, rng=rng)
        indices.append(found.index)
        tied += _tied(found.tie_rate, series, settings)
    sequences = [np.concatenate([part[part >= 0] for part in parts]) for parts in zip(*indices, strict=True)]
    counts = np.stack([np.bincount(sequence, minlength=settings.patterns) for sequence in sequences])
    low, high = interval_within_samples(
        sequences, settings.patterns, settings.span, level=_LEVEL, replicates=_REPLICATES, rng=rng
    )
    return counts, tied, low, high


def _tied(
    rate: Float64[np.ndarray, " head"], series: Float64[np.ndarray, "head step"], settings: Settings
) -> Int64[np.ndarray, " head"]:
    return np.asarray(np.rint(rate * (series.shape[-1] - settings.span)), np.int64)

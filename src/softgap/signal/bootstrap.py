"""Intervals for permutation entropy from resampled blocks of windows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.signal.batch import Options, checked_batch
from softgap.signal.checked import checked_count, checked_rng, checked_share
from softgap.signal.kernels import resample_row, shannon_rows
from softgap.signal.results import Measured

__all__ = ["Interval", "centred_interval", "entropy_interval", "resampled_entropies", "usual_block"]


@dataclass(frozen=True, eq=False)
class Interval(Measured):
    """Permutation entropy of each series between ``low`` and ``high``; ``samples`` are the resampled entropies.

    ``block`` is the number of windows per block.
    """

    value: Float[np.ndarray, "*lead"]
    low: Float[np.ndarray, "*lead"]
    high: Float[np.ndarray, "*lead"]
    samples: Float[np.ndarray, "*lead replicate"]
    block: Int[np.ndarray, "*lead"]
    windows: Int[np.ndarray, "*lead"]
    tie_rate: Float[np.ndarray, "*lead"]
    eligible: Bool[np.ndarray, "*lead"]


def entropy_interval(
    x: Any,
    order: int = 3,
    delay: int = 1,
    *,
    level: float = 0.95,
    replicates: int = 999,
    block: int | None = None,
    normalised: bool = True,
    **options: Unpack[Options],
) -> Interval:
    """Block-bootstrap interval of the permutation entropy of each series.

    Blocks of consecutive windows are drawn with replacement from the pattern sequence, closed to a circle (Politis and
    Romano 1992), until there are as many windows as before. Resampling loses about as much entropy again as sampling
    did, so the quantiles of the resampled entropies h are moved up by twice that loss, 2 (H - mean h): once to stand
    around H, once to stand around what H estimates. ``low`` and ``high`` stay within 0 and log(order!).

    Parameters
    ----------
    block
        Windows per block; by default the cube root of their number, and no fewer than share a value with one window.
    **options
        As everywhere (:class:`Options`), but ``rng`` is required: it draws the blocks.

    Notes
    -----
    The coverage that was measured is in docs/signal.md; the plain percentile interval never covered white noise. At
    the maximum of entropy the estimate is not normally distributed and the interval is too wide: compare such series
    by :func:`z_scores`.
    """
    checked_share("level", level, usual=0.95)
    checked_count("replicates", replicates, least=2)
    if block is not None:
        checked_count("block", block)
    rng = checked_rng(options.get("rng"))
    batch = checked_batch(x, order, delay, options)
    series = len(batch.rows)
    value, samples = np.full(series, np.nan), np.full((series, replicates), np.nan)
    sizes = np.zeros(series, np.int64)
    windows, rate, eligible = np.empty(series, np.int64), np.empty(series), np.empty(series, bool)
    for part in batch.indices():
        windows[part.where], rate[part.where], eligible[part.where] = part.windows, part.tie_rate, part.eligible
        for row in np.flatnonzero(part.eligible):
            at = part.where.start + row
            index = part.table[row][part.table[row] >= 0]
            sizes[at] = min(index.size, block or usual_block(index.size, batch.span))
            samples[at] = resampled_entropies(index, batch.patterns, int(sizes[at]), replicates, rng)
            shannon_rows(np.bincount(index, minlength=batch.patterns)[None], value[at : at + 1])
    low, high = centred_interval(value, samples, level, math.log(batch.patterns))
    unit = batch.unit(normalised)
    results = (value / unit, low / unit, high / unit, samples / unit, sizes, windows, rate, eligible)
    return Interval(*map(batch.shaped, results))


def usual_block(windows: int, span: int) -> int:
    """Windows per block: the cube root of their number, and no fewer than share a value with one window."""
    return min(windows, max(math.ceil(math.pow(windows, 1 / 3)), 2 * span + 1))


def resampled_entropies(
    index: Int[np.ndarray, " window"], patterns: int, block: int, replicates: int, rng: np.random.Generator
) -> Float[np.ndarray, " replicate"]:
    """Entropies in nats of sequences of as many patterns as ``index`` has, drawn from it in blocks."""
    entropies = np.empty(replicates)
    draws = rng.random((replicates, -(-index.size // block)))
    resample_row(index, patterns, block, draws, entropies)
    return entropies


def centred_interval(
    value: np.ndarray, samples: np.ndarray, level: float, largest: float
) -> tuple[np.ndarray, np.ndarray]:
    """Quantiles of resampled entropies, moved up by twice what resampling lost, within 0 and ``largest``."""
    tail = (1 - level) / 2
    low, high = np.quantile(samples, [tail, 1 - tail], axis=-1) + 2 * (value - samples.mean(axis=-1))
    return np.clip(low, 0, largest), np.clip(high, 0, largest)

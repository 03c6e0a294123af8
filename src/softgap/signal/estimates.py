"""Estimates of permutation entropy: bias correction, rarefaction and bootstrap intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.inputs import check_count, check_rng, check_share
from softgap.intervals import ArrayInterval
from softgap.signal.entropy import reduce_blocks
from softgap.signal.kernels import resample_row, shannon_rows, stretch_rows
from softgap.signal.patterns import Options, check_batch, noise_spread
from softgap.signal.results import Entropy, SeriesResult
from softgap.signal.validation import check_delay, check_order

__all__ = [
    "EntropyInterval",
    "Rarefied",
    "bias_factor",
    "centred_interval",
    "corrected_entropy",
    "entropy_interval",
    "rarefied_entropy",
    "resampled_entropies",
    "usual_block",
]


def corrected_entropy(
    x: Any, order: int = 3, delay: int = 1, *, normalised: bool = True, seed: int = 0, **options: Unpack[Options]
) -> Entropy:
    """Permutation entropy with its short-length bias taken out; 1 on average for white noise of any length.

    H + f (K - 1) / 2N nats for K patterns seen in N windows. f = 1 is the correction of Miller and Madow, which is
    too large here because neighbouring windows share values; f is measured on white noise, see ``bias_factor``.
    A single value may exceed 1, as an estimate that is right on average must.

    Notes
    -----
    For series far from white noise f is an approximation: their windows repeat in other ways.
    """
    batch = check_batch(x, order, delay, options)

    def reduce(counts: np.ndarray) -> np.ndarray:
        entropy, windows = np.empty(len(counts)), counts.sum(axis=1)
        shannon_rows(counts, entropy)
        sizes, inverse = np.unique(windows, return_inverse=True)
        factors = np.array([bias_factor(batch.order, int(size), batch.delay, seed=seed) for size in sizes])
        entropy += factors[inverse] * ((counts > 0).sum(axis=1) - 1) / (2 * windows)
        return entropy / batch.unit(normalised)

    return Entropy(*reduce_blocks(batch, batch.counts(), reduce))


def bias_factor(order: int, windows: int, delay: int = 1, *, seed: int = 0) -> float:
    """What the Miller-Madow correction has to be multiplied by for white noise of ``windows`` windows.

    f = 2 N E[log order! - H] / E[K - 1], simulated at the two nearest powers of sqrt(2) and interpolated in log N;
    from 20 order! windows on (at least 2,000) the value there. It tends to sum_i v_i / p_i / (order! - 1), v_i the
    long-run variance of the indicator of pattern i: about 0.7 at order 3.
    """
    check_order(order)
    check_delay(delay)
    check_count("a seed", seed, least=0)
    place = 2 * math.log2(min(check_count("windows", windows), max(2000, 20 * math.factorial(order))))
    below = math.floor(place)
    low, high = (_simulated_factor(order, delay, k, seed) for k in (below, below + 1))
    return low + (place - below) * (high - low)


@lru_cache(maxsize=4096)
def _simulated_factor(order: int, delay: int, half_powers: int, seed: int) -> float:
    windows = round(2 ** (half_powers / 2))
    if windows < 2:  # one window is one pattern: nothing to scale
        return 0.0
    series = max(8, min(20_000, 4_000_000 // windows))
    rng = np.random.default_rng([seed, order, delay, half_powers])
    noise = noise_spread(order, windows, delay=delay, series=series, rng=rng)
    deficit = (1 - noise.mean) * math.log(math.factorial(order))
    return 2 * windows * deficit / (noise.patterns - 1)


@dataclass(frozen=True, eq=False)
class Rarefied(SeriesResult):
    """Entropies taken at one number of windows, ``common``, so that series of different length compare.

    ``stretches`` is how many stretches of that many windows were averaged for each series.
    """

    value: Float[np.ndarray, "*lead"]
    common: int
    stretches: Int[np.ndarray, "*lead"]
    windows: Int[np.ndarray, "*lead"]
    tie_rate: Float[np.ndarray, "*lead"]
    eligible: Bool[np.ndarray, "*lead"]


def rarefied_entropy(
    x: Any,
    order: int = 3,
    delay: int = 1,
    *,
    windows: int | None = None,
    normalised: bool = True,
    **options: Unpack[Options],
) -> Rarefied:
    """Permutation entropy at the same number of windows for every series.

    The mean plug-in entropy over evenly spaced stretches of ``windows`` consecutive windows that together cover the
    series, so that the bias of a short series is put on the long ones too. By default ``windows`` is that of the
    shortest eligible series. Series with fewer are not eligible, nor is any if ``windows`` is below the rule.
    """
    batch = check_batch(x, order, delay, options)
    series = len(batch.rows)
    counted, rate = np.empty(series, np.int64), np.empty(series)
    # Twice over the blocks: the patterns of all windows would take half the memory of the series.
    for block in batch.indices():
        counted[block.where], rate[block.where] = block.windows, block.tie_rate
    enough = counted[counted >= batch.least]
    fewest = int(enough.min()) if enough.size else batch.least
    common = fewest if windows is None else check_count("windows", windows)
    values, stretches = np.full(series, np.nan), np.zeros(series, np.int64)
    if common >= batch.least:
        for block in batch.indices():
            stretch_rows(block.table, batch.patterns, common, values[block.where], stretches[block.where])
    unit, shaped = batch.unit(normalised), batch.restore_shape
    return Rarefied(
        shaped(values / unit), common, shaped(stretches), shaped(counted), shaped(rate), shaped(stretches > 0)
    )


@dataclass(frozen=True, eq=False)
class EntropyInterval(ArrayInterval, SeriesResult):
    """Permutation entropy of each series between ``low`` and ``high``; ``samples`` are the resampled entropies.

    ``block`` is the number of windows per block.
    """

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
) -> EntropyInterval:
    """Block-bootstrap interval of the permutation entropy of each series.

    Blocks of consecutive windows are drawn with replacement from the pattern sequence, closed to a circle (Politis and
    Romano 1992), until there are as many windows as before. Resampling loses about as much entropy again as sampling
    did, so the quantiles of the resampled entropies h are moved up by twice that loss, 2 (H - mean h): once to stand
    around H, once to stand around what H estimates. ``low`` and ``high`` stay within 0 and log(order!).

    Parameters
    ----------
    x
        Real numbers, time last, any leading axes: one value per series.
    order
        Values per window, 2 to 8.
    delay
        Steps between neighbouring values of a window.
    level
        Coverage of the interval.
    replicates
        Bootstrap replicates.
    block
        Windows per block; by default the cube root of their number, and no fewer than share a value with one window.
    normalised
        Divide by log(order!); False gives nats.
    **options
        As everywhere (``Options``), but ``rng`` is required: it draws the blocks.

    Returns
    -------
    Interval
        ``value``, ``low`` and ``high``, per series.

    Notes
    -----
    The coverage that was measured is in docs/signal.md; the plain percentile interval never covered white noise. At
    the maximum of entropy the estimate is not normally distributed and the interval is too wide: compare such series
    by ``z_scores``.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.signal import entropy_interval
    >>> rng = np.random.default_rng(0)
    >>> found = entropy_interval(rng.standard_normal(500).cumsum(), replicates=199, rng=rng)
    >>> bool(found.low <= found.value <= found.high)
    True
    """
    check_share("level", level, usual=0.95)
    check_count("replicates", replicates, least=2)
    if block is not None:
        check_count("block", block)
    rng = check_rng(options.get("rng"))
    batch = check_batch(x, order, delay, options)
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
    return EntropyInterval(*map(batch.restore_shape, results), level=level)


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

"""Entropies that do not depend on how long a series happens to be: bias correction and rarefaction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Unpack

import numpy as np
from jaxtyping import Bool, Float, Int

from softgap.signal.batch import Options, checked_batch
from softgap.signal.checked import checked_count, checked_delay, checked_order
from softgap.signal.eligibility import noise_spread
from softgap.signal.entropy import measured
from softgap.signal.kernels import shannon_rows, stretch_rows
from softgap.signal.results import Entropy, Measured

__all__ = ["Rarefied", "bias_factor", "corrected_entropy", "rarefied_entropy"]


def corrected_entropy(
    x: Any, order: int = 3, delay: int = 1, *, normalised: bool = True, seed: int = 0, **options: Unpack[Options]
) -> Entropy:
    """Permutation entropy with its short-length bias taken out; 1 on average for white noise of any length.

    H + f (K - 1) / 2N nats for K patterns seen in N windows. f = 1 is the correction of Miller and Madow, which is
    too large here because neighbouring windows share values; f is measured on white noise, see :func:`bias_factor`.
    A single value may exceed 1, as an estimate that is right on average must.

    Notes
    -----
    For series far from white noise f is an approximation: their windows repeat in other ways.
    """
    batch = checked_batch(x, order, delay, options)

    def reduce(counts: np.ndarray) -> np.ndarray:
        entropy, windows = np.empty(len(counts)), counts.sum(axis=1)
        shannon_rows(counts, entropy)
        sizes, inverse = np.unique(windows, return_inverse=True)
        factors = np.array([bias_factor(batch.order, int(size), batch.delay, seed=seed) for size in sizes])
        entropy += factors[inverse] * ((counts > 0).sum(axis=1) - 1) / (2 * windows)
        return entropy / batch.unit(normalised)

    return Entropy(*measured(batch, batch.counts(), reduce))


def bias_factor(order: int, windows: int, delay: int = 1, *, seed: int = 0) -> float:
    """What the Miller-Madow correction has to be multiplied by for white noise of ``windows`` windows.

    f = 2 N E[log order! - H] / E[K - 1], simulated at the two nearest powers of sqrt(2) and interpolated in log N;
    from 20 order! windows on (at least 2,000) the value there. It tends to sum_i v_i / p_i / (order! - 1), v_i the
    long-run variance of the indicator of pattern i: about 0.7 at order 3.
    """
    checked_order(order)
    checked_delay(delay)
    checked_count("a seed", seed, least=0)
    place = 2 * math.log2(min(checked_count("windows", windows), max(2000, 20 * math.factorial(order))))
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
class Rarefied(Measured):
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
    batch = checked_batch(x, order, delay, options)
    series = len(batch.rows)
    counted, rate = np.empty(series, np.int64), np.empty(series)
    # Twice over the blocks: the patterns of all windows would take half the memory of the series.
    for block in batch.indices():
        counted[block.where], rate[block.where] = block.windows, block.tie_rate
    enough = counted[counted >= batch.least]
    if windows is None:
        common = int(enough.min()) if enough.size else batch.least
    else:
        common = checked_count("windows", windows)
    values, stretches = np.full(series, np.nan), np.zeros(series, np.int64)
    if common >= batch.least:
        for block in batch.indices():
            stretch_rows(block.table, batch.patterns, common, values[block.where], stretches[block.where])
    unit, shaped = batch.unit(normalised), batch.shaped
    return Rarefied(
        shaped(values / unit), common, shaped(stretches), shaped(counted), shaped(rate), shaped(stretches > 0)
    )

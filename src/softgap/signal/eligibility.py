"""How many windows a series needs before its entropy is reported.

The default rule is read off simulated white noise, whose permutation entropy is 1: from ``LEAST_WINDOWS[order]``
windows on, no more than one series in forty scores below 0.95. Both what a short series loses on average and how much
it scatters are in that number. Up to order 5 that asks for more than the common 2 * order!; above, the common rule is
enough and is taken. ``python benchmarks/spread.py`` prints the simulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from softgap.errors import ValueInputError, unknown_name
from softgap.signal.checked import checked_count, checked_delay, checked_order, checked_rng, is_whole
from softgap.signal.kernels import count_rows, shannon_rows

__all__ = ["ELIGIBILITY", "LEAST_WINDOWS", "Spread", "least_windows", "noise_spread"]

LEAST_WINDOWS: Mapping[int, int] = MappingProxyType({2: 32, 3: 64, 4: 128, 5: 360, 6: 1440, 7: 10080, 8: 80640})
"""The default rule, by order."""

ELIGIBILITY = ("spread", "2*order!")
"""Rules by name: the simulated one above, and the one in common use."""

# Samples drawn at a time, so that memory does not grow with the number of series.
_BLOCK = 1 << 21


def least_windows(rule: str | int, order: int) -> int:
    """The least number of windows of an eligible series, by the name of a rule or as a number of your own."""
    if isinstance(rule, str):
        if rule not in ELIGIBILITY:
            raise unknown_name("eligibility rule", rule, ELIGIBILITY)
        return LEAST_WINDOWS[order] if rule == "spread" else 2 * math.factorial(order)
    if not is_whole(rule) or rule < 1:
        raise ValueInputError(
            f"eligibility must be {' or '.join(map(repr, ELIGIBILITY))} or a number of windows from 1, got {rule!r}"
        )
    return int(rule)


@dataclass(frozen=True)
class Spread:
    """Normalised permutation entropy of white noise at one length: mean, standard deviation and 2.5 % quantile.

    ``patterns`` is the mean number of different patterns seen.
    """

    mean: float
    deviation: float
    low: float
    patterns: float


def noise_spread(order: int, windows: int, *, delay: int = 1, series: int = 2000, rng: np.random.Generator) -> Spread:
    """Simulate ``series`` white-noise series of ``windows`` windows each."""
    checked_order(order)
    checked_delay(delay)
    checked_count("windows", windows)
    checked_count("series", series, least=2)
    checked_rng(rng)
    patterns, length = math.factorial(order), windows + (order - 1) * delay
    entropy, seen = np.empty(series), np.empty(series)
    rows = max(1, _BLOCK // max(length, patterns))
    for start in range(0, series, rows):
        noise = rng.random((min(rows, series - start), length))
        counts = np.zeros((len(noise), patterns), np.int64)
        # Ties are kept, so that every series has all its windows: in 53 random bits they are rarer than one in 10^12.
        count_rows(noise, np.full(len(noise), length), order, delay, True, counts, np.empty(len(noise), np.int64))
        shannon_rows(counts, entropy[start : start + rows])
        seen[start : start + rows] = (counts > 0).sum(axis=1)
    entropy /= math.log(patterns)
    low = float(np.quantile(entropy, 0.025))
    return Spread(float(entropy.mean()), float(entropy.std(ddof=1)), low, float(seen.mean()))

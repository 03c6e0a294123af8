"""Results of the ordinal measures: a value per series, with its windows, ties and eligibility."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = [
    "ComplexityEntropy",
    "Entropy",
    "MissingPatterns",
    "PatternCounts",
    "Patterns",
    "RenyiComplexity",
    "SeriesResult",
]

Numbers = Float[np.ndarray, "..."]
Counts = Int[np.ndarray, "..."]
Flags = Bool[np.ndarray, "..."]


class SeriesResult:
    """What every result says about each series; arrays have the leading axes of the input.

    ``windows`` were counted, ``tie_rate`` is the share of all windows that hold equal values, and where ``eligible``
    is False there were fewer windows than the eligibility rule asks for: every number there is NaN.
    """

    windows: Counts
    tie_rate: Numbers
    eligible: Flags

    @property
    def reason(self) -> np.ndarray:
        """One sentence per series that is not eligible, '' for the others."""
        reasons = np.full(self.eligible.shape, "", dtype=object)
        for where in np.argwhere(~self.eligible):
            at = tuple(where)
            windows, rate = int(self.windows[at]), float(self.tie_rate[at])
            if windows == 0 and rate == 1:
                reasons[at] = (
                    "all windows hold equal values (tie rate 1), as in a constant series; use ties='stable' or 'jitter'"
                )
            else:
                reasons[at] = (
                    f"{windows} windows (tie rate {rate:.3g}) are fewer than the eligibility rule asks for, "
                    "or all their weights are zero; use a longer series or a lower order"
                )
        return reasons


@dataclass(frozen=True, eq=False)
class Entropy(SeriesResult):
    """An entropy, or another single number, per series (and per q or scale, as a last axis)."""

    value: Numbers
    windows: Counts
    tie_rate: Numbers
    eligible: Flags


@dataclass(frozen=True, eq=False)
class Patterns:
    """The pattern index of every window, -1 where it was excluded or lies past the end of its series."""

    index: Int[np.ndarray, "*lead window"]
    windows: Counts
    tie_rate: Numbers


@dataclass(frozen=True, eq=False)
class PatternCounts(SeriesResult):
    """How often each pattern occurs; counted for series that are not eligible too."""

    counts: Int[np.ndarray, "*lead pattern"]
    windows: Counts
    tie_rate: Numbers
    eligible: Flags


@dataclass(frozen=True, eq=False)
class ComplexityEntropy(SeriesResult):
    """A point of the complexity-entropy plane per series."""

    entropy: Numbers
    complexity: Numbers
    windows: Counts
    tie_rate: Numbers
    eligible: Flags


@dataclass(frozen=True, eq=False)
class RenyiComplexity(SeriesResult):
    """The curve (H_q, C_q) over ``q``, the last axis of both."""

    q: Float[np.ndarray, " q"]
    entropy: Numbers
    complexity: Numbers
    windows: Counts
    tie_rate: Numbers
    eligible: Flags


@dataclass(frozen=True, eq=False)
class MissingPatterns(SeriesResult):
    """Patterns that never occur, and those among them whose absence is not chance.

    ``fraction`` is the number of missing patterns over order!.
    """

    missing: Bool[np.ndarray, "*lead pattern"]
    forbidden: Bool[np.ndarray, "*lead pattern"]
    fraction: Numbers
    windows: Counts
    tie_rate: Numbers
    eligible: Flags

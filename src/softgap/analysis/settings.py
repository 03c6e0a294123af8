"""What an analysis is asked for, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from softgap.analysis.cuts import Cut
from softgap.errors import unknown_name
from softgap.signal.batch import checked_batch
from softgap.signal.checked import checked_count, checked_share
from softgap.signal.eligibility import least_windows
from softgap.trajectories import QUANTITIES

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """All that the numbers of an analysis depend on beside the trajectories; see :func:`softgap.analysis.analyze`."""

    mechanism: str | None
    quantity: str
    transform: str
    order: int
    delay: int
    segment: str
    ties: str
    eligibility: str | int
    alpha: float
    seed: int

    def __post_init__(self) -> None:
        checked_share("alpha", self.alpha, usual=0.05)
        checked_count("seed", self.seed, least=0)
        if self.quantity not in QUANTITIES:
            raise unknown_name("quantity", self.quantity, QUANTITIES)
        # Order, delay, ties and eligibility by the rules of the signal room.
        rng = np.random.default_rng(0)
        options: Any = {"ties": self.ties, "rng": rng, "eligibility": self.eligibility}
        checked_batch(np.zeros(1), self.order, self.delay, options, short=True)
        Cut(self.transform, self.segment)

    @property
    def cut(self) -> Cut:
        """What is done to every series before its windows are taken."""
        return Cut(self.transform, self.segment)

    @property
    def span(self) -> int:
        """Steps from the first to the last value of a window."""
        return (self.order - 1) * self.delay

    @property
    def patterns(self) -> int:
        """The number of patterns, order!."""
        return math.factorial(self.order)

    @property
    def least(self) -> int:
        """Windows that a head needs to be eligible."""
        return least_windows(self.eligibility, self.order)

    def windows(self, steps: int) -> int:
        """Windows of a sample of so many steps, after the cut."""
        return max(0, self.cut.length(steps) - self.span)

    def to_json(self, mechanism: str) -> dict[str, Any]:
        """As plain values, with the mechanism that was taken and the rule as a number."""
        values = {name: value for name, value in asdict(self).items() if name != "alpha"}
        return {**values, "mechanism": mechanism, "least_windows": self.least}

"""What is done to every series before its patterns are taken: a transform, then a segment of what it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int

from softgap.errors import unknown_name
from softgap.signal import SEGMENTS, TRANSFORMS, apply_transform, residuals, segment_slice, steps_lost
from softgap.signal.residuals import fewest_steps

__all__ = ["CONTROL", "Cut"]

CONTROL = "control"
"""The transform that subtracts, step by step, the same quantity of the mechanism `uniform`.

It takes away what the position lab finds behind the trend (the running mean of values and the concentration of
softmax) and leaves what the mechanism itself adds.
"""


@dataclass(frozen=True)
class Cut:
    """A transform and a segment, by name."""

    transform: str
    segment: str

    def __post_init__(self) -> None:
        if self.transform not in (*TRANSFORMS, CONTROL):
            raise unknown_name("transform", self.transform, (*TRANSFORMS, CONTROL))
        if self.segment not in SEGMENTS:
            raise unknown_name("segment", self.segment, SEGMENTS)

    @property
    def fits_a_trend(self) -> bool:
        """Whether all samples of a study are needed at once."""
        return self.transform == "residual"

    @property
    def _own(self) -> str:
        # The control is subtracted where samples are read, so that noise, which has none, passes as it is.
        return "raw" if self.transform == CONTROL else self.transform

    def length(self, steps: int) -> int:
        """Steps that are left of so many; 0 where they are too few for the transform or the segment."""
        if self.fits_a_trend and steps < fewest_steps():
            return 0
        left = max(0, steps - steps_lost(self._own))
        if left < 3:
            return left if self.segment == "full" else 0
        part = segment_slice(left, self.segment)
        return int(part.stop - part.start)

    def __call__(
        self, series: Sequence[Float64[np.ndarray, "series step"]], positions: Sequence[Int[np.ndarray, " step"]]
    ) -> list[Float64[np.ndarray, "series left"]]:
        """The series of one or all samples; the residual is that of the samples given together."""
        if self.fits_a_trend:
            changed: Sequence[np.ndarray] = residuals(series, positions).series
        else:
            changed = [apply_transform(x, self._own) for x in series]
        return [x[..., segment_slice(x.shape[-1], self.segment)] for x in changed]

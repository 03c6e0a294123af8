"""The one sentence that a run or a study opens with: how much of softmax a fitted linear attention could do here.

The share is that of the calibration (THEORY section 8): 1 - mean divergence(fitted) / mean divergence(uniform), over
heads and over steps from position 64 on where there are enough of them. Its interval resamples blocks of steps within
one run, and whole samples in a study.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from softgap.trajectories import Trajectories

__all__ = ["UNKNOWN", "GapSums", "Headline", "gap_sums", "headline"]

FITTED, CONTROL, CLASSICAL = "fitted", "uniform", "elu1"
FIRST, BLOCK, FEWEST = 64, 16, 32
RESAMPLES = 999
# A head whose distance to the mean of values is below this has no gap; one that keeps half of it needs softmax.
NO_GAP, HALF = 0.02, 0.5
NAMED = 3
UNKNOWN = (
    "How much of this a linear attention could do is not known yet: fit one to each head of this model, once, with "
    "'softgap calibrate'."
)
"""What to say where no fitted map was measured."""


@dataclass(frozen=True, eq=False)
class GapSums:
    """Divergences from fitted, uniform and elu1 (NaN where it was not measured), summed over parts of a run or study.

    Attributes
    ----------
    parts
        Blocks of steps of one run, or whole samples.
    steps
        How many steps all parts hold together.
    """

    parts: Float[np.ndarray, "part mechanism layer head"]
    steps: int

    @classmethod
    def of_samples(cls, samples: Sequence[GapSums]) -> GapSums:
        """Every sample as one part."""
        return cls(np.stack([one.parts.sum(axis=0) for one in samples]), sum(one.steps for one in samples))


@dataclass(frozen=True)
class Headline:
    """How much of the gap a fitted linear attention closes, beside its control.

    Attributes
    ----------
    share, low, high
        With the middle 95 % over resampled parts; the ends are NaN where there is one part only.
    classical
        The same share for elu1, None where it was not measured.
    stubborn
        (layer, head) of the heads that keep more than half of their gap, the largest rest first.
    heads
        How many heads have a gap.
    """

    share: float
    low: float
    high: float
    classical: float | None
    stubborn: tuple[tuple[int, int], ...]
    heads: int

    @property
    def sentence(self) -> str:
        """The whole in words."""
        interval = "" if np.isnan(self.low) else f" ({self.low:.2f} to {self.high:.2f})"
        beside = "" if self.classical is None else f", where elu1 gets {self.classical:.2f}"
        if not self.stubborn:
            rest = f"none of {self.heads} heads keeps more than half of its gap"
        else:
            named = ", ".join(f"layer {layer} head {head}" for layer, head in self.stubborn[:NAMED])
            keep = "head keeps" if len(self.stubborn) == 1 else "heads keep"
            rest = f"{len(self.stubborn)} of {self.heads} {keep} more than half of the gap, first of all {named}"
        return (
            f"A linear attention fitted to each head goes {self.share:.2f}{interval} of the way from the mean of "
            f"values to softmax here{beside}; {rest}."
        )


def gap_sums(run: Trajectories) -> GapSums | None:
    """The sums of one run by blocks of steps; None where fitted or its control was not measured."""
    if not {FITTED, CONTROL} <= set(run.mechanisms):
        return None
    late = run.positions >= FIRST
    kept = late if np.count_nonzero(late) >= FEWEST else np.ones_like(late)
    absent = np.full((len(run.layers), run.divergence.shape[1], run.n_steps), np.nan)
    found = np.stack(
        [run.select(name).divergence if name in run.mechanisms else absent for name in (FITTED, CONTROL, CLASSICAL)]
    )[..., kept].astype(np.float64)
    if not found.shape[-1]:
        return None
    parts = np.stack(
        [np.nansum(found[..., start : start + BLOCK], axis=-1) for start in range(0, found.shape[-1], BLOCK)]
    )
    parts[:, np.isnan(found).all(axis=(1, 2, 3))] = np.nan
    return GapSums(parts, found.shape[-1])


def headline(gap: GapSums, layers: Sequence[int]) -> Headline | None:
    """The headline of a run or a study; None where nothing lies between softmax and the mean of values."""
    total = gap.parts.sum(axis=0)
    mine, uniform, classical = total.sum(axis=(1, 2))
    if not uniform > 0:
        return None
    rng = np.random.default_rng(0)
    sums = gap.parts[:, :2].sum(axis=(2, 3))
    drawn = sums[rng.integers(len(sums), size=(RESAMPLES, len(sums)))].sum(axis=1)
    ends = np.quantile(1 - drawn[:, 0] / drawn[:, 1], [0.025, 0.975]) if len(sums) > 1 else (np.nan, np.nan)
    has_gap = total[1] >= NO_GAP * gap.steps
    kept = np.where(has_gap, total[0] / np.where(has_gap, total[1], 1.0), 0.0)
    order = np.argsort(-total[0] * (kept > HALF), axis=None)[: int((kept > HALF).sum())]
    width = total.shape[-1]
    return Headline(
        float(1 - mine / uniform),
        float(ends[0]),
        float(ends[1]),
        None if np.isnan(classical) else float(1 - classical / uniform),
        tuple((layers[int(i) // width], int(i) % width) for i in order),
        int(has_gap.sum()),
    )

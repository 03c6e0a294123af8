"""The one sentence that a run or a study opens with: how much of softmax a fitted linear attention could do here.

The share is that of the calibration (THEORY section 8): 1 - mean divergence(fitted) / mean divergence(uniform), over
heads and over steps from position 64 on where there are enough of them. Intervals resample blocks of steps within one
run, and whole samples in a study. Every number stands beside that of elu1, the control of the fit.
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
ENDS = (0.025, 0.975)
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

    @property
    def left(self) -> Float[np.ndarray, "layer head"]:
        """The share of its gap that the fitted map leaves to each head, NaN for a head without a gap."""
        fitted, _ = _left(self.parts.sum(axis=0), self.steps)
        return np.asarray(fitted)


@dataclass(frozen=True)
class Headline:
    """How much of the gap a fitted linear attention closes, beside its control.

    Attributes
    ----------
    share, low, high
        With the middle 95 % over resampled parts; here and below the ends are NaN where there is one part only.
    classical, classical_low, classical_high
        The same share for elu1, None where it was not measured.
    stubborn
        (layer, head) of the heads that keep more than half of their gap, the largest rest first.
    fewest, most
        The middle 95 % of their number.
    classical_stubborn
        How many heads elu1 leaves more than half of their gap; None where it was not measured.
    heads
        How many heads have a gap.
    """

    share: float
    low: float
    high: float
    classical: float | None
    stubborn: tuple[tuple[int, int], ...]
    heads: int
    classical_low: float | None = None
    classical_high: float | None = None
    fewest: float = np.nan
    most: float = np.nan
    classical_stubborn: int | None = None

    @property
    def sentence(self) -> str:
        """The whole in words."""
        return (
            f"A linear attention fitted to each head goes {self.share:.2f}{_ends(self.low, self.high)} of the way from "
            f"the mean of values to softmax here{self._classical}; {self._stubborn}."
        )

    @property
    def _classical(self) -> str:
        if self.classical is None:
            return ""
        return f", where elu1 goes {self.classical:.2f}{_ends(self.classical_low, self.classical_high)}"

    @property
    def _stubborn(self) -> str:
        """Which heads linear attention cannot do."""
        beside = "" if self.classical_stubborn is None else f", with elu1 {self.classical_stubborn}"
        if not self.stubborn:
            return f"none of {self.heads} heads keeps more than half of its gap{beside}"
        named = ", ".join(f"layer {layer} head {head}" for layer, head in self.stubborn[:NAMED])
        keep = "keeps" if len(self.stubborn) == 1 else "keep"
        count = f"{len(self.stubborn)}{_ends(self.fewest, self.most, 0)}"
        return f"{count} of {self.heads} heads {keep} more than half of the gap{beside}, first of all {named}"


def _ends(low: float | None, high: float | None, digits: int = 2) -> str:
    return "" if low is None or high is None or np.isnan(low) else f" ({low:.{digits}f} to {high:.{digits}f})"


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
    left = _left(total, gap.steps)
    keeps = left > HALF
    order = np.argsort(-total[0] * keeps[0], axis=None)[: int(keeps[0].sum())]
    width = total.shape[-1]
    (lows, highs), counts = _intervals(gap)
    measured = not np.isnan(classical)
    return Headline(
        share=float(1 - mine / uniform),
        low=lows[0],
        high=highs[0],
        classical=float(1 - classical / uniform) if measured else None,
        classical_low=lows[1] if measured else None,
        classical_high=highs[1] if measured else None,
        stubborn=tuple((layers[int(i) // width], int(i) % width) for i in order),
        fewest=counts[0],
        most=counts[1],
        classical_stubborn=int(keeps[1].sum()) if measured else None,
        heads=int((~np.isnan(left[0])).sum()),
    )


def _left(
    total: Float[np.ndarray, "*draw mechanism layer head"], steps: int
) -> Float[np.ndarray, "*draw two layer head"]:
    """The share of each head's gap that fitted and elu1 leave, NaN for a head without a gap."""
    uniform = total[..., 1, :, :]
    known = np.where(uniform >= NO_GAP * steps, uniform, np.nan)
    return total[..., [0, 2], :, :] / known[..., None, :, :]


def _intervals(gap: GapSums) -> tuple[list[list[float]], list[float]]:
    """The ends of the middle 95 % of the shares of fitted and elu1, and of how many heads keep more than half."""
    count = len(gap.parts)
    if count < 2:
        return [[np.nan, np.nan], [np.nan, np.nan]], [np.nan, np.nan]
    rng = np.random.default_rng(0)
    drawn = rng.integers(count, size=(RESAMPLES, count))
    taken = (drawn[:, :, None] == np.arange(count)).sum(axis=1)
    totals = np.tensordot(taken, gap.parts, axes=1)
    mine, uniform, classical = np.moveaxis(totals.sum(axis=(2, 3)), 1, 0)
    shares = np.quantile(1 - np.stack([mine, classical], axis=1) / uniform[:, None], ENDS, axis=0)
    heads = (_left(totals, gap.steps)[:, 0] > HALF).sum(axis=(1, 2))
    return shares.tolist(), np.quantile(heads, ENDS).tolist()

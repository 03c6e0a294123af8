"""The sentences that a run or a study opens with: how much of the gap a fitted linear attention closes.

The share of the gap closed is the one that a calibration reports: 1 - mean divergence(fitted) / mean
divergence(uniform), over heads and over steps from position 64 on (over all steps where these are too few). Intervals
resample blocks of steps within one run, and whole samples in a study. Every number stands beside that of elu1, the
baseline of the fit. The mean of values is a weak baseline, so a second paragraph quotes stricter measures of the
calibration on held-out text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from softgap.deprecation import DeprecatedAttribute
from softgap.kinds import (
    NOT_CALIBRATED,
    QUICK_CALIBRATION,
    UNKNOWN_KINDS,
    UNMEASURED,
    counts_from_numbers,
    kinds_sentence,
)
from softgap.trajectories import Manifest, Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = [
    "FITTED",
    "NO_GAP",
    "GapSums",
    "Headline",
    "Opening",
    "gap_shares",
    "gap_steps",
    "gap_sums",
    "headline",
    "held_out_sentence",
    "kind_counts_sentence",
    "opening",
]

FITTED, CLASSICAL, WINDOW = "fitted", "elu1", "window:"
FIRST, BLOCK, FEWEST = 64, 16, 32
RESAMPLES = 999
# A head whose distance to the mean of values is below this has no gap; one that keeps half of it needs softmax.
NO_GAP, HALF = 0.02, 0.5
NAMED_HEADS = 3
# A text shorter than this many windows is said to be short: a window sees most of it.
SHORT_TEXT = 4
INTERVAL_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True, eq=False)
class GapSums:
    """Divergences from fitted, uniform, elu1 and a window, summed over parts of a run or study.

    Those of elu1 and of the window are NaN where they were not measured. The window is the first one of the run, by
    default the one that keeps as much as the fitted map.

    Attributes
    ----------
    parts
        Blocks of steps of one run, or whole samples.
    steps
        How many steps all parts hold together.
    window
        Name of the window; empty without one.
    length
        Tokens of the longest text.
    """

    parts: Float[np.ndarray, "part mechanism layer head"]
    steps: int
    window: str = ""
    length: int = 0

    @classmethod
    def of_samples(cls, samples: Sequence[GapSums]) -> GapSums:
        """Every sample as one part."""
        parts = np.stack([sums.parts.sum(axis=0) for sums in samples])
        longest = max(sums.length for sums in samples)
        return cls(parts, sum(sums.steps for sums in samples), samples[0].window, longest)

    @property
    def left(self) -> Float[np.ndarray, "layer head"]:
        """The share of its gap that the fitted map leaves to each head, NaN for a head without a gap."""
        fitted, _ = _remaining_gaps(self.parts.sum(axis=0), self.steps)
        return np.asarray(fitted)

    @property
    def ranked(self) -> list[tuple[int, int]]:
        """(index of the layer, head) by that share, the largest first; heads without a gap are not among them."""
        left = self.left
        order = np.argsort(-left, axis=None, kind="stable")[: np.count_nonzero(~np.isnan(left))]
        return [(int(i) // left.shape[1], int(i) % left.shape[1]) for i in order]


@dataclass(frozen=True)
class Headline:
    """How much of the gap a fitted linear attention closes, beside its baseline.

    Attributes
    ----------
    share, low, high
        With the middle 95 % over resampled parts; here and below the ends are NaN where there is one part only.
    classical, classical_low, classical_high
        The same share for elu1, None where it was not measured.
    stubborn
        (layer, head) of the heads that keep more than half of their gap, the largest share first.
    kept
        The share of its gap that each of them keeps; above 1 the fitted map is further from softmax than the mean of
        values is.
    fewest, most
        The middle 95 % of their number.
    classical_stubborn
        How many heads elu1 leaves more than half of their gap; None where it was not measured.
    window, window_low, window_high
        The share that the window closes, None where none was measured.
    window_keys, length
        Keys that the window keeps, and tokens of the longest text: in a short one a window sees nearly everything.
    heads
        How many heads have a gap.
    """

    share: float
    low: float
    high: float
    classical: float | None
    stubborn: tuple[tuple[int, int], ...]
    gap_left: tuple[float, ...]
    heads: int
    classical_low: float | None = None
    classical_high: float | None = None
    fewest: float = np.nan
    most: float = np.nan
    classical_stubborn: int | None = None
    window: float | None = None
    window_low: float | None = None
    window_high: float | None = None
    window_keys: int = 0
    length: int = 0

    kept = DeprecatedAttribute("gap_left")

    def to_json(self) -> dict[str, Any]:
        """As plain data, with the sentence; files keep the name ``kept`` for ``gap_left``."""
        values = {"kept" if name == "gap_left" else name: value for name, value in asdict(self).items()}
        return {**values, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """The headline as two sentences."""
        return (
            f"On this text a fitted linear attention closes {_percent(self.share)}{_percents(self.low, self.high)} of "
            f"the gap between averaging and softmax{self._window}{self._classical}. {self._stubborn}."
        )

    @property
    def _window(self) -> str:
        if self.window is None:
            return ""
        keys = f" of {self.window_keys} keys" if self.window_keys else ""
        short = self.length and self.window_keys and self.length < SHORT_TEXT * self.window_keys
        all_seen = f" in a text of only {self.length} tokens" if short else ""
        return (
            f"; a window{keys} closes {_percent(self.window)}{_percents(self.window_low, self.window_high)}{all_seen}"
        )

    @property
    def _classical(self) -> str:
        if self.classical is None:
            return ""
        return f"; elu+1 closes {_percent(self.classical)}{_percents(self.classical_low, self.classical_high)}"

    @property
    def _stubborn(self) -> str:
        """The heads that a fitted linear attention cannot replace."""
        classical = "" if self.classical_stubborn is None else f" (with elu+1, {self.classical_stubborn} do)"
        if not self.stubborn:
            return f"None of {self.heads} heads keeps more than half of its gap{classical}"
        names = [
            f"{layer}.{head} ({_percent(share)})"
            for (layer, head), share in list(zip(self.stubborn, self.gap_left, strict=True))[:NAMED_HEADS]
        ]
        listed = " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
        keep = "keeps more than half of its gap" if len(self.stubborn) == 1 else "keep more than half of their gap"
        spread = "" if np.isnan(self.fewest) else f" ({self.fewest:.0f} to {self.most:.0f})"
        first = "most of all " if len(self.stubborn) > 1 else ""
        return f"{len(self.stubborn)} of {self.heads} heads{spread} {keep}{classical}: {first}{listed}"


def _percent(share: float) -> str:
    return f"{_hundredths(share)} %"


def _percents(low: float | None, high: float | None) -> str:
    """An interval of shares in percent, nothing where it is unknown."""
    return "" if low is None or high is None or np.isnan(low) else f" ({_hundredths(low)} to {_hundredths(high)})"


def _hundredths(share: float) -> str:
    return f"{round(100 * share) + 0.0:.0f}".replace("-", "−")


def gap_sums(run: Trajectories) -> GapSums | None:
    """The sums of one run by blocks of steps; None where fitted or its baseline was not measured."""
    if not {FITTED, BASELINE} <= set(run.mechanisms):
        return None
    steps = gap_steps(run)
    absent = np.full((len(run.layers), run.divergence.shape[1], run.n_steps), np.nan)
    window = next((name for name in run.mechanisms if name.startswith(WINDOW)), "")
    names = (FITTED, BASELINE, CLASSICAL, window)
    sums = np.stack([run.select(name).divergence if name in run.mechanisms else absent for name in names])[
        ..., steps
    ].astype(np.float64)
    if not sums.shape[-1]:
        return None
    parts = np.stack(
        [np.nansum(sums[..., start : start + BLOCK], axis=-1) for start in range(0, sums.shape[-1], BLOCK)]
    )
    parts[:, np.isnan(sums).all(axis=(1, 2, 3))] = np.nan
    return GapSums(parts, sums.shape[-1], window, int(run.positions.max()) + 1)


def gap_steps(run: Trajectories) -> Bool[np.ndarray, " step"]:
    """The steps that a share of the gap is taken over: those from position 64 on, or all where these are too few."""
    late = run.positions >= FIRST
    return late if np.count_nonzero(late) >= FEWEST else np.ones_like(late)


def gap_shares(
    mechanism: Float[np.ndarray, "*heads"], uniform: Float[np.ndarray, "*heads"], steps: int
) -> Float[np.ndarray, "*heads"]:
    """The share of each head's gap that a mechanism leaves, from sums over steps; NaN for a head without a gap."""
    return np.asarray(mechanism / np.where(uniform >= NO_GAP * steps, uniform, np.nan))


def held_out_sentence(held_out: object) -> str:
    """The measures of a calibration on held-out text, in words.

    Parameters
    ----------
    held_out
        As ``softgap.models.tensor_files.held_out_summary`` returns it and a manifest stores it. Measures that an
        earlier version did not take are left out; the sentence is empty where there is nothing to quote.
    """
    share, profile, explained, uniform, ranks = (
        _number(held_out, name)
        for name in ("gap_closed", "against_profile", "explained", "explained_uniform", "rank_correlation")
    )
    if share is None or profile is None or explained is None:
        return ""
    baseline = "" if uniform is None else f"; the mean of values explains {_signed(uniform)}"
    agreement = (
        ""
        if ranks is None
        else f" Across heads, gap closed and energy explained have a rank correlation of {_signed(ranks)} (Spearman): "
        "the two metrics agree to that extent on which heads need softmax."
    )
    dtype = held_out.get("calibrated_in") if isinstance(held_out, Mapping) else None
    elsewhere = f" It was calibrated in {dtype}, and these numbers are of that dtype." if dtype else ""
    quick = "quick " if isinstance(held_out, Mapping) and held_out.get("quick") else ""
    return (
        f"On held-out text the {quick}calibration closes {_percent(share)} of the gap that the mean of values leaves, "
        f"and {_percent(profile)} of the gap that profile (average weights by distance) leaves. It explains "
        f"{_signed(explained)} of the output energy in the median head{baseline}.{agreement}{elsewhere}"
    )


def kind_counts_sentence(held_out: object) -> str:
    """How many heads need which kind of substitute, on the calibration's held-out text; empty where it does not say.

    Parameters
    ----------
    held_out
        As for ``held_out_sentence``.
    """
    counts, worth = counts_from_numbers(held_out) if isinstance(held_out, Mapping) else ({}, None)
    if not counts or not isinstance(held_out, Mapping):
        return ""
    sentence = kinds_sentence(counts, worth)
    return f"{sentence} {QUICK_CALIBRATION}" if held_out.get("quick") else sentence


@dataclass(frozen=True)
class Opening:
    """What every view of a run or a study opens with, on a terminal and on a page.

    Attributes
    ----------
    kinds
        How many heads need which kind of substitute, by the calibration's held-out text; or why that is not known.
    gap
        How much of the gap a fitted linear attention closes on the text of this run; empty where it was not measured.
    held_out
        Stricter measures of the calibration on held-out text.
    headline
        The numbers of ``gap``.
    labelled
        Whether the kinds are known.
    caution
        What to know before anything else: how many numbers are not finite; empty where all are.
    """

    kinds: str
    gap: str = ""
    held_out: str = ""
    headline: Headline | None = None
    labelled: bool = False
    caution: str = ""

    @property
    def title(self) -> str:
        """What a page shows large: the kinds; where these are unknown, the gap; and else why. A caution comes first."""
        return f"{self.caution} {self.kinds if self.labelled or not self.gap else self.gap}".strip()

    @property
    def rest(self) -> str:
        """What it shows below."""
        left = (self.gap if self.labelled else self.kinds) if self.gap else ""
        return f"{left} {self.held_out}".strip()


def opening(
    gap: GapSums | None, manifest: Manifest, layers: Sequence[int], kinds: str = "", caution: str = ""
) -> Opening:
    """The sentences that a view of these measurements opens with.

    Parameters
    ----------
    gap
        None where no fitted map was measured.
    kinds
        The sentence on the kinds by a calibration, for measurements that do not store it.
    caution
        The sentence on numbers that are not finite.
    """
    held_out = manifest.extra.get("held_out", {})
    known = kind_counts_sentence(held_out) or kinds
    if gap is None and not known:
        usual = set(manifest.mechanisms) <= {CLASSICAL, BASELINE}
        return Opening(NOT_CALIBRATED if usual else UNMEASURED, caution=caution)
    found = None if gap is None else headline(gap, layers)
    if found is None:
        return Opening(known or UNKNOWN_KINDS, labelled=bool(known), caution=caution)
    return Opening(known or UNKNOWN_KINDS, found.sentence, held_out_sentence(held_out), found, bool(known), caution)


def _number(held_out: object, name: str) -> float | None:
    value = held_out.get(name) if isinstance(held_out, Mapping) else None
    return float(value) if isinstance(value, int | float) and np.isfinite(value) else None


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def headline(gap: GapSums, layers: Sequence[int]) -> Headline | None:
    """The headline of a run or a study; None where nothing lies between softmax and the mean of values."""
    total = gap.parts.sum(axis=0)
    fitted, uniform, classical, *window = total.sum(axis=(1, 2)).tolist()
    if not uniform > 0:
        return None
    left = _remaining_gaps(total, gap.steps)
    keeps = left > HALF
    stubborn = gap.ranked[: int(keeps[0].sum())]
    (lows, highs), counts = _intervals(gap)
    measured = not np.isnan(classical)
    windows = bool(window) and not np.isnan(window[0])
    return Headline(
        share=float(1 - fitted / uniform),
        low=lows[0],
        high=highs[0],
        classical=float(1 - classical / uniform) if measured else None,
        classical_low=lows[1] if measured else None,
        classical_high=highs[1] if measured else None,
        stubborn=tuple((layers[at], head) for at, head in stubborn),
        gap_left=tuple(float(left[0, at, head]) for at, head in stubborn),
        fewest=counts[0],
        most=counts[1],
        classical_stubborn=int(keeps[1].sum()) if measured else None,
        window=float(1 - window[0] / uniform) if windows else None,
        window_low=lows[2] if windows else None,
        window_high=highs[2] if windows else None,
        window_keys=sum(map(int, re.findall(r"(?:w|sinks)=(\d+)", gap.window))) if windows else 0,
        length=gap.length if windows else 0,
        heads=int((~np.isnan(left[0])).sum()),
    )


def _remaining_gaps(
    total: Float[np.ndarray, "*draw mechanism layer head"], steps: int
) -> Float[np.ndarray, "*draw two layer head"]:
    """The share of each head's gap that fitted and elu1 leave, NaN for a head without a gap."""
    return gap_shares(total[..., [0, 2], :, :], total[..., [1], :, :], steps)


def _intervals(gap: GapSums) -> tuple[list[list[float]], list[float]]:
    """The ends of the middle 95 % of the shares of all but uniform, and of how many heads keep more than half."""
    count = len(gap.parts)
    if count < 2:
        return [[np.nan] * 3, [np.nan] * 3], [np.nan, np.nan]
    rng = np.random.default_rng(0)
    resampled = rng.integers(count, size=(RESAMPLES, count))
    times = (resampled[:, :, None] == np.arange(count)).sum(axis=1)
    totals = np.tensordot(times, gap.parts, axes=1)
    fitted, uniform, *others = np.moveaxis(totals.sum(axis=(2, 3)), 1, 0)
    shares = np.quantile(1 - np.stack([fitted, *others], axis=1) / uniform[:, None], INTERVAL_QUANTILES, axis=0)
    heads = (_remaining_gaps(totals, gap.steps)[:, 0] > HALF).sum(axis=(1, 2))
    return shares.tolist(), np.quantile(heads, INTERVAL_QUANTILES).tolist()

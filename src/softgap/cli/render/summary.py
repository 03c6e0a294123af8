"""The summary numbers of a run, and their means over a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from softgap.analysis.headline import FITTED, GapSums, Headline, gap_sums, headline
from softgap.cli.render.output import mean
from softgap.trajectories import QUANTITIES, NonFinite, Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = ["HeadMean", "Summary", "merge_summaries", "summarise"]

_LISTED = 5


@dataclass(frozen=True)
class HeadMean:
    """Mean divergence of one head from the mechanism that ranks the heads, and from the control.

    ``share_left`` is the share of its gap that the fitted map leaves, by which heads are ranked where it is known.
    """

    layer: int
    head: int
    divergence: float
    uniform: float | None
    share_left: float | None = None


@dataclass(frozen=True, eq=False)
class Summary:
    """Means of a run, or of several: NaN steps are left out, and what has no number at all is NaN.

    Attributes
    ----------
    means
        Mean of each quantity over heads and steps, by mechanism; the first mechanism is the one shown.
    heads
        Mean divergence over the steps, for every mechanism.
    distance
        Mean of |divergence - divergence of uniform| over heads and steps, for the first mechanism; None without the
        control, or for the control itself.
    focus
        Mean of each focus quantity that was measured.
    gap
        What the headline is made of; None where no fitted map was measured.
    non_finite
        How many numbers are not finite.
    """

    sample_id: str
    label: str | None
    n_prompt: int
    n_steps: int
    layers: tuple[int, ...]
    means: Mapping[str, Mapping[str, float]]
    heads: Float[np.ndarray, "mechanism layer head"]
    logprob: float
    entropy: float
    distance: float | None
    focus: Mapping[str, float]
    gap: GapSums | None = None
    non_finite: NonFinite = field(default_factory=NonFinite)

    @property
    def headline(self) -> Headline | None:
        """The share of the gap that a fitted linear attention closes; None where none was measured."""
        return None if self.gap is None else headline(self.gap, self.layers)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Names of the mechanisms, in order."""
        return tuple(self.means)

    @property
    def ranking(self) -> int:
        """The mechanism that ranks heads: the fitted one where it was measured, else the first."""
        return self.mechanisms.index(FITTED) if FITTED in self.mechanisms else 0

    @property
    def ranked_by(self) -> str:
        """The quantity that orders the heads, in words."""
        if self.gap is not None and self.gap.ranked:
            return "share of the gap that fitted leaves"
        return f"divergence from {self.mechanisms[self.ranking]}"

    def extremes(self, count: int = _LISTED) -> tuple[list[HeadMean], list[HeadMean]]:
        """The heads whose substitute is furthest from softmax and those closest to it, the extreme one first.

        They are ordered by the share of the gap that the fitted map leaves, as in the headline; without a fitted map,
        by the divergence.
        """
        ranked = [self._head(layer, head) for layer, head in self._order()]
        count = min(count, max(1, len(ranked) // 2))
        return ranked[:count], ranked[::-1][:count]

    def _order(self) -> list[tuple[int, int]]:
        """(index of the layer, head) of the heads that have a number, the one that needs softmax most first."""
        if self.gap is not None and self.gap.ranked:
            return self.gap.ranked
        values = self.heads[self.ranking]
        layer, head = np.nonzero(~np.isnan(values))
        order = np.argsort(values[layer, head], kind="stable")[::-1]
        return [(int(layer[i]), int(head[i])) for i in order]

    def row(self) -> dict[str, Any]:
        """The numbers of one sample, for JSON."""
        return {
            "id": self.sample_id,
            "label": self.label,
            "n_prompt": self.n_prompt,
            "n_steps": self.n_steps,
            "means": {name: dict(values) for name, values in self.means.items()},
            "distance_from_uniform": self.distance,
            "logprob": self.logprob,
            "entropy": self.entropy,
            "focus": dict(self.focus),
            "headline": None if self.headline is None else self.headline.to_json(),
            "non_finite": self.non_finite.to_json(),
        }

    def head_rows(self) -> list[dict[str, Any]]:
        """The mean divergence of every head from every mechanism, for JSON."""
        rows = []
        for layer, head in zip(*np.nonzero(~np.isnan(self.heads).all(axis=0)), strict=True):
            divergence = {name: float(self.heads[i, layer, head]) for i, name in enumerate(self.mechanisms)}
            rows.append({"layer": self.layers[layer], "head": int(head), "divergence": divergence})
        return rows

    def _head(self, layer: int, head: int) -> HeadMean:
        control = self.mechanisms.index(BASELINE) if BASELINE in self.mechanisms else None
        uniform = None if control is None else float(self.heads[control, layer, head])
        left = None if self.gap is None else float(self.gap.left[layer, head])
        share = None if left is None or np.isnan(left) else left
        return HeadMean(self.layers[layer], head, float(self.heads[self.ranking, layer, head]), uniform, share)


def summarise(run: Trajectories) -> Summary:
    """The summary of one run's completion."""
    means = {
        name: {quantity: float(mean(run.quantities[quantity][i])) for quantity in QUANTITIES}
        for i, name in enumerate(run.mechanisms)
    }
    distance = None
    if BASELINE in run.mechanisms[1:]:
        divergence = run.quantities["divergence"].astype(np.float64)
        distance = float(mean(np.abs(divergence[0] - divergence[run.mechanisms.index(BASELINE)])))
    return Summary(
        sample_id=run.sample_id,
        label=run.label,
        n_prompt=run.n_prompt,
        n_steps=run.n_steps,
        layers=run.layers,
        means=means,
        heads=mean(run.quantities["divergence"], axis=-1),
        logprob=float(mean(run.logprob)),
        entropy=float(mean(run.entropy)),
        distance=distance,
        focus={name: float(mean(values)) for name, values in run.focus.items()},
        gap=gap_sums(run),
        non_finite=run.non_finite,
    )


def merge_summaries(summaries: Sequence[Summary]) -> Summary:
    """The mean of several summaries of one study, every sample counted once; lengths are added up."""
    first = summaries[0]
    gaps = [summary.gap for summary in summaries if summary.gap is not None]

    def over(values: Sequence[float]) -> float:
        return float(mean(np.array(values)))

    return Summary(
        sample_id="all",
        label=None,
        n_prompt=sum(summary.n_prompt for summary in summaries),
        n_steps=sum(summary.n_steps for summary in summaries),
        layers=first.layers,
        means={
            name: {quantity: over([summary.means[name][quantity] for summary in summaries]) for quantity in QUANTITIES}
            for name in first.mechanisms
        },
        heads=mean(np.stack([summary.heads for summary in summaries]), axis=0),
        logprob=over([summary.logprob for summary in summaries]),
        entropy=over([summary.entropy for summary in summaries]),
        distance=None if first.distance is None else over([s.distance for s in summaries if s.distance is not None]),
        focus={name: over([summary.focus[name] for summary in summaries]) for name in first.focus},
        gap=GapSums.of_samples(gaps) if len(gaps) == len(summaries) else None,
        non_finite=sum((summary.non_finite for summary in summaries), NonFinite()),
    )

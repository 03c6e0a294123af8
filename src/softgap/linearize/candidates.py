"""Candidates of a search: sets of swapped heads, what they cost on the text that chooses, and the largest that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers
from softgap.intervene.substitute import Head, Substitute
from softgap.linearize.distil import distil_substitute
from softgap.linearize.frontier import Budget
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.recall import RecallTest, change_of_recall
from softgap.linearize.sequences import Reading, Sequences, join_readings, read_swapped
from softgap.models.loading import Model
from softgap.progress import Progress

__all__ = ["Candidate", "CandidateCosts", "SearchText", "largest_candidate", "n_checked", "split_text"]


@dataclass(frozen=True, eq=False)
class SearchText:
    """Sequences to fit on, to choose on and to check on, and recall lists to fit on."""

    fit: Sequences
    choose: Sequences
    check: Sequences
    fit_recall_lists: Sequences | None = None


def n_checked(n_sequences: int) -> int:
    """How many sequences a plan is checked on."""
    return max(1, n_sequences // 4)


def split_text(sequences: Sequences) -> SearchText:
    """Half of the sequences to fit on, a quarter to choose on, the last quarter to check on."""
    half, quarter = len(sequences) // 2, n_checked(len(sequences))
    bounds = ((0, half), (half, len(sequences) - quarter), (len(sequences) - quarter, None))
    fit, choose, check = (sequences.part(slice(*bound)) for bound in bounds)
    return SearchText(fit, choose, check)


@dataclass(frozen=True, eq=False)
class Candidate:
    """Heads that would be swapped, and what they would become before any output correction."""

    heads: tuple[Head, ...]
    plain: Substitute

    @cached_property
    def key(self) -> Any:
        """What tells it apart from the other candidates of a search."""
        return [[part.name, heads] for heads, part in self.plain.swaps(self.heads)] if self.heads else []


class CandidateCosts:
    """What candidates cost, on the quarter of the text and the recall lists that choose.

    Attributes
    ----------
    share
        Of the whole search that is done, for progress.
    workers
        Of a cluster, where the text is read; None reads it here.
    """

    def __init__(
        self,
        model: Model,
        text: SearchText,
        settings: dict[str, Any],
        checkpoints: Checkpoints,
        progress: Progress,
        recall: RecallTest | None,
        limits: Budget,
        workers: Workers | None = None,
    ) -> None:
        self._model, self._text, self._recall, self._limits, self.workers = model, text, recall, limits, workers
        self._settings, self._checkpoints, self._progress = settings, checkpoints, progress
        self._substitutes: dict[str, Substitute] = {}
        self.share = 0.3
        if recall is not None:
            recall.report = lambda n: progress(f"asking {n} recall lists", self.share)
        self._original = self._reading(None)

    def substitute(self, candidate: Candidate) -> Substitute:
        """What its heads become, with corrected outputs and distilled where asked; computed once for a candidate."""
        if not self._settings["repair"]:
            return candidate.plain
        key = str(candidate.key)
        if key not in self._substitutes:
            fitted = fit_output_correction(self._model, self._text.fit, candidate.heads, candidate.plain)
            if self._settings["tune"]:
                fitted = distil_substitute(
                    self._model, self._text.fit, candidate.heads, fitted,
                    recall_lists=self._text.fit_recall_lists, steps=self._settings["tune"], seed=self._settings["seed"],
                    progress=lambda stage, share: self._progress(stage, self.share),
                )  # fmt: skip
            self._substitutes[key] = fitted
        return self._substitutes[key]

    def change(self, candidate: Candidate) -> dict[str, float]:
        """Rise in loss, and changes in accuracy and recall; ``recall_low`` is the lower end of recall's interval.

        Recall takes far more passes than loss: it is not asked where the loss already exceeds its limit.
        """
        before, after = [self._original], [self._reading(candidate)]
        rise = float(after[0].loss.mean() - before[0].loss.mean())
        low = {}
        if self._recall is not None and (self._limits.loss is None or rise <= self._limits.loss):
            original, swapped = self._asked(candidate)
            before.append(original)
            after.append(swapped)
            low = {"recall_low": change_of_recall(original, swapped, seed=self._settings["seed"]).low}
        means = join_readings(before).means(), join_readings(after).means()
        return {name: means[1][name] - means[0][name] for name in means[0]} | low

    def lists(self, candidate: Candidate) -> int:
        """On how many recall lists it was decided whether its heads may go; 0 where recall is not limited."""
        if self._recall is None:
            return 0
        return len(self._asked(candidate)[0].recall) * self._recall.lists_per_sequence

    def _asked(self, candidate: Candidate) -> tuple[Reading, Reading]:
        if self._recall is None:
            raise ValueError("this search has no recall lists")
        return self._recall.compare(
            candidate.heads, lambda: self.substitute(candidate), key=candidate.key, limit=self._limits.recall
        )

    def _reading(self, candidate: Candidate | None) -> Reading:
        def make() -> dict[str, Any]:
            heads = [] if candidate is None else candidate.heads
            head_substitute = None if candidate is None else self.substitute(candidate)
            choose = self._text.choose
            return read_swapped(self._model, choose, None, heads, head_substitute, self.workers).to_json()

        key = ["set", [] if candidate is None else candidate.key]
        return Reading.from_json(self._checkpoints.find_or_make(key, make))


def largest_candidate(
    costs: CandidateCosts,
    n: int,
    candidate: Callable[[int], Candidate],
    limits: Budget,
    *,
    first: str,
    words: Callable[[int], str],
    progress: Progress,
) -> Candidate:
    """The last of ``n`` candidates that is within the budget, by bisection.

    Costs grow from candidate to candidate, up to the noise of the text. ``candidate(0)`` swaps nothing; ``first`` is
    what a refusal calls ``candidate(1)``. ``words`` say for progress how far a candidate goes.
    """
    least = costs.change(candidate(1))
    if not limits.allows(least):
        raise limits.refusal(least, first)
    low, high, done = 1, n, 0
    total = max(1, (n - 1).bit_length())
    while high - low > 1:
        middle = (low + high) // 2
        if limits.allows(costs.change(candidate(middle))):
            low = middle
        else:
            high = middle
        done += 1
        costs.share = min(0.9, 0.3 + 0.6 * done / total)
        progress(words(low), costs.share)
    return candidate(low)

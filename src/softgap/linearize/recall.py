"""Measure associative recall on as many lists as a half-width of two hundredths takes.

A list asks for all of its pairs in one forward. Lists are asked in blocks until the 95 % intervals over resampled lists
of the original model's recall and of its change under the swap both have a half-width of at most ``HALF_WIDTH``, or
until ``MOST_LISTS`` are asked. A search that decides whether a drop is within its limit also stops once the interval
of the change lies on one side of the limit. What a plan reports never rests on fewer lists than decided on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers
from softgap.intervals import Interval, interval_of
from softgap.intervene.substitute import Head, Substitute
from softgap.linearize.sequences import Reading, Sequences, digest_of_sequences, join_readings, read_swapped
from softgap.models.loading import Model

__all__ = ["FEWEST_LISTS", "HALF_WIDTH", "MOST_LISTS", "RecallTest", "change_of_recall", "half_widths"]

HALF_WIDTH = 0.02
"""The largest half-width of the 95 % interval of a recall that is reported or decided on."""
BLOCK_LISTS = 48
FEWEST_LISTS = 2 * BLOCK_LISTS
"""Where asking begins: 1,152 questions, enough where one answer in eight changes and the questions are independent."""
MOST_LISTS = 10 * BLOCK_LISTS
"""Where asking ends: 5,760 questions, a half-width of .013 at worst for a share of independent questions."""


@dataclass(eq=False)
class RecallTest:
    """Recall of one model with different heads swapped, all on the same lists.

    Attributes
    ----------
    draw
        ``draw(skip, n)`` gives ``n`` lists after the first ``skip``.
    lists
        Ask exactly so many, whatever the half-width; None for as many as it takes.
    report
        Told how many lists are asked by now.
    workers
        Of a cluster, to ask the lists there.
    lists_per_sequence
        Lists that a sequence holds. Intervals are over sequences, since lists of one depend on each other.
    """

    model: Model
    draw: Callable[[int, int], Sequences]
    lists: int | None = None
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(None, {}))
    seed: int = 0
    lists_per_sequence: int = 1
    workers: Workers | None = None
    report: Callable[[int], None] = lambda lists: None
    _blocks: list[Sequences] = field(default_factory=list, init=False)
    _readings: dict[str, list[Reading]] = field(default_factory=dict, init=False)

    def compare(
        self,
        heads: Sequence[Head],
        make_substitute: Callable[[], Substitute | None],
        *,
        key: Any = None,
        fewest: int = FEWEST_LISTS,
        limit: float | None = None,
    ) -> tuple[Reading, Reading]:
        """The original model and the one with these heads swapped, on enough lists and at least ``fewest``.

        ``key`` tells the swap apart from others of the same test; None takes the heads. With a ``limit`` of the drop
        asking ends, too, as soon as the interval of the change lies on one side of it.
        """
        swapped_key = heads if key is None else key
        blocks = 1 if self.lists is not None else -(-fewest // BLOCK_LISTS)
        while True:
            original, swapped = (
                self._evaluate((), [], lambda: None, blocks),
                self._evaluate(tuple(heads), swapped_key, make_substitute, blocks),
            )
            done = self.lists is not None or blocks * BLOCK_LISTS >= MOST_LISTS
            if limit is not None:
                change = change_of_recall(original, swapped, seed=self.seed)
                done = done or change.low >= -limit or change.high < -limit
            if done or max(half_widths(original, swapped, seed=self.seed).values()) <= HALF_WIDTH:
                return original, swapped
            blocks += 1

    def _evaluate(
        self, heads: tuple[Head, ...], key: Any, make_substitute: Callable[[], Substitute | None], blocks: int
    ) -> Reading:
        """The first blocks of lists; what was asked before is used again."""
        readings = self._readings.setdefault(str(key), [])
        while len(readings) < blocks:
            block = self._block(len(readings))

            def make(block: Sequences = block) -> dict[str, list[float]]:
                head_substitute = make_substitute() if heads else None
                return read_swapped(self.model, None, block, heads, head_substitute, self.workers).to_json()

            readings.append(
                Reading.from_json(self.checkpoints.find_or_make(["recall", key, digest_of_sequences(block)], make))
            )
            self.report(sum(len(part.recall) for part in readings) * self.lists_per_sequence)
        return join_readings(readings[:blocks])

    def _block(self, number: int) -> Sequences:
        while len(self._blocks) <= number:
            skip = len(self._blocks) * BLOCK_LISTS
            self._blocks.append(self.draw(skip, BLOCK_LISTS if self.lists is None else self.lists))
        return self._blocks[number]


def change_of_recall(original: Reading, swapped: Reading, *, seed: int = 0) -> Interval:
    """Change in recall, paired by list, with its 95 % interval over resampled lists."""
    return interval_of(swapped.recall - original.recall, rng=np.random.default_rng(seed))


def half_widths(original: Reading, swapped: Reading, *, seed: int = 0) -> dict[str, float]:
    """Half-widths of the 95 % intervals of the original recall (``original``) and of its change (``change``)."""
    pairs = {"original": original.recall, "change": swapped.recall - original.recall}
    return {name: interval_of(x, rng=np.random.default_rng(seed)).half_width for name, x in pairs.items()}

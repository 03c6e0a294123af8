"""Allocate substitutes to KV groups: what each may become, what that keeps and costs, and which to take.

A KV group keeps softmax or becomes one of several options. An option keeps the same bytes at any length; softmax keeps
all keys and values of the context. Costs are scores (``softgap.linearize.scores.unit_scores``), taken as additive. At
any total of bytes the cheapest allocation then is, up to one group, one where every group takes the option with the
least

    score + lambda x bytes,

with one lambda for all groups. ``cheapest_path`` lists these allocations, from softmax everywhere to the fewest bytes:
each step moves one group along the lower convex hull of its options, the step that costs least per byte first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from softgap.attention import Mechanism
from softgap.intervene.substitute import Head, Mixture
from softgap.linearize.frontier import Unit

__all__ = ["SOFTMAX", "Allocations", "cheapest_path"]

SOFTMAX = -1
"""The choice of a group that keeps its softmax."""


def cheapest_path(
    scores: Float[np.ndarray, "option unit"], sizes: Float[np.ndarray, " option"], softmax_size: float
) -> list[Int[np.ndarray, " unit"]]:
    """For every unit its option, or ``SOFTMAX``, step by step from softmax everywhere to the fewest bytes.

    Parameters
    ----------
    scores
        What each option costs in each unit; softmax costs 0.
    sizes
        Bytes that an option keeps per unit.
    softmax_size
        Bytes that softmax keeps per unit. Options that keep as much are never taken.

    Examples
    --------
    Two units: the first hardly misses its softmax, the second does.

    >>> import numpy as np
    >>> scores = np.array([[0.01, 0.5], [0.02, 2.0]])
    >>> for choice in cheapest_path(scores, np.array([64.0, 0.0]), 1000.0):
    ...     print(choice)
    [-1 -1]
    [ 0 -1]
    [ 1 -1]
    [1 0]
    [1 1]
    """
    steps = []
    for unit in range(scores.shape[1]):
        hull = _lower_hull(scores[:, unit], softmax_size - sizes)
        steps += [(slope, place, unit, option) for place, (slope, option) in enumerate(hull)]
    choice = np.full(scores.shape[1], SOFTMAX)
    path = [choice]
    for _, _, unit, option in sorted(steps):
        choice = choice.copy()
        choice[unit] = option
        path.append(choice)
    return path


def _lower_hull(scores: Float[np.ndarray, " option"], saved: Float[np.ndarray, " option"]) -> list[tuple[float, int]]:
    """The options on the lower convex hull of (bytes saved, score), with the slope of the edge that leads to each."""
    order = sorted((i for i in range(len(scores)) if saved[i] > 0), key=lambda i: (saved[i], scores[i]))
    hull: list[tuple[float, int]] = []
    for option in order:
        while True:
            last = hull[-1][1] if hull else SOFTMAX
            x, y = (0.0, 0.0) if last == SOFTMAX else (float(saved[last]), float(scores[last]))
            if saved[option] == x:  # as many bytes as the last one, and no better
                break
            slope = (float(scores[option]) - y) / (float(saved[option]) - x)
            if hull and slope <= hull[-1][0]:
                hull.pop()
                continue
            hull.append((slope, option))
            break
    return hull


@dataclass(frozen=True, eq=False)
class Allocations:
    """All cheapest allocations of some options to units, from softmax everywhere to the fewest bytes.

    Attributes
    ----------
    units
        Heads that go together.
    options
        What they may become.
    sizes
        Bytes per unit that each option keeps.
    softmax_size
        Bytes per unit that softmax keeps.
    path
        As ``cheapest_path`` gives it.
    """

    units: Sequence[Unit]
    options: Sequence[Mechanism]
    sizes: Float[np.ndarray, " option"]
    softmax_size: float
    path: Sequence[Int[np.ndarray, " unit"]]

    def __len__(self) -> int:
        return len(self.path)

    def nbytes(self, step: int) -> float:
        """Bytes that all units keep at a step of the path."""
        choice = self.path[step]
        return float(np.where(choice == SOFTMAX, self.softmax_size, self.sizes[choice]).sum())

    def heads(self, step: int) -> list[Head]:
        """The heads that are swapped at a step."""
        swapped = np.flatnonzero(self.path[step] != SOFTMAX).tolist()
        return sorted(head for unit in swapped for head in self.units[unit])

    def substitute(self, step: int) -> Mixture:
        """What they become."""
        choice = self.path[step]
        parts = []
        for option, mechanism in enumerate(self.options):
            heads = tuple(
                sorted(head for unit in np.flatnonzero(choice == option).tolist() for head in self.units[unit])
            )
            if heads:
                parts.append((heads, mechanism))
        return Mixture(parts)

    def within(self, budget: float) -> int | None:
        """The first step whose bytes stay within a budget; None where no step does."""
        return next((step for step in range(len(self)) if self.nbytes(step) <= budget), None)

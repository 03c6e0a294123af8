"""Means of a study by label, with intervals over its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float, Float64
from scipy.stats import t as student

from softgap.analysis.headline import gap_shares, gap_steps
from softgap.trajectories import Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = ["LEVEL", "Group", "Groups", "step_means"]

LEVEL = 0.95
"""Of every interval."""

# With more labels than this a label is a name, not a group.
_MOST = 12


@dataclass
class _Sums:
    """Number, sum and sum of squares of what has been added, entry by entry; NaN does not count."""

    count: Float64[np.ndarray, ...]
    total: Float64[np.ndarray, ...]
    squares: Float64[np.ndarray, ...]

    @classmethod
    def like(cls, values: Float[np.ndarray, ...]) -> _Sums:
        return cls(*(np.zeros(values.shape) for _ in range(3)))

    def add(self, values: Float[np.ndarray, ...]) -> None:
        if values.shape[-1] > self.count.shape[-1]:
            more = [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] - self.count.shape[-1])]
            self.count, self.total, self.squares = (np.pad(x, more) for x in (self.count, self.total, self.squares))
        part = (..., slice(0, values.shape[-1]))
        known = ~np.isnan(values)
        wide = np.where(known, values, 0.0).astype(np.float64)
        self.count[part] += known
        self.total[part] += wide
        self.squares[part] += wide**2

    def mean(self) -> Float64[np.ndarray, ...]:
        return np.where(self.count > 0, self.total / np.maximum(self.count, 1), np.nan)

    def half_width(self) -> Float64[np.ndarray, ...]:
        """Half of Student's interval of the mean; NaN with fewer than two samples."""
        n = np.maximum(self.count, 2)
        variance = np.maximum(0.0, self.squares - n * self.mean() ** 2) / (n - 1)
        width = student.ppf((1 + LEVEL) / 2, n - 1) * np.sqrt(variance / n)
        return np.where(self.count > 1, width, np.nan)


@dataclass(eq=False)
class Group:
    """One label's samples.

    Attributes
    ----------
    label
        None for all samples of the study together.
    samples
        How many.
    heads
        By ``quantity/mechanism`` (or the name of a focus quantity): sums over samples of the mean over the completion's
        steps, per head. Every sample counts once, however long it is.
    overall
        The same, averaged over the heads.
    steps
        By ``divergence/mechanism``: sums over samples of the divergence at each step, as the mean over all heads, then
        over each layer.
    gap
        By mechanism: the divergence of every head, summed over all steps that a share of the gap is taken over.
    gap_steps
        How many steps these are.
    """

    label: str | None
    samples: int = 0
    heads: dict[str, _Sums] = field(default_factory=dict)
    overall: dict[str, _Sums] = field(default_factory=dict)
    steps: dict[str, _Sums] = field(default_factory=dict)
    gap: dict[str, Float64[np.ndarray, " head"]] = field(default_factory=dict)
    gap_steps: int = 0

    def add(self, run: Trajectories, means: Mapping[str, Float[np.ndarray, " head"]]) -> None:
        """Count one sample."""
        self.samples += 1
        for key, values in means.items():
            self.heads.setdefault(key, _Sums.like(values)).add(values)
            whole = _mean(values)[None]
            self.overall.setdefault(key, _Sums.like(whole)).add(whole)
        for key, steps in step_means(run).items():
            self.steps.setdefault(key, _Sums.like(steps)).add(steps)
        steps_with_gap = gap_steps(run)
        self.gap_steps += int(np.count_nonzero(steps_with_gap))
        real = run.kv_group >= 0
        for name in run.mechanisms:
            total = np.nansum(run.select(name).divergence[real][:, steps_with_gap], axis=-1, dtype=np.float64)
            self.gap[name] = total + self.gap.get(name, np.zeros_like(total))

    def gap_left(self) -> dict[str, Float64[np.ndarray, " head"]]:
        """The share of each head's gap that a mechanism leaves, by ``gap/mechanism``; none without the control."""
        if BASELINE not in self.gap:
            return {}
        uniform = self.gap[BASELINE]
        return {
            f"gap/{name}": gap_shares(total, uniform, self.gap_steps)
            for name, total in self.gap.items()
            if name != BASELINE
        }


class Groups:
    """All samples together, and those of every label, filled one sample at a time."""

    def __init__(self) -> None:
        self._everyone = Group(None)
        self._by_label: dict[str, Group] = {}

    def add(self, run: Trajectories, means: Mapping[str, Float[np.ndarray, " head"]]) -> None:
        """Count one sample, with the means of its arrays; see ``Group``."""
        self._everyone.add(run, means)
        label = run.label
        if label is not None and (label in self._by_label or len(self._by_label) <= _MOST):
            self._by_label.setdefault(label, Group(label)).add(run, means)

    def result(self) -> list[Group]:
        """All samples first, then the labels in the order they came; none of these if they are too many."""
        return [self._everyone, *(self._by_label.values() if len(self._by_label) <= _MOST else ())]


def step_means(run: Trajectories) -> dict[str, Float64[np.ndarray, "layer step"]]:
    """Divergence from each mechanism at each step of the completion: mean over all heads, then over each layer."""
    means = {}
    for name in run.mechanisms:
        values = run.select(name).divergence.astype(np.float64)
        means[f"divergence/{name}"] = np.stack([_mean(values, (0, 1)), *(_mean(layer, 0) for layer in values)])
    return means


def _mean(values: Float[np.ndarray, ...], axis: int | tuple[int, ...] | None = None) -> Float64[np.ndarray, ...]:
    known = np.count_nonzero(~np.isnan(values), axis=axis)
    return np.asarray(np.where(known > 0, np.nansum(values, axis=axis) / np.maximum(known, 1), np.nan))

"""How many numbers of a measurement are not finite, and the sentence that says so first."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from softgap.trajectories.run import Trajectories

__all__ = ["NonFinite", "count_non_finite"]

_SMALLEST = 0.1
"""Percent below which a share is written as an inequality."""


@dataclass(frozen=True)
class NonFinite:
    """Numbers that are NaN or infinite where a sound model gives a finite one; false if there are none.

    Attributes
    ----------
    divergences, of_divergences
        Over mechanisms, heads and steps, those of the prompt included. For finite outputs a divergence is always a
        number, so NaN means that the output of the model or of the mechanism was not finite.
    scores, of_scores
        Steps whose log-probability or entropy is not finite although the logits were looked at.
    """

    divergences: int = 0
    of_divergences: int = 0
    scores: int = 0
    of_scores: int = 0

    def __bool__(self) -> bool:
        return self.divergences > 0 or self.scores > 0

    def __add__(self, other: NonFinite) -> NonFinite:
        mine, theirs = asdict(self), asdict(other)
        return NonFinite(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def sentence(self) -> str:
        """What a summary says before anything else; empty where all numbers are finite."""
        counts = [
            f"{count:,} of {total:,} {name} ({_percent(count, total)})"
            for count, total, name in (
                (self.divergences, self.of_divergences, "divergences"),
                (self.scores, self.of_scores, "log-probabilities"),
            )
            if count
        ]
        if not counts:
            return ""
        return (
            f"Not a sound measurement: {' and '.join(counts)} are not finite numbers, and every mean below leaves them "
            "out. Check the model with softgap doctor, or load it in float32."
        )

    def to_json(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def _percent(count: int, total: int) -> str:
    share = 100 * count / total
    return f"below {_SMALLEST} %" if share < _SMALLEST else f"{share:.0f} %" if share >= 1 else f"{share:.1f} %"


def count_non_finite(run: Trajectories) -> NonFinite:
    """Count the numbers of a run, prompt included, that are not finite."""
    real = run.kv_group >= 0
    divergence = run.quantities["divergence"][:, real]
    counts = NonFinite(
        int(np.count_nonzero(~np.isfinite(divergence))), divergence.size, *_scores(run, looked_at=_is_scored(run))
    )
    return counts if run.prompt is None else counts + count_non_finite(run.prompt)


def _is_scored(run: Trajectories) -> bool:
    """Whether the logits of these steps were looked at: those of a prompt that is answered are not."""
    known = run.part == "completion" and run.manifest.options.get("mode") in ("live", "replay", "study")
    return known or bool(np.isfinite(run.entropy).any())


def _scores(run: Trajectories, *, looked_at: bool) -> tuple[int, int]:
    if not looked_at:
        return 0, 0
    # A token that the model rules out has the log-probability -inf, which is an answer.
    unknown = np.isnan(run.logprob) & (run.token_ids >= 0)
    return int(np.count_nonzero(~np.isfinite(run.entropy) | unknown)), run.n_steps

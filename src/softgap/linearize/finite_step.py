"""Replace the scores of the costliest heads by measured costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from softgap.attention import Mechanism
from softgap.errors import ValueInputError
from softgap.intervene.swap import Substitute
from softgap.linearize.impact import impact_on
from softgap.linearize.scores import Scores
from softgap.linearize.sequences import Sequences
from softgap.models.loading import Model
from softgap.progress import Progress, silent

__all__ = ["with_finite_steps"]


def with_finite_steps(
    model: Model,
    sequences: Sequences,
    mechanism: str | Mechanism | Substitute,
    scores: Scores,
    name: str = "gradient+fisher",
    *,
    top: int = 16,
    progress: Progress = silent,
) -> Scores:
    """Add the score ``name`` + " corrected": the measured rise in loss for the ``top`` heads, which stay on top.

    Parameters
    ----------
    sequences
        The sequences that the scores come from; the corrected heads are swapped on them, one at a time.
    """
    if not 1 <= top <= len(scores.heads):
        raise ValueInputError(f"top must be between 1 and the {len(scores.heads)} heads, got {top}")
    order = np.argsort(scores.mean(name), kind="stable")[::-1][:top]
    selected = [scores.heads[place] for place in order]
    measured_impact = impact_on(model, sequences, None, mechanism, baselines=[], heads=selected, progress=progress)
    values = scores.values[name].copy()
    rises = dict(zip(measured_impact.heads, measured_impact.change["loss"][0], strict=True))
    for place in order:
        values[place] = rises[scores.heads[place]]
    cost = scores.passes.get(name, 0.0) + top
    corrected = f"{name} corrected"
    return replace(scores, values={**scores.values, corrected: values}, passes={**scores.passes, corrected: cost})

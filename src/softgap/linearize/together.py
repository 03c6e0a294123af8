"""Many heads swapped together: loss, accuracy and recall of a model, text by text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from softgap.linearize.heads import Head
from softgap.linearize.judged import judge_forward
from softgap.linearize.passages import Passages
from softgap.linearize.resampling import Interval, interval_of
from softgap.linearize.substitute import Substitute
from softgap.linearize.swapping import swap
from softgap.probe.models import Model
from softgap.probe.support import check_measurable

__all__ = ["Reading", "read_swapped"]

# Tokens in one forward.
BATCH_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model gets right, per text and per lookup."""

    loss: Float[np.ndarray, " text"]
    accuracy: Float[np.ndarray, " text"]
    recall: Float[np.ndarray, " lookup"]

    def change_from(self, original: Reading, *, seed: int = 0) -> dict[str, Interval]:
        """Rise in loss and changes in accuracy and recall, with intervals over texts and lookups."""
        found = {}
        for name in ("loss", "accuracy", "recall"):
            values = getattr(self, name) - getattr(original, name)
            if len(values):
                found[name] = interval_of(values, rng=np.random.default_rng(seed))
        return found

    def means(self) -> dict[str, float]:
        """Means over texts."""
        values = {name: getattr(self, name) for name in ("loss", "accuracy", "recall")}
        return {name: float(x.mean()) for name, x in values.items() if len(x)}

    def to_json(self) -> dict[str, list[float]]:
        """As plain data."""
        return {name: getattr(self, name).tolist() for name in ("loss", "accuracy", "recall")}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Reading:
        """From plain data."""
        return cls(**{name: np.asarray(data[name], dtype=float) for name in ("loss", "accuracy", "recall")})


def read_swapped(
    model: Model, read: Passages, asked: Passages | None, heads: Sequence[Head], chosen: Substitute | None
) -> Reading:
    """Read passages and lookups with these heads swapped; no heads is the original."""
    check_measurable(model)
    swapped = swap(model, heads, chosen) if heads and chosen is not None else nullcontext()
    with torch.inference_mode(), swapped:
        text = _means(model, read)
        lookup = np.zeros((3, 0)) if asked is None else _means(model, asked)
    return Reading(text[0], text[2], lookup[2])


def _means(model: Model, passages: Passages) -> Float[np.ndarray, "quantity text"]:
    size = max(1, BATCH_TOKENS // passages.ids.shape[1])
    parts = [passages.part(slice(start, start + size)) for start in range(0, len(passages), size)]
    means = [judge_forward(model, part.ids, None).means(part)[:, 0] for part in parts]
    return torch.cat(means, dim=1).double().cpu().numpy()

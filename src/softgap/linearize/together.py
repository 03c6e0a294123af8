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
from softgap.linearize.judged import judge_forward, right_tokens
from softgap.linearize.passages import Passages
from softgap.linearize.resampling import Interval, interval_of
from softgap.linearize.substitute import Substitute
from softgap.linearize.swapping import swap
from softgap.probe.models import Model
from softgap.probe.support import check_measurable

__all__ = ["Reading", "joined_readings", "read_swapped"]

# Tokens in one forward.
BATCH_TOKENS = 2048
OF_TEXTS = ("loss", "accuracy")
OF_LISTS = ("recall", "whole_answers")


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model gets right, per text and per list of lookups.

    ``recall`` is the share of a list's answers whose first token is right, ``whole_answers`` of those of which every
    token is.
    """

    loss: Float[np.ndarray, " text"]
    accuracy: Float[np.ndarray, " text"]
    recall: Float[np.ndarray, " list"]
    whole_answers: Float[np.ndarray, " list"]

    def change_from(self, original: Reading, *, seed: int = 0) -> dict[str, Interval]:
        """Rise in loss and changes in accuracy and recall, with intervals over texts and lookups."""
        found = {}
        for name in (*OF_TEXTS, *OF_LISTS):
            values = getattr(self, name) - getattr(original, name)
            if len(values):
                found[name] = interval_of(values, rng=np.random.default_rng(seed))
        return found

    def means(self) -> dict[str, float]:
        """Means over texts."""
        values = {name: getattr(self, name) for name in (*OF_TEXTS, *OF_LISTS)}
        return {name: float(x.mean()) for name, x in values.items() if len(x)}

    def to_json(self) -> dict[str, list[float]]:
        """As plain data."""
        return {name: getattr(self, name).tolist() for name in (*OF_TEXTS, *OF_LISTS)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Reading:
        """From plain data."""
        return cls(**{name: np.asarray(data[name], dtype=float) for name in (*OF_TEXTS, *OF_LISTS)})


def read_swapped(
    model: Model, read: Passages | None, asked: Passages | None, heads: Sequence[Head], chosen: Substitute | None
) -> Reading:
    """Read passages and lookups with these heads swapped, either where given; no heads is the original."""
    check_measurable(model)
    swapped = swap(model, heads, chosen) if heads and chosen is not None else nullcontext()
    with torch.inference_mode(), swapped:
        text = [judge_forward(model, part.ids, None).means(part)[:, 0] for part in _batches(read)]
        lists = [] if asked is None else [part.answered(right_tokens(model, part)) for part in _batches(asked)]
    loss, _, accuracy = _joined(text) if text else np.zeros((3, 0))
    recall, whole = _joined([torch.stack(both) for both in lists]) if lists else np.zeros((2, 0))
    return Reading(loss, accuracy, recall, whole)


def joined_readings(readings: Sequence[Reading]) -> Reading:
    """Several readings of one model as one, texts and lists one after the other."""
    return Reading(**{name: np.concatenate([getattr(x, name) for x in readings]) for name in (*OF_TEXTS, *OF_LISTS)})


def _batches(passages: Passages | None) -> list[Passages]:
    if passages is None:
        return []
    size = max(1, BATCH_TOKENS // passages.ids.shape[1])
    return [passages.part(slice(start, start + size)) for start in range(0, len(passages), size)]


def _joined(parts: Sequence[Float[torch.Tensor, "quantity text"]]) -> Float[np.ndarray, "quantity text"]:
    return torch.cat(list(parts), dim=1).double().cpu().numpy()

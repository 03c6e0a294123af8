"""What a head depends on: the keys near the query, heavy keys wherever they are, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64
from scipy import stats
from torch import nn

from softgap.attention import Visible, attend
from softgap.probe.tap import AttentionCall
from softgap.theory.locality.masks import CONTROLS, Mask, MaskKind, masked_rows

__all__ = ["FALSE_DISCOVERIES", "MASKS", "Dependence", "Label", "passing", "planted_heads", "t_test_p"]


Label = Literal["local", "heavy", "neither", "not decided"]


MASKS: tuple[MaskKind, ...] = ("local", *CONTROLS)


"""The masks of a single head, in the order of the arrays."""


FALSE_DISCOVERIES = 0.05


"""Expected share of wrong heads among those that get a label, at most."""


@dataclass(frozen=True, eq=False)
class Dependence:
    """The rise in loss under the masks of ``MASKS``, of one head at a time.

    A head is *local* where hiding its last w keys costs more than ``least``, more than hiding far keys of equal mass,
    and more than hiding its w heaviest far keys. It is *heavy* where it is not local and one of the two far masks costs
    more than ``least``: what counts is weight, not nearness. Each is a one-sided t test over texts, all of a head's
    tests at once, and then the procedure of Benjamini and Hochberg over heads.

    Attributes
    ----------
    heads
        (layer, head) pairs.
    removed
        Mean attention mass that each mask took away.
    least
        The smallest rise that counts.
    """

    heads: tuple[tuple[int, int], ...]
    rise: Float64[np.ndarray, "text mask head"]
    removed: Float64[np.ndarray, "text mask head"]
    width: int
    least: float

    @property
    def labels(self) -> tuple[Label, ...]:
        """One per head."""
        if len(self.rise) < 2:
            undecided: Label = "not decided"
            return (undecided,) * len(self.heads)
        local, far = self.rise[:, 0], self.rise[:, 1:]
        beats = [t_test_p(local - self.least), *(t_test_p(local - far[:, i]) for i in range(far.shape[1]))]
        costs = np.minimum(len(CONTROLS) * np.min([t_test_p(far[:, i] - self.least) for i in range(2)], axis=0), 1)
        is_local, is_heavy = passing(np.max(beats, axis=0)), passing(costs)
        names: Sequence[Label] = ("neither", "heavy", "local")
        return tuple(names[2 if a else 1 if b else 0] for a, b in zip(is_local, is_heavy, strict=True))

    def count(self, label: Label) -> int:
        """How many heads have it."""
        return self.labels.count(label)

    def mean(self, kind: MaskKind) -> Float64[np.ndarray, " head"]:
        """Mean rise over texts."""
        return np.asarray(self.rise[:, MASKS.index(kind)].mean(axis=0))

    def excess(self, kind: MaskKind) -> Float64[np.ndarray, " head"]:
        """Mean rise by the local mask minus that by a far one."""
        return np.asarray(self.mean("local") - self.mean(kind))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "width": self.width,
            "least": self.least,
            "texts": len(self.rise),
            "heads": [
                {
                    "layer": layer,
                    "head": head,
                    "label": label,
                    "rise": {kind: self.rise[:, j, i].tolist() for j, kind in enumerate(MASKS)},
                    "removed": {kind: float(self.removed[:, j, i].mean()) for j, kind in enumerate(MASKS)},
                }
                for i, ((layer, head), label) in enumerate(zip(self.heads, self.labels, strict=True))
            ],
        }


def t_test_p(values: Float64[np.ndarray, "text ..."]) -> Float64[np.ndarray, ...]:
    """One-sided p-value of the t test over texts that a mean is above 0."""
    mean, error = values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values))
    with np.errstate(divide="ignore", invalid="ignore"):
        # Texts that agree exactly leave no doubt about a mean, and none about a mean of 0.
        score = np.where(mean == 0, 0.0, mean / error)
    return np.asarray(stats.t.sf(score, len(values) - 1))


def passing(p: Float64[np.ndarray, ...]) -> np.ndarray:
    """Where a p-value passes Benjamini and Hochberg's procedure over all of them."""
    return np.asarray(stats.false_discovery_control(p, axis=None)).reshape(p.shape) <= FALSE_DISCOVERIES


_GAIN = 12.0


def planted_heads(
    truth: Sequence[Label],
    *,
    rng: np.random.Generator,
    texts: int,
    length: int,
    dim: int,
    width: int,
    least: float,
) -> Dependence:
    """Heads whose label is known, under the same masks.

    A local head asks for one of its last w keys at each query, a heavy one for one key beyond them, and the others ask
    for nothing in particular. Keys and values are i.i.d. In place of a loss stands the squared change of the output,
    as a share of its mean square.
    """
    masks = [Mask(kind, width) for kind in MASKS]
    start = length // 2
    rise, removed = np.zeros((2, texts, len(masks), len(truth)))
    for text in range(texts):
        call = _planted_call(truth, rng, length, dim, width)
        plain = call.output[0, start:].double()
        for i, mask in enumerate(masks):
            rows = masked_rows(call, Visible(), mask, start=start)
            change = (rows.output.double() - plain).square().sum(dim=(0, 2))
            rise[text, i] = (change / plain.square().sum(dim=(0, 2))).numpy()
            removed[text, i] = rows.removed.numpy()
    return Dependence(tuple((0, head) for head in range(len(truth))), rise, removed, width, least)


def _planted_call(truth: Sequence[Label], rng: np.random.Generator, length: int, dim: int, width: int) -> AttentionCall:
    keys, values = rng.standard_normal((2, len(truth), length, dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    query = np.zeros_like(keys)
    position = np.arange(length)
    for head, label in enumerate(truth):
        near = position - rng.integers(1, width + 1, length)
        far = 1 + (rng.random(length) * np.maximum(position - width - 1, 1)).astype(int)
        if label != "neither":
            # Soft enough that the other keys hold some of the mass.
            query[head] = keys[head, np.maximum(near if label == "local" else far, 0)] * (_GAIN - rng.random())
    q, k, v = (torch.as_tensor(x, dtype=torch.float32)[None] for x in (query, keys, values))
    output = attend("softmax", q, k, v, scale=1.0).output.transpose(1, 2)
    return AttentionCall(nn.Identity(), q, k, v, None, {"scaling": 1.0}, output)

"""The keys on which a window or a hybrid keeps exact softmax, and what the model does to their scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.visible import Visible
from softgap.errors import ValueInputError

__all__ = ["ExactRows", "ExactSet", "ScoreRule"]


@dataclass(frozen=True)
class ExactSet:
    """The keys that softmax sees: the first ``sinks`` of a sequence, and the last ``recent`` with the query's own.

    ``far`` more of the keys between stay exact (``softgap.attention.far_keys``).
    """

    recent: int
    sinks: int = 0
    far: int = 0

    def __post_init__(self) -> None:
        if self.recent < 1 or self.recent % 1:
            raise ValueInputError(f"a window's w must be a whole number of keys from 1 on, got {self.recent:g}")
        if self.sinks < 0 or self.sinks % 1:
            raise ValueInputError(f"a window's sinks must be a whole number of keys from 0 on, got {self.sinks:g}")
        if self.far < 0 or self.far % 1:
            raise ValueInputError(f"a window's far must be a whole number of keys from 0 on, got {self.far:g}")
        object.__setattr__(self, "recent", int(self.recent))
        object.__setattr__(self, "far", int(self.far))
        object.__setattr__(self, "sinks", int(self.sinks))

    @classmethod
    def of(cls, options: Mapping[str, float]) -> ExactSet:
        """From the options of a window or a hybrid."""
        return cls(options["w"], options["sinks"], options.get("far", 0))  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Keys that are kept."""
        return self.recent + self.sinks + self.far

    def rows(self, visible: Visible, start: int, stop: int, keys: tuple[int, int], device: torch.device) -> ExactRows:
        """The sets of the queries start..stop-1 over a range of keys; a mask's sinks are the first keys it shows."""
        seen = visible.rows(start, stop, keys, device)
        j = torch.arange(*keys, device=device)
        recent = seen & (visible.positions(start, stop, device)[:, None] - j < self.recent)
        return ExactRows(seen, recent | (seen & self._sinks(visible, keys, device)), recent)

    def _sinks(self, visible: Visible, keys: tuple[int, int], device: torch.device) -> Bool[Tensor, "#batch 1 1 key"]:
        """Which keys of a range are among the first of their sequence."""
        if visible.ordinals is not None:
            number = visible.ordinals.to(device)[:, slice(*keys)] + 1
        elif visible.mask is not None:
            number = visible.mask.any(dim=2).any(dim=1).cumsum(dim=-1)[:, slice(*keys)]
        elif visible.key_valid is not None:
            number = visible.key_valid.to(device).cumsum(dim=1)[:, slice(*keys)]
        else:
            number = torch.arange(*keys, device=device)[None] + 1
        return (number <= self.sinks)[:, None, None]


class ExactRows(NamedTuple):
    """Which keys some queries see, which of those softmax sees, and which of these are recent; axes may be 1."""

    seen: Bool[Tensor, "batch head query key"]
    exact: Bool[Tensor, "batch head query key"]
    recent: Bool[Tensor, "batch head query key"]


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """What a model does to its scores s_j before the softmax.

    Attributes
    ----------
    softcap
        Bound c of the scores, c tanh(s_j / c); None for none.
    sink_logits
        Learned logits that take part in the normaliser and have no value; None for none.
    """

    softcap: float | None = None
    sink_logits: Float[Tensor, "#batch head"] | None = None

    def cap(self, scores: Tensor) -> Tensor:
        """The scores after the softcap."""
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def for_heads(self, heads: Int[Tensor, " head"]) -> ScoreRule:
        """The same for some query heads only."""
        if self.sink_logits is None:
            return self
        return ScoreRule(self.softcap, self.sink_logits.index_select(1, heads.to(self.sink_logits.device)))

    def sink_column(self, like: Tensor) -> Float[Tensor, "#batch head 1 1"] | None:
        """The learned logits as a column of scores, on the device and in the dtype of a tensor."""
        return None if self.sink_logits is None else self.sink_logits.to(like.device, like.dtype)[:, :, None, None]

"""Follow the current forward pass: the positions of its queries and what they see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.attention import Visible
from softgap.errors import ModelError
from softgap.probe.arguments import by_name, cache_length
from softgap.probe.tap import AttentionCall
from softgap.probe.visibility import VisibleSets

__all__ = ["Forward", "follow_forwards"]


class Forward:
    """Where the queries of the present forward stand, and what they see; made by ``follow_forwards``."""

    def __init__(self) -> None:
        self._arguments: dict[str, Any] | None = None
        self._cached: int | None = None
        self._sets = VisibleSets()

    def visible(self, call: AttentionCall) -> Visible:
        """The visible set of one attention call; layers that share a mask share the work.

        A part of the model that is called on its own has no forward: its queries stand at the end of the keys.
        """
        return (VisibleSets(sys.maxsize) if self._arguments is None else self._sets).of(call)

    def positions(self) -> Int[Tensor, "#batch query"]:
        """Positions of the queries, padding not counted: those the model was told, or by its mask and its cache."""
        if self._arguments is None:
            raise ModelError(
                "positions are known in forwards of the whole model only, got a call of one of its parts; call the "
                "model itself, or leave positions out"
            )
        position_ids = self._arguments.get("position_ids")
        if isinstance(position_ids, Tensor) and position_ids.dim() == 2:
            return position_ids
        inputs = self._arguments.get("input_ids")
        inputs = self._arguments.get("inputs_embeds") if inputs is None else inputs
        if not isinstance(inputs, Tensor) or self._cached is None:
            raise ModelError(
                "positions follow from position_ids, or from input_ids and a cache that tells its length, and this "
                "forward has neither; pass position_ids, or leave positions out"
            )
        total = self._cached + inputs.shape[1]
        positions = torch.arange(self._cached, total, device=inputs.device)[None]
        mask = self._arguments.get("attention_mask")
        if isinstance(mask, Tensor) and tuple(mask.shape) == (inputs.shape[0], total):
            positions = positions - mask.ne(0).int().argmax(dim=1, keepdim=True).to(inputs.device)
        return positions

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = by_name(module.forward, args, kwargs)
        cache = self._arguments.get("past_key_values")
        tells = callable(getattr(cache, "get_seq_length", None))
        # Asked now: every layer of the forward lets the cache grow.
        self._cached = cache_length(cache) if tells or cache is None else None
        # Where no cache tells its length the newest keys come last.
        self._sets = VisibleSets(cache_length(cache) if tells else sys.maxsize)

    def _end(self, *_: Any) -> None:
        # The masks of the forward are not kept beyond it.
        self._arguments, self._sets = None, VisibleSets()


@contextmanager
def follow_forwards(model: PreTrainedModel) -> Iterator[Forward]:
    """Follow the forwards of a model while the block runs."""
    forward = Forward()
    before = model.register_forward_pre_hook(forward._begin, with_kwargs=True)
    after = model.register_forward_hook(forward._end, always_call=True)
    try:
        yield forward
    finally:
        before.remove()
        after.remove()

"""Forwards that begin in the middle: what the blocks below passed on once is not computed again.

A change in layer l leaves everything below it as it was. The model's own forward is called, with each block below the
one that holds layer l answering at once with what was remembered: embeddings, masks and rotary angles are made anew,
which costs little, and no family needs an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.token_scores import answering

__all__ = ["Blocks"]


class Blocks:
    """The blocks of a model that hold its attention layers, and what they passed on in one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks, self._places = _found(model, attention_layers(model))
        self._kept: list[Any] = []

    def place(self, layer: AttentionLayer) -> int:
        """Which of the blocks holds this layer."""
        return self._places[layer.index]

    @property
    def known(self) -> bool:
        """Whether the model is a row of blocks with one attention layer in each, at most."""
        return bool(self.blocks)

    @contextmanager
    def remembered(self) -> Iterator[None]:
        """Keep what every block passes on in the forward of this block of code."""
        self._kept = [None] * len(self.blocks)

        def keep(place: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                self._kept[place] = output

            return hook

        with ExitStack() as stack:
            for place, block in enumerate(self.blocks):
                stack.callback(block.register_forward_hook(keep(place)).remove)
            yield

    @contextmanager
    def beginning_at(self, layer: AttentionLayer, copies: int = 1) -> Iterator[None]:
        """Forwards over ``copies`` of the remembered batch, one behind the other, begin in the block of this layer."""
        place = self._places[layer.index]
        with ExitStack() as stack:
            if place:
                answer = _repeated(self._kept[place - 1], copies)
                for block in self.blocks[:place]:
                    stack.enter_context(answering(block, answer))
            yield


def _found(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> tuple[list[nn.Module], list[int]]:
    """The outermost list of blocks that holds every attention layer, one in a block at most; and each one's place."""
    for candidate in model.modules():
        if not isinstance(candidate, nn.ModuleList):
            continue
        inside = [{id(module) for module in block.modules()} for block in candidate]
        places = [[i for i, own in enumerate(inside) if id(layer.module) in own] for layer in layers]
        if all(len(place) == 1 for place in places):
            flat = [place[0] for place in places]
            if flat == sorted(set(flat)):
                return list(candidate), flat
    return [], []


def _repeated(kept: Any, copies: int) -> Any:
    """What a block passed on, for several copies of its batch."""
    if isinstance(kept, Tensor):
        return kept if copies == 1 else kept.repeat(copies, *[1] * (kept.dim() - 1))
    if isinstance(kept, tuple):
        return tuple(_repeated(part, copies) for part in kept)
    return kept

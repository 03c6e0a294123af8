"""Run a model from a layer on, or many sequences layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.errors import UnsupportedError
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.tap import AttentionCall, observe_attention, replace_attention
from softgap.probe.token_scores import return_constant

__all__ = ["Blocks", "LayerwiseRun"]


class Blocks:
    """The blocks of a model that hold its attention layers, and what they passed on in one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks, self._places = _find_blocks(model, attention_layers(model))
        self._outputs: list[Any] = []

    def place(self, layer: AttentionLayer) -> int:
        """Which of the blocks holds this layer."""
        return self._places[layer.index]

    @property
    def is_stack(self) -> bool:
        """Whether the model is a plain stack of blocks with at most one attention layer each."""
        return bool(self.blocks)

    @contextmanager
    def keep_outputs(self) -> Iterator[None]:
        """Keep what every block passes on in the forward of this block of code."""
        self._outputs = [None] * len(self.blocks)

        def keep(place: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                self._outputs[place] = output

            return hook

        with ExitStack() as stack:
            for place, block in enumerate(self.blocks):
                stack.callback(block.register_forward_hook(keep(place)).remove)
            yield

    @contextmanager
    def start_at(self, layer: AttentionLayer, copies: int = 1) -> Iterator[None]:
        """Forwards over ``copies`` of the remembered batch, one behind the other, begin in the block of this layer."""
        place = self._places[layer.index]
        with ExitStack() as stack:
            if place:
                answer = _repeat(self._outputs[place - 1], copies)
                for block in self.blocks[:place]:
                    stack.enter_context(return_constant(block, answer))
            yield


def _find_blocks(model: PreTrainedModel, layers: Sequence[AttentionLayer]) -> tuple[list[nn.Module], list[int]]:
    """The outermost list of blocks that holds every attention layer, one in a block at most; and each one's place."""
    for candidate in model.modules():
        if not isinstance(candidate, nn.ModuleList):
            continue
        inside = [{id(module) for module in block.modules()} for block in candidate]
        places = [[i for i, modules in enumerate(inside) if id(layer.module) in modules] for layer in layers]
        if all(len(place) == 1 for place in places):
            flat = [place[0] for place in places]
            if flat == sorted(set(flat)):
                return list(candidate), flat
    return [], []


def _repeat(output: Any, copies: int) -> Any:
    """What a block passed on, for several copies of its batch."""
    if isinstance(output, Tensor):
        return output if copies == 1 else output.repeat(copies, *[1] * (output.dim() - 1))
    if isinstance(output, tuple):
        return tuple(_repeat(part, copies) for part in output)
    return output


Result = TypeVar("Result")


class _StopForward(Exception):
    """What was asked for has been seen: the rest of the forward is not needed."""


class LayerwiseRun:
    """Where each text stands: what the last block passed on for it.

    Parameters
    ----------
    rows
        Token ids, one text a row.
    """

    def __init__(self, model: PreTrainedModel, rows: Int[Tensor, "text time"]) -> None:
        self._model, self._rows = model, rows
        self._blocks = Blocks(model)
        if not self._blocks.is_stack:
            raise UnsupportedError(
                f"model type '{model.config.model_type}' is not a plain stack of blocks with one attention layer "
                "each, so outputs cannot be corrected layer by layer; leave the output correction out"
            )
        self._outputs: list[Any] = [None] * len(rows)
        self._place = 0

    def advance_to(self, layer: AttentionLayer, replace: Callable[[AttentionCall], Tensor] | None = None) -> None:
        """Go on to just below the block of this layer."""
        while self._place < self._blocks.place(layer):
            self.step(replace)

    def observe(self, layer: AttentionLayer, text: int, visit: Callable[[AttentionCall], Result]) -> Result:
        """What ``visit`` makes of the attention call of a layer in the next block, for one text; nothing moves."""
        results: list[Result] = []

        def listen(call: AttentionCall) -> None:
            if call.module is layer.module:
                results.append(visit(call))
                raise _StopForward

        with observe_attention(self._model, listen):
            self._run(text)
        return results[0]

    def step(self, replace: Callable[[AttentionCall], Tensor] | None = None) -> None:
        """Take all texts through the next block."""
        for text in range(len(self._rows)):

            def hook(module: nn.Module, args: Any, output: Any, text: int = text) -> None:
                self._outputs[text] = output
                raise _StopForward

            with ExitStack() as stack:
                stack.callback(self._blocks.blocks[self._place].register_forward_hook(hook).remove)
                if replace is not None:
                    stack.enter_context(replace_attention(self._model, replace))
                self._run(text)
        self._place += 1

    def _run(self, text: int) -> None:
        with ExitStack() as stack:
            for block in self._blocks.blocks[: self._place]:
                stack.enter_context(return_constant(block, self._outputs[text]))
            try:
                with torch.inference_mode():
                    self._model(self._rows[text][None], use_cache=False)
            except _StopForward:
                pass

"""Follow the forward passes of a model, run it from a layer on, or run many sequences layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.attention import Visible
from softgap.errors import ModelError, UnsupportedError
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.tap import AttentionCall, by_name, cache_length, observe_attention, replace_attention
from softgap.probe.token_scores import return_constant
from softgap.probe.visibility import VisibleSets

__all__ = ["Blocks", "Forward", "LayerwiseRun", "follow_forwards"]


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

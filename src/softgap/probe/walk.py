"""Texts that go up a model block by block, all of them through one block before the next."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.errors import UnsupportedError
from softgap.probe.blocks import Blocks
from softgap.probe.layout import AttentionLayer
from softgap.probe.tap import AttentionCall, replaced, tapped
from softgap.probe.token_scores import answering

__all__ = ["Walk"]

Result = TypeVar("Result")


class _Reached(Exception):
    """What was asked for has been seen: the rest of the forward is not needed."""


class Walk:
    """Where each text stands: what the last block passed on for it.

    Parameters
    ----------
    rows
        Token ids, one text a row.
    """

    def __init__(self, model: PreTrainedModel, rows: Int[Tensor, "text time"]) -> None:
        self._model, self._rows = model, rows
        self._blocks = Blocks(model)
        if not self._blocks.known:
            raise UnsupportedError(
                f"model type '{model.config.model_type}' is no row of blocks with one attention layer each, so it "
                "cannot be repaired block by block; leave the repair out"
            )
        self._kept: list[Any] = [None] * len(rows)
        self._place = 0

    def climb(self, layer: AttentionLayer, replace: Callable[[AttentionCall], Tensor] | None = None) -> None:
        """Go on to just below the block of this layer."""
        while self._place < self._blocks.place(layer):
            self.step(replace)

    def look(self, layer: AttentionLayer, text: int, visit: Callable[[AttentionCall], Result]) -> Result:
        """What ``visit`` makes of the attention call of a layer in the next block, for one text; nothing moves."""
        found: list[Result] = []

        def listen(call: AttentionCall) -> None:
            if call.module is layer.module:
                found.append(visit(call))
                raise _Reached

        with tapped(self._model, listen):
            self._run(text)
        return found[0]

    def step(self, replace: Callable[[AttentionCall], Tensor] | None = None) -> None:
        """Take all texts through the next block."""
        for text in range(len(self._rows)):

            def hook(module: nn.Module, args: Any, output: Any, text: int = text) -> None:
                self._kept[text] = output
                raise _Reached

            with ExitStack() as stack:
                stack.callback(self._blocks.blocks[self._place].register_forward_hook(hook).remove)
                if replace is not None:
                    stack.enter_context(replaced(self._model, replace))
                self._run(text)
        self._place += 1

    def _run(self, text: int) -> None:
        with ExitStack() as stack:
            for block in self._blocks.blocks[: self._place]:
                stack.enter_context(answering(block, self._kept[text]))
            try:
                with torch.inference_mode():
                    self._model(self._rows[text][None], use_cache=False)
            except _Reached:
                pass

"""The rise in a model's loss where keys are hidden from one head, or from all heads at once."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.intervene.layerwise import Blocks
from softgap.models.loading import Model
from softgap.models.placement import input_device
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.tap import AttentionCall, observe_attention, replace_attention
from softgap.probe.token_scores import forward_then_logits
from softgap.probe.visibility import VisibleSets
from softgap.theory.locality.masks import Mask, local_shares, masked_rows

__all__ = ["LayerRises", "MaskedText"]


# Tokens of all copies of a text in one forward: with more, activations leave the processor's cache.
_BATCH_TOKENS = 1024


# Rows of logits that are looked at together, over all copies.
_ROWS = 128


# Two computations of one model differ by rounding; a forward that begins in the middle may not differ by more.
_TOLERANCE = 1e-3


@dataclass(frozen=True, eq=False)
class LayerRises:
    """One text with keys hidden from one head of a layer at a time.

    Attributes
    ----------
    rise
        In mean loss over the queries that see less.
    removed
        Mean attention mass that was taken away.
    """

    rise: Float[Tensor, "mask head"]
    removed: Float[Tensor, "mask head"]


class MaskedText:
    """One text under masks: queries from ``start`` on see less, and their loss counts.

    Parameters
    ----------
    widths
        Widths for ``shares``.
    sinks
        First keys that no mask hides.
    seed
        Of the random keys; every mask draws its own from it.

    Attributes
    ----------
    loss
        Without any mask.
    shares
        For every layer the means of ``local_shares``.
    """

    def __init__(
        self,
        model: Model,
        token_ids: Sequence[int],
        *,
        start: int,
        widths: Sequence[int] = (),
        sinks: int = 1,
        seed: int = 0,
    ) -> None:
        self._model, self._start, self._sinks, self._seed = model, start, sinks, seed
        self._ids = torch.tensor([list(token_ids)], device=input_device(model))
        self._blocks = Blocks(model)
        self.shares: list[Float[Tensor, "quantity width head"]] = []
        sets = VisibleSets()

        def listen(call: AttentionCall) -> None:
            self.shares.append(local_shares(call, sets.of(call), tuple(widths), start=start, sinks=sinks))

        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._blocks.is_stack:
                stack.enter_context(self._blocks.keep_outputs())
            if widths:
                stack.enter_context(observe_attention(model, listen))
            self.loss = float(self._losses(1)[0])
        self._reuse = self._blocks.is_stack and self._restarts()

    def hide_from_heads(self, layer: AttentionLayer, heads: Sequence[int], masks: Sequence[Mask]) -> LayerRises:
        """Each mask in each head alone; blocks below the layer run once for all of them."""
        variants = [(i, head) for i in range(len(masks)) for head in heads]
        outputs: list[Float[Tensor, "row head value_dim"]] = []
        removed = torch.zeros(len(masks), len(heads), dtype=torch.float64)
        losses = []
        step = max(1, _BATCH_TOKENS // self._ids.shape[1])
        for first in range(0, len(variants), step):
            part = variants[first : first + step]

            def replaced(call: AttentionCall, part: Sequence[tuple[int, int]] = part) -> Tensor:
                if call.module is not layer.module:
                    return call.output
                if not outputs:
                    single = _first_sequence(call)
                    for i, rows in enumerate(self._masked(single, masks)):
                        outputs.append(rows.output)
                        removed[i] = rows.removed[list(heads)]
                output = call.output.clone()
                for copy, (i, head) in enumerate(part):
                    output[copy, self._start :, head] = outputs[i][:, head]
                return output

            copies = len(part)
            begin = self._blocks.start_at(layer, copies) if self._reuse else nullcontext()
            with torch.inference_mode(), begin, replace_attention(self._model, replaced):
                losses.append(self._losses(copies))
        rise = torch.cat(losses).view(len(masks), len(heads)) - self.loss
        return LayerRises(rise, removed)

    def hide_from_all(self, mask: Mask) -> tuple[float, float]:
        """The rise in loss with a mask in every head at once, and the mean mass that it takes away."""
        removed: list[float] = []

        def replaced(call: AttentionCall) -> Tensor:
            (rows,) = self._masked(call, [mask])
            removed.append(float(rows.removed.mean()))
            return torch.cat([call.output[:, : self._start], rows.output[None]], dim=1)

        with torch.inference_mode(), replace_attention(self._model, replaced):
            loss = float(self._losses(1)[0])
        return loss - self.loss, sum(removed) / len(removed)

    def _masked(self, call: AttentionCall, masks: Sequence[Mask]) -> Iterator[Any]:
        visible = VisibleSets().of(call)
        for mask in masks:
            # The same keys whichever heads and masks are measured with it.
            seed = zlib.crc32(f"{self._seed} {mask.width} {getattr(call.module, 'layer_idx', 0)}".encode())
            generator = torch.Generator().manual_seed(seed)
            yield masked_rows(call, visible, mask, start=self._start, sinks=self._sinks, generator=generator)

    def _losses(self, copies: int) -> Float[Tensor, " copy"]:
        """Mean loss of the queries from the start on, for each copy of the text."""
        ids: Int[Tensor, "copy time"] = self._ids.repeat(copies, 1)
        n = ids.shape[1] - 1
        inputs = {"input_ids": ids[:, :-1], "use_cache": False}
        total = torch.zeros(copies, dtype=torch.float64)
        blocks: Callable[[], Any] = forward_then_logits(
            self._model, inputs, n, rows=max(1, _ROWS // copies), begin=self._start
        )
        for first, logits in blocks():
            skip = max(0, self._start - first)
            stop = first + logits.shape[1]
            numbers = logits[:, skip:].float().transpose(1, 2)
            loss = functional.cross_entropy(numbers, ids[:, first + skip + 1 : stop + 1], reduction="none")
            total += loss.sum(dim=1, dtype=torch.float64).cpu()
        return total / (n - self._start)

    def _restarts(self) -> bool:
        """Whether a forward from the last layer on gives the same loss: some models keep more than hidden states."""
        with torch.inference_mode(), self._blocks.start_at(attention_layers(self._model)[-1]):
            return abs(float(self._losses(1)[0]) - self.loss) <= _TOLERANCE * max(1.0, self.loss)


def _first_sequence(call: AttentionCall) -> AttentionCall:
    mask = call.mask if call.mask is None or call.mask.shape[0] == 1 else call.mask[:1]
    return call._replace(query=call.query[:1], key=call.key[:1], value=call.value[:1], mask=mask)

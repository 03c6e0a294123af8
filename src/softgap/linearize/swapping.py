"""Swap heads: some heads of a model attend by another mechanism while a block of code runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.errors import ValueInputError
from softgap.linearize.heads import heads_by_layer
from softgap.linearize.part import Part, part_of
from softgap.linearize.substitute import Substitute, substitute
from softgap.probe.forward import Forward, followed
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, replaced

__all__ = ["swap"]


@contextmanager
def swap(
    model: Any,
    heads: Iterable[Sequence[int]],
    mechanism: str | Mechanism | Substitute,
    *,
    window: int | None = None,
    positions: range | tuple[int, int] | None = None,
) -> Iterator[None]:
    """Let some heads of a model attend by another mechanism while the block runs, in forwards and in ``generate``.

    A swapped head's output is what :func:`softgap.attend` gives on the queries, keys, values and visible keys of the
    call, in float32 (float64 for a float64 model), cast back to the model's dtype. Its softcap, learned sinks, biases
    and dropout belong to the model's own attention and go with it. All other heads keep their very bits.

    Swaps nest, for several mechanisms at once; where two name the same head, the inner one decides. A recording, inside
    or around, measures what the model passes on: a swapped head is at no distance from its mechanism.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    heads
        (layer, head) pairs; :func:`heads_of_layer` and :func:`heads_of_group` list those of a layer or a KV group.
    mechanism
        A name (``"elu1"``, ``"top_k:k=8"``), a :class:`Mechanism` with its parameters ``[layer, head, ...]``, or a
        :class:`Substitute`, which may repair a head's output too.
    window
        Keep softmax on so many of the nearest keys and use the mechanism for the rest: a hybrid.
    positions
        Swap only queries at these positions, ``range(start, stop)`` or ``(start, stop)``, padding not counted. Step i
        of a generation is the query at position n_prompt - 1 + i.
    """
    span = _span(positions)
    layers = attention_layers(model)
    chosen = heads_by_layer(layers, heads)
    prepared = substitute(mechanism, model, window=window)
    parts = {id(layer.module): part_of(layer, own, prepared, len(layers)) for layer, own in chosen}
    with followed(model) as forward, replaced(model, _Swap(parts, forward, span).output):
        yield


@dataclass(frozen=True, eq=False)
class _Swap:
    """What the swapped layers pass on instead of their own output."""

    parts: Mapping[int, Part]
    forward: Forward
    span: range | None

    def output(self, call: AttentionCall) -> Float[Tensor, "batch query head value_dim"]:
        part = self.parts.get(id(call.module))
        if part is None:
            return call.output
        inside = None if self.span is None else self._inside(self.span).to(call.output.device)
        if inside is not None and not bool(inside.any()):
            return call.output
        heads = part.heads.to(call.output.device)
        found = part.output(call, self.forward.visible(call))
        if inside is not None:
            found = torch.where(inside[..., None, None], found, call.output.index_select(2, heads))
        return call.output.index_copy(2, heads, found)

    def _inside(self, span: range) -> Tensor:
        positions = self.forward.positions()
        return (positions >= span.start) & (positions < span.stop)


def _span(positions: range | tuple[int, int] | None) -> range | None:
    if positions is None:
        return None
    try:
        span = positions if isinstance(positions, range) else range(*positions)
    except TypeError:
        raise ValueInputError(f"positions must be range(start, stop) or (start, stop), got {positions!r}") from None
    if span.step != 1 or not 0 <= span.start < span.stop:
        raise ValueInputError(
            f"positions must run from a start of at least 0 to a later stop in steps of 1, got {positions!r}"
        )
    return span

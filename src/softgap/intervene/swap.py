"""Swap heads: some heads of a model attend by another mechanism while a block of code runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Mechanism
from softgap.errors import UnsupportedError, ValueInputError
from softgap.intervene.layerwise import Forward, follow_forwards
from softgap.intervene.substitute import Head, Substitute, SwappedLayer, substitute, swapped_layer
from softgap.models.support import refuse_attached
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.tap import AttentionCall, replace_attention

__all__ = ["enter_swap", "heads_by_layer", "heads_of_group", "heads_of_layer", "prepare_swap", "swap"]


def heads_of_layer(model: Any, layer: int) -> list[Head]:
    """All heads of a layer, as (layer, head) pairs."""
    attention_layer = _layer(attention_layers(model), layer)
    return [(layer, head) for head in range(attention_layer.heads)]


def heads_of_group(model: Any, layer: int, group: int) -> list[Head]:
    """The query heads that share one KV head (memory is saved only where all of them go), as (layer, head) pairs."""
    attention_layer = _layer(attention_layers(model), layer)
    if not 0 <= group < attention_layer.kv_heads:
        raise ValueInputError(f"KV groups of layer {layer} are {_range(range(attention_layer.kv_heads))}, got {group}")
    size = attention_layer.heads // attention_layer.kv_heads
    return [(layer, head) for head in range(group * size, (group + 1) * size)]


def heads_by_layer(
    layers: Sequence[AttentionLayer], heads: Iterable[Sequence[int]]
) -> list[tuple[AttentionLayer, list[int]]]:
    """The heads of each layer that has some, sorted, after checking that every one of them exists and comes once."""
    by_layer: dict[int, set[int]] = {}
    for layer, head in map(_pair, heads):
        attention_layer = _layer(layers, layer)
        if not 0 <= head < attention_layer.heads:
            raise ValueInputError(
                f"heads of layer {layer} are {_range(range(attention_layer.heads))}, got ({layer}, {head})"
            )
        if head in by_layer.setdefault(layer, set()):
            raise ValueInputError(f"each head may be named once, got ({layer}, {head}) twice; leave one of them out")
        by_layer[layer].add(head)
    if not by_layer:
        raise ValueInputError(
            "heads must name at least one (layer, head) pair, got none; heads_of_layer lists those of a whole layer"
        )
    return [(layer, sorted(by_layer[layer.number])) for layer in layers if layer.number in by_layer]


def _pair(head: Any) -> Head:
    try:
        layer, index = map(operator.index, head)
    except (TypeError, ValueError):
        raise ValueInputError(f"a head is a (layer, head) pair of whole numbers, got {head!r}") from None
    return layer, index


def _layer(layers: Sequence[AttentionLayer], number: int) -> AttentionLayer:
    for layer in layers:
        if layer.number == number:
            break
    else:
        raise ValueInputError(f"attention layers of this model are {_range([x.number for x in layers])}, got {number}")
    if layer.shared:
        raise UnsupportedError(
            f"layer {number} shares its module '{type(layer.module).__name__}' with another attention call of the same "
            "forward, so its heads cannot be told apart; choose a model whose layers have modules of their own"
        )
    return layer


def _range(numbers: Sequence[int]) -> str:
    """Numbers in words: a range where they are one."""
    if list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]} only"
    return ", ".join(map(str, numbers))


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

    A swapped head's output is what ``softgap.attend`` gives on the queries, keys, values and visible keys of the
    call, in float32 (float64 for a float64 model), cast back to the model's dtype. The model's biases and
    dropout go with its own attention; its softcap and learned sinks stay where a window keeps exact softmax. All other
    heads keep their very bits.

    Swaps nest, for several mechanisms at once; where two name the same head, the inner one decides. A recording, inside
    or around, measures what the model passes on: a swapped head is at no distance from its mechanism.

    Parameters
    ----------
    model
        Any causal model of transformers whose attention goes through the registry.
    heads
        (layer, head) pairs; ``heads_of_layer`` and ``heads_of_group`` list those of a layer or a KV group.
    mechanism
        A name (``"elu1"``, ``"top_k:k=8"``), a ``Mechanism`` with its parameters ``[layer, head, ...]``, a
        ``Substitute``, which may correct a head's output too, or a ``Mixture`` of several for heads of their own.
    window
        Keep softmax on this many most recent keys and use the mechanism for the rest: a hybrid.
    positions
        Swap only queries at these positions, ``range(start, stop)`` or ``(start, stop)``, padding not counted. Step i
        of a generation is the query at position n_prompt - 1 + i.

    Yields
    ------
    None
        The model is as before when the block ends.

    Examples
    --------
    ``tiny-llama`` is a folder with a small random model of two layers with four heads:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> inputs = tokenizer("A fox went out.", return_tensors="pt", return_token_type_ids=False)
    >>> before = model(**inputs).logits
    >>> with softgap.linearize.swap(model, [(0, 1), (1, 2)], "elu1"):
    ...     swapped = model(**inputs).logits
    >>> bool((swapped == before).all()), bool((model(**inputs).logits == before).all())
    (False, True)
    """
    refuse_attached(model)
    span = _span(positions)
    parts = prepare_swap(model, heads, substitute(mechanism, model, window=window))
    with enter_swap(model, parts, span):
        yield


def prepare_swap(model: Any, heads: Iterable[Sequence[int]], prepared: Substitute) -> dict[int, SwappedLayer]:
    """The swapped heads of every layer, by the identity of its module; ``enter_swap`` takes them as often as wanted."""
    layers = attention_layers(model)
    return {
        id(layer.module): swapped_layer(layer, layer_heads, prepared, len(layers))
        for layer, layer_heads in heads_by_layer(layers, heads)
    }


@contextmanager
def enter_swap(model: Any, parts: Mapping[int, SwappedLayer], span: range | None = None) -> Iterator[None]:
    """Let what ``prepare_swap`` made take the place of the heads' own attention while the block runs."""
    with follow_forwards(model) as forward, replace_attention(model, _Swap(parts, forward, span).output):
        yield


@dataclass(frozen=True, eq=False)
class _Swap:
    """What the swapped layers pass on instead of their own output."""

    parts: Mapping[int, SwappedLayer]
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
        swapped = part.output(call, self.forward.visible(call))
        if inside is not None:
            swapped = torch.where(inside[..., None, None], swapped, call.output.index_select(2, heads))
        return call.output.index_copy(2, heads, swapped)

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

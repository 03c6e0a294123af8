"""Heads of a model by (layer, head): whole layers, whole KV groups, and whether a list of them makes sense."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from softgap.errors import UnsupportedError, ValueInputError
from softgap.probe.layout import AttentionLayer, attention_layers

__all__ = ["Head", "heads_by_layer", "heads_of_group", "heads_of_layer"]

Head = tuple[int, int]


def heads_of_layer(model: Any, layer: int) -> list[Head]:
    """All heads of a layer, as (layer, head) pairs."""
    found = _layer(attention_layers(model), layer)
    return [(layer, head) for head in range(found.heads)]


def heads_of_group(model: Any, layer: int, group: int) -> list[Head]:
    """The query heads that share one KV head (memory is saved only where all of them go), as (layer, head) pairs."""
    found = _layer(attention_layers(model), layer)
    if not 0 <= group < found.kv_heads:
        raise ValueInputError(f"KV groups of layer {layer} are {_range(range(found.kv_heads))}, got {group}")
    size = found.heads // found.kv_heads
    return [(layer, head) for head in range(group * size, (group + 1) * size)]


def heads_by_layer(
    layers: Sequence[AttentionLayer], heads: Iterable[Sequence[int]]
) -> list[tuple[AttentionLayer, list[int]]]:
    """The heads of each layer that has some, sorted, after checking that every one of them exists and comes once."""
    chosen: dict[int, set[int]] = {}
    for layer, head in map(_pair, heads):
        found = _layer(layers, layer)
        if not 0 <= head < found.heads:
            raise ValueInputError(f"heads of layer {layer} are {_range(range(found.heads))}, got ({layer}, {head})")
        if head in chosen.setdefault(layer, set()):
            raise ValueInputError(f"each head may be named once, got ({layer}, {head}) twice; leave one of them out")
        chosen[layer].add(head)
    if not chosen:
        raise ValueInputError(
            "heads must name at least one (layer, head) pair, got none; heads_of_layer lists those of a whole layer"
        )
    return [(layer, sorted(chosen[layer.number])) for layer in layers if layer.number in chosen]


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

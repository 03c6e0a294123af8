"""Swap heads: some heads of a model attend by another mechanism while a block of code runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention import Mechanism, Visible, attend
from softgap.errors import ModelError, ShapeError, ValueInputError
from softgap.linearize.heads import heads_by_layer
from softgap.probe.forward import Forward, followed
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.recording import ready
from softgap.probe.tap import AttentionCall, replaced

__all__ = ["swap"]


@contextmanager
def swap(
    model: Any,
    heads: Iterable[Sequence[int]],
    mechanism: str | Mechanism,
    *,
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
        A name (``"elu1"``, ``"top_k:k=8"``), or a :class:`Mechanism` with its parameters ``[layer, head, ...]``.
    positions
        Swap only queries at these positions, ``range(start, stop)`` or ``(start, stop)``, padding not counted. Step i
        of a generation is the query at position n_prompt - 1 + i.
    """
    span = _span(positions)
    layers = attention_layers(model)
    chosen = heads_by_layer(layers, heads)
    prepared = ready(mechanism, model)
    parts = {id(layer.module): _part(layer, own, prepared, len(layers)) for layer, own in chosen}
    with followed(model) as forward, replaced(model, _Swap(parts, forward, span).output):
        yield


@dataclass(frozen=True, eq=False)
class _Part:
    """The swapped heads of one layer, and their mechanism with the parameters of these heads only.

    ``kv_heads`` are the KV heads that they need: each once where all serve equally many swapped heads, else one for
    each swapped head.
    """

    layer: AttentionLayer
    heads: Int[Tensor, " swapped"]
    kv_heads: Int[Tensor, " kv_head"]
    mechanism: Mechanism

    def output(self, call: AttentionCall, visible: Visible) -> Float[Tensor, "batch query swapped value_dim"]:
        """The mechanism's output on the tensors of one call."""
        if (call.query.shape[1], call.key.shape[1]) != (self.layer.heads, self.layer.kv_heads):
            raise ModelError(
                f"layer {self.layer.number} had {self.layer.heads} heads when the swap began and has "
                f"{call.query.shape[1]} now; do not change a model while its heads are swapped"
            )
        device = call.query.device
        heads, kv_heads = self.heads.to(device), self.kv_heads.to(device)
        q = call.query.index_select(1, heads)
        k, v = (x.index_select(1, kv_heads) for x in (call.key, call.value))
        if visible.mask is not None and visible.mask.shape[1] > 1:
            visible = dataclasses.replace(visible, mask=visible.mask.index_select(1, heads))
        # One row over all keys costs less than the state they would make; and the chunked form writes over what a
        # gradient needs.
        explicit = q.shape[2] == 1 or _differentiated(q, k, v, *self.mechanism.parameters.values())
        with torch.autocast(device.type, enabled=False):
            found = attend(
                self.mechanism,
                q,
                k,
                v,
                visible=visible,
                scale=call.scale,
                form="quadratic" if explicit else "auto",
                dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
                check=False,
            )
        return found.output.transpose(1, 2).to(call.output.dtype)


@dataclass(frozen=True, eq=False)
class _Swap:
    """What the swapped layers pass on instead of their own output."""

    parts: Mapping[int, _Part]
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


def _differentiated(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


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


def _part(layer: AttentionLayer, heads: Sequence[int], mechanism: Mechanism, n_layers: int) -> _Part:
    size = layer.heads // layer.kv_heads
    owners = [head // size for head in heads]
    shared = sorted(set(owners))
    # attend() gives every KV head equally many query heads.
    if len({owners.count(owner) for owner in shared}) == 1:
        owners = shared
    queries, keys = torch.tensor(heads), torch.tensor(owners)
    own = _parameters(mechanism, layer, n_layers)
    parameters = {
        # As large as both where every query head has a KV head of its own; then the two choices are one.
        name: x if x.shape[1] == 1 else x.index_select(1, (queries if x.shape[1] == layer.heads else keys).to(x.device))
        for name, x in own.parameters.items()
    }
    return _Part(layer, queries, keys, dataclasses.replace(own, parameters=MappingProxyType(parameters)))


def _parameters(mechanism: Mechanism, layer: AttentionLayer, n_layers: int) -> Mechanism:
    """The mechanism with the parameters of one layer."""
    for name, tensor in mechanism.parameters.items():
        by_layer, by_head = tensor.shape[:2]
        if by_layer not in (1, n_layers) or by_head not in (1, layer.heads, layer.kv_heads):
            raise ShapeError(
                f"parameter '{name}' of mechanism '{mechanism.name}' must be for {n_layers} layers and, in layer "
                f"{layer.number}, {layer.heads} heads or {layer.kv_heads} KV heads (or 1 for all), got "
                f"{by_layer} and {by_head}; use parameters made for this model"
            )
    return mechanism.for_layers([layer.index])

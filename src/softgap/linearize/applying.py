"""A plan at work: its heads swapped in every forward; with its cache, a state of constant size for freed groups."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from softgap.attention import HybridState, LinearState, Visible, attend
from softgap.errors import UnsupportedError
from softgap.linearize.heads import Head, heads_by_layer
from softgap.linearize.part import Part, part_of
from softgap.linearize.plan import Plan
from softgap.linearize.substitute import Substitute
from softgap.linearize.swapping import swap
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.models import Model
from softgap.probe.state_cache import StateLayer, bounded_layers, state_cache
from softgap.probe.tap import AttentionCall, stood_in
from softgap.probe.visibility import VisibleSets, seen_by_mask, with_origin

__all__ = ["Applied", "apply", "freed_groups", "streams"]


@contextmanager
def apply(model: Model, plan: Plan) -> Iterator[Applied]:
    """Run a model under a plan while the block runs.

    Forwards and ``generate`` use the plan's heads as :func:`swap` does. ``model.generate(...,
    past_key_values=applied.cache())`` computes the same with a state of constant size in the place of the keys and
    values of every freed KV group: that saves the memory.
    """
    plan.check(model)
    applied = Applied(model, plan.heads, plan.substitute)
    try:
        with swap(model, plan.heads, plan.substitute), stood_in(model, applied._stand):
            yield applied
    finally:
        applied._close()


def freed_groups(layer: AttentionLayer, heads: Sequence[int]) -> list[int]:
    """KV heads of a layer all of whose query heads are among these."""
    size = layer.heads // layer.kv_heads
    return [g for g in range(layer.kv_heads) if set(range(g * size, (g + 1) * size)) <= set(heads)]


def streams(chosen: Substitute) -> bool:
    """Whether what heads become lives in a state of constant size: only then a swapped KV group needs no cache."""
    return chosen.mechanism.factorable(64) or chosen.mechanism.kind == "constant"


@dataclass(frozen=True, eq=False)
class _Split:
    """One layer with freed groups: its kept heads, the swapped ones among them, and the freed ones."""

    kept: Tensor
    among_kept: Part | None
    freed: Part
    groups: tuple[tuple[int, ...], tuple[int, ...]]


class Applied:
    """A model under a plan; made by :func:`apply`."""

    def __init__(self, model: Model, heads: Sequence[Head], chosen: Substitute) -> None:
        self._model = model
        layers = attention_layers(model)
        self._window = chosen.window
        self._streams = streams(chosen)
        self._name = chosen.mechanism.name
        self._splits: dict[int, _Split] = {}
        self._indices: dict[int, int] = {}
        bounded = bounded_layers(model)
        for layer, own in heads_by_layer(layers, heads):
            groups = freed_groups(layer, own)
            if groups and layer.number not in bounded:
                self._splits[id(layer.module)] = _split(layer, own, groups, chosen, len(layers))
                self._indices[id(layer.module)] = layer.number
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def cache(self) -> Any:
        """An empty cache for one ``generate`` or one row of forwards, to be passed as ``past_key_values``."""
        if not self._streams:
            raise UnsupportedError(
                f"mechanism '{self._name}' has no state of constant size and cannot stream; generate without the "
                "plan's cache, or make a plan with a mechanism such as elu1 or fitted"
            )
        made = state_cache(self._model, {self._indices[key]: split.groups for key, split in self._splits.items()})
        self._caches.add(made)
        return made

    def _close(self) -> None:
        """Caches are of no use to a model without the plan: it would miss the freed heads and not say so."""
        for cache in self._caches:
            for layer in cache.layers:
                if isinstance(layer, StateLayer):
                    layer.closed = True

    def _stand(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None] | None:
        split = self._splits.get(id(module))
        if split is None:
            return None
        held = self._held(self._indices[id(module)])
        if held is None:
            return None
        layer, (new_key, new_value) = held
        mask = args[0] if args else kwargs.get("attention_mask")
        call = AttentionCall(module, query, key, value, mask, kwargs, query)
        freed = self._freed(split.freed, layer, call, new_key, new_value)
        batch, heads, n, _ = query.shape
        kept = _kept(split, original, call, args, kwargs) if len(split.kept) else None
        output = (query if kept is None else kept).new_empty(batch, n, heads, freed.shape[-1])
        output[:, :, split.freed.heads] = freed.to(output.dtype)
        if kept is not None:
            output[:, :, split.kept] = kept
        return output, None

    def _held(self, index: int) -> tuple[StateLayer, tuple[Tensor, Tensor]] | None:
        """The layer of a cache of ours that was updated just now."""
        for cache in self._caches:
            layer = cache.layers[index]
            fresh = layer.take() if isinstance(layer, StateLayer) else None
            if fresh is not None:
                return layer, fresh
        return None

    def _freed(self, part: Part, layer: StateLayer, call: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        q = call.query.index_select(1, part.heads.to(k.device))
        valid = None
        if call.mask is not None:
            seen = seen_by_mask(call.mask, q.shape[2], layer.length)
            valid = seen[:, 0, -1, layer.length - k.shape[2] :].expand(k.shape[0], -1)
        with torch.inference_mode(), torch.autocast(k.device.type, enabled=False):
            if part.mechanism.kind == "constant":
                found = attend(part.mechanism, q, k, v, dtype=dtype, check=False).output
            else:
                found = self._state(part, layer, call, valid, k.shape[2], dtype).attend(q, k, v, valid).output
            return part.read_out(found).transpose(1, 2)

    def _state(
        self,
        part: Part,
        layer: StateLayer,
        call: AttentionCall,
        valid: Bool[Tensor, "batch key"] | None,
        n_keys: int,
        dtype: torch.dtype,
    ) -> LinearState | HybridState:
        """The state of a layer's freed heads, made when it is first asked for."""
        if layer.state is None:
            origin = _origin(call, valid, n_keys)
            layer.state = (
                LinearState(part.mechanism, scale=call.scale, dtype=dtype, origin=origin)
                if self._window is None
                else HybridState(part.mechanism, near=self._window, scale=call.scale, dtype=dtype, origin=origin)
            )
        made: LinearState | HybridState = layer.state
        return made


def _origin(call: AttentionCall, valid: Tensor | None, n_keys: int) -> Tensor | None:
    """The position of the first key that a new state sees."""
    told = call.options.get("position_ids")
    if not isinstance(told, Tensor):
        return None
    return with_origin(Visible(key_valid=valid), told, call.query.shape[0], call.query.shape[2], n_keys).origin


def _kept(
    split: _Split, original: Callable[..., Any], call: AttentionCall, args: tuple[Any, ...], kwargs: Any
) -> Tensor:
    """The kept heads: the model's own attention on what the cache holds, some of them swapped."""
    query = call.query.index_select(1, split.kept.to(call.query.device))
    try:
        output: Tensor = original(call.module, query, call.key, call.value, *args, **kwargs)[0]
    except RuntimeError as error:
        raise UnsupportedError(
            f"this model's attention cannot be computed for {query.shape[1]} of its {call.query.shape[1]} heads alone "
            f"({str(error).splitlines()[0]}); free whole layers, or leave the plan's cache out"
        ) from error
    if split.among_kept is None:
        return output
    inner = call._replace(query=query, output=output)
    found = split.among_kept.output(inner, VisibleSets(2**62).of(inner))
    return output.index_copy(2, split.among_kept.heads.to(output.device), found)


def _split(
    layer: AttentionLayer, own: Sequence[int], groups: Sequence[int], chosen: Substitute, n_layers: int
) -> _Split:
    size = layer.heads // layer.kv_heads
    kept_groups = [g for g in range(layer.kv_heads) if g not in groups]
    kept = [head for g in kept_groups for head in range(g * size, (g + 1) * size)]
    freed = part_of(layer, [head for head in own if head // size in groups], chosen, n_layers)
    some = [head for head in own if head in kept]
    among = None
    if some:
        part = part_of(layer, some, chosen, n_layers)
        smaller = dataclasses.replace(layer, heads=len(kept), kv_heads=len(kept_groups))
        among = dataclasses.replace(
            part,
            layer=smaller,
            heads=torch.tensor([kept.index(head) for head in some]),
            kv_heads=torch.tensor([kept_groups.index(int(g)) for g in part.kv_heads]),
        )
    return _Split(torch.tensor(kept, dtype=torch.long), among, freed, (tuple(kept_groups), tuple(groups)))

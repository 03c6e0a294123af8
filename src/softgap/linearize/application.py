"""Run a model under a plan, with recurrent states in the place of the keys and values of freed KV groups."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from softgap.attention import HybridState, LinearState, ScoreRule, Visible, attend, new_state
from softgap.attention.decode import DecodeMaps, DecodeStep, can_decode
from softgap.attention.tensor_step import TensorMaps, TensorStep
from softgap.errors import UnsupportedError, ValueInputError
from softgap.intervene.state_cache import StateLayer, bounded_layers, state_cache
from softgap.intervene.substitute import Head, Substitute, SwappedLayer, swapped_layer
from softgap.intervene.swap import enter_swap, heads_by_layer, prepare_swap
from softgap.linearize.plan import Plan, freed_groups, streams
from softgap.models.loading import Model
from softgap.models.support import refuse_attached
from softgap.probe.layout import AttentionLayer, attention_layers
from softgap.probe.tap import AttentionCall, override_attention
from softgap.probe.visibility import VisibleSets, seen_by_mask, with_origin

__all__ = ["Applied", "apply", "under_plan"]


@contextmanager
def apply(model: Model, plan: Plan, *, compile_step: bool | str = False) -> Iterator[Applied]:
    """Run a model under a plan while the block runs.

    Forwards and ``generate`` use the plan's heads as ``swap`` does. ``model.generate(...,
    past_key_values=applied.cache())`` computes the same with a state of constant size in the place of the keys and
    values of every freed KV group: that saves the memory.

    Parameters
    ----------
    model
        The model that the plan was found for.
    plan
        A plan from ``find_plan`` or ``load_plan``.
    compile_step
        Let ``torch.compile`` capture the step that the cache takes for each new token, a graph for each kind of layer:
        True by torch's default backend, or the name of another. The first tokens wait for it. Without it the step is
        a compiled pass on the CPU in float32, and tensor operations elsewhere.

    Yields
    ------
    Applied
        Its ``cache()`` is a new KV cache with recurrent states.

    Raises
    ------
    UnsupportedError
        If the plan belongs to another model.

    Examples
    --------
    ``plan.json`` is a plan that ``softgap linearize`` wrote for the small random model in ``tiny-llama``:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> plan = softgap.linearize.load_plan("plan.json")
    >>> inputs = tokenizer("A fox went out.", return_tensors="pt", return_token_type_ids=False)
    >>> with softgap.linearize.apply(model, plan) as applied:
    ...     ids = model.generate(**inputs, max_new_tokens=4, do_sample=False, past_key_values=applied.cache())
    >>> ids.shape[1] - inputs["input_ids"].shape[1]
    4
    """
    plan.check(model)
    refuse_attached(model)
    backend = "inductor" if compile_step is True else compile_step or None
    if backend is not None and backend not in torch.compiler.list_backends(exclude_tags=()):
        raise ValueInputError(
            f"compile_step must be True, False or a backend of torch.compile "
            f"({', '.join(torch.compiler.list_backends())}), got {compile_step!r}"
        )
    applied = Applied(model, plan.heads, plan.substitute, backend)
    with under_plan(model, prepare_swap(model, plan.heads, plan.substitute), applied):
        yield applied


@contextmanager
def under_plan(model: Model, swapped: Mapping[int, SwappedLayer], applied: Applied) -> Iterator[None]:
    """Run a model under a plan that is prepared, while the block runs."""
    try:
        with enter_swap(model, swapped), override_attention(model, applied._attend):
            yield
    finally:
        applied._close()


def heads_in_part(model: Model, heads: Sequence[Head], head_substitute: Substitute) -> list[Head]:
    """Swapped heads with far keys whose KV group keeps another head: no state serves them when tokens are generated."""
    own = {head for part, each in head_substitute.swaps(heads) if each.mechanism.options.get("far") for head in part}
    found = []
    for layer, layer_heads in heads_by_layer(attention_layers(model), heads):
        size, freed = layer.heads // layer.kv_heads, freed_groups(layer, layer_heads)
        found += [(layer.number, h) for h in layer_heads if (layer.number, h) in own and h // size not in freed]
    return found


def refusal_of_part(heads: Sequence[Head]) -> str:
    """Why heads with far keys cannot generate, in one sentence."""
    layer, head = heads[0]
    return (
        f"far keys need all query heads of a KV group, and head {head} of layer {layer} shares its keys with a head "
        "that keeps softmax; swap whole groups"
    )


@dataclass(frozen=True, eq=False)
class _Split:
    """One layer with freed groups: its kept heads, the swapped ones among them, and the freed ones.

    ``maps`` are what the decode step of each freed part reads, once it was asked for, by part and device.
    """

    remaining: Tensor
    swapped_remaining: SwappedLayer | None
    freed: SwappedLayer
    groups: tuple[tuple[int, ...], tuple[int, ...]]
    maps: dict[tuple[int, torch.device, torch.dtype], DecodeMaps | TensorMaps] = field(default_factory=dict)


@dataclass(eq=False)
class _States:
    """The states of a layer's freed heads, one for each mechanism that needs one, and their decode steps."""

    by_part: dict[int, LinearState | HybridState] = field(default_factory=dict)
    steps: dict[int, DecodeStep | TensorStep] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(int(x.nbytes) for x in (*self.by_part.values(), *self.steps.values()))


def _digest(heads: Sequence[Head], head_substitute: Substitute) -> str:
    parts = [[part.name, part.digest, sorted(own)] for own, part in head_substitute.swaps(heads)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class Applied:
    """A model under a plan; made by ``apply``.

    Attributes
    ----------
    streams
        Whether the plan's heads live in states of constant size.
    digest
        A hash of the heads that are swapped and of what they become.
    """

    def __init__(
        self, model: Model, heads: Sequence[Head], head_substitute: Substitute, backend: str | None = None
    ) -> None:
        self._model, self._backend = model, backend
        layers = attention_layers(model)
        self.streams = streams(head_substitute)
        names = dict.fromkeys(part.mechanism.name for _, part in head_substitute.swaps(heads) if not streams(part))
        self._name = ", ".join(names)
        self._splits: dict[int, _Split] = {}
        self._indices: dict[int, int] = {}
        bounded = bounded_layers(model)
        self._partly = heads_in_part(model, heads, head_substitute)
        for layer, layer_heads in heads_by_layer(layers, heads):
            groups = freed_groups(layer, layer_heads)
            if groups and layer.number not in bounded:
                self._splits[id(layer.module)] = _split(layer, layer_heads, groups, head_substitute, len(layers))
                self._indices[id(layer.module)] = layer.number
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._masked: tuple[Tensor | None, int, Tensor | None] = (None, 0, None)
        self.digest = _digest(heads, head_substitute)

    def cache(self) -> Any:
        """An empty cache for one ``generate`` or one row of forwards, to be passed as ``past_key_values``."""
        if not self.streams:
            raise UnsupportedError(
                f"mechanism '{self._name}' has no state of constant size and cannot stream; generate without the "
                "plan's cache, or make a plan with a mechanism such as elu1 or fitted"
            )
        if self._partly:
            raise UnsupportedError(refusal_of_part(self._partly))
        cache = state_cache(self._model, {self._indices[key]: split.groups for key, split in self._splits.items()})
        self._caches.add(cache)
        return cache

    def _close(self) -> None:
        """Caches are of no use to a model without the plan: it would miss the freed heads and not say so."""
        for cache in self._caches:
            for layer in cache.layers:
                if isinstance(layer, StateLayer):
                    layer.closed = True

    def _attend(
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
        held = self._updated_layer(self._indices[id(module)])
        if held is None:
            return None
        layer, fresh = held
        mask = args[0] if args else kwargs.get("attention_mask")
        call = AttentionCall(module, query, key, value, mask, kwargs, query)
        if layer.state is None:
            layer.state = _States()
        valid = self._valid(call, layer.length, fresh[0])
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        output = query.new_empty(*query.shape[0:3:2], query.shape[1], fresh[1].shape[-1], dtype=exact)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(query.device.type):
            with torch.inference_mode(), torch.autocast(query.device.type, enabled=False):
                self._attend_freed(split, layer.state, call, *fresh, valid, output)
        else:  # nothing to switch off, and entering the two takes time in every layer
            self._attend_freed(split, layer.state, call, *fresh, valid, output)
        if len(split.remaining) == 0:
            return output.to(query.dtype), None
        remaining = _attend_remaining(split, original, call, args, kwargs)
        output = output.to(remaining.dtype)
        _write_heads(output, split.remaining, remaining)
        return output, None

    def _updated_layer(self, index: int) -> tuple[StateLayer, tuple[Tensor, Tensor]] | None:
        """The layer of a cache of ours that was updated just now."""
        for cache in self._caches:
            layer = cache.layers[index]
            fresh = layer.take() if isinstance(layer, StateLayer) else None
            if fresh is not None:
                return layer, fresh
        return None

    def _valid(self, call: AttentionCall, length: int, k: Tensor) -> Bool[Tensor, "batch key"] | None:
        """Which of the newest keys are no padding; None where all are."""
        if call.mask is None:
            return None
        # All layers of a forward have one mask; it is kept with the result, so that its id cannot pass to another.
        if self._masked[0] is not call.mask or self._masked[1] != length:
            # The last query sees every key that is no padding.
            seen = seen_by_mask(call.mask[:, :1, -1:], 1, length)
            valid = seen[:, 0, 0, length - k.shape[2] :].expand(k.shape[0], -1)
            # A window need not count its keys where none of them is padding.
            self._masked = (call.mask, length, None if bool(valid.all()) else valid)
        return self._masked[2]

    def _attend_freed(
        self, split: _Split, states: _States, call: AttentionCall, k: Tensor, v: Tensor, valid: Tensor | None,
        output: Float[Tensor, "batch query head value_dim"],
    ) -> None:  # fmt: skip
        """Write the outputs of the freed heads, from their states and the newest keys and values."""
        n = call.query.shape[2]
        newest: list[Tensor] = []
        for number, part in enumerate(split.freed.parts):
            state = self._state(split, number, states, call, k, v, valid)
            step = states.steps.get(number)
            if n == 1 == k.shape[2] and step is not None:
                # The same for all parts of the layer.
                newest = newest or [x.to(output.dtype).contiguous() for x in (call.query, k, v)]
                step(newest[0], newest[1], newest[2], output[:, 0], valid)
                continue
            places = part.kv_heads.to(k.device)
            q, own_k, own_v = call.query.index_select(1, part.heads.to(k.device)), k, v
            if len(places) < k.shape[1] or len(split.freed.parts) > 1:
                own_k, own_v = k.index_select(1, places), v.index_select(1, places)
            if state is None:
                attended = attend(part.mechanism, q, own_k, own_v, dtype=output.dtype, check=False)
            else:
                attended = state.attend(q, own_k, own_v, valid)
            _write_heads(output, part.heads, part.read_out(attended.output).transpose(1, 2))

    def _state(
        self, split: _Split, number: int, states: _States, call: AttentionCall, k: Tensor, v: Tensor,
        valid: Tensor | None,
    ) -> Any:  # fmt: skip
        """The state of a part, made when it is first asked for; None for a constant."""
        part = split.freed.parts[number]
        if part.mechanism.kind == "constant":
            return None
        if number not in states.by_part:
            dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
            origin = _first_position(call, valid, k.shape[2])
            rule = call.rule.for_heads(part.heads)
            state = new_state(part.mechanism, scale=call.scale, dtype=dtype, origin=origin, rule=rule)
            states.by_part[number] = state
            if can_decode(part.mechanism):
                states.steps[number] = self._step(split, number, state, call.scale, rule, k.new_empty(0, dtype=dtype))
                states.steps[number].reserve(k.shape[0])
        return states.by_part[number]

    def _step(
        self, split: _Split, number: int, state: Any, scale: float, rule: ScoreRule, like: Tensor
    ) -> DecodeStep | TensorStep:
        """What moves a state on by one position: the compiled pass where it can go, else tensor operations."""
        part, key = split.freed.parts[number], (number, like.device, like.dtype)
        own = (part.mechanism, part.heads, part.kv_heads, part.weight, part.bias)
        maps = split.maps.get(key)
        if self._backend is None and like.device.type == "cpu" and like.dtype == torch.float32:
            maps = maps if isinstance(maps, DecodeMaps) else DecodeMaps(*own)
            split.maps[key] = maps
            return DecodeStep(state, maps, scale=scale, rule=rule)
        maps = maps if isinstance(maps, TensorMaps) else TensorMaps(*own, like=like)
        split.maps[key] = maps
        return TensorStep(state, maps, scale=scale, rule=rule, backend=self._backend)


def _write_heads(output: Tensor, heads: Tensor, part: Float[Tensor, "batch query part value_dim"]) -> None:
    """Write the outputs of some heads: into a slice where they follow each other, which takes half of the time."""
    first, count = int(heads[0]), len(heads)
    if torch.equal(heads, torch.arange(first, first + count)):
        output[:, :, first : first + count] = part
    else:
        output[:, :, heads] = part


def _first_position(call: AttentionCall, valid: Tensor | None, n_keys: int) -> Tensor | None:
    """The position of the first key that a new state sees."""
    positions = call.options.get("position_ids")
    if not isinstance(positions, Tensor):
        return None
    return with_origin(Visible(key_valid=valid), positions, call.query.shape[0], call.query.shape[2], n_keys).origin


def _attend_remaining(
    split: _Split, original: Callable[..., Any], call: AttentionCall, args: tuple[Any, ...], kwargs: Any
) -> Tensor:
    """The kept heads: the model's own attention on what the cache holds, some of them swapped."""
    query = call.query.index_select(1, split.remaining.to(call.query.device))
    try:
        output: Tensor = original(call.module, query, call.key, call.value, *args, **kwargs)[0]
    except RuntimeError as error:
        raise UnsupportedError(
            f"this model's attention cannot be computed for {query.shape[1]} of its {call.query.shape[1]} heads alone "
            f"({str(error).splitlines()[0]}); free whole layers, or leave the plan's cache out"
        ) from error
    if split.swapped_remaining is None:
        return output
    inner = call._replace(query=query, output=output)
    swapped = split.swapped_remaining.output(inner, VisibleSets(2**62).of(inner))
    return output.index_copy(2, split.swapped_remaining.heads.to(output.device), swapped)


def _split(
    layer: AttentionLayer,
    heads: Sequence[int],
    groups: Sequence[int],
    head_substitute: Substitute,
    n_layers: int,
) -> _Split:
    size = layer.heads // layer.kv_heads
    remaining_groups = [g for g in range(layer.kv_heads) if g not in groups]
    remaining = [head for g in remaining_groups for head in range(g * size, (g + 1) * size)]
    freed = swapped_layer(layer, [head for head in heads if head // size in groups], head_substitute, n_layers)
    swapped_heads = [head for head in heads if head in remaining]
    swapped_remaining = None
    if swapped_heads:
        whole = swapped_layer(layer, swapped_heads, head_substitute, n_layers)
        smaller = dataclasses.replace(layer, heads=len(remaining), kv_heads=len(remaining_groups))
        parts = tuple(
            dataclasses.replace(
                part,
                layer=smaller,
                heads=torch.tensor([remaining.index(int(head)) for head in part.heads]),
                kv_heads=torch.tensor([remaining_groups.index(int(g)) for g in part.kv_heads]),
            )
            for part in whole.parts
        )
        swapped_remaining = SwappedLayer(smaller, parts)
    kept = torch.tensor(remaining, dtype=torch.long)
    return _Split(kept, swapped_remaining, freed, (tuple(remaining_groups), tuple(groups)))

"""Linearization plans: which heads are swapped, their cost and memory, their file, and how to apply them."""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from softgap.attention import HybridState, LinearState, Mechanism, Visible, add_window, attend, new_state, resolve
from softgap.errors import SoftgapError, StoreError, UnsupportedError
from softgap.intervals import Interval
from softgap.intervene.state_cache import StateLayer, bounded_layers, state_cache
from softgap.intervene.swap import Head, Readout, Substitute, SwappedLayer, heads_by_layer, swap, swapped_layer
from softgap.linearize.baselines import Baselines, group_bytes
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model
from softgap.models.tensor_files import digest_of, load_calibration, save_calibration
from softgap.probe.layout import AttentionLayer, attention_layers, head_dim
from softgap.probe.tap import AttentionCall, override_attention
from softgap.probe.visibility import VisibleSets, seen_by_mask, with_origin

__all__ = ["Applied", "Plan", "apply", "freed_groups", "load_plan", "memory_of", "streams"]


FORMAT = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """Heads that go, what they become, and what it costs.

    Attributes
    ----------
    model, fingerprint
        The model that it is for.
    heads, groups, layers
        (layer, head) pairs that are swapped; (layer, KV head) pairs that are freed with all of their query heads, so
        that no keys and values need to be kept; layers that are freed whole.
    substitute
        What the heads become.
    original, expected
        Loss, accuracy, recall and whole answers of the model, and their changes under the plan with intervals over
        texts and recall lists, on text and lists that the search for the plan never saw. Recall is the share of
        answers whose first token is right.
    recall
        How well recall is known: ``lists`` and ``questions`` that were asked, and the half-widths of the 95 % intervals
        of its change (``half_width``) and of the model's own (``half_width_original``); ``decided_on`` other lists,
        where recall was limited. Empty in plans of version 0.1, whose recall was scored over all tokens of the answers.
    memory
        Bytes per token of context that the KV cache of the model takes and under the plan, and bytes of all states and
        of the plan's parameters.
    provenance
        How the plan was found.
    baselines
        What the same heads cost with windows of equal memory and with a constant, and what random heads cost; None
        where that was not measured.
    """

    model: str
    fingerprint: str
    heads: tuple[Head, ...]
    groups: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    substitute: Substitute
    original: Mapping[str, float] = field(default_factory=dict)
    expected: Mapping[str, Interval] = field(default_factory=dict)
    recall: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    baselines: Baselines | None = None

    def check(self, model: Model) -> None:
        """Refuse another model, or heads that it does not have."""
        fingerprint = model_fingerprint(model)
        if fingerprint != self.fingerprint:
            raise UnsupportedError(
                f"the plan is for the model {self.fingerprint} ({self.model}), and this one is {fingerprint} "
                f"({model.name_or_path or model.config.model_type}); load that model, or make a plan for this one"
            )
        heads_by_layer(attention_layers(model), self.heads)

    def recall_words(self) -> str:
        """On how many questions recall rests and how far it may be off, as one sentence; "" where it is not known."""
        if not self.recall:
            return ""
        return (
            f"Recall rests on {self.recall['lists']:,.0f} lists ({self.recall['questions']:,.0f} questions); the 95 % "
            f"half-width of its change is {self.recall['half_width']:.3f}, that of the model's own recall "
            f"{self.recall['half_width_original']:.3f}."
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, and its parameters, where it has some, beside it as safetensors."""
        target = Path(path)
        tensors = {name: x.contiguous() for name, x in self.substitute.tensors().items()}
        parameters = target.with_suffix(".safetensors") if tensors else None
        mechanism = self.substitute.mechanism
        document = {
            "format": FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "mechanism": {
                "name": mechanism.name,
                "options": dict(mechanism.options),
                "tail_options": {} if mechanism.tail is None else dict(mechanism.tail.options),
                "calibration": mechanism.origin,
                "window": None,
                "repaired": self.substitute.readout is not None,
            },
            "heads": self.heads,
            "groups": self.groups,
            "layers": self.layers,
            "original": dict(self.original),
            "expected": {name: interval.to_json() for name, interval in self.expected.items()},
            "recall": dict(self.recall),
            "memory": dict(self.memory),
            "parameters": None if parameters is None else {"file": parameters.name, "digest": digest_of(tensors)},
            "provenance": dict(self.provenance),
            "baselines": None if self.baselines is None else self.baselines.to_json(),
        }
        if parameters is not None:
            save_calibration(parameters, tensors, {"fingerprint": self.fingerprint, "plan": target.name})
        partial = target.with_name(f".{target.name}.partial")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            partial.replace(target)
        except OSError as error:
            raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
        return target


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and its parameters.

    Parameters
    ----------
    path
        The JSON file; parameters are in the safetensors file beside it.

    Returns
    -------
    Plan
        The same as was saved.

    Raises
    ------
    StoreError
        If there is no such file, or it is damaged.

    Examples
    --------
    ``plan.json`` is a plan that ``softgap linearize`` wrote:

    >>> import softgap
    >>> plan = softgap.linearize.load_plan("plan.json")
    >>> plan.heads, plan.groups
    (((0, 0), (0, 1)), ((0, 0),))
    """
    source = Path(path)
    try:
        document = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        _check_types(document)
        about = document["mechanism"]
        head_substitute = Substitute(_mechanism_of(about), about["window"])
        head_substitute = _with_parameters(head_substitute, document["parameters"], source, about["calibration"])
        return Plan(
            model=document["model"],
            fingerprint=document["fingerprint"],
            heads=tuple((a, b) for a, b in document["heads"]),
            groups=tuple((a, b) for a, b in document["groups"]),
            layers=tuple(document["layers"]),
            substitute=head_substitute,
            original=document["original"],
            expected={name: Interval(**values) for name, values in document["expected"].items()},
            recall=document.get("recall", {}),
            memory=document["memory"],
            provenance=document["provenance"],
            # Plans before version 0.2 have none.
            baselines=None if document.get("baselines") is None else Baselines.from_json(document["baselines"]),
        )
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot read the plan '{source}': {error.strerror or error}; give a plan's JSON file"
        ) from error
    except SoftgapError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"'{source}' is no plan of softgap ({error}); make one with 'softgap linearize'") from error


def _mechanism_of(about: Mapping[str, Any]) -> Mechanism:
    """The mechanism that a plan names, without its parameters."""
    tail, plus, _ = about["name"].partition("+")
    if plus:
        return add_window(resolve(tail).configure(**about.get("tail_options", {})), **about["options"])
    return resolve(about["name"]).configure(**about["options"])


def _check_types(document: Mapping[str, Any]) -> None:
    """Raise unless every field holds what a plan writes there; what it means is checked against the model."""
    texts = [document[name] for name in ("model", "fingerprint")] + [document["mechanism"]["name"]]
    pairs = [*document["heads"], *document["groups"]]
    places = [number for pair in pairs for number in pair] + [*document["layers"]]
    window = document["mechanism"]["window"]
    places += [] if window is None else [window]
    intervals = [value for interval in document["expected"].values() for value in interval.values()]
    numbers = [*document["original"].values(), *document["memory"].values(), *intervals]
    numbers += [*document.get("recall", {}).values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("model, fingerprint and mechanism must be names")
    if not all(type(number) is int and number >= 0 for number in places):
        raise ValueError("heads, groups, layers and window must be whole numbers from 0")
    if not all(type(number) in (int, float) for number in numbers):
        raise ValueError("original, expected, recall and memory must hold numbers")
    if not isinstance(document["provenance"], dict):
        raise ValueError("provenance must be an object")


def _with_parameters(
    head_substitute: Substitute, about: Mapping[str, str] | None, source: Path, origin: str
) -> Substitute:
    if about is None:
        return head_substitute
    stored = load_calibration(source.with_name(about["file"]))
    if digest_of(stored.tensors) != about["digest"]:
        raise StoreError(
            f"the parameters '{about['file']}' beside '{source}' are not those of the plan; put its own file there"
        )
    parts: dict[str, dict[str, Tensor]] = {"mechanism": {}, "readout": {}}
    for name, tensor in stored.tensors.items():
        kind, _, parameter = name.partition(".")
        parts[kind][parameter] = tensor
    mechanism = head_substitute.mechanism
    if parts["mechanism"]:
        mechanism = replace(mechanism.with_parameters(**parts["mechanism"]), origin=origin)
    readout = Readout(**parts["readout"]) if parts["readout"] else None
    return Substitute(mechanism, readout=readout)


def memory_of(model: Model, groups: Sequence[tuple[int, int]], head_substitute: Substitute) -> dict[str, float]:
    """Bytes of the KV cache per token of context, of the model and under a plan; of all states, at any length.

    And of the maps and readouts that the plan brings along, which are held once for all texts. Layers whose cache does
    not grow with the text count for nothing.
    """
    bounded = bounded_layers(model)
    layers = attention_layers(model)
    bytes_per_group = 2 * head_dim(model) * model.dtype.itemsize
    total = sum(layer.kv_heads for layer in layers if layer.number not in bounded)
    # What has no state keeps the cache, so that no group is freed.
    state = group_bytes(model, head_substitute.mechanism) if groups else 0
    return {
        "per_token_original": float(bytes_per_group * total),
        "per_token": float(bytes_per_group * (total - len(groups))),
        "saved_per_token": float(bytes_per_group * len(groups)),
        "states": float(len(groups) * state),
        "parameters": float(sum(x.nbytes for x in head_substitute.tensors().values())),
    }


@contextmanager
def apply(model: Model, plan: Plan) -> Iterator[Applied]:
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
    applied = Applied(model, plan.heads, plan.substitute)
    try:
        with swap(model, plan.heads, plan.substitute), override_attention(model, applied._attend):
            yield applied
    finally:
        applied._close()


def freed_groups(layer: AttentionLayer, heads: Sequence[int]) -> list[int]:
    """KV heads of a layer all of whose query heads are among these."""
    size = layer.heads // layer.kv_heads
    return [g for g in range(layer.kv_heads) if set(range(g * size, (g + 1) * size)) <= set(heads)]


def streams(head_substitute: Substitute) -> bool:
    """Whether what heads become lives in a state of constant size: only then a swapped KV group needs no cache."""
    return head_substitute.mechanism.streams(64) or head_substitute.mechanism.kind == "constant"


@dataclass(frozen=True, eq=False)
class _Split:
    """One layer with freed groups: its kept heads, the swapped ones among them, and the freed ones."""

    remaining: Tensor
    swapped_remaining: SwappedLayer | None
    freed: SwappedLayer
    groups: tuple[tuple[int, ...], tuple[int, ...]]


class Applied:
    """A model under a plan; made by ``apply``."""

    def __init__(self, model: Model, heads: Sequence[Head], head_substitute: Substitute) -> None:
        self._model = model
        layers = attention_layers(model)
        self._streams = streams(head_substitute)
        self._name = head_substitute.mechanism.name
        self._splits: dict[int, _Split] = {}
        self._indices: dict[int, int] = {}
        bounded = bounded_layers(model)
        for layer, layer_heads in heads_by_layer(layers, heads):
            groups = freed_groups(layer, layer_heads)
            if groups and layer.number not in bounded:
                self._splits[id(layer.module)] = _split(layer, layer_heads, groups, head_substitute, len(layers))
                self._indices[id(layer.module)] = layer.number
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def cache(self) -> Any:
        """An empty cache for one ``generate`` or one row of forwards, to be passed as ``past_key_values``."""
        if not self._streams:
            raise UnsupportedError(
                f"mechanism '{self._name}' has no state of constant size and cannot stream; generate without the "
                "plan's cache, or make a plan with a mechanism such as elu1 or fitted"
            )
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
        layer, (new_key, new_value) = held
        mask = args[0] if args else kwargs.get("attention_mask")
        call = AttentionCall(module, query, key, value, mask, kwargs, query)
        freed = self._attend_freed(split.freed, layer, call, new_key, new_value)
        batch, heads, n, _ = query.shape
        remaining = _attend_remaining(split, original, call, args, kwargs) if len(split.remaining) else None
        output = (query if remaining is None else remaining).new_empty(batch, n, heads, freed.shape[-1])
        output[:, :, split.freed.heads] = freed.to(output.dtype)
        if remaining is not None:
            output[:, :, split.remaining] = remaining
        return output, None

    def _updated_layer(self, index: int) -> tuple[StateLayer, tuple[Tensor, Tensor]] | None:
        """The layer of a cache of ours that was updated just now."""
        for cache in self._caches:
            layer = cache.layers[index]
            fresh = layer.take() if isinstance(layer, StateLayer) else None
            if fresh is not None:
                return layer, fresh
        return None

    def _attend_freed(self, part: SwappedLayer, layer: StateLayer, call: AttentionCall, k: Tensor, v: Tensor) -> Tensor:
        dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
        q = call.query.index_select(1, part.heads.to(k.device))
        valid = None
        if call.mask is not None:
            seen = seen_by_mask(call.mask, q.shape[2], layer.length)
            valid = seen[:, 0, -1, layer.length - k.shape[2] :].expand(k.shape[0], -1)
            # A window need not count its keys where none of them is padding.
            valid = None if bool(valid.all()) else valid
        with torch.inference_mode(), torch.autocast(k.device.type, enabled=False):
            if part.mechanism.kind == "constant":
                output = attend(part.mechanism, q, k, v, dtype=dtype, check=False).output
            else:
                output = self._state(part, layer, call, valid, k.shape[2], dtype).attend(q, k, v, valid).output
            return part.read_out(output).transpose(1, 2)

    def _state(
        self,
        part: SwappedLayer,
        layer: StateLayer,
        call: AttentionCall,
        valid: Bool[Tensor, "batch key"] | None,
        n_keys: int,
        dtype: torch.dtype,
    ) -> LinearState | HybridState:
        """The state of a layer's freed heads, made when it is first asked for."""
        if layer.state is None:
            origin = _first_position(call, valid, n_keys)
            rule = call.rule.for_heads(part.heads)
            layer.state = new_state(part.mechanism, scale=call.scale, dtype=dtype, origin=origin, rule=rule)
        state: LinearState | HybridState = layer.state
        return state


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
    layer: AttentionLayer, heads: Sequence[int], groups: Sequence[int], head_substitute: Substitute, n_layers: int
) -> _Split:
    size = layer.heads // layer.kv_heads
    remaining_groups = [g for g in range(layer.kv_heads) if g not in groups]
    remaining = [head for g in remaining_groups for head in range(g * size, (g + 1) * size)]
    freed = swapped_layer(layer, [head for head in heads if head // size in groups], head_substitute, n_layers)
    swapped_heads = [head for head in heads if head in remaining]
    swapped_remaining = None
    if swapped_heads:
        part = swapped_layer(layer, swapped_heads, head_substitute, n_layers)
        smaller = dataclasses.replace(layer, heads=len(remaining), kv_heads=len(remaining_groups))
        swapped_remaining = dataclasses.replace(
            part,
            layer=smaller,
            heads=torch.tensor([remaining.index(head) for head in swapped_heads]),
            kv_heads=torch.tensor([remaining_groups.index(int(g)) for g in part.kv_heads]),
        )
    return _Split(
        torch.tensor(remaining, dtype=torch.long), swapped_remaining, freed, (tuple(remaining_groups), tuple(groups))
    )

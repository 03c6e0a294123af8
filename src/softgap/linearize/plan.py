"""Linearization plans: which heads are swapped, their cost and memory, their file, and how to apply them."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from softgap.attention import Mechanism, add_window, resolve
from softgap.attention.memory import derived_numbers
from softgap.checkpoints import one_writer, write_whole
from softgap.errors import SoftgapError, StoreError, UnsupportedError
from softgap.intervals import Interval
from softgap.intervene.state_cache import bounded_layers
from softgap.intervene.substitute import Head, Mixture, Readout, Substitute
from softgap.intervene.swap import heads_by_layer, heads_of_group
from softgap.linearize.baselines import Baselines, group_bytes
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model
from softgap.models.tensor_files import check_shapes, digest_of, load_calibration, save_calibration
from softgap.probe.layout import AttentionLayer, attention_layers, head_dim

__all__ = ["Plan", "cache_bytes_at", "freed_groups", "kind_of", "load_plan", "memory_of", "plan_of", "streams"]


FORMAT = 1
MIXED_FORMAT = 2


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
        What the heads become: a ``Substitute`` for all of them, or a ``Mixture`` of several kinds.
    original, expected
        Loss, accuracy, recall and whole answers of the model, and their changes under the plan with intervals over
        texts and recall lists, on text and lists that the search for the plan never saw. Recall is the share of
        answers whose first token is right.
    recall
        How well recall is known: ``lists`` and ``questions`` that were asked, the ``distance`` in tokens between a list
        and its questions (the shortest, with ``farthest``, where there are several), and the half-widths of the 95 %
        intervals of its change (``half_width``) and of the model's own (``half_width_original``); ``decided_on`` other
        lists, where recall was limited. Empty in plans of version 0.1, whose recall was scored over all tokens of the
        answers.
    memory
        Bytes per token of context that the KV cache of the model takes and under the plan, and bytes of all states and
        of the plan's parameters. ``softgap.linearize.plan.cache_bytes_at`` adds them up at a length.
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
        """Refuse another model, heads that it does not have, and groups that cannot be freed with these heads."""
        fingerprint = model_fingerprint(model)
        if fingerprint != self.fingerprint:
            raise UnsupportedError(
                f"the plan is for the model {self.fingerprint} ({self.model}), and this one is {fingerprint} "
                f"({model.name_or_path or model.config.model_type}); load that model, or make a plan for this one"
            )
        swapped = heads_by_layer(attention_layers(model), self.heads)
        key_heads = {layer.number: layer.kv_heads for layer in attention_layers(model)}
        absent = [(layer, group) for layer, group in self.groups if group >= key_heads.get(layer, 0)]
        if absent:
            layer, group = absent[0]
            raise StoreError(
                f"a plan may free KV groups that the model has, and this one frees group {group} of layer {layer}, "
                f"which has {key_heads.get(layer, 0)}; make the plan again with 'softgap linearize'"
            )
        check_shapes(self.substitute.tensors(), model, "the plan", "make the plan again with 'softgap linearize'")
        freed = {(layer.number, group) for layer, heads in swapped for group in freed_groups(layer, heads)}
        whole = {layer.number for layer, heads in swapped if len(heads) == layer.heads}
        kept = [entry for entry in self.groups if entry not in freed]
        if kept:
            raise StoreError(
                f"a plan may free a KV group only with all of its query heads, and this one keeps softmax in some that "
                f"read group {kept[0][1]} of layer {kept[0][0]}; make the plan again with 'softgap linearize'"
            )
        if not whole.issuperset(self.layers):
            raise StoreError(
                f"a plan may free a layer only with all of its heads, and this one keeps softmax in some of layer "
                f"{min(set(self.layers) - whole)}; make the plan again with 'softgap linearize'"
            )

    def recall_words(self) -> str:
        """On how many questions recall rests and how far it may be off, as one sentence; "" where it is not known."""
        if not self.recall:
            return ""
        distance, farthest = (self.recall.get(name, 0) for name in ("distance", "farthest"))
        across = f"{distance:,.0f} to {farthest:,.0f}" if farthest else f"{distance:,.0f}"
        across = f" across {across} tokens of other text" if distance else ""
        return (
            f"Recall rests on {self.recall['lists']:,.0f} lists ({self.recall['questions']:,.0f} questions){across}; "
            f"the 95 % half-width of its change is {self.recall['half_width']:.3f}, that of the model's own recall "
            f"{self.recall['half_width_original']:.3f}."
        )

    def kinds(self) -> dict[Head, str]:
        """What every swapped head becomes: constant, window, hybrid, or the name of the mechanism."""
        return {head: kind_of(part.mechanism) for heads, part in self.substitute.swaps(self.heads) for head in heads}

    def sentence(self, heads: int, groups: int) -> str:
        """What it does to a model with so many heads and KV groups, in one or two sentences."""
        counts = Counter(self.kinds().values())
        becomes = self.substitute.name
        if len(counts) > 1:
            becomes = ", ".join(f"{kind} ({number} head{'s' * (number > 1)})" for kind, number in counts.items())
            becomes += ", output corrected" if self.substitute.readout else ""
        layers = f"{len(self.layers)} whole layer{'s' * (len(self.layers) != 1)}"
        return (
            f"The plan replaces softmax by {becomes} in {len(self.heads)} of {heads} heads. It frees "
            f"{len(self.groups)} of {groups} KV groups and {layers}."
        )

    def cache_words(self) -> str:
        """Bytes of one sequence's cache at the context of the search, as one sentence; "" where none was given."""
        context = self.provenance.get("context")
        if not context:
            return ""
        own, original = (cache_bytes_at(self.memory, context, original=x) for x in (False, True))
        return (
            f"At {context:,} tokens one sequence keeps {own / 1e6:.1f} MB instead of {original / 1e6:.1f} MB "
            f"({own / original:.0%})."
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, and its parameters, where it has some, beside it as safetensors."""
        target = Path(path)
        tensors = {name: x.contiguous() for name, x in self.substitute.tensors().items()}
        parameters = target.with_suffix(".safetensors") if tensors else None
        document = {
            "format": _format_of(self.substitute),
            "model": self.model,
            "fingerprint": self.fingerprint,
            **_about_substitute(self.substitute),
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
        with one_writer(target):
            if parameters is not None:
                save_calibration(parameters, tensors, {"fingerprint": self.fingerprint, "plan": target.name})
            write_whole(target, json.dumps(document, indent=1) + "\n")
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
        if not isinstance(document, dict) or document.get("format") not in (FORMAT, MIXED_FORMAT):
            raise ValueError(f"its format is not {FORMAT} or {MIXED_FORMAT}")
        _check_types(document)
        _check_ranges(document)
        parameters = _stored_parameters(document["parameters"], source)
        head_substitute = _read_substitute(document, parameters)
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


def _format_of(head_substitute: Substitute) -> int:
    """Plans with one mechanism are what version 0.1 reads."""
    return MIXED_FORMAT if isinstance(head_substitute, Mixture) else FORMAT


def _about_substitute(head_substitute: Substitute) -> dict[str, Any]:
    """What the heads become, without the numbers."""
    repaired = head_substitute.readout is not None
    if not isinstance(head_substitute, Mixture):
        about = _about_mechanism(head_substitute.mechanism)
        return {"mechanism": {**about, "window": None, "repaired": repaired}}
    names = [(name, x) for name, x in head_substitute.tensors().items()]
    parts = []
    for heads, mechanism in head_substitute.parts:
        stored = {key: next(name for name, y in names if y is x) for key, x in mechanism.parameters.items()}
        parts.append({**_about_mechanism(mechanism), "heads": heads, "parameters": stored})
    return {"mixture": {"parts": parts, "repaired": repaired}}


def _about_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    return {
        "name": mechanism.name,
        "options": dict(mechanism.options),
        "tail_options": {} if mechanism.tail is None else dict(mechanism.tail.options),
        "calibration": mechanism.origin,
    }


def _read_substitute(document: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Substitute:
    """What ``_about_substitute`` and the parameters' file hold."""
    readout_parts = {name.partition(".")[2]: x for name, x in parameters.items() if name.startswith("readout.")}
    readout = Readout(**readout_parts) if readout_parts else None
    if document["format"] == FORMAT:
        about = document["mechanism"]
        own = {name.partition(".")[2]: x for name, x in parameters.items() if name.startswith("mechanism.")}
        # A plan of version 0.1 writes the window of a hybrid apart.
        bare = Substitute(_mechanism_of(about), about["window"]).mechanism
        return Substitute(_equipped(bare, own, about["calibration"]), readout=readout)
    parts = []
    for part in document["mixture"]["parts"]:
        own = {key: parameters[name] for key, name in part["parameters"].items()}
        heads = tuple((a, b) for a, b in part["heads"])
        parts.append((heads, _equipped(_mechanism_of(part), own, part["calibration"])))
    return Mixture(parts, readout)


def _equipped(mechanism: Mechanism, parameters: Mapping[str, Tensor], origin: str) -> Mechanism:
    return replace(mechanism.with_parameters(**parameters), origin=origin) if parameters else mechanism


def _mechanism_of(about: Mapping[str, Any]) -> Mechanism:
    """The mechanism that a plan names, without its parameters."""
    tail, plus, _ = about["name"].partition("+")
    if plus:
        return add_window(resolve(tail).configure(**about.get("tail_options", {})), **about["options"])
    return resolve(about["name"]).configure(**about["options"])


def _check_types(document: Mapping[str, Any]) -> None:
    """Raise unless every field holds what a plan writes there; what it means is checked against the model."""
    mixed = document["format"] == MIXED_FORMAT
    mechanisms = document["mixture"]["parts"] if mixed else [document["mechanism"]]
    texts = [document[name] for name in ("model", "fingerprint")] + [about["name"] for about in mechanisms]
    pairs = [*document["heads"], *document["groups"]]
    if mixed:
        pairs += [pair for about in mechanisms for pair in about["heads"]]
        texts += [name for about in mechanisms for name in about["parameters"].values()]
    places = [number for pair in pairs for number in pair] + [*document["layers"]]
    window = None if mixed else document["mechanism"]["window"]
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


_LARGEST = 2**31 - 1


def _check_ranges(document: Mapping[str, Any]) -> None:
    """Raise unless heads, groups, layers and windows agree with each other, and costs are finite."""
    mixed = document["format"] == MIXED_FORMAT
    mechanisms = document["mixture"]["parts"] if mixed else [document["mechanism"]]
    heads = [(layer, head) for layer, head in document["heads"]]
    groups = [(layer, group) for layer, group in document["groups"]]
    for name, entries in (("heads", heads), ("groups", groups), ("layers", document["layers"])):
        if len(set(entries)) < len(entries):
            raise ValueError(f"{name} must name everything once")
    parts = [(layer, head) for about in mechanisms for layer, head in about["heads"]] if mixed else heads
    if not heads or sorted(parts) != sorted(heads):
        raise ValueError("heads must name at least one head, and each must be in one part of the mixture")
    _check_groups(heads, groups, document["layers"])
    window = None if mixed else document["mechanism"]["window"]
    numbers = [x for about in mechanisms for x in about["options"].values() if type(x) in (int, float)]
    if any(not -_LARGEST <= x <= _LARGEST for x in numbers) or (window is not None and not 1 <= window <= _LARGEST):
        raise ValueError(f"windows and other options must be numbers up to {_LARGEST}, and a window at least 1")
    costs = [document.get(name) for name in ("original", "expected", "recall", "memory", "baselines")]
    if not all(math.isfinite(number) for number in _numbers_in(costs)):
        raise ValueError("costs must be finite numbers")
    if any(number < 0 for number in document["memory"].values()):
        raise ValueError("memory must be numbers of bytes from 0")
    if any(interval["low"] > interval["high"] for interval in document["expected"].values()):
        raise ValueError("an interval must not end before it begins")


def _check_groups(heads: Sequence[Head], groups: Sequence[tuple[int, int]], layers: Sequence[int]) -> None:
    """Raise where no number of query heads per KV group fits the heads, groups and layers of a plan.

    The model knows that number and is not here; but every freed group has all of its heads swapped, and a freed layer
    all of its heads and groups.
    """
    swapped: dict[int, list[int]] = {}
    freed: dict[int, list[int]] = {}
    for found, pairs in ((swapped, heads), (freed, groups)):
        for layer, number in sorted(pairs):
            found.setdefault(layer, []).append(number)
    for layer in layers:
        own, own_groups = swapped.get(layer, []), freed.get(layer, [])
        whole = own == list(range(len(own))) and own_groups == list(range(len(own_groups)))
        if not own_groups or not whole or len(own) % len(own_groups):
            raise ValueError(f"layers must be those of which all heads are swapped and all groups freed, got {layer}")
    for layer, own_groups in freed.items():
        own = swapped.get(layer, [])
        sizes = [len(own) // len(own_groups)] if layer in layers else range(1, len(own) // len(own_groups) + 1)
        if not any(set(own) >= {g * size + i for g in own_groups for i in range(size)} for size in sizes):
            raise ValueError(
                f"groups must be KV groups all of whose heads are swapped, and no number of heads per group fits "
                f"{len(own_groups)} groups and {len(own)} swapped heads of layer {layer}, got group {own_groups[-1]}"
            )


def _numbers_in(value: Any) -> Iterator[float]:
    """All numbers in a JSON document."""
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _numbers_in(entry)
    elif type(value) in (int, float):
        yield value


def _stored_parameters(about: Mapping[str, str] | None, source: Path) -> Mapping[str, Tensor]:
    """The numbers in the file beside a plan; none where it has no such file."""
    if about is None:
        return {}
    stored = load_calibration(source.with_name(about["file"]))
    if digest_of(stored.tensors) != about["digest"]:
        raise StoreError(
            f"the parameters '{about['file']}' beside '{source}' are not those of the plan; put its own file there"
        )
    return stored.tensors


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
    states = sum(_state_bytes(model, head_substitute, group) for group in groups)
    return {
        "per_token_original": float(bytes_per_group * total),
        "per_token": float(bytes_per_group * (total - len(groups))),
        "saved_per_token": float(bytes_per_group * len(groups)),
        "states": float(states),
        "parameters": float(sum(x.nbytes for x in head_substitute.tensors().values())),
    }


def _state_bytes(model: Model, head_substitute: Substitute, group: tuple[int, int]) -> float:
    """Bytes that a freed KV group keeps: those of every mechanism that its heads have."""
    parts = head_substitute.swaps(heads_of_group(model, *group))
    kv_heads = attention_layers(model)[0].kv_heads
    derived = sum(derived_numbers(part.mechanism, kv_heads=kv_heads) for _, part in parts)
    return sum(group_bytes(model, part.mechanism) for _, part in parts) + derived * 4


def cache_bytes_at(memory: Mapping[str, float], length: int, *, original: bool = False) -> float:
    """Bytes that the cache of one sequence takes at a length: keys and values, and under the plan its states."""
    if original:
        return memory["per_token_original"] * length
    return memory["per_token"] * length + memory["states"]


def plan_of(model: Model, heads: Sequence[Head], head_substitute: Substitute, **about: Any) -> Plan:
    """A plan that swaps these heads, with what that frees; ``about`` are fields of the plan that were measured."""
    bounded = bounded_layers(model)
    freed = [
        (layer, layer_heads)
        for layer, layer_heads in heads_by_layer(attention_layers(model), heads)
        if streams(head_substitute) and layer.number not in bounded
    ]
    groups = tuple((layer.number, group) for layer, layer_heads in freed for group in freed_groups(layer, layer_heads))
    return Plan(
        model=model.name_or_path or model.config.model_type,
        fingerprint=model_fingerprint(model),
        heads=tuple(heads),
        groups=groups,
        layers=tuple(layer.number for layer, layer_heads in freed if len(layer_heads) == layer.heads),
        substitute=head_substitute,
        memory=memory_of(model, groups, head_substitute),
        **about,
    )


def freed_groups(layer: AttentionLayer, heads: Sequence[int]) -> list[int]:
    """KV heads of a layer all of whose query heads are among these."""
    size = layer.heads // layer.kv_heads
    return [g for g in range(layer.kv_heads) if set(range(g * size, (g + 1) * size)) <= set(heads)]


def kind_of(mechanism: Mechanism) -> str:
    """The kind of substitute that a mechanism is: constant, window, hybrid, or its name."""
    return mechanism.kind if mechanism.kind in ("constant", "window", "hybrid") else mechanism.name


def streams(head_substitute: Substitute) -> bool:
    """Whether what heads become lives in states of constant size: only then a swapped KV group needs no cache."""
    if isinstance(head_substitute, Mixture):
        return all(streams(Substitute(mechanism)) for _, mechanism in head_substitute.parts)
    return head_substitute.mechanism.streams(64) or head_substitute.mechanism.kind == "constant"

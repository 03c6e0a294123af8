"""A plan: which heads of a model go without softmax, by what, and what that is expected to cost; as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from softgap.attention import resolve
from softgap.errors import SoftgapError, StoreError, UnsupportedError
from softgap.linearize.heads import Head, heads_by_layer
from softgap.linearize.resampling import Interval
from softgap.linearize.substitute import Readout, Substitute
from softgap.probe.calibrations import digest_of, load_calibration, save_calibration
from softgap.probe.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
from softgap.probe.models import Model

__all__ = ["Plan", "load_plan"]

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
        texts and lists of lookups, on text and lists that the search for the plan never saw. Recall is the share of
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

    def check(self, model: Model) -> None:
        """Refuse another model, or heads that it does not have."""
        found = model_fingerprint(model)
        if found != self.fingerprint:
            raise UnsupportedError(
                f"the plan is for the model {self.fingerprint} ({self.model}), and this one is {found} "
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
                "calibration": mechanism.origin,
                "window": self.substitute.window,
                "repaired": self.substitute.readout is not None,
            },
            "heads": self.heads,
            "groups": self.groups,
            "layers": self.layers,
            "original": dict(self.original),
            "expected": {name: asdict(interval) for name, interval in self.expected.items()},
            "recall": dict(self.recall),
            "memory": dict(self.memory),
            "parameters": None if parameters is None else {"file": parameters.name, "digest": digest_of(tensors)},
            "provenance": dict(self.provenance),
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
    """Read a plan and its parameters."""
    source = Path(path)
    try:
        document = json.loads(source.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        _check_types(document)
        about = document["mechanism"]
        chosen = Substitute(resolve(about["name"]).configure(**about["options"]), about["window"])
        chosen = _with_parameters(chosen, document["parameters"], source, about["calibration"])
        return Plan(
            model=document["model"],
            fingerprint=document["fingerprint"],
            heads=tuple((a, b) for a, b in document["heads"]),
            groups=tuple((a, b) for a, b in document["groups"]),
            layers=tuple(document["layers"]),
            substitute=chosen,
            original=document["original"],
            expected={name: Interval(**values) for name, values in document["expected"].items()},
            recall=document.get("recall", {}),
            memory=document["memory"],
            provenance=document["provenance"],
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


def _with_parameters(chosen: Substitute, about: Mapping[str, str] | None, source: Path, origin: str) -> Substitute:
    if about is None:
        return chosen
    stored = load_calibration(source.with_name(about["file"]))
    if digest_of(stored.tensors) != about["digest"]:
        raise StoreError(
            f"the parameters '{about['file']}' beside '{source}' are not those of the plan; put its own file there"
        )
    parts: dict[str, dict[str, Tensor]] = {"mechanism": {}, "readout": {}}
    for name, tensor in stored.tensors.items():
        kind, _, parameter = name.partition(".")
        parts[kind][parameter] = tensor
    mechanism = chosen.mechanism
    if parts["mechanism"]:
        mechanism = replace(mechanism.with_parameters(**parts["mechanism"]), origin=origin)
    readout = Readout(**parts["readout"]) if parts["readout"] else None
    return Substitute(mechanism, chosen.window, readout)

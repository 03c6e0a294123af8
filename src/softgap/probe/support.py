"""Which models the tap can reach: those whose attention goes through transformers' registry.

A module reaches the registry if the code of its class names a global that is an `AttentionInterface`. That is looked up
in the compiled functions of the class, not in a list of model types: a new type is judged by what it does.

Reaching a model is not enough to measure it: :func:`check_measurable`, which everything that takes numbers from a model
asks first, also wants evaluation mode.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from softgap.errors import ModelError
from softgap.probe.causal import model_refusal

__all__ = [
    "TAPPED_ATTENTION",
    "AttentionModule",
    "attention_modules",
    "attention_registries",
    "check_measurable",
    "check_tappable",
    "untappable_reason",
]

TAPPED_ATTENTION = ("eager", "sdpa")
"""Attention implementations whose masks softgap reads; paged, flash and flex attention hand over other kinds."""


@dataclass(frozen=True)
class AttentionModule:
    """A module that calls attention through a registry.

    `layer` is the index the module itself carries. It may be None (Zamba) or -1 (Zamba 2) where one module serves
    several layers, and appear twice (self- and cross-attention of former encoder-decoders).
    """

    name: str
    layer: int | None
    module: nn.Module
    registry: AttentionInterface


def check_measurable(model: nn.Module) -> None:
    """Raise `ModelError` unless the model can be tapped and is in evaluation mode, where no dropout adds noise.

    A swap alone takes no numbers, so heads may be swapped in a model that trains.
    """
    check_tappable(model)
    part = _in_training(model)
    if part is not None:
        where = f" ('{part}')" if part else ""
        raise ModelError(
            f"a model must be in evaluation mode to be measured, got {type(model).__name__} in training mode{where}, "
            "where dropout changes the numbers at random; call model.eval() first"
        )


def check_tappable(model: nn.Module) -> None:
    """Raise `ModelError` with the reason if this is not a causal model, or its attention cannot be tapped."""
    reason = untappable_reason(model)
    if reason is not None:
        raise ModelError(reason)


def untappable_reason(model: nn.Module) -> str | None:
    """Why this is not a causal model or its attention cannot be tapped, as one sentence, or None if it is and can."""
    if not isinstance(model, PreTrainedModel):
        return (
            f"the model must be a transformers PreTrainedModel, got {type(model).__name__}; "
            "pass the model inside the wrapper"
        )
    model_type = model.config.model_type
    found = attention_modules(model)
    reason = model_refusal(model, (entry.module for entry in found))
    if reason is not None:
        return (
            f"softgap measures causal (decoder-only) language models, got {type(model).__name__}: {reason}; choose a "
            "causal model such as Llama, Qwen, Gemma or GPT-2"
        )
    if not found:
        return _outside_registry(model, model_type)
    for entry in found:
        config = getattr(entry.module, "config", model.config)
        name = config._attn_implementation
        if name not in TAPPED_ATTENTION:
            allowed = " or ".join(repr(known) for known in TAPPED_ATTENTION)
            return (
                f"the attention implementation of a tapped model must be {allowed}, got {name!r} in '{entry.name}'; "
                "call model.set_attn_implementation('sdpa')"
            )
        if name == "eager" and getattr(config, "reorder_and_upcast_attn", False):
            return (
                f"model type '{model_type}' with reorder_and_upcast_attn bypasses the attention registry under "
                "'eager'; call model.set_attn_implementation('sdpa') or set config.reorder_and_upcast_attn to False"
            )
    return None


def attention_modules(model: PreTrainedModel) -> tuple[AttentionModule, ...]:
    """Modules of the text model that call attention through a registry, in the order the model names them."""
    towers = [f"{name}." for name, part in model.named_modules() if name and _reads_no_text(part)]
    registries = {kind: _registry_of(kind) for kind in {type(module) for module in model.modules()}}
    found = []
    for name, module in model.named_modules():
        # A whole model names the registry too, to set it up.
        registry = None if isinstance(module, PreTrainedModel) else registries[type(module)]
        if registry is not None and not any(name.startswith(tower) for tower in towers):
            found.append(AttentionModule(name, getattr(module, "layer_idx", None), module, registry))
    return tuple(found)


def attention_registries(model: PreTrainedModel) -> tuple[AttentionInterface, ...]:
    """The distinct registries this model's attention is looked up in; Doge, for one, has its own."""
    return tuple({id(entry.registry): entry.registry for entry in attention_modules(model)}.values())


def _in_training(model: nn.Module) -> str | None:
    """The part of a model that is in training mode, "" for the whole model, or None.

    Of the parts only attention and dropout count: a module that is put into a model afterwards is in training mode
    unless told otherwise.
    """
    if model.training:
        return ""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    for name, module in model.named_modules():
        if module.training and (isinstance(module, kinds) or _registry_of(type(module)) is not None):
            return str(name)
    return None


def _outside_registry(model: PreTrainedModel, model_type: str) -> str:
    own = sorted({type(part).__name__ for part in model.modules() if "Attention" in type(part).__name__})
    if not own:
        return f"model type '{model_type}' has no softmax attention to measure; choose one that has, such as Llama"
    return (
        f"model type '{model_type}' computes attention in code of its own ({', '.join(own)}), not through "
        "transformers' attention registry, so its queries, keys and values cannot be read; choose a type that uses the "
        "registry, such as Llama, Qwen, Gemma, GPT-2 or OPT"
    )


def _reads_no_text(part: nn.Module) -> bool:
    """Whether a part is a vision or audio model of its own."""
    if not isinstance(part, PreTrainedModel):
        return False
    modalities = part.input_modalities
    return "text" not in ((modalities,) if isinstance(modalities, str) else modalities)


def _registry_of(module_class: type[nn.Module]) -> AttentionInterface | None:
    """The registry that the code of a module class names, or None."""
    for base in module_class.__mro__:
        if base is nn.Module:
            break
        for member in vars(base).values():
            function = inspect.unwrap(member) if callable(member) else getattr(member, "__func__", None)
            if not isinstance(function, types.FunctionType):
                continue
            for name in _names(function.__code__):
                value = function.__globals__.get(name)
                if isinstance(value, AttentionInterface):
                    return value
    return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names that a function and the functions inside it refer to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)

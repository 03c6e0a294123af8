"""Which models are supported: causal language models whose attention goes through transformers' registry."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from softgap.errors import ModelError, UnsupportedError

__all__ = [
    "ATTACHED",
    "TAPPED_ATTENTION",
    "attention_modules",
    "check_measurable",
    "check_tappable",
    "context_length",
    "in_training",
    "layer_numbers",
    "refusal",
    "refuse_attached",
    "untappable_reason",
]


ATTACHED = "_softgap_attached"
"""The attribute of a model that holds the plan attached to it (``softgap.linearize.attach``)."""
_HEAD_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the model with this config.json cannot be used, in words that follow a colon, or None if it can."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return "its config.json has no model_type"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _unknown_type(model_type, config)
    reason = _not_causal(
        model_type,
        encoder_decoder=_value(config, model_type, "is_encoder_decoder"),
        decoder=config.get("is_decoder") or config.get("causal"),
        bidirectional=_value(config, model_type, "use_bidirectional_attention"),
    )
    return reason or _headless(config)


def model_refusal(model: PreTrainedModel, attention: Iterable[nn.Module]) -> str | None:
    """Why a model with these attention modules is not a causal language model, or None; the words follow a colon."""
    config, names = model.config, [kind.__name__ for kind in type(model).__mro__]
    model_type, text = config.model_type, config.get_text_config()
    known = any(name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in names)
    both = getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False)
    if not (known or both) and any(name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() for name in names):
        return f"{names[0]} predicts masked tokens from both sides, not the next token"
    decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    reason = _not_causal(
        model_type,
        encoder_decoder=both,
        decoder=decoder,
        bidirectional=getattr(config, "use_bidirectional_attention", None),
    )
    if reason is not None or known or decoder:
        return reason
    if model_type in CONFIG_MAPPING_NAMES and getattr(CONFIG_MAPPING[model_type], "is_encoder_decoder", False):
        return f"{names[0]} is the encoder of an encoder-decoder of type '{model_type}', not a causal language model"
    if not any(name.endswith(_HEAD_SUFFIXES) for name in names) and not any(
        getattr(module, "is_causal", True) for module in attention
    ):
        return f"all attention of {names[0]} is declared to go in both directions (is_causal is False)"
    return None


def _not_causal(model_type: str, *, encoder_decoder: object, decoder: object, bidirectional: object) -> str | None:
    """What config.json and a model in memory are both asked."""
    if encoder_decoder:
        return f"model type '{model_type}' is an encoder-decoder, not a causal language model"
    if _is_encoder(model_type) and not decoder:
        return (
            f"model type '{model_type}' is an encoder that attends in both directions (is_decoder is not set), "
            "not a causal language model"
        )
    if bidirectional in (True, "all"):
        return f"this '{model_type}' model attends in both directions (an embedding model), it is not causal"
    return None


def _unknown_type(model_type: str, config: Mapping[str, Any]) -> str:
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}) or (
        config.get("auto_map") and model_type not in CONFIG_MAPPING_NAMES
    ):
        return f"model type '{model_type}' needs code from its own repository, which softgap never runs"
    if model_type not in CONFIG_MAPPING_NAMES:
        return (
            f"model type '{model_type}' is unknown to transformers {transformers.__version__} (a newer one may know it)"
        )
    return f"model type '{model_type}' is not a causal language model"


def _value(config: Mapping[str, Any], model_type: str, name: str) -> Any:
    """The configured value, or the default of the type's configuration class."""
    if name in config:
        return config[name]
    return getattr(CONFIG_MAPPING[model_type], name, None)


def _is_encoder(model_type: str) -> bool:
    masked = model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return masked or str(MODEL_MAPPING_NAMES.get(model_type, "")).endswith("Encoder")


def _headless(config: Mapping[str, Any]) -> str | None:
    saved_as = config.get("architectures") or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if not saved_as or any(name in known or name.endswith(_HEAD_SUFFIXES) for name in saved_as):
        return None
    return f"it was saved as {saved_as[0]}, which has no language-model head"


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


def check_measurable(model: nn.Module, *, allow_dropout: bool = False) -> None:
    """Raise `ModelError` unless the model can be tapped and is in evaluation mode, where no dropout adds noise.

    ``allow_dropout`` accepts training mode. A swap alone takes no numbers, so heads may be swapped in a model that
    trains.
    """
    check_tappable(model)
    refuse_attached(model)
    part = None if allow_dropout else _in_training(model)
    if part is not None:
        where = f" ('{part}')" if part else ""
        raise ModelError(
            f"a model must be in evaluation mode to be measured, got {type(model).__name__} in training mode{where}, "
            "where dropout changes the numbers at random; call model.eval() first, or give allow_dropout=True to "
            "record, generate or read"
        )


def refuse_attached(model: nn.Module) -> None:
    """Raise `UnsupportedError` if a plan is attached to the model: what is measured is the original one."""
    if getattr(model, ATTACHED, None) is not None:
        raise UnsupportedError(
            "a plan is attached to this model, and softgap measures the original one; take it off with "
            "softgap.linearize.detach(model), and compare the two with softgap.evaluate"
        )


def check_tappable(model: nn.Module) -> None:
    """Raise `ModelError` with the reason if this is not a causal model, or its attention cannot be tapped."""
    reason = untappable_reason(model)
    if reason is not None:
        raise ModelError(reason)


def untappable_reason(model: nn.Module) -> str | None:
    """Why this is not a causal model or its attention cannot be tapped, as one sentence, or None if it is and can."""
    if _is_compiled_wrapper(model):
        return (
            f"the model must be a transformers PreTrainedModel, got the {type(model).__name__} that torch.compile "
            "returned, whose graph was made without the tap; pass the module that was compiled, model._orig_mod, and "
            "call that one"
        )
    if not isinstance(model, PreTrainedModel):
        return (
            f"the model must be a transformers PreTrainedModel, got {type(model).__name__}; "
            "pass the model inside the wrapper"
        )
    model_type = model.config.model_type
    modules = attention_modules(model)
    reason = model_refusal(model, (entry.module for entry in modules))
    if reason is not None:
        return (
            f"softgap measures causal (decoder-only) language models, got {type(model).__name__}: {reason}; choose a "
            "causal model such as Llama, Qwen, Gemma or GPT-2"
        )
    if not modules:
        return _outside_registry(model, model_type)
    part = _compiled_part(model, modules)
    if part is not None and not _compiles_nothing():
        return (
            f"a tapped model must run its own code, got {part} compiled by torch.compile, whose graph was made without "
            "the tap; do it inside 'with torch.compiler.set_stance(\"force_eager\"):', or load the model again"
        )
    for entry in modules:
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


def _is_compiled_wrapper(module: nn.Module) -> bool:
    # By name, because torch._dynamo takes long to import and nobody may have compiled anything.
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _compiled_part(model: nn.Module, attention: Iterable[AttentionModule]) -> str | None:
    """The part of a model that torch.compile has compiled and that holds attention, in words, or None."""
    inside = {id(entry.module) for entry in attention}
    for name, module in model.named_modules():
        compiled = (
            _is_compiled_wrapper(module)
            or getattr(module, "_compiled_call_impl", None) is not None
            or hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")
        )
        if compiled and any(id(part) in inside for part in module.modules()):
            return f"its part '{name}'" if name else type(module).__name__
    return None


def _compiles_nothing() -> bool:
    """Whether compiled code runs uncompiled now: inside torch.compiler.set_stance("force_eager")."""
    frame = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(getattr(frame, "_stance", None), "stance", None) == "force_eager"


def context_length(model: PreTrainedModel) -> int | None:
    """The positions that a model was made for; None where its configuration does not say."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def in_training(model: nn.Module) -> bool:
    """Whether a model, or a part of it that may drop something, is in training mode."""
    return _in_training(model) is not None


def attention_modules(model: PreTrainedModel) -> tuple[AttentionModule, ...]:
    """Modules of the text model that call attention through a registry, in the order the model names them."""
    towers = [f"{name}." for name, part in model.named_modules() if name and _reads_no_text(part)]
    registries = {kind: _registry_of(kind) for kind in {type(module) for module in model.modules()}}
    modules = []
    for name, module in model.named_modules():
        # A whole model names the registry too, to set it up.
        registry = None if isinstance(module, PreTrainedModel) else registries[type(module)]
        if registry is not None and not any(name.startswith(tower) for tower in towers):
            modules.append(AttentionModule(name, getattr(module, "layer_idx", None), module, registry))
    return tuple(modules)


def layer_numbers(layer_ids: Sequence[int | None]) -> tuple[int, ...]:
    """What layers are called: by their own index, or in the order of the calls where some share one or have none."""
    known = [layer for layer in layer_ids if layer is not None]
    ordered = len(known) == len(layer_ids) and all(a < b for a, b in zip([-1, *known], known, strict=False))
    return tuple(known) if ordered else tuple(range(len(layer_ids)))


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
    names = sorted({type(part).__name__ for part in model.modules() if "Attention" in type(part).__name__})
    if not names:
        return f"model type '{model_type}' has no softmax attention to measure; choose one that has, such as Llama"
    return (
        f"model type '{model_type}' computes attention in code of its own ({', '.join(names)}), not through "
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

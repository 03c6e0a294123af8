"""Tiny random models of every causal type in the installed transformers, for the gates and the coverage table.

A model is small in every dimension and whole in every kind: sliding and full layers, dense and expert layers, linear
and softmax layers all occur. Its weights depend on the type, the seed and nothing else.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from softgap.errors import UnsupportedError, unknown_name
from softgap.probe.tiny_overrides import OVERRIDES, PAD, SIZES

__all__ = ["attention_names", "causal_types", "goes_through_registry", "tiny_config", "tiny_model"]

# Scores q·k/√d of normalised inputs have a standard deviation near GAIN²: softmax weights are far from even.
_GAIN = 1.5
_EMBEDDING_STD = 0.25
_BIAS_STD = 0.1
# Learned sinks, and the key scale of zaya: at their initial zero they would say nothing.
_ATTENTION_SCALARS = ("sinks", "temp")
# State-space parameters live on scales of their own: what the model's own initialisation gave them stays.
_OWN_SCALE = ("A_log", "D", "dt_")
_SLIDING_AND_FULL = ({"full_attention"}, {"sliding_attention"})


def causal_types() -> tuple[str, ...]:
    """Every model type that the installed transformers can load as a causal language model."""
    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def goes_through_registry(model_type: str) -> bool:
    """Whether the modelling file of this type calls attention through transformers' registry."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(sys.modules[_model_class(model_type).__module__])


def attention_names(model_type: str) -> tuple[str, ...]:
    """Those of "sdpa" and "eager" that this type accepts."""
    return ("sdpa", "eager") if _model_class(model_type)._supports_sdpa else ("eager",)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The type's default config with every dimension shrunk and every kind of layer kept.

    Where the causal class of a composite type takes only the text part, that part is returned.
    """
    wanted = cast(type[PreTrainedConfig], _model_class(model_type).config_class)
    config = _shrunk(CONFIG_MAPPING[model_type]())
    if isinstance(config, wanted):
        return config
    parts = (getattr(config, name) for name in config.sub_configs)
    return next(part for part in parts if isinstance(part, wanted))


def tiny_model(
    model_type: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, attn: str = "sdpa"
) -> PreTrainedModel:
    """A tiny model with random weights, in eval mode, whose `generate` runs to the length asked for.

    Matrices have entries N(0, GAIN²/fan-in), so that attention is far from uniform; embeddings, biases and learned
    sinks are random too; norms and state-space parameters stay as the model's own initialisation made them. The same
    seed gives the same weights (rounded, in a smaller dtype). Global random state is left as it was.
    """
    allowed = attention_names(model_type)
    if attn not in allowed:
        names = " or ".join(f"'{name}'" for name in allowed)
        raise UnsupportedError(f"attn of {model_type} must be {names}, got '{attn}'; pass attn='{allowed[-1]}'")
    config = tiny_config(model_type)
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed other devices too.
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = _model_class(model_type)._from_config(config, dtype=dtype, attn_implementation=attn)
    _fill(model, torch.Generator().manual_seed(seed))
    # No end-of-sequence token: a random model would meet it by chance.
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=PAD + 1, decoder_start_token_id=PAD + 1, do_sample=False
    )
    model.eval()
    return model


def _model_class(model_type: str) -> type[PreTrainedModel]:
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise unknown_name("causal model type", model_type, causal_types())
    return cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])


def _shrunk(default: PreTrainedConfig) -> PreTrainedConfig:
    config_class = type(default)
    fields = {field.name for field in dataclasses.fields(cast(Any, config_class))}
    values = {name: value for name, value in SIZES.items() if name in fields}
    for name in config_class.sub_configs:
        if (part := getattr(default, name, None)) is not None:
            values[name] = _shrunk(part)
    values |= _layer_plan(default, fields)
    # Copied, because a config may edit what it is given.
    return config_class(**values | deepcopy(OVERRIDES.get(config_class.model_type, {})))


def _layer_plan(default: PreTrainedConfig, fields: set[str]) -> dict[str, Any]:
    """As few layers as hold every kind of attention beside every kind of feed-forward the default config has."""
    kinds = {
        name: list(dict.fromkeys(getattr(default, name)))
        for name in ("layer_types", "mlp_layer_types")
        if name in fields and getattr(default, name, None)
    }
    if "sliding_window" in fields and set(kinds.get("layer_types", ())) in _SLIDING_AND_FULL:
        kinds["layer_types"] = ["full_attention", "sliding_attention"]
    longest = max(map(len, kinds.values()), default=1)
    if longest == 1:
        return {name: kind * 2 for name, kind in kinds.items()}
    count = max(4, longest)
    plan: dict[str, Any] = {"num_hidden_layers": count}
    if attention := kinds.get("layer_types"):
        plan["layer_types"] = [attention[i % len(attention)] for i in range(count)]
    if feed_forward := kinds.get("mlp_layer_types"):
        plan["mlp_layer_types"] = [feed_forward[i * len(feed_forward) // count] for i in range(count)]
    return plan


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    filled: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            std = _std(module, name, parameter)
            if std is None or id(parameter) in filled:
                continue
            filled.add(id(parameter))
            # Drawn in float32 whatever the dtype, so that one seed means one model.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _std(module: nn.Module, name: str, parameter: Tensor) -> float | None:
    """Standard deviation of a parameter's entries, or None where the model's own initialisation stays."""
    if isinstance(module, nn.Embedding):
        return _EMBEDDING_STD
    if name in _ATTENTION_SCALARS:
        return 1.0
    if "Norm" in type(module).__name__ or name.startswith(_OWN_SCALE):
        return None
    if name.endswith("bias"):
        return _BIAS_STD
    if parameter.ndim < 2:
        return None
    fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[1:].numel()
    if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
        fan_in = parameter.shape[-1]
    return _GAIN / math.sqrt(fan_in)

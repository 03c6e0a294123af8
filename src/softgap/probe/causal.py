"""Whether a configuration is a causal language model that transformers implements itself.

That is answered from config.json alone, before any weight is read:

* the model type is one of transformers' causal language models, and needs no code from the model's repository;
* it is no encoder-decoder;
* types that are encoders by nature (they also have a masked-language-model class: BERT, RoBERTa, ...) count as causal
  only with ``is_decoder`` set (XLM: ``causal``), because their causal class attends in both directions otherwise;
* Gemma's ``use_bidirectional_attention`` (embedding models) is off;
* the class it was saved from, where given, has a language-model head: a classifier's tied head would load silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

__all__ = ["refusal"]

_HEAD_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the model with this config.json cannot be used, in words that follow a colon, or None if it can."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return "its config.json has no model_type"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _unknown_type(model_type, config)
    if _value(config, model_type, "is_encoder_decoder"):
        return f"model type '{model_type}' is an encoder-decoder, not a causal language model"
    if _is_encoder(model_type) and not (config.get("is_decoder") or config.get("causal")):
        return (
            f"model type '{model_type}' is an encoder that attends in both directions (is_decoder is not set), "
            "not a causal language model"
        )
    if _value(config, model_type, "use_bidirectional_attention") in (True, "all"):
        return f"this '{model_type}' model attends in both directions (an embedding model), it is not causal"
    return _headless(config)


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

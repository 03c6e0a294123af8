"""Whether a model is a causal (decoder-only) language model: the only kind whose next-token numbers mean anything.

:func:`refusal` answers from config.json alone, before any weight is read:

* the model type is one of transformers' causal language models, and needs no code from the model's repository;
* it is no encoder-decoder;
* types that are encoders by nature (they also have a masked-language-model class: BERT, RoBERTa, ...) count as causal
  only with ``is_decoder`` set (XLM: ``causal``), because their causal class attends in both directions otherwise;
* Gemma's ``use_bidirectional_attention`` (embedding models) is off;
* the class it was saved from, where given, has a language-model head: a classifier's tied head would load silently.

:func:`model_refusal` answers for a model in memory, of a type that transformers need not know: the same rules, and

* its class is not a masked language model;
* it is not the encoder half of an encoder-decoder;
* unless its class generates text, its attention modules do not all declare ``is_causal = False``. A class that does
  generate may declare it and still be causal: BigBird-Pegasus passes its own masks, PaliGemma attends both ways within
  the prompt only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

__all__ = ["model_refusal", "refusal"]

_HEAD_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why the model with this config.json cannot be used, in words that follow a colon, or None if it can."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        return "its config.json has no model_type"
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _unknown_type(model_type, config)
    found = _not_causal(
        model_type,
        encoder_decoder=_value(config, model_type, "is_encoder_decoder"),
        decoder=config.get("is_decoder") or config.get("causal"),
        bidirectional=_value(config, model_type, "use_bidirectional_attention"),
    )
    return found or _headless(config)


def model_refusal(model: PreTrainedModel, attention: Iterable[nn.Module]) -> str | None:
    """Why a model with these attention modules is not a causal language model, or None; the words follow a colon."""
    config, names = model.config, [kind.__name__ for kind in type(model).__mro__]
    model_type, text = config.model_type, config.get_text_config()
    known = any(name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in names)
    if not known and any(name in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() for name in names):
        return f"{names[0]} predicts masked tokens from both sides, not the next token"
    decoder = getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    found = _not_causal(
        model_type,
        encoder_decoder=getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False),
        decoder=decoder,
        bidirectional=getattr(config, "use_bidirectional_attention", None),
    )
    if found is not None or known or decoder:
        return found
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

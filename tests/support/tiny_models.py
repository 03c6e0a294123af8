"""Tiny random models of every causal type in the installed transformers, for tests and the coverage table."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import sys
from copy import deepcopy
from typing import Any, Final, cast

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

__all__ = ["attention_names", "causal_types", "goes_through_registry", "modelling_source", "tiny_config", "tiny_model"]


PAD: Final = 0


_HIDDEN: Final = 64


_HEADS: Final = 4


_VOCABULARY: Final = 128


def _each(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(" ".join(names).split(), value)


SIZES: Final[dict[str, Any]] = {
    # widths
    **_each(
        _HIDDEN,
        "hidden_size d_model n_embd word_embed_proj_dim embedding_size lru_width emb_dim",
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size dff intermediate_size_mlp",
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size dense_intermediate_size",
        "shared_intermediate_size moe_shared_expert_intermediate_size prefix_dense_intermediate_size",
        "hidden_size_global",
    ),
    **_each(32, "kv_lora_rank q_lora_rank o_lora_rank hc_lowrank router_hidden_size mamba_d_ssm"),
    # heads
    **_each(_HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads"),
    **_each(_HEADS, "num_encoder_attention_heads num_decoder_attention_heads"),
    **_each(_HEADS, "swa_num_attention_heads linear_num_key_heads linear_num_value_heads linear_num_heads"),
    **_each(2, "num_key_value_heads kv_n_heads swa_num_key_value_heads"),
    **_each(16, "head_dim v_head_dim qk_nope_head_dim swa_head_dim kv_channels"),
    **_each(8, "qk_rope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim"),
    # depth
    **_each(2, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth"),
    **_each(2, "num_encoder_layers num_decoder_layers"),
    "num_kv_shared_layers": 2,
    # vocabulary, positions and windows
    **_each(_VOCABULARY, "vocab_size decoder_vocab_size audio_vocab_size vocab_size_per_layer_input"),
    **_each(1024, "max_position_embeddings n_positions max_seq_len max_target_positions"),
    **_each(16, "sliding_window sliding_window_size local_attention attention_window_size attention_chunk_size"),
    "use_sliding_window": True,
    # experts
    **_each(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_each(2, "num_experts_per_tok moe_topk moe_top_k moe_k zero_expert_num"),
    **_each(1, "n_group topk_group n_shared_experts moe_num_shared_experts num_shared_experts first_k_dense_replace"),
    # state spaces, indexers and per-layer embeddings
    **_each(8, "mamba_d_state ssm_state_size mamba_n_heads mamba_num_heads index_topk laurel_rank"),
    **_each(16, "mamba_chunk_size chunk_size mamba_head_dim index_head_dim hidden_size_per_layer_input"),
    # only the chunked form of Mamba 2 clamps time steps to this minimum; the recurrent one does not
    "time_step_min": 1e-6,
    # with fewer heads the indexer's sum of rectified scores is often exactly 0, and top-k breaks the ties at random
    "index_n_heads": 16,
    # scales that belong to the full width
    "query_pre_attn_scalar": 16,
    "attention_multiplier": 0.25,
    **_each(1.0, "logit_scale logits_mup_width_multiplier"),
    "dim_model_base": _HIDDEN,
    # roles; tied embeddings would make a random model repeat its last token
    "tie_word_embeddings": False,
    "is_decoder": True,
    "pad_token_id": PAD,
    "bos_token_id": PAD + 1,
    "decoder_start_token_id": PAD + 1,
    "eos_token_id": PAD + 2,
}


# Latent attention expands one latent to a key and a value for every query head.
_LATENT: Final = _each(
    {"num_key_value_heads": _HEADS},
    "axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4 kimi_linear",
    "minicpm3 youtu",
)


def _alternating(first: str, second: str, field: str = "layer_types") -> dict[str, Any]:
    return {"num_hidden_layers": 4, field: [first, second] * 2}


OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    **_LATENT,
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        **_alternating("sliding_attention", "full_attention"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            "full_attention": None,
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "partial_rotary_factor": 0.5,
        "o_groups": 2,
    },
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 32},
    "gemma4_unified_text": {"global_head_dim": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": _alternating("linear_attention", "full_attention"),
    "jamba": {
        "num_hidden_layers": 4,
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "expert_layer_offset": 3},
    },
    "lfm2": _alternating("conv", "full_attention"),
    "lfm2_moe": {**_alternating("conv", "full_attention"), "num_dense_layers": 2},
    "longcat_flash": {"num_key_value_heads": _HEADS, "head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "minimax_m3_vl_text": {
        **_alternating("full_attention", "minimax_m3_sparse"),
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        **{"rotary_dim": 8, "index_n_heads": _HEADS, "index_block_size": 4, "index_topk_blocks": 2},
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    # its masks know no window, its cache does
    "moshi": {"sliding_window": 1024},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi4_multimodal_audio": {"num_blocks": 2, "ext_pw_out_channel": 64, "nemo_conv_channels": 64},
    "qwen2_moe": {"mlp_only_layers": [0, 1]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "qwen3_next": {"mlp_only_layers": [0, 1]},
    "qwen4_exp_text": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "roc_bert": {"pronunciation_embed_dim": 64, "shape_embed_dim": 64, "shape_vocab_size": 1024},
    "xmod": {"default_language": "en_XX"},
    "zamba": _alternating("linear_attention", "hybrid", "layers_block_type"),
    "zamba2": _alternating("linear_attention", "hybrid", "layers_block_type"),
    "zaya": {**_alternating("hybrid", "hybrid_sliding"), "num_experts_per_tok": 1},
}


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
    """Whether this type calls attention through transformers' registry, or wraps a language model that does."""
    source = modelling_source(model_type)
    return (
        "ALL_ATTENTION_FUNCTIONS" in source or re.search(r"self\.(language_)?model = AutoModel\.", source) is not None
    )


def modelling_source(model_type: str) -> str:
    """The modelling file of the installed transformers that this type's causal model is in."""
    return inspect.getsource(sys.modules[_model_class(model_type).__module__])


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

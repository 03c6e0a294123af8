"""The tap's reach is decided by what a model's code does, and what is out of reach is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softgap.errors import ModelError
from softgap.models.support import attention_modules, check_tappable, untappable_reason
from support import model_examples as examples
from support.linearize_cases import attention_registries
from support.tiny_models import attention_names, causal_types, tiny_config, tiny_model

# What transformers 5.22 computes outside its registry.
OUTSIDE = {
    "big_bird",
    "bloom",
    "codegen",
    "cpmant",
    "falcon",
    "falcon_mamba",
    "git",
    "gpt_neo",
    "gpt_neox_japanese",
    "gptj",
    "mamba",
    "mamba2",
    "megatron-bert",
    "mpt",
    "mvp",
    "openai-gpt",
    "prophetnet",
    "rembert",
    "roformer",
    "rwkv",
    "trocr",
    "xglm",
    "xlm",
    "xlnet",
    "xlstm",
}
# The first needs packages for its vision tower; the others have no configuration that is both tiny and valid.
UNBUILT = {"gemma3n", "gemma4_assistant", "reformer"}


@pytest.mark.parametrize(
    ("model_type", "own"),
    [
        ("bloom", "BloomAttention"),
        ("codegen", "CodeGenAttention"),
        ("falcon", "FalconAttention"),
        ("gpt_neo", "GPTNeoAttention, GPTNeoSelfAttention"),
        ("gptj", "GPTJAttention"),
        ("mpt", "MptAttention"),
        ("rwkv", "RwkvSelfAttention"),
        ("xglm", "XGLMAttention"),
    ],
)
def test_attention_outside_the_registry_is_refused_by_name(model_type: str, own: str) -> None:
    model = tiny_model(model_type, attn=attention_names(model_type)[-1])
    with pytest.raises(ModelError) as caught:
        check_tappable(model)
    assert str(caught.value) == (
        f"model type '{model_type}' computes attention in code of its own ({own}), not through transformers' attention "
        "registry, so its queries, keys and values cannot be read; choose a type that uses the registry, such as "
        "Llama, Qwen, Gemma, GPT-2 or OPT"
    )


@pytest.mark.parametrize("model_type", ["mamba", "xlstm"])
def test_models_without_attention_are_refused(model_type: str) -> None:
    assert untappable_reason(tiny_model(model_type, attn=attention_names(model_type)[-1])) == (
        f"model type '{model_type}' has no softmax attention to measure; choose one that has, such as Llama"
    )


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "opt", "gpt_neox"])
def test_attention_in_the_registry_is_accepted(model_type: str, attn: str) -> None:
    model = tiny_model(model_type, attn=attn)
    check_tappable(model)
    found = attention_modules(model)
    assert [entry.layer for entry in found] == list(range(model.config.num_hidden_layers))
    assert attention_registries(model) == (ALL_ATTENTION_FUNCTIONS,)


def test_hybrid_models_are_accepted_for_their_attention_layers() -> None:
    model = tiny_model("jamba")
    check_tappable(model)
    assert {type(entry.module).__name__ for entry in attention_modules(model)} == {"JambaAttention"}


def test_a_registry_of_its_own_is_found() -> None:
    model = tiny_model("doge")
    check_tappable(model)
    (registry,) = attention_registries(model)
    assert registry is not ALL_ATTENTION_FUNCTIONS
    assert registry is not None


def test_vision_towers_do_not_count() -> None:
    with torch.device("meta"):
        git = AutoModelForCausalLM.from_config(tiny_config("git"))
        gemma = AutoModelForCausalLM.from_config(tiny_config("gemma3"))
    assert any("Vision" in type(module).__name__ for module in git.modules())
    assert "model type 'git' computes attention in code of its own" in str(untappable_reason(git))
    assert untappable_reason(gemma) is None
    assert {type(entry.module).__name__ for entry in attention_modules(gemma)} == {"Gemma3Attention"}


def test_upcast_attention_of_gpt2_is_refused_under_eager_only() -> None:
    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, reorder_and_upcast_attn=True)
    model = GPT2LMHeadModel(config)
    check_tappable(model)
    model.set_attn_implementation("eager")
    assert untappable_reason(model) == (
        "model type 'gpt2' with reorder_and_upcast_attn bypasses the attention registry under 'eager'; call "
        "model.set_attn_implementation('sdpa') or set config.reorder_and_upcast_attn to False"
    )
    config.reorder_and_upcast_attn = False
    check_tappable(model)


@pytest.mark.parametrize("name", ["paged|eager", "paged|sdpa", "flash_attention_2", "flex_attention"])
def test_other_implementations_are_refused(name: str) -> None:
    model = examples.tiny_llama()
    model.config._attn_implementation = name
    assert untappable_reason(model) == (
        f"the attention implementation of a tapped model must be 'eager' or 'sdpa', got '{name}' in "
        "'model.layers.0.self_attn'; call model.set_attn_implementation('sdpa')"
    )


def test_wrapped_models_are_refused() -> None:
    assert untappable_reason(nn.Sequential(examples.tiny_llama())) == (
        "the model must be a transformers PreTrainedModel, got Sequential; pass the model inside the wrapper"
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_all_causal_types_are_judged() -> None:
    outside, refused = set(), set()
    for model_type in set(causal_types()) - UNBUILT:
        model = tiny_model(model_type, attn=attention_names(model_type)[-1])
        outside |= set() if attention_modules(model) else {model_type}
        refused |= set() if untappable_reason(model) is None else {model_type}
    assert outside == OUTSIDE
    assert refused == OUTSIDE, "every causal type whose attention is in the registry can be measured"

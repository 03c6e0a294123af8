"""Tiny random models of diverse types: built, deterministic, non-trivial, and able to generate."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from softgap.errors import UnknownNameError, UnsupportedError
from support.tiny_models import attention_names, causal_types, goes_through_registry, tiny_config, tiny_model

DIVERSE = [
    "llama mistral qwen2 qwen3 gemma2 gemma3_text gemma4_text phi phi3 gpt2 gpt_neox opt olmo2 granite cohere2 helium",
    "deepseek_v3 glm_moe_dsa gpt_oss smollm3 mixtral starcoder2 qwen3_moe glm4 exaone4 stablelm nemotron bitnet",
    "ernie4_5 minimax falcon_h1 jamba qwen3_next lfm2 bart roberta diffllama doge zamba2",
]
TYPES = " ".join(DIVERSE).split()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads only wait for one another at this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt() -> tuple[Tensor, Tensor]:
    """Two rows longer than the sliding window, the first padded on the left."""
    ids = torch.randint(3, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :4] = mask[0, :4] = 0
    return ids, mask


@pytest.mark.parametrize("model_type", TYPES)
def test_weights_depend_on_the_seed_and_on_nothing_global(model_type: str) -> None:
    attn = attention_names(model_type)[0]
    before = torch.get_rng_state()
    first = tiny_model(model_type, seed=1, attn=attn).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    again = tiny_model(model_type, seed=1, attn=attn).state_dict()
    other = tiny_model(model_type, seed=2, attn=attn).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if name.endswith("q_proj.weight"))
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))


@pytest.mark.parametrize("model_type", TYPES)
def test_generation_from_a_padded_batch_runs_to_the_length_asked_for(model_type: str) -> None:
    ids, mask = prompt()
    for attn in attention_names(model_type):
        model = cast(Any, tiny_model(model_type, attn=attn))
        output = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, output_logits=True, return_dict_in_generate=True
        )
        assert output.sequences.shape == (2, 28)
        assert torch.isfinite(torch.stack(output.logits)).all()
        assert len(output.sequences[:, 20:].unique()) > 1


@pytest.mark.parametrize("model_type", [name for name in TYPES if name != "minimax"])  # its linear layers report too
def test_attention_is_neither_even_nor_on_one_key(model_type: str) -> None:
    ids = prompt()[0][1:]
    model = tiny_model(model_type, attn="eager")
    with torch.no_grad():
        layers: list[Tensor] = [
            weights for weights in model(input_ids=ids, output_attentions=True).attentions if weights is not None
        ]
    assert layers
    for weights in layers:
        last = weights[:, :, -1]
        visible = (last > 0).sum(-1)
        evenness = torch.special.entr(last).sum(-1) / visible.log()
        assert 0.02 < evenness.mean() < 0.97


@pytest.mark.parametrize(
    ("model_type", "field", "kinds"),
    [
        ("gemma3_text", "layer_types", {"sliding_attention", "full_attention"}),
        ("qwen2", "layer_types", {"sliding_attention", "full_attention"}),
        ("qwen3_next", "layer_types", {"linear_attention", "full_attention"}),
        ("lfm2", "layer_types", {"conv", "full_attention"}),
        ("axk1", "mlp_layer_types", {"dense", "sparse"}),
        ("beam", "layer_types", {"sliding_attention", "full_attention"}),
        ("beam", "mlp_layer_types", {"dense", "sparse"}),
    ],
)
def test_every_kind_of_layer_occurs(model_type: str, field: str, kinds: set[str]) -> None:
    assert set(getattr(tiny_config(model_type), field)) == kinds


def test_every_kind_of_attention_meets_every_kind_of_feed_forward() -> None:
    config = tiny_config("beam")
    assert len(set(zip(config.layer_types, config.mlp_layer_types, strict=True))) == 4


def test_a_smaller_dtype_holds_the_same_weights_rounded() -> None:
    wide = tiny_model("gpt_oss", attn="eager").state_dict()
    narrow = tiny_model("gpt_oss", attn="eager", dtype=torch.bfloat16).state_dict()
    for name, value in narrow.items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, wide[name].bfloat16())


@pytest.mark.parametrize("model_type", ["gpt_oss", "mimo_v2_flash", "gpt2", "opt"])
def test_learned_sinks_and_biases_say_something(model_type: str) -> None:
    weights = tiny_model(model_type, attn="eager").state_dict()
    scores = [value for name, value in weights.items() if name.endswith(("sinks", "_proj.bias", "c_attn.bias"))]
    assert scores
    assert all(value.abs().mean() > 0.05 for value in scores)
    sinks = [value for name, value in weights.items() if name.endswith("sinks")]
    assert all(value.abs().mean() > 0.2 for value in sinks)


def test_models_are_small_and_in_eval_mode() -> None:
    model = tiny_model("gemma3")
    assert not any(module.training for module in model.modules())
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


def test_the_text_part_of_a_composite_type_is_taken_where_the_causal_class_wants_it() -> None:
    assert tiny_config("llama4").model_type == "llama4_text"
    assert tiny_config("gemma3").model_type == "gemma3"


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "doge", "deepseek_v3", "fuyu", "got_ocr2"])
def test_types_in_the_registry(model_type: str) -> None:
    assert goes_through_registry(model_type)


@pytest.mark.parametrize("model_type", ["bloom", "falcon", "gptj", "gpt_neo", "mpt", "mamba"])
def test_types_outside_the_registry(model_type: str) -> None:
    assert model_type in causal_types()
    assert not goes_through_registry(model_type)


def test_the_coverage_page_names_the_line_that_prevents_each_type_from_passing() -> None:
    """Of the installed transformers; and every page tells the number of types that pass."""
    root = Path(__file__).parents[2]
    page = (root / "docs" / "coverage.md").read_text()
    verdicts = re.findall(r"^\| ([^|]+) \| (?:sdpa|eager) \| \*\*([^*]+)\*\*", page, re.MULTILINE)
    failing = {model_type for model_type, verdict in verdicts if verdict != "pass"}
    failing |= set(causal_types()) - {model_type for model_type, _ in verdicts}
    coverage = runpy.run_path(str(root / "experiments" / "model_coverage.py"))
    assert set(coverage["BLOCKERS"]) == failing
    for model_type in failing:
        number, code = coverage["blocking_line"](model_type)
        assert f"| {model_type} | {number}: `{code.replace('|', '/')}` |" in page
    passing = len(causal_types()) - len(failing)
    assert f"**{passing} types pass every gate.**" in page
    for place in ("README.md", "docs/howto/models.md"):
        told = re.findall(r"(\d+) pass \[?every gate|\[(\d+) model types\]", (root / place).read_text())
        assert told
        assert {number for pair in told for number in pair if number} == {str(passing)}, place


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="'lama'; did you mean 'llama'"):
        tiny_model("lama")


def test_an_attention_the_type_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="attn of gpt_oss must be 'eager', got 'sdpa'; pass attn='eager'"):
        tiny_model("gpt_oss")

"""A model is measured only where the numbers mean something: causal, and in evaluation mode. Everything asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    VisionEncoderDecoderModel,
)

import softgap
from softgap.calibration import evaluate_held_out
from softgap.errors import ModelError
from softgap.linearize import (
    Sequences,
    distil_substitute,
    find_plan,
    fit_output_correction,
    frontier,
    head_scores,
    impact,
    swap,
)
from softgap.linearize.sequences import read_swapped
from softgap.models.support import check_measurable, untappable_reason
from softgap.probe import read_ids
from softgap.probe.layout import visit_layers
from softgap.theory import focus_in_model, injectivity_in_model, position_in_model
from support.model_examples import byte_tokenizer, tiny_llama

IDS = [5, 9, 4, 12, 7, 31, 8, 6]
PASSAGES = Sequences(torch.tensor([IDS] * 4), torch.ones(4, len(IDS) - 1, dtype=torch.bool))
SMALL: dict[str, Any] = {
    "vocab_size": 270, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def recorded(model: Any) -> None:
    with softgap.record(model, ["elu1"]):
        model(torch.tensor([IDS]))


RNG = np.random.default_rng(0)
ENTRANCES: dict[str, Callable[[Any], Any]] = {
    "record": recorded,
    "Recording": lambda model: softgap.Recording(model, ["elu1"]),
    "generate": lambda model: softgap.generate(model, byte_tokenizer(), "Boat", 2),
    "read": lambda model: softgap.read(model, byte_tokenizer(), "Boat 3 left"),
    "read_ids": lambda model: read_ids(model, [IDS]),
    "doctor": softgap.doctor,
    "calibrate": lambda model: softgap.calibrate(model, byte_tokenizer(), ["Boat 3 left"]),
    "judge": lambda model: evaluate_held_out(model, [IDS], ["fitted", "uniform"]),
    "visit_layers": lambda model: visit_layers(model, IDS, lambda layer: layer.layer),
    "impact": lambda model: impact(model, byte_tokenizer(), ["Boat 3 left"]),
    "head_scores": lambda model: head_scores(model, PASSAGES, "elu1"),
    "repaired": lambda model: fit_output_correction(model, PASSAGES, [(0, 0)], "elu1"),
    "tuned": lambda model: distil_substitute(model, PASSAGES, [(0, 0)], "elu1"),
    "frontier": lambda model: frontier(model, PASSAGES, PASSAGES, None, "elu1"),
    "find_plan": lambda model: find_plan(model, byte_tokenizer(), ["Boat 3 left"], "elu1", budget=1),
    "read_swapped": lambda model: read_swapped(model, PASSAGES, None, [], None),
    "focus": lambda model: focus_in_model(model, IDS, rng=RNG),
    "injectivity": lambda model: injectivity_in_model(model, IDS, rng=RNG),
    "position": lambda model: position_in_model(model, IDS, rng=RNG),
}


def dropping_gpt2() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=270, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_a_model_in_training_mode_is_refused_before_it_runs(entrance: str) -> None:
    model = dropping_gpt2()
    model.register_forward_pre_hook(lambda *given: pytest.fail("the model was run"))
    model.train()
    with pytest.raises(ModelError) as caught:
        ENTRANCES[entrance](model)
    assert str(caught.value) == (
        "a model must be in evaluation mode to be measured, got GPT2LMHeadModel in training mode, where dropout "
        "changes the numbers at random; call model.eval() first, or give allow_dropout=True to record, generate or read"
    )
    assert model.training, "nobody changes the mode of the user's model"


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_an_encoder_is_refused_before_it_runs(entrance: str) -> None:
    model = BertForMaskedLM(BertConfig(**SMALL)).eval()
    model.register_forward_pre_hook(lambda *given: pytest.fail("the model was run"))
    with pytest.raises(ModelError) as caught:
        ENTRANCES[entrance](model)
    assert str(caught.value) == (
        "softgap measures causal (decoder-only) language models, got BertForMaskedLM: BertForMaskedLM predicts masked "
        "tokens from both sides, not the next token; choose a causal model such as Llama, Qwen, Gemma or GPT-2"
    )


def test_dropout_is_what_would_have_been_measured() -> None:
    """In training mode two readings of one text differ: the reason of the refusal, seen past it."""
    model = dropping_gpt2()
    calm = [model(torch.tensor([IDS])).logits for _ in range(2)]
    assert torch.equal(*calm)
    model.train()
    assert not torch.equal(*[model(torch.tensor([IDS])).logits for _ in range(2)])


@pytest.mark.parametrize("name", ["transformer.h.1.attn", "transformer.h.0.mlp.dropout"])
def test_a_part_in_training_mode_is_named(name: str) -> None:
    model = dropping_gpt2()
    model.get_submodule(name).train()
    with pytest.raises(ModelError, match=rf"got GPT2LMHeadModel in training mode \('{name}"):
        check_measurable(model)


def test_a_module_that_drops_nothing_may_say_that_it_trains() -> None:
    model = tiny_llama()
    model.model.norm = nn.Sequential(model.model.norm)  # as a wrapper that somebody adds: in training mode by default
    assert model.model.norm.training
    check_measurable(model)


def test_heads_may_be_swapped_in_a_model_that_trains() -> None:
    model = tiny_llama().train()
    with swap(model, [(0, 1)], "elu1"):
        model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad is not None


def test_dropout_is_measured_where_it_is_meant() -> None:
    """Two readings differ, the manifest says why, and the same entrances go back to a calm model."""
    model = dropping_gpt2()
    drops: dict[str, Any] = {"allow_dropout": True}
    calm = softgap.read(model, byte_tokenizer(), "Boat 3 left", **drops)
    assert "allow_dropout" not in calm.manifest.options, "a model in evaluation mode drops nothing"
    model.train()
    with softgap.record(model, ["elu1"], **drops) as recording:
        model(torch.tensor([IDS]))
    runs = [
        recording.trajectories()[0],
        softgap.generate(model, byte_tokenizer(), "Boat", 2, **drops),
        *(softgap.read(model, byte_tokenizer(), "Boat 3 left", **drops) for _ in range(2)),
    ]
    assert [run.manifest.options["allow_dropout"] for run in runs] == [True] * 4
    assert not np.allclose(runs[2].divergence, runs[3].divergence, atol=1e-3)
    assert model.training


def compiled(part: str) -> Any:
    """A tiny Llama of which a part is compiled; "" is the whole model."""
    model = tiny_llama()
    model.get_submodule(part).compile(backend="eager")
    return model


def with_compiled_forward() -> Any:
    model = tiny_llama()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def with_compiled_layer() -> Any:
    model = tiny_llama()
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    return model


COMPILED: dict[str, tuple[Callable[[], Any], str]] = {
    "model.compile()": (lambda: compiled(""), "got LlamaForCausalLM compiled"),
    "a compiled forward": (with_compiled_forward, "got LlamaForCausalLM compiled"),
    "a compiled layer": (with_compiled_layer, r"got its part 'model\.layers\.1' compiled"),
    "layer.compile()": (lambda: compiled("model.layers.1"), r"got its part 'model\.layers\.1' compiled"),
    "attention alone": (
        lambda: compiled("model.layers.0.self_attn"),
        r"got its part 'model\.layers\.0\.self_attn' compiled",
    ),
}


@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_model_is_refused_or_recorded_as_it_is(way: str) -> None:
    make, sentence = COMPILED[way]
    model = make()
    with pytest.raises(ModelError, match=f"must run its own code, {sentence} .*set_stance"):
        recorded(model)
    with torch.compiler.set_stance("force_eager"):
        found, plain = (softgap.read(m, byte_tokenizer(), "Boat 3 left") for m in (model, tiny_llama()))
    assert np.array_equal(found.divergence, plain.divergence)


def test_the_wrapper_of_torch_compile_is_refused_and_says_what_to_pass() -> None:
    wrapped: Any = torch.compile(tiny_llama(), backend="eager")
    with pytest.raises(ModelError, match=r"got the OptimizedModule that torch.compile returned, .*; pass the module"):
        recorded(wrapped)
    recorded(wrapped._orig_mod)


def test_a_compiled_part_without_attention_hides_nothing() -> None:
    model = tiny_llama()
    model.model.layers[1].mlp = torch.compile(model.model.layers[1].mlp, backend="eager")
    check_measurable(model)


def t5() -> T5Config:
    return T5Config(vocab_size=270, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)


def bart() -> Any:
    from transformers import BartConfig, BartForConditionalGeneration

    sides: dict[str, Any] = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")
    }
    return BartForConditionalGeneration(
        BartConfig(vocab_size=270, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16, **sides)
    )


def vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))


def pictures() -> Any:
    from transformers import VisionEncoderDecoderConfig, ViTConfig

    vision = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16)
    text = GPT2Config(vocab_size=270, n_embd=16, n_layer=2, n_head=2, add_cross_attention=True)
    return VisionEncoderDecoderModel(VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: T5ForConditionalGeneration(t5()), "model type 't5' is an encoder-decoder"),
        (lambda: T5EncoderModel(t5()), "T5EncoderModel is the encoder of an encoder-decoder of type 't5'"),
        (bart, "model type 'bart' is an encoder-decoder"),
        (vit, "all attention of ViTModel is declared to go in both directions"),
        (pictures, "model type 'vision-encoder-decoder' is an encoder-decoder"),
        (lambda: BertLMHeadModel(BertConfig(**SMALL)), r"'bert' is an encoder .* \(is_decoder is not set\)"),
        (lambda: BertModel(BertConfig(**SMALL)), r"'bert' is an encoder .* \(is_decoder is not set\)"),
        (lambda: BertForMaskedLM(BertConfig(**SMALL, is_decoder=True)), "predicts masked tokens from both sides"),
        (lambda: ModernBertForMaskedLM(ModernBertConfig(**SMALL, pad_token_id=0)), "predicts masked tokens"),
        (lambda: tiny_bidirectional(), r"declared to go in both directions \(is_causal is False\)"),
    ],
)
def test_what_is_not_causal_is_refused_with_its_reason(make: Callable[[], Any], reason: str) -> None:
    model = make().eval()
    with pytest.raises(
        ModelError, match=f"causal .decoder-only. language models, got {type(model).__name__}: .*{reason}"
    ):
        check_measurable(model)


def tiny_bidirectional() -> Any:
    """A model of a user's own on top of Llama's layers: no type or class name tells that it looks ahead."""

    class Embedder(type(tiny_llama().model)):  # type: ignore[misc]
        pass

    model = Embedder(tiny_llama().config)
    for layer in model.layers:
        layer.self_attn.is_causal = False
    return model


def test_causal_models_of_other_kinds_still_pass() -> None:
    """A BERT that decodes, a model without a head, and a prefix language model that reads pictures."""
    check_measurable(BertLMHeadModel(BertConfig(**SMALL, is_decoder=True)).eval())
    check_measurable(tiny_llama().model)
    with torch.device("meta"):
        pali = PaliGemmaForConditionalGeneration(
            PaliGemmaConfig(
                text_config={**SMALL, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8},
                vision_config={"model_type": "siglip_vision_model", **SMALL},
                projection_dim=16,
            )
        )
    assert untappable_reason(pali) is None

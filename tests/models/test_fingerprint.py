"""A fingerprint changes with the model's function and with nothing else."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from softgap.errors import ModelError
from softgap.models import fingerprint
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import load_model
from support import model_examples as examples
from support.tiny_models import tiny_model

WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def test_it_is_32_hexadecimal_digits() -> None:
    value = model_fingerprint(examples.tiny_llama())
    assert len(value) == 32
    int(value, 16)


def test_it_stays_through_saving_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGAP_CACHE", str(tmp_path / "cache"))
    original = examples.tiny_llama()
    value = model_fingerprint(original)
    folder = examples.save_folder(tmp_path / "one", original)
    eager, _ = load_model(folder, attn="eager")
    assert model_fingerprint(eager) == value
    gguf = examples.write_gguf(tmp_path / "two.gguf", original)
    assert model_fingerprint(load_model(gguf)[0]) == value
    assert model_fingerprint(examples.tiny_llama()) == value
    assert model_fingerprint(original.train()) == value


@torch.no_grad()
def nudge(model: LlamaForCausalLM) -> None:
    model.get_parameter(WEIGHT)[5, 7] += 1e-6


def nudge_behind_autograd(model: LlamaForCausalLM) -> None:
    model.get_parameter(WEIGHT).data.mul_(1.001)


@torch.no_grad()
def replace(model: LlamaForCausalLM) -> None:
    projection = model.model.layers[1].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.flip(0))


def swap_layers(model: LlamaForCausalLM) -> None:
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def rotate_otherwise(model: LlamaForCausalLM) -> None:
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}


def narrow(model: LlamaForCausalLM) -> None:
    model.to(torch.bfloat16)  # type: ignore[arg-type]


@pytest.mark.parametrize("edit", [nudge, nudge_behind_autograd, replace, swap_layers, rotate_otherwise, narrow])
def test_every_edit_changes_it(edit: Callable[[LlamaForCausalLM], None]) -> None:
    model = examples.tiny_llama()
    before = model_fingerprint(model)
    edit(model)
    after = model_fingerprint(model)
    assert after != before
    assert after == model_fingerprint(model, fresh=True)


def test_an_edit_undone_gives_it_back() -> None:
    model = examples.tiny_llama()
    value = model_fingerprint(model)
    kept = model.get_parameter(WEIGHT).detach().clone()
    nudge(model)
    assert model_fingerprint(model) != value
    with torch.no_grad():
        model.get_parameter(WEIGHT).copy_(kept)
    assert model_fingerprint(model) == value


def test_weights_are_hashed_once_per_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = examples.tiny_llama()
    value = model_fingerprint(model)
    monkeypatch.setattr(fingerprint, "_digest", lambda *_: pytest.fail("hashed again"))
    assert model_fingerprint(model) == value
    with pytest.raises(pytest.fail.Exception, match="hashed again"):
        model_fingerprint(model, fresh=True)


def test_a_model_is_forgotten_with_its_last_reference() -> None:
    model = examples.tiny_llama()
    model_fingerprint(model)
    assert model in fingerprint._HASHED
    known = len(fingerprint._HASHED)
    del model
    gc.collect()
    assert len(fingerprint._HASHED) < known


def test_tied_and_untied_heads_differ() -> None:
    tied = examples.tiny_llama()
    untied = examples.tiny_llama(tie_word_embeddings=False)
    untied.load_state_dict(tied.state_dict())
    assert model_fingerprint(tied) != model_fingerprint(untied)


def test_inference_tensors_have_one_too() -> None:
    with torch.inference_mode():
        model = examples.tiny_llama()
    assert model_fingerprint(model) == model_fingerprint(examples.tiny_llama())


def test_settings_at_their_default_do_not_count() -> None:
    model = tiny_model("llama")
    before = model_fingerprint(model)
    model.config.use_cache = not model.config.use_cache
    model.config.name_of_a_later_version = None
    assert model_fingerprint(model) == before
    model.config.attention_dropout = 0.5
    assert model_fingerprint(model) != before


def test_types_without_a_default_have_one_too() -> None:
    class Demanding(LlamaConfig):
        def __init__(self, size: int) -> None:
            super().__init__(hidden_size=size)

    model = examples.tiny_llama()
    model.config.__class__ = Demanding
    before = model_fingerprint(model)
    model.config.attention_dropout = 0.5
    assert model_fingerprint(model) != before


def test_weights_that_are_not_loaded_are_refused() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(examples.tiny_llama().config)
    with pytest.raises(ModelError, match=r"the weight 'lm_head\.weight' is not loaded \(device 'meta'\)"):
        model_fingerprint(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    model = examples.tiny_llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 5] = value
    said = rf"^the weights of a model must be finite numbers, got NaN or infinity in '{WEIGHT}'; the file is damaged"
    with pytest.raises(ModelError, match=said):
        model_fingerprint(model)
    with pytest.raises(ModelError, match=said):  # what is known of a model is refused too
        model_fingerprint(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 5] = 0.5
    assert len(model_fingerprint(model)) == 32


def test_a_bias_may_rule_tokens_out() -> None:
    model = tiny_model("gptj", attn="eager")
    with torch.no_grad():
        model.lm_head.bias[4] = -torch.inf
    assert len(model_fingerprint(model)) == 32

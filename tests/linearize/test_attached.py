"""A model with a plan attached: every forward and generation is that of the plan, and no measurement takes it."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

import softgap
from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.linearize import Plan, Substitute, apply, attach, attached_plan, detach, find_plan, swap
from softgap.models.fingerprint import model_fingerprint
from softgap.probe.tap import overridden_names
from support.model_examples import byte_tokenizer, tiny_llama

IDS = torch.arange(3, 33)[None]
HEADS = ((0, 0), (0, 1), (1, 2))


def plan_of(model: Any, name: str = "window:w=5,sinks=2") -> Plan:
    return Plan("tiny", model_fingerprint(model), HEADS, ((0, 0),), (), Substitute(resolve(name)))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.mark.parametrize("name", ["window:w=5,sinks=2", "elu1+window:w=4,sinks=1,far=3", "elu1"])
def test_forwards_and_generations_are_those_of_the_plan(name: str) -> None:
    model: Any = tiny_llama()
    plan, before = plan_of(model, name), logits(model)
    if "far" in name:  # far keys need whole KV groups
        plan = replace(plan, heads=HEADS[:2])
    with torch.no_grad(), apply(model, plan) as applied:
        expected = model(IDS).logits
        settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        written = model.generate(IDS, **settings, past_key_values=applied.cache())
    attach(model, plan)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, before)
    assert torch.equal(model.generate(IDS, **settings), written)
    assert attached_plan(model) is plan
    assert type(model).__name__ == "LlamaForCausalLM"
    assert overridden_names() == ()
    detach(model)
    assert attached_plan(model) is None
    assert type(model) is type(tiny_llama())
    assert torch.equal(logits(model), before)
    detach(model)


def test_far_keys_in_part_of_a_group_cannot_generate() -> None:
    model: Any = tiny_llama()
    with (
        apply(model, plan_of(model, "window:w=4,sinks=1,far=3")) as applied,
        pytest.raises(SoftgapError, match="far keys need all query heads of a KV group"),
    ):
        applied.cache()
    with pytest.raises(SoftgapError, match="far keys need all query heads of a KV group"):
        find_plan(model, byte_tokenizer(), ["abc " * 200], "window:w=4,sinks=1,far=3", by="heads", length=32)


def test_generate_gets_the_cache_of_the_plan_unless_it_brings_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_llama()
    seen: list[Any] = []
    own = type(model).generate

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs.get("past_key_values"))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", generate)
    attach(model, plan_of(model))
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    first = model.generate(IDS, **settings)
    assert torch.equal(model.generate(IDS, **settings, use_cache=False), first)
    model.generate(IDS, **settings, num_beams=2)
    model.generation_config.use_cache = False
    model.generate(IDS, **settings)
    assert seen[0] is not None
    assert seen[1:] == [None, None, None]


def test_a_copy_and_another_dtype_stay_under_the_plan() -> None:
    model: Any = tiny_llama()
    attach(model, plan_of(model))
    expected = logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(logits(twin), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.01)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(logits(twin), expected)
    assert torch.allclose(logits(model.double()).float(), expected, atol=1e-5)


def test_a_model_with_a_plan_is_freed() -> None:
    model: Any = tiny_llama()
    attach(model, plan_of(model))
    logits(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_measurements_refuse_a_model_with_a_plan() -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    plan = plan_of(model)
    attach(model, plan)

    def swapped() -> None:
        with swap(model, HEADS, "elu1"):
            pass

    def applied() -> None:
        with apply(model, plan):
            pass

    calls = [
        lambda: softgap.read(model, tokenizer, "abc"),
        lambda: softgap.generate(model, tokenizer, "abc", 2),
        lambda: softgap.evaluate(model, tokenizer, "recall", lengths=[64]),
        lambda: softgap.calibrate(model, tokenizer, ["abc " * 200]),
        lambda: softgap.doctor(model),
        lambda: find_plan(model, tokenizer, ["abc " * 200], "elu1"),
        swapped,
        applied,
    ]
    for call in calls:
        with pytest.raises(SoftgapError, match="a plan is attached to this model"):
            call()
    with pytest.raises(SoftgapError, match="has a plan attached already"):
        attach(model, plan)
    with pytest.raises(SoftgapError, match="plan"):
        attach(tiny_llama(seed=2), plan)


def test_an_error_in_a_forward_leaves_nothing_behind() -> None:
    model: Any = tiny_llama()
    attach(model, plan_of(model))
    with pytest.raises(Exception, match=r".+"):
        model(torch.tensor([[10**6]]))
    assert overridden_names() == ()
    assert logits(model).isfinite().all()

"""Generation under a plan is the user's own call with the plan's cache, and it counts what the caches really hold."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import softgap
from softgap.attention import resolve
from softgap.errors import SoftgapError
from softgap.intervene.state_cache import bounded_layers, cache_bytes
from softgap.linearize import (
    GenerationStep,
    Plan,
    Substitute,
    apply,
    attach,
    attached_plan,
    detach,
    export_plan,
    generate,
    swap,
)
from softgap.linearize.generation import saving_words
from softgap.linearize.plan import plan_of
from softgap.models.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
from support.model_examples import byte_tokenizer, tiny_llama
from support.probe_cases import tiny_with

TOKENIZER = byte_tokenizer()
FREED = ((0, 0), (0, 1), (1, 2), (1, 3))
PROMPTS = ["A fox", "went out at night", "x"]


def planned(name: str = "elu1+window:w=5,sinks=2", **settings: Any) -> tuple[Any, Plan]:
    model: Any = tiny_llama(**{"max_position_embeddings": 512, **settings})
    return model, plan_of(model, FREED, Substitute(resolve(name)))


def ids_of(text: str) -> torch.Tensor:
    found: torch.Tensor = TOKENIZER(text, return_tensors="pt")["input_ids"]
    return found


def own_call(model: Any, plan: Plan, text: str, n: int, **settings: Any) -> tuple[list[int], Any]:
    """What a user writes who applies a plan."""
    ids = ids_of(text)
    with apply(model, plan) as applied:
        cache = applied.cache()
        written = model.generate(
            ids, **{"do_sample": False, "max_new_tokens": n, **settings}, past_key_values=cache, pad_token_id=2
        )
    return written[0, ids.shape[1] :].tolist(), cache


@pytest.mark.parametrize("name", ["elu1", "window:w=5,sinks=2", "elu1+window:w=4,sinks=1,far=3"])
def test_it_is_the_own_call_with_the_cache_of_the_plan(name: str) -> None:
    model, plan = planned(name)
    tokens, cache = own_call(model, plan, "A fox went out", 12)
    made = generate(model, TOKENIZER, plan, "A fox went out", 12)
    assert made.token_ids == (tuple(tokens),)
    assert made.text == TOKENIZER.decode(tokens, skip_special_tokens=True)
    assert made.prompt_tokens == (ids_of("A fox went out").shape[1],)
    assert made.cache_bytes == cache_bytes(cache) > 0
    assert made.without_cache == ""
    assert made.seconds_to_first > 0
    assert made.tokens_per_second == pytest.approx(1 / made.seconds_per_token)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.cache_bytes = 0  # type: ignore[misc]


def test_several_prompts_are_padded_on_the_left_and_written_as_alone() -> None:
    model, plan = planned()
    together = generate(model, TOKENIZER, plan, PROMPTS, 9)
    alone = [generate(model, TOKENIZER, plan, prompt, 9) for prompt in PROMPTS]
    assert together.token_ids == tuple(made.token_ids[0] for made in alone)
    assert together.texts == tuple(made.text for made in alone)
    assert together.prompts == tuple(PROMPTS)
    assert together.original_bytes == 3 * max(made.original_bytes for made in alone)
    assert together.tokens_per_second == pytest.approx(3 / together.seconds_per_token)
    with pytest.raises(SoftgapError, match="there are 3; use texts"):
        _ = together.text


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral"])
def test_the_bytes_are_those_of_the_caches(model_type: str) -> None:
    """Layers with a sliding window keep the same with and without a plan."""
    model = tiny_with(model_type, attn="eager", vocab_size=300)
    bounded = bounded_layers(model)
    heads = [(x.number, h) for x in attention_layers(model) if x.number not in bounded for h in range(x.heads)]
    plan = plan_of(model, heads or [(0, 0)], Substitute(resolve("window:w=3,sinks=1")))
    texts = ["A fox went out at night", "x"]
    rows = [ids_of(text)[0].tolist() for text in texts]
    steps: list[GenerationStep] = []
    made = generate(model, TOKENIZER, plan, texts, 8, chat=False, eos_token_id=None, listener=steps.append)
    original = DynamicCache(config=model.config)
    longest = max(map(len, rows))
    padded = torch.tensor([[2] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        model.generate(padded, attention_mask=mask, max_new_tokens=8, past_key_values=original, eos_token_id=None)
    assert made.original_bytes == cache_bytes(original)
    assert (made.cache_bytes < made.original_bytes) == bool(heads)
    assert [step.index for step in steps] == list(range(8))
    assert tuple(zip(*(step.token_ids for step in steps), strict=True)) == made.token_ids
    assert (steps[-1].cache_bytes, steps[-1].original_bytes) == (made.cache_bytes, made.original_bytes)
    assert steps[0].original_bytes < steps[-1].original_bytes or model_type == "mistral"
    assert sum(step.seconds for step in steps[1:]) / 7 == pytest.approx(made.seconds_per_token)
    assert steps[0].seconds == made.seconds_to_first


def test_a_plan_that_cannot_stream_keeps_all_keys_and_says_so() -> None:
    model, plan = planned("relu2_scores")
    ids = ids_of("A fox went out")
    with swap(model, FREED, "relu2_scores"):
        expected = model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :].tolist()
    made = generate(model, TOKENIZER, plan, "A fox went out", 6)
    assert list(made.token_ids[0]) == expected
    assert made.cache_bytes == made.original_bytes > 0
    assert made.smaller_from == math.inf
    assert made.sentence().startswith("The cache holds ")
    assert "as the original's, because mechanism 'relu2_scores' has no state of constant size" in made.sentence()


def test_sampling_follows_the_seed_and_leaves_the_global_state() -> None:
    model, plan = planned()
    before = torch.random.get_rng_state()
    first, again, other = (
        generate(model, TOKENIZER, plan, "A fox", 10, seed=seed, temperature=0.9) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.token_ids == again.token_ids != other.token_ids
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        tokens, _ = own_call(model, plan, "A fox", 10, do_sample=True, temperature=0.9)
    assert first.token_ids == (tuple(tokens),)


def test_a_row_ends_with_the_token_that_ended_it() -> None:
    model, plan = planned()
    whole = generate(model, TOKENIZER, plan, PROMPTS, 9, seed=1, eos_token_id=None).token_ids
    end = whole[0][3]
    assert end not in whole[0][:3]
    cut = generate(model, TOKENIZER, plan, PROMPTS, 9, seed=1, eos_token_id=end).token_ids
    assert cut[0] == whole[0][:4]
    assert cut == tuple(row[: row.index(end) + 1] if end in row else row for row in whole)


def test_it_stops_when_asked() -> None:
    model, plan = planned()
    steps: list[GenerationStep] = []
    made = generate(
        model, TOKENIZER, plan, PROMPTS, 40, eos_token_id=None, listener=steps.append, stop=lambda: len(steps) == 3
    )
    assert [len(row) for row in made.token_ids] == [3, 3, 3]
    one = generate(model, TOKENIZER, plan, "A fox", 1)
    assert math.isnan(one.seconds_per_token)
    assert math.isnan(one.tokens_per_second)
    assert "per second" not in one.sentence()


def test_a_folder_brings_its_plan(tmp_path: Path) -> None:
    model, plan = planned()
    expected = generate(model, TOKENIZER, plan, "A fox", 8)
    export_plan(model, plan, tmp_path / "planned", format="folder", tokenizer=TOKENIZER)
    loaded, tokenizer = softgap.load_model(tmp_path / "planned")
    attached = attached_plan(loaded)
    assert attached is not None
    for given in (None, attached):
        made = generate(loaded, tokenizer, given, "A fox", 8)
        assert (made.token_ids, made.cache_bytes) == (expected.token_ids, expected.cache_bytes)
    with pytest.raises(SoftgapError, match="a plan is attached to this model already, and another one was given"):
        generate(loaded, tokenizer, plan, "A fox", 8)
    detach(loaded)
    with pytest.raises(SoftgapError, match="plan=None takes the plan that is attached to the model, and none is"):
        generate(loaded, tokenizer, None, "A fox", 8)


def test_a_model_in_use_is_refused() -> None:
    model, plan = planned()
    attach(model, plan)

    def again(step: GenerationStep) -> None:
        generate(model, TOKENIZER, None, "A fox", 2)

    with pytest.raises(SoftgapError, match="the model is in use under its plan"):
        generate(model, TOKENIZER, None, "A fox", 2, listener=again)
    assert generate(model, TOKENIZER, None, "A fox", 2).cache_bytes > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"past_key_values": 1}, "makes past_key_values itself, got 1; leave it out"),
        ({"use_cache": False}, "makes use_cache itself, got False"),
        ({"num_beams": 3}, "follows greedy search and sampling, got beam search"),
        ({"num_return_sequences": 2, "seed": 1}, "num_return_sequences must be 1 under a plan, got 2; repeat"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number from 1, got 0"),
        ({"max_new_tokens": 600}, "the model's context is 512 tokens"),
        ({"chat": True}, "this tokenizer has no chat template"),
    ],
)
def test_bad_settings_get_a_sentence(settings: dict[str, Any], sentence: str) -> None:
    model, plan = planned()
    with pytest.raises(SoftgapError, match=sentence):
        generate(model, TOKENIZER, plan, "A fox", **{"max_new_tokens": 4, **settings})


def test_bad_plans_and_prompts_get_a_sentence() -> None:
    model, plan = planned()
    with pytest.raises(SoftgapError, match="the plan is for the model"):
        generate(tiny_llama(seed=1), TOKENIZER, plan, "A fox", 4)
    with pytest.raises(SoftgapError, match="at least one text is needed, got none"):
        generate(model, TOKENIZER, plan, [])
    with pytest.raises(SoftgapError, match="a prompt must hold some text"):
        generate(model, TOKENIZER, plan, ["A fox", " "])
    part = Plan("tiny", model_fingerprint(model), FREED[:1], (), (), Substitute(resolve("window:w=4,sinks=1,far=3")))
    with pytest.raises(SoftgapError, match="far keys need all query heads of a KV group"):
        generate(model, TOKENIZER, part, "A fox", 4)


def test_the_length_from_which_a_plan_saves() -> None:
    model, plan = planned("window:w=5,sinks=2")
    threshold = int(generate(model, TOKENIZER, plan, "A fox", 2).smaller_from)
    assert 7 <= threshold < 40
    for length, smaller in ((threshold - 1, False), (threshold, True)):
        with torch.no_grad(), apply(model, plan) as applied:
            cache, original = applied.cache(), DynamicCache(config=model.config)
            model(torch.full((1, length), 5), past_key_values=cache, use_cache=True)
        with torch.no_grad():
            model(torch.full((1, length), 5), past_key_values=original, use_cache=True)
        assert (cache_bytes(cache) < cache_bytes(original)) is smaller


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((2_000_000, 8_000_000, 30), "the cache holds 2.0 MB under the plan and 8.0 MB without it (25%)"),
        (
            (4096, 2048, 90),
            "the cache holds 4.1 kB under the plan, more than the 2.0 kB without it: it saves memory from 90 tokens on",
        ),
        ((4096, 2048, math.inf), "the cache holds 4.1 kB under the plan, more than the 2.0 kB without it"),
        ((0, 0, math.inf), "the cache holds 0.0 kB under the plan and 0.0 kB without it"),
    ],
)
def test_the_words_are_honest_about_short_texts(values: tuple[int, int, float], words: str) -> None:
    assert saving_words(*values) == words


def test_the_record_is_plain_data() -> None:
    model, plan = planned()
    made = generate(model, TOKENIZER, plan, PROMPTS[:2], 4)
    document = replace(made, seconds_per_token=0.5).to_json()
    assert document["tokens_per_second"] == 4.0
    assert [row["token_ids"] for row in document["continuations"]] == [list(row) for row in made.token_ids]
    assert document["cache_bytes"] == made.cache_bytes
    assert document["original_cache_bytes"] == made.original_bytes
    assert document["plan_cache"] is True
    assert document["sentence"].endswith("; the model wrote 4.0 tokens per second.")

"""A text that is read gives, for every head and query, what float64 loops give on the same tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from softgap.errors import ValueInputError
from softgap.probe import read, read_ids
from support import model_examples as examples
from support.probe_cases import (
    MEASURED,
    PAIR,
    SAME_MODEL,
    SAME_TENSORS,
    difference,
    expected,
    gap,
    ids_of,
    only,
    prompt_of,
    tiny_with,
    window_of,
)

# Groups of query heads, all or one of them per KV head; windows, mixed and everywhere; softcap; sinks; d_v != d.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("llama", "sdpa", {"num_key_value_heads": 1}),
    ("llama", "eager", {"num_key_value_heads": 1}),
    ("gpt2", "sdpa", {}),
    ("gpt2", "eager", {}),
    ("mistral", "sdpa", {"sliding_window": 5}),
    ("mistral", "eager", {"sliding_window": 5}),
    ("gemma2", "eager", {}),
    ("gpt_oss", "eager", {}),
    ("deepseek_v3", "sdpa", {}),
    ("deepseek_v3", "eager", {}),
    ("qwen2", "sdpa", {}),
    ("qwen2", "eager", {}),
]
NAMES = [f"{model_type}-{attn}{'-changed' if changes else ''}" for model_type, attn, changes in CASES]


@pytest.mark.parametrize(("model_type", "attn", "changes"), CASES, ids=NAMES)
def test_reading_equals_the_oracle(model_type: str, attn: str, changes: dict[str, Any]) -> None:
    model = tiny_with(model_type, attn=attn, **changes)
    ids = ids_of(37)
    truth = expected(model, ids)
    run = only(read_ids(model, [ids], mechanisms=MEASURED))
    assert gap(run, truth, slice(None)) < SAME_TENSORS
    assert run.mechanisms == MEASURED
    assert np.median(truth.quantities["divergence"][:2]) > 0.05, "the case is too easy to tell anything"
    assert difference(run.entropy, truth.entropy) < SAME_TENSORS
    assert difference(run.logprob[:-1], truth.logprob(ids[1:])) < SAME_TENSORS


def test_the_cases_are_what_they_claim() -> None:
    window = tiny_with("mistral", sliding_window=5).config
    mixed = tiny_with("gemma2", attn="eager").config
    sinks = dict(tiny_with("gpt_oss", attn="eager").named_parameters())["model.layers.0.self_attn.sinks"]
    latent = tiny_with("deepseek_v3").config
    assert [window_of(window, layer) for layer in range(2)] == [5, 5]
    assert [window_of(mixed, layer) for layer in range(4)] == [16, None, 16, None]
    assert mixed.attn_logit_softcapping is not None
    assert bool((sinks != 0).all())
    assert latent.v_head_dim != latent.qk_nope_head_dim + latent.qk_rope_head_dim


def test_a_text_has_one_step_per_query_and_the_last_predicts_nothing() -> None:
    model = tiny_with("llama")
    ids = ids_of(9)
    run = only(read_ids(model, [ids]))
    assert run.mechanisms == PAIR
    assert run.positions.tolist() == list(range(9))
    assert run.token_ids.tolist() == [*ids[1:], -1]
    assert np.isnan(run.logprob).tolist() == [False] * 8 + [True]
    assert not np.isnan(run.entropy).any()
    assert run.tokens == ("",) * 9
    assert run.prompt is None


@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 300])
def test_logits_in_blocks_are_those_of_the_whole_text(length: int) -> None:
    model = tiny_with("llama")
    ids = ids_of(length)
    truth = expected(model, ids)
    run = only(read_ids(model, [ids], mechanisms=MEASURED))
    assert difference(run.entropy, truth.entropy) < SAME_TENSORS
    assert difference(run.logprob[:-1], truth.logprob(ids[1:])) < SAME_TENSORS
    assert np.isnan(run.logprob[-1])
    assert gap(run, truth, slice(None)) < SAME_TENSORS


def test_a_completion_splits_the_queries_where_a_generation_would() -> None:
    model = tiny_with("llama")
    ids = ids_of(20)
    truth = expected(model, ids)
    run = only(read_ids(model, [ids[:13]], [ids[13:]], mechanisms=MEASURED))
    assert run.n_prompt == 13
    assert run.positions.tolist() == list(range(12, 19))
    assert run.token_ids.tolist() == ids[13:]
    assert gap(run, truth, slice(12, 19)) < SAME_TENSORS
    assert difference(run.logprob, truth.logprob(ids[13:], first=12)) < SAME_TENSORS
    assert prompt_of(run).positions.tolist() == list(range(12))
    assert prompt_of(run).token_ids.tolist() == ids[1:13]
    assert gap(prompt_of(run), truth, slice(0, 12)) < SAME_TENSORS
    assert difference(prompt_of(run).logprob, truth.logprob(ids[1:13])) < SAME_TENSORS


@pytest.mark.parametrize("model_type", ["llama", "mistral", "gpt2", "llama4_text"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_rows_padded_on_the_right_are_read_as_if_alone(model_type: str, attn: str) -> None:
    model = tiny_with(model_type, attn=attn)
    texts = [ids_of(30), ids_of(7, seed=1), ids_of(1, seed=2), ids_of(21, seed=3)]
    for run, ids in zip(read_ids(model, texts, mechanisms=MEASURED), texts, strict=True):
        alone = only(read_ids(model, [ids], mechanisms=MEASURED))
        assert run.positions.tolist() == alone.positions.tolist() == list(range(len(ids)))
        assert run.token_ids.tolist() == [*ids[1:], -1]
        assert difference(run.quantities["divergence"], alone.quantities["divergence"]) < SAME_MODEL
        assert difference(run.quantities["relative_l2"], alone.quantities["relative_l2"]) < SAME_MODEL
        assert difference(run.logprob, alone.logprob) < SAME_MODEL
        assert difference(run.entropy, alone.entropy) < SAME_MODEL


def test_completions_of_different_lengths_are_read_as_if_alone() -> None:
    model = tiny_with("llama")
    prompts, completions = [ids_of(5), ids_of(12, seed=1)], [ids_of(9, seed=2), ids_of(3, seed=3)]
    for run, p, c in zip(read_ids(model, prompts, completions, mechanisms=MEASURED), prompts, completions, strict=True):
        alone = only(read_ids(model, [p], [c], mechanisms=MEASURED))
        assert run.positions.tolist() == list(range(len(p) - 1, len(p) + len(c) - 1))
        assert run.token_ids.tolist() == c
        assert run.n_prompt == len(p)
        assert difference(run.quantities["norm_ratio"], alone.quantities["norm_ratio"]) < SAME_MODEL
        assert difference(run.logprob, alone.logprob) < SAME_MODEL
        assert prompt_of(run).positions.tolist() == prompt_of(alone).positions.tolist()


def test_reading_text_is_reading_its_tokens() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    text, more = "once upon", " a time"
    ids = tokenizer(text)["input_ids"]
    following = tokenizer(more, add_special_tokens=False)["input_ids"]
    whole = read(model, tokenizer, text)
    by_ids = only(read_ids(model, [ids], tokenizer=tokenizer, mechanisms=MEASURED))
    assert whole.tokens == by_ids.tokens == (*"nce upon", "")
    assert difference(whole.divergence, by_ids.divergence) == 0
    assert (whole.prompt_text, whole.completion_text) == ("", text)
    run = read(model, tokenizer, text, more)
    assert difference(run.divergence, only(read_ids(model, [ids], [following], mechanisms=MEASURED)).divergence) == 0
    assert run.tokens == tuple(more)
    assert (run.prompt_text, run.completion_text, run.n_prompt) == (text, more, len(ids))
    batch = read(model, tokenizer, [text, more])
    assert [r.completion_text for r in batch] == [text, more]
    assert run.manifest.options["mode"] == "replay"


def test_bad_texts_are_refused() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    with pytest.raises(ValueInputError, match="must hold some text, got '  '"):
        read(model, tokenizer, "  ")
    with pytest.raises(ValueInputError, match="at least one token, got none from ''"):
        read(model, tokenizer, "a", "")
    with pytest.raises(ValueInputError, match="must go together, got 2 and 1"):
        read(model, tokenizer, ["a", "b"], ["c"])
    with pytest.raises(ValueInputError, match="the model's context is 64 tokens, got 65 tokens"):
        read(model, tokenizer, "x" * 65)
    # The last token of a completion is never fed: 65 tokens fit, 66 do not.
    assert only(read_ids(model, [ids_of(40)], [ids_of(25)], mechanisms=MEASURED)).n_steps == 25
    with pytest.raises(ValueInputError, match="the model's context is 64 tokens, got 65 tokens"):
        read_ids(model, [ids_of(40)], [ids_of(26)], mechanisms=MEASURED)
    with pytest.raises(ValueInputError, match="at least one text"):
        read(model, tokenizer, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_instrument_is_float32_whatever_the_model(dtype: torch.dtype) -> None:
    model = tiny_with("llama", dtype=dtype)
    ids = ids_of(25)
    # The model's rounding is on both sides: the oracle sees the same half-precision tensors.
    assert gap(only(read_ids(model, [ids], mechanisms=MEASURED)), expected(model, ids), slice(None)) < SAME_TENSORS

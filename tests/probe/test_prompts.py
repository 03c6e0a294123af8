"""Prompts in any plain form give the same run, and what is none is refused with a sentence that says what to pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap.errors import SoftgapError
from softgap.probe.prompts import as_prompts
from support.model_examples import CHAT_TEMPLATE, byte_tokenizer, tiny_llama

TOKENIZER = byte_tokenizer()
MODEL = tiny_llama()
IDS = [int(token) for token in TOKENIZER("A fox went out")["input_ids"]]


def test_a_text_and_its_token_ids_are_read_alike() -> None:
    text = softgap.read(MODEL, TOKENIZER, "A fox went out", mechanisms="elu1")
    forms: tuple[Any, ...] = (IDS, tuple(IDS), torch.tensor(IDS), np.array(IDS))
    for ids in forms:
        run = softgap.read(MODEL, TOKENIZER, ids, mechanisms="elu1")
        assert np.array_equal(run.divergence, text.divergence)
        assert run.completion_text == "A fox went out"
    (batch,) = softgap.read(MODEL, TOKENIZER, [IDS])
    assert batch.mechanisms == ("elu1", "uniform")


def test_without_a_tokenizer_token_ids_are_enough() -> None:
    run = softgap.generate(MODEL, None, IDS, max_new_tokens=3)
    assert run.n_steps == 3
    assert (run.prompt_text, run.completion_text) == ("", "")
    same = softgap.generate(MODEL, TOKENIZER, "A fox went out", max_new_tokens=3, chat=False)
    assert np.array_equal(run.token_ids, same.token_ids)
    read = softgap.read(MODEL, None, IDS, completion=run.token_ids.tolist())
    assert np.allclose(read.divergence, run.divergence, atol=1e-5)


def test_messages_go_through_the_chat_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    messages = [{"role": "user", "content": "A fox"}]
    run = softgap.generate(MODEL, tokenizer, messages, max_new_tokens=2)
    same = softgap.generate(MODEL, tokenizer, "A fox", max_new_tokens=2)
    assert np.array_equal(run.divergence, same.divergence)
    assert run.prompt_text == "A fox"
    both: Any = [messages, "A fox"]
    first, second = softgap.generate(MODEL, tokenizer, both, max_new_tokens=2)
    assert (first.prompt_text, second.prompt_text) == ("A fox", "A fox")
    with pytest.raises(SoftgapError, match="a completion must be a text or token ids, got chat messages"):
        softgap.read(MODEL, tokenizer, "A fox", completion=both[0])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("smollm2-135m", TOKENIZER, "A"), "model must be a loaded model, got the name 'smollm2-135m'; load it first"),
        ((softgap, TOKENIZER, "A"), "the model comes first and its tokenizer second, got module and"),
        ((TOKENIZER, MODEL, "A"), "the model comes first and its tokenizer second, got"),
        (
            ((MODEL, TOKENIZER), None, "A"),
            "model must be a loaded model, got a tuple; softgap.load_model returns a pair",
        ),
        ((MODEL, "gpt2", "A"), "tokenizer must be the tokenizer of the model, or None for token ids, got 'gpt2'"),
        ((MODEL, None, "A"), "text needs a tokenizer, got None"),
        ((MODEL, TOKENIZER, 5), "a prompt must be a text, chat messages"),
        ((MODEL, TOKENIZER, b"A"), "a prompt must be a text, chat messages"),
        ((MODEL, TOKENIZER, {"input_ids": IDS}), r"a prompt must be .*; give its 'input_ids'"),
        ((MODEL, TOKENIZER, ["A", 5]), "a prompt must be .*, got 5 in a list"),
        ((MODEL, TOKENIZER, torch.tensor([IDS, IDS])), r"token ids in an array must be one row, got shape \[2, 14\]"),
        ((MODEL, TOKENIZER, [-1, 2]), "token ids must be whole numbers from 0 to"),
        ((MODEL, TOKENIZER, [10**6]), "token ids must be whole numbers from 0 to"),
        ((MODEL, TOKENIZER, [{"role": "user"}]), "a chat message must hold the texts 'role' and 'content', got"),
        ((MODEL, TOKENIZER, [{"role": "user", "content": "A"}]), "this tokenizer has no chat template"),
    ],
)
def test_what_is_no_prompt_is_refused(arguments: tuple[Any, ...], sentence: str) -> None:
    for function in (softgap.read, softgap.generate):
        with pytest.raises(SoftgapError, match=f"^{sentence}"):
            function(*arguments)


def test_one_prompt_and_a_list_of_one_are_told_apart() -> None:
    assert as_prompts([5, 7]) == (((5, 7),), True)
    assert as_prompts([[5, 7]]) == (((5, 7),), False)
    assert as_prompts([torch.tensor([5, 7])]) == (((5, 7),), False)
    assert as_prompts([]) == ((), False)

"""Sequences of a search begin with the tokenizer's first tokens, and with nothing where there are none."""

from __future__ import annotations

import pytest
import torch

from softgap.errors import ValueInputError
from softgap.linearize import recall_sequences, split_sequences
from softgap.linearize.candidates import split_text
from softgap.linearize.search import _RecallLists
from softgap.linearize.sequences import cut_sequences
from softgap.models.tokens import TokenStream, token_ids
from support.model_examples import byte_tokenizer, tiny_llama

PLAIN, WITH_FIRST = byte_tokenizer(), byte_tokenizer(first=True)
FIRST = WITH_FIRST.bos_token_id
TEXT = " ".join(f"Boat {i} left the harbour with {i * i % 97} barrels." for i in range(100))


def test_every_sequence_begins_with_the_first_token_and_no_text_is_lost() -> None:
    sequences = split_sequences(tiny_llama(), WITH_FIRST, [TEXT[:2000], TEXT[2000:]], length=64)
    ids = PLAIN(TEXT)["input_ids"]
    assert sequences.ids[:, 0].tolist() == [FIRST] * (len(ids) // 63)
    assert sequences.ids[:, 1:].flatten().tolist() == ids[: len(ids) // 63 * 63]
    assert bool(sequences.scored.all())


def test_a_tokenizer_without_first_tokens_cuts_the_bare_text() -> None:
    sequences = split_sequences(tiny_llama(), PLAIN, [TEXT], length=64)
    ids = PLAIN(TEXT)["input_ids"]
    assert sequences.ids.flatten().tolist() == ids[: len(ids) // 64 * 64]


def test_first_tokens_are_not_predicted() -> None:
    sequences = cut_sequences(tiny_llama(), TokenStream(tuple(range(5, 25)), (3, 4)), 6, 2)
    assert sequences.ids.tolist() == [[3, 4, 5, 6, 7, 8], [3, 4, 21, 22, 23, 24]]
    assert sequences.scored.tolist() == [[False, True, True, True, True]] * 2


def test_a_text_of_just_enough_tokens_is_enough() -> None:
    enough = "a" * (4 * 63)
    assert len(split_sequences(tiny_llama(), WITH_FIRST, [enough], length=64, fewest=4)) == 4
    with pytest.raises(ValueInputError, match="at least 252 tokens"):
        split_sequences(tiny_llama(), WITH_FIRST, [enough[1:]], length=64, fewest=4)


def test_recall_lists_begin_with_the_first_token_and_have_it_nowhere_else() -> None:
    model = tiny_llama(max_position_embeddings=1024)
    text = split_text(split_sequences(model, WITH_FIRST, [TEXT], length=64))
    lists = _RecallLists(model, WITH_FIRST, 3, 0, text, (100,)).fit()
    assert lists.ids[:, 0].tolist() == [FIRST] * 3
    assert not bool((lists.ids[:, 1:] == FIRST).any())
    bare = recall_sequences(model, PLAIN, 3, seed=5)
    assert torch.equal(recall_sequences(model, WITH_FIRST, 3, seed=5).ids[:, 1:], bare.ids)
    assert token_ids(WITH_FIRST, TEXT).first == (FIRST,)

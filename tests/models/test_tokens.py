"""Token streams: texts without the tokenizer's first tokens, and sequences that begin with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softgap.models.tokens import TokenStream, first_tokens, stream_of, token_ids
from support.model_examples import byte_tokenizer

PLAIN, WITH_FIRST = byte_tokenizer(), byte_tokenizer(first=True)
FIRST = WITH_FIRST.bos_token_id


def test_a_tokenizer_tells_its_first_tokens() -> None:
    assert first_tokens(PLAIN) == ()
    assert first_tokens(WITH_FIRST) == (FIRST,)


def test_texts_are_joined_without_first_tokens_between_them() -> None:
    stream = token_ids(WITH_FIRST, ["A fox", " went out."])
    assert stream.ids == token_ids(PLAIN, "A fox went out.").ids == tuple(PLAIN("A fox went out.")["input_ids"])
    assert FIRST not in stream


@pytest.mark.parametrize("tokenizer", [PLAIN, WITH_FIRST])
@given(start=st.integers(0, 12), length=st.integers(2, 8))
def test_a_sequence_is_what_the_tokenizer_makes_of_its_text(tokenizer: object, start: int, length: int) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    stream = token_ids(tokenizer, text)  # type: ignore[arg-type]
    part = text[start : start + stream.body(length)]
    assert list(stream.sequence(start, length)) == tokenizer(part)["input_ids"]  # type: ignore[operator]
    assert list(stream[start:].sequence(0, length)) == tokenizer(part)["input_ids"]  # type: ignore[operator]
    assert len(stream.sequence(start, length)) == length


def test_plain_token_ids_have_no_first_tokens() -> None:
    assert stream_of([5, 6, 7]).sequence(1, 2) == (6, 7)
    stream = TokenStream((5, 6), (1,))
    assert stream_of(stream) is stream

"""Tokens of texts, and the first tokens that a tokenizer puts before every text, such as ``<bos>``.

A model that was trained behind a first token uses it as its attention sink: gemma-3-270m loses two thirds of a nat per
token where it is missing. A text that is cut into sequences therefore gives it to every sequence, at its beginning
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

from softgap.inputs import as_items
from softgap.models.loading import Tokenizer

__all__ = ["TokenStream", "first_tokens", "stream_of", "token_ids"]


@dataclass(frozen=True)
class TokenStream(Sequence[int]):
    """The tokens of a text, and those that belong before every sequence that is cut from it.

    Attributes
    ----------
    ids
        The text, without first tokens. Its length, its items and its slices are the stream's own.
    first
        What every sequence begins with; empty where the tokenizer puts nothing before a text.
    """

    ids: tuple[int, ...]
    first: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> TokenStream: ...

    def __getitem__(self, at: int | slice) -> int | TokenStream:
        return TokenStream(self.ids[at], self.first) if isinstance(at, slice) else self.ids[at]

    def body(self, length: int) -> int:
        """Tokens of the text in a sequence of ``length`` tokens."""
        return length - len(self.first)

    def sequence(self, start: int, length: int) -> tuple[int, ...]:
        """The sequence of ``length`` tokens whose text begins at ``start``; shorter where the text ends."""
        return (*self.first, *self.ids[start : start + self.body(length)])


def stream_of(ids: Sequence[int]) -> TokenStream:
    """Token ids as a stream; plain ones have no first tokens."""
    return ids if isinstance(ids, TokenStream) else TokenStream(tuple(ids))


def token_ids(tokenizer: Tokenizer, texts: str | Sequence[str]) -> TokenStream:
    """The tokens of all texts, one behind the other, and the tokenizer's first tokens."""
    encoded = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in as_items(texts))
    return TokenStream(tuple(token for ids in encoded for token in ids), first_tokens(tokenizer))


def first_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that a tokenizer puts before every text; often none, or one."""
    whole = list(tokenizer("a")["input_ids"])
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    return tuple(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else ()

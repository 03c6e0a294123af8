"""Texts as rows of token ids: prompts and completions, whether they fit the model, and rows padded to one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from softgap.errors import ValueInputError

__all__ = ["check_lengths", "check_sinks", "completion_ids", "decoded", "pad_id", "padded", "prompt_ids", "uses_chat"]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool | None) -> list[int]:
    """Token ids of a prompt, in the tokenizer's chat template if asked for."""
    if not text.strip():
        raise ValueInputError(f"a prompt must hold some text, got {text!r}")
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueInputError("this tokenizer has no chat template; leave chat out")
    if uses_chat(tokenizer, chat):
        messages = [{"role": "user", "content": text}]
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    else:
        encoded = tokenizer(text, verbose=False)  # a text too long is refused in our own words
    ids = encoded["input_ids"]
    if not len(ids):
        raise ValueInputError(f"a prompt must hold at least one token, got none from {text!r}")
    return [int(token) for token in ids]


def completion_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a completion: no special tokens in front."""
    encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    ids = encoded["input_ids"]
    if not len(ids):
        raise ValueInputError(f"a completion must hold at least one token, got none from {text!r}")
    return [int(token) for token in ids]


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Whether a prompt goes into the chat template: as asked, or by default where the tokenizer has one."""
    return bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat


def check_lengths(model: PreTrainedModel, rows: Sequence[Sequence[int]], more: int) -> None:
    """Refuse rows of tokens that the model's context does not hold, ``more`` new ones included."""
    longest = max((len(row) for row in rows), default=0)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is not None and longest + more > context:
        asked = f"{longest} tokens" + (f" and {more} new ones" if more else "")
        raise ValueInputError(f"the model's context is {context} tokens, got {asked}; shorten the text")


def check_sinks(rows: Sequence[Sequence[int]], drop_sinks: int) -> None:
    """Refuse to drop all tokens of a row."""
    shortest = min((len(row) for row in rows), default=0)
    if drop_sinks and shortest <= drop_sinks:
        raise ValueInputError(f"drop_sinks must leave some text, got {drop_sinks} of {shortest} tokens; drop fewer")


def padded(
    rows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase | None, side: str, device: torch.device
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, "batch time"]]:
    """Rows as one tensor, padded on one side, with its mask."""
    if not rows:
        raise ValueInputError("at least one text is needed, got none")
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad_id(tokenizer))
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(length - len(row), None) if side == "left" else slice(0, len(row))
        ids[i, place] = torch.tensor(row)
        mask[i, place] = 1
    return ids.to(device), mask.to(device)


def pad_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The padding token, or any other: padding is masked everywhere."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    return 0


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones and padding (below 0) left out."""
    return str(tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=True))

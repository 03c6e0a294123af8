"""Prompts in any plain form (text, chat messages, token ids) as token ids, and what is refused on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from softgap.errors import ModelError, ValueInputError
from softgap.inputs import is_whole, shortened

__all__ = [
    "Prompt",
    "as_prompts",
    "check_loaded",
    "completion_ids",
    "decode_tokens",
    "is_ids",
    "pad_id",
    "prompt_ids",
    "prompt_text",
    "uses_chat",
]

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or the messages of a chat."""

_FORMS = "a text, chat messages ({'role': ..., 'content': ...}), token ids, or a list of these"


def check_loaded(model: Any, tokenizer: Any) -> None:
    """Refuse a name in the place of a model, and a model and its tokenizer that changed places."""
    if isinstance(model, str):
        raise ModelError(
            f"model must be a loaded model, got the name {shortened(model)}; load it first: "
            f"model, tokenizer = softgap.load_model({model!r})"
        )
    if isinstance(model, tuple):
        raise ModelError(
            "model must be a loaded model, got a tuple; softgap.load_model returns a pair: model, tokenizer = ..."
        )
    if isinstance(tokenizer, nn.Module) or not isinstance(model, nn.Module):
        raise ModelError(
            f"the model comes first and its tokenizer second, got {type(model).__name__} and "
            f"{type(tokenizer).__name__}; give (model, tokenizer, text)"
        )
    if tokenizer is not None and not callable(tokenizer):
        raise ValueInputError(
            f"tokenizer must be the tokenizer of the model, or None for token ids, got {shortened(tokenizer)}; "
            "softgap.load_model returns both"
        )


def as_prompts(given: Any) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts of an argument, and whether it was one alone, not a list.

    >>> as_prompts("A fox")
    (('A fox',), True)
    >>> as_prompts([5, 7])
    (((5, 7),), True)
    >>> as_prompts([[5, 7], "A fox"])
    (((5, 7), 'A fox'), False)
    """
    if isinstance(given, Tensor | np.ndarray):
        given = _from_array(given)
    if isinstance(given, str):
        return (given,), True
    if isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, bytes):
        hint = "; give its 'input_ids'" if isinstance(given, Mapping) and "input_ids" in given else ""
        raise ValueInputError(f"a prompt must be {_FORMS}, got {shortened(given)}{hint}")
    items: list[Any] = [
        item.tolist() if isinstance(item, Tensor | np.ndarray) and item.ndim == 1 else item for item in given
    ]
    if items and all(is_whole(item) for item in items):
        return (tuple(map(int, items)),), True
    if items and all(isinstance(item, Mapping) for item in items):
        return (items,), True
    for item in items:
        if not isinstance(item, str) and not _is_list_of(item, Mapping) and not _is_list_of(item, int):
            raise ValueInputError(f"a prompt must be {_FORMS}, got {shortened(item)} in a list")
    return tuple(item if isinstance(item, str) else tuple(item) for item in items), False


def _from_array(given: Any) -> list[Any]:
    if given.ndim == 2 and len(given) == 1:
        return [given[0].tolist()]
    if given.ndim != 1:
        raise ValueInputError(
            f"token ids in an array must be one row, got shape {list(given.shape)}; give a batch as a list of rows "
            "without padding"
        )
    ids: list[Any] = given.tolist()
    return ids


def _is_list_of(item: Any, kind: type) -> bool:
    inside = list(item) if isinstance(item, list | tuple) else []
    return bool(inside) and all(is_whole(each) if kind is int else isinstance(each, kind) for each in inside)


def is_ids(prompt: Prompt) -> bool:
    """Whether a prompt is token ids."""
    return not isinstance(prompt, str) and not isinstance(prompt[0], Mapping)


def prompt_ids(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt, chat: bool | None) -> list[int]:
    """Token ids of a prompt, in the tokenizer's chat template if asked for; ids stay as they are."""
    if is_ids(prompt):
        return _checked_ids(tokenizer, prompt, chat)
    if isinstance(prompt, str) and not prompt.strip():
        raise ValueInputError(f"a prompt must hold some text, got {prompt!r}")
    if tokenizer is None:
        raise ValueInputError(
            "text needs a tokenizer, got None; give the model's tokenizer, or token ids as the prompt"
        )
    messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not isinstance(prompt, str):
        _check_messages(messages, chat)
        chat = True
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueInputError("this tokenizer has no chat template; leave chat out, and give the prompt as text")
    if uses_chat(tokenizer, chat):
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    else:
        encoded = tokenizer(prompt, verbose=False)  # a text too long is refused in our own words
    ids = encoded["input_ids"]
    if not len(ids):
        raise ValueInputError(f"a prompt must hold at least one token, got none from {prompt!r}")
    return [int(token) for token in ids]


def _checked_ids(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[Any], chat: bool | None) -> list[int]:
    if chat:
        raise ValueInputError("token ids go to the model as they are, got them with chat=True; leave chat out")
    most = None if tokenizer is None else len(tokenizer)
    for token in ids:
        if not is_whole(token) or token < 0 or (most is not None and token >= most):
            allowed = "from 0" if most is None else f"from 0 to {most - 1}"
            raise ValueInputError(f"token ids must be whole numbers {allowed}, got {token!r}; correct it")
    return [int(token) for token in ids]


def _check_messages(messages: Sequence[Mapping[str, Any]], chat: bool | None) -> None:
    if chat is False:
        raise ValueInputError("chat messages need the chat template, got them with chat=False; leave chat out")
    for message in messages:
        if not {"role", "content"} <= set(message) or not isinstance(message["content"], str):
            raise ValueInputError(
                f"a chat message must hold the texts 'role' and 'content', got {shortened(dict(message))}; add them"
            )
    if not any(message["content"].strip() for message in messages):
        raise ValueInputError("chat messages must hold some text, got none; write something to read")


def prompt_text(tokenizer: PreTrainedTokenizerBase | None, prompt: Prompt) -> str:
    """The prompt as it is stored and shown; empty for token ids without a tokenizer."""
    if isinstance(prompt, str):
        return prompt
    first = prompt[0]
    if isinstance(first, Mapping):
        return "\n".join(str(message["content"]) for message in prompt)  # type: ignore[index]
    return "" if tokenizer is None else decode_tokens(tokenizer, [int(token) for token in prompt])  # type: ignore[arg-type]


def completion_ids(tokenizer: PreTrainedTokenizerBase | None, completion: Prompt) -> list[int]:
    """Token ids of a completion: no special tokens in front; ids stay as they are."""
    if is_ids(completion):
        return _checked_ids(tokenizer, completion, None)
    if not isinstance(completion, str):
        raise ValueInputError("a completion must be a text or token ids, got chat messages; give the answer's text")
    if tokenizer is None:
        raise ValueInputError(
            "text needs a tokenizer, got None; give the model's tokenizer, or token ids as the completion"
        )
    encoded: Any = tokenizer(completion, add_special_tokens=False, verbose=False)
    ids = encoded["input_ids"]
    if not len(ids):
        raise ValueInputError(f"a completion must hold at least one token, got none from {completion!r}")
    return [int(token) for token in ids]


def uses_chat(tokenizer: PreTrainedTokenizerBase | None, chat: bool | None) -> bool:
    """Whether a prompt goes into the chat template: as asked, or by default where the tokenizer has one."""
    return bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat


def pad_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The padding token, or any other: padding is masked everywhere."""
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(tokenizer, name, None)
        if isinstance(token, int):
            return token
    return 0


def decode_tokens(tokenizer: PreTrainedTokenizerBase | None, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones and padding (below 0) left out; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return str(tokenizer.decode([token for token in tokens if token >= 0], skip_special_tokens=True))

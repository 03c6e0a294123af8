"""Read the arguments of a model's forward and generate calls: tokens, padding, cache and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from softgap.errors import ModelError, UnsupportedError
from softgap.models.loading import Model

__all__ = [
    "by_name",
    "cache_length",
    "cached_keys",
    "fed_tokens",
    "generation_config",
    "grows_by_copies",
    "new_valid",
    "prompt_length",
    "row_lengths",
    "takes_positions",
]


def by_name(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments by the names that the function gives them."""
    if not args:
        return kwargs
    return {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}


def takes_positions(model: Model) -> bool:
    """Whether a model can be told where its tokens are."""
    return "position_ids" in inspect.signature(model.forward).parameters


def fed_tokens(arguments: dict[str, Any]) -> Int[Tensor, "batch time"]:
    """The tokens of a forward, -1 where it was given embeddings."""
    ids = arguments.get("input_ids")
    if ids is not None:
        # A copy: the caller's may be a view that keeps all earlier tokens alive.
        return ids.detach().clone()  # type: ignore[no-any-return]
    embeddings = arguments.get("inputs_embeds")
    if embeddings is None:
        raise ModelError("a recorded forward needs input_ids or inputs_embeds, got neither")
    # Embeddings have no token ids: -1 stands for a token that is not known.
    return torch.full(embeddings.shape[:2], -1, dtype=torch.long, device=embeddings.device)


def new_valid(attention_mask: object, n: int, cached: int) -> Bool[Tensor, "batch time"] | None:
    """Which tokens are no padding, where the caller's mask says so: all of them, or at least the n newest."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return None
    return (attention_mask if attention_mask.shape[1] == cached + n else attention_mask[:, -n:]).bool()


def cache_length(cache: object) -> int:
    """Positions a cache holds; 0 for none, or where it cannot tell."""
    count = getattr(cache, "get_seq_length", None)
    return int(count()) if callable(count) else 0


def cached_keys(cache: object) -> object:
    """The tensor that a cache keeps its first layer's keys in, where it has one: another one once it was reordered."""
    for layer in getattr(cache, "layers", ()):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor):
            return keys
    return None


def grows_by_copies(cache: object) -> bool:
    """Whether a cache never writes to a tensor it has handed out: the plain dynamic cache, which concatenates."""
    if type(cache) is not DynamicCache or cache.offloading:
        return False
    return all(type(layer) is DynamicLayer for layer in cache.layers)


def prompt_length(arguments: dict[str, Any]) -> int:
    """Tokens of the prompt, those in a cache included: the mask counts them where only new tokens are given."""
    lengths = [
        int(value.shape[1])
        for value in (arguments.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "attention_mask"))
        if isinstance(value, Tensor) and value.dim() >= 2
    ]
    return max(lengths, default=1)  # nothing given: the model begins with its own first token


def generation_config(model: Any, arguments: dict[str, Any]) -> Any:
    """The settings this generation will use, refused where one step is not one token of one sequence."""
    named = inspect.signature(type(model).generate).parameters
    settings = {key: value for key, value in arguments.items() if key not in named}
    config, _ = model._prepare_generation_config(arguments.get("generation_config"), **settings)
    mode = str(config.get_generation_mode(arguments.get("assistant_model")).value).replace("_", " ")
    if arguments.get("custom_generate") is not None:
        mode = "a custom generation"
    elif config.guidance_scale not in (None, 1):
        mode = "classifier-free guidance"
    if mode not in ("greedy search", "sample"):
        raise UnsupportedError(
            f"live recording follows greedy search and sampling, got {mode}; generate without recording, then replay "
            "the text with softgap.read"
        )
    if config.use_cache is False:
        raise UnsupportedError(
            "recording a generation needs the KV cache, got use_cache=False; leave it on, or generate without "
            "recording and then replay the text with softgap.read"
        )
    return config


def row_lengths(new: Int[Tensor, "batch time"], config: Any, arguments: dict[str, Any], otherwise: int) -> list[int]:
    """New tokens of each row up to where it stopped; ``otherwise`` for a row that did not."""
    lengths = [otherwise] * len(new)
    if config.eos_token_id is None:
        return lengths
    ends = torch.as_tensor(config.eos_token_id, device=new.device).reshape(-1)
    criteria = bool(config.stop_strings or arguments.get("stopping_criteria"))
    for i, tokens in enumerate(new):
        stops, not_padding = torch.isin(tokens, ends), tokens != config.pad_token_id
        if bool(stops.any()):
            lengths[i] = int(stops.int().argmax()) + 1
        elif criteria and bool(not_padding.any()) and not bool(not_padding[-1]):
            # A row that a criterion stopped has no mark of its own, only padding behind it.
            lengths[i] = int(not_padding.nonzero()[-1]) + 1
    return lengths

"""Tap a model: its attention, by an override of the attention function it uses, and the arguments of its calls.

transformers looks its attention function up by name in a registry at every call. While a model is tapped, the entry of
the name it uses is replaced by a dispatcher that computes the model's own attention first and then shows queries, keys,
values and output to whoever listens to that very module. The name stays, so masks and every branch on the name stay as
they were; other models pass through untouched; the entry is put back when the last tap goes.

A tap observes (``observe_attention``) or returns another output (``replace_attention``). All replacements come
first, in the order in which they were entered, and then all listeners: a listener sees what the model really passes
on, whichever of the two blocks is inside the other.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from softgap.attention import ScoreRule
from softgap.errors import ModelError, UnsupportedError
from softgap.models.loading import Model
from softgap.models.support import attention_modules, check_measurable, check_tappable

__all__ = [
    "AttentionCall",
    "by_name",
    "cache_length",
    "cached_keys",
    "fed_tokens",
    "generation_config",
    "grows_by_copies",
    "new_valid",
    "observe_attention",
    "overridden_names",
    "override_attention",
    "prepared_config",
    "prompt_length",
    "replace_attention",
    "row_lengths",
    "second_thread",
    "takes_positions",
]


class AttentionCall(NamedTuple):
    """One call of a model's attention: what went in, and what comes out (the model's own, unless it is replaced).

    Shapes: query ``[batch, head, query, dim]``, key and value ``[batch, kv_head, key, dim]`` after the cache update,
    output ``[batch, query, head, value_dim]``.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    output: Tensor

    @property
    def scale(self) -> float:
        """The scaling the model passes, or the usual one."""
        scaling = self.options.get("scaling")
        return float(self.query.shape[-1] ** -0.5 if scaling is None else scaling)

    @property
    def rule(self) -> ScoreRule:
        """What the model does to its scores, for exact softmax on some of its keys."""
        sinks = self.options.get("s_aux")
        return ScoreRule(self.options.get("softcap"), None if sinks is None else sinks.detach().reshape(1, -1))

    @property
    def is_causal(self) -> bool:
        """Whether the model means causal attention where it passes no mask."""
        is_causal = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if is_causal is None else is_causal)


Listener = Callable[[AttentionCall], None]


Replacer = Callable[[AttentionCall], Tensor]


Attention = Callable[..., tuple[Tensor, Tensor | None]]


# Given the model's own attention function and its arguments: a result in its place, or None to let it run.
Stand = Callable[..., tuple[Tensor, Tensor | None] | None]


@dataclass(frozen=True, eq=False)
class _Tap:
    """One reader of a model's attention; while the last one entered is ``alone``, the others are not called."""

    listen: Listener | None = None
    replace: Replacer | None = None
    stand: Stand | None = None
    alone: bool = False
    thread: threading.Thread = field(default_factory=threading.current_thread)


@dataclass
class _Override:
    """One replaced registry entry, with what a user had put there before, and how many taps need it."""

    registry: AttentionInterface
    name: str
    previous: Attention | None
    ours: Attention
    taps: int = 0


_lock = threading.RLock()


_taps: dict[int, tuple[_Tap, ...]] = {}


_overrides: dict[tuple[int, str], _Override] = {}


@contextmanager
def observe_attention(
    model: PreTrainedModel, listener: Listener, *, alone: bool = False, allow_dropout: bool = False
) -> Iterator[None]:
    """Show every attention call of this model to the listener, for as long as the block runs.

    ``alone`` hides the calls of the block from every other tap of this model, replacements included. Such a listener
    looks at shapes and places, so the model may be in training mode, as it may with ``allow_dropout``.
    """
    if not alone:
        check_measurable(model, allow_dropout=allow_dropout)
    with _attach(model, _Tap(listen=listener, alone=alone)):
        yield


@contextmanager
def replace_attention(model: PreTrainedModel, replace: Replacer) -> Iterator[None]:
    """Let the model go on with what ``replace`` returns for each of its attention calls, while the block runs.

    The result has the shape and dtype of ``call.output``, which must not be written to. Each replacement is shown the
    output of those entered before it, so the last one entered has the last word.
    """
    with _attach(model, _Tap(replace=replace)):
        yield


@contextmanager
def override_attention(model: PreTrainedModel, stand: Stand) -> Iterator[None]:
    """Ask ``stand(original, module, query, key, value, *args, **kwargs)`` before the model's own attention runs.

    Where it gives a result, the model's attention is not computed. There are no keys then to show to a listener, and no
    softmax output for a second replacement to start from: both are refused. The one replacement that may be there is
    what the stand computes in its own way.
    """
    with _attach(model, _Tap(stand=stand)):
        yield


@contextmanager
def _attach(model: PreTrainedModel, tap: _Tap) -> Iterator[None]:
    check_tappable(model)
    entries = attention_modules(model)
    # Keyed by identity: no two live modules share an id, and the entries keep these alive.
    modules = {id(entry.module) for entry in entries}
    targets = {
        (id(entry.registry), name): (entry.registry, name)
        for entry in entries
        for name in (getattr(entry.module, "config", model.config)._attn_implementation,)
    }
    with _lock:
        if tap.listen is not None:
            _refuse_second_thread(other for module in modules for other in _taps.get(module, ()))
        for key, (registry, name) in targets.items():
            _acquire(key, registry, name)
        for module in modules:
            _taps[module] = (*_taps.get(module, ()), tap)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                remaining = tuple(other for other in _taps[module] if other is not tap)
                if remaining:
                    _taps[module] = remaining
                else:
                    del _taps[module]
            for key in targets:
                _release(key)


def _refuse_second_thread(taps: Iterable[_Tap]) -> None:
    """A listener sees the calls of every thread, so two threads cannot listen to one model."""
    for tap in taps:
        if tap.listen is not None and tap.thread is not threading.current_thread() and tap.thread.is_alive():
            raise second_thread(tap.thread)


def second_thread(first: threading.Thread) -> UnsupportedError:
    """The error for a thread that measures a model which another thread is measuring."""
    return UnsupportedError(
        f"one thread at a time may measure a model, but the thread '{first.name}' is measuring this one; wait until it "
        "has ended, or load the model once for each thread"
    )


def overridden_names() -> tuple[str, ...]:
    """Names of the registry entries that are overridden now; empty when nothing is tapped."""
    return tuple(override.name for override in _overrides.values())


def _acquire(key: tuple[int, str], registry: AttentionInterface, name: str) -> None:
    override = _overrides.get(key)
    if override is None:
        local: dict[str, Attention] = registry._local_mapping
        previous = local.get(name)
        ours = registry[name] = _dispatcher(registry, name, previous)
        override = _overrides[key] = _Override(registry, name, previous, ours)
    override.taps += 1


def _release(key: tuple[int, str]) -> None:
    override = _overrides[key]
    override.taps -= 1
    if override.taps:
        return
    del _overrides[key]
    local: dict[str, Attention] = override.registry._local_mapping
    if local.get(override.name) is not override.ours:
        return  # somebody registered another function meanwhile: theirs to keep
    if override.previous is None:
        del override.registry[override.name]
    else:
        override.registry[override.name] = override.previous


def _dispatcher(registry: AttentionInterface, name: str, previous: Attention | None) -> Attention:
    # "eager" is in no registry: each model file has its own.
    shared = previous or type(registry)._global_mapping.get(name)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        original = shared or _eager_of(module)
        taps = _taps.get(id(module), ())
        if taps and taps[-1].alone:
            taps = taps[-1:]
        for tap in taps:
            if tap.stand is not None:
                instead = tap.stand(original, module, query, key, value, *args, **kwargs)
                if instead is not None:
                    _refuse_company(taps)
                    return instead
        result = original(module, query, key, value, *args, **kwargs)
        if not taps:
            return result
        mask = args[0] if args else kwargs.get("attention_mask")
        call = AttentionCall(module, query, key, value, mask, kwargs, result[0])
        for tap in taps:
            if tap.replace is not None:
                call = call._replace(output=tap.replace(call))
        for tap in taps:
            if tap.listen is not None:
                tap.listen(call)
        return result if call.output is result[0] else (call.output, result[1])

    return attention


def _refuse_company(taps: tuple[_Tap, ...]) -> None:
    """Refuse readers of a call that a state of constant size answered."""
    if any(tap.listen is not None for tap in taps):
        raise UnsupportedError(
            "a recording cannot see layers that a plan's cache computes from a state of constant size, which keeps no "
            "keys; generate without the plan's cache while recording, or read the text afterwards with softgap.read"
        )
    if sum(tap.replace is not None for tap in taps) > 1:
        raise UnsupportedError(
            "heads cannot be swapped a second time in layers that a plan's cache computes from a state of constant "
            "size; generate without the plan's cache, or put all heads into one plan"
        )


def _eager_of(module: nn.Module) -> Attention:
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            eager: Attention = function
            return eager
    raise ModelError(f"'{type(module).__name__}' has no eager attention of its own; use attn='sdpa'")


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
    config, mode = prepared_config(model, arguments)
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


def prepared_config(model: Any, arguments: dict[str, Any]) -> tuple[Any, str]:
    """The settings that a ``generate`` with these arguments will use, and how it chooses tokens, in words."""
    named = inspect.signature(type(model).generate).parameters
    settings = {key: value for key, value in arguments.items() if key not in named}
    config, _ = model._prepare_generation_config(arguments.get("generation_config"), **settings)
    mode = str(config.get_generation_mode(arguments.get("assistant_model")).value).replace("_", " ")
    if arguments.get("custom_generate") is not None:
        mode = "a custom generation"
    elif config.guidance_scale not in (None, 1):
        mode = "classifier-free guidance"
    return config, mode


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

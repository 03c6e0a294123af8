"""Tap the attention of a model by an override of the attention function that it already uses.

transformers looks its attention function up by name in a registry at every call. While a model is tapped, the entry of
the name it uses is replaced by a dispatcher that computes the model's own attention first and then shows queries, keys,
values and output to whoever listens to that very module. The name stays, so masks and every branch on the name stay as
they were; other models pass through untouched; the entry is put back when the last tap goes.

A tap observes (``observe_attention``) or returns another output (``replace_attention``). All replacements come
first, in the order in which they were entered, and then all listeners: a listener sees what the model really passes
on, whichever of the two blocks is inside the other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from softgap.errors import ModelError, UnsupportedError
from softgap.models.support import attention_modules, check_measurable, check_tappable

__all__ = ["AttentionCall", "observe_attention", "overridden_names", "override_attention", "replace_attention"]


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
def observe_attention(model: PreTrainedModel, listener: Listener, *, alone: bool = False) -> Iterator[None]:
    """Show every attention call of this model to the listener, for as long as the block runs.

    ``alone`` hides the calls of the block from every other tap of this model, replacements included. Such a listener
    looks at shapes and places, so only then may the model be in training mode.
    """
    if not alone:
        check_measurable(model)
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

"""The one seam into models: an override of the attention function that a model already uses.

transformers looks its attention function up by name in a registry at every call. While a model is tapped, the entry of
the name it uses is replaced by a dispatcher that computes the model's own attention first and then shows queries, keys,
values and output to whoever listens to that very module. The name stays, so masks and every branch on the name stay as
they were; other models pass through untouched; the entry is put back when the last tap goes.
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

from softgap.errors import ModelError
from softgap.probe.support import attention_modules, check_tappable

__all__ = ["AttentionCall", "overridden_names", "tapped"]


class AttentionCall(NamedTuple):
    """One call of a model's attention: what went in, and what the model itself made of it.

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
        given = self.options.get("scaling")
        return float(self.query.shape[-1] ** -0.5 if given is None else given)

    @property
    def is_causal(self) -> bool:
        """Whether the model means causal attention where it passes no mask."""
        given = self.options.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if given is None else given)


Listener = Callable[[AttentionCall], None]
Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass
class _Override:
    """One replaced registry entry, with what a user had put there before, and how many taps need it."""

    registry: AttentionInterface
    name: str
    previous: Attention | None
    ours: Attention
    taps: int = 0


_lock = threading.RLock()
_listeners: dict[int, tuple[Listener, ...]] = {}
_overrides: dict[tuple[int, str], _Override] = {}


@contextmanager
def tapped(model: PreTrainedModel, listener: Listener) -> Iterator[None]:
    """Show every attention call of this model to the listener, for as long as the block runs."""
    check_tappable(model)
    entries = attention_modules(model)
    # Keyed by identity: no two live modules share an id, and the entries keep these alive.
    modules = {id(entry.module) for entry in entries}
    wanted = {
        (id(entry.registry), name): (entry.registry, name)
        for entry in entries
        for name in (getattr(entry.module, "config", model.config)._attn_implementation,)
    }
    with _lock:
        for key, (registry, name) in wanted.items():
            _acquire(key, registry, name)
        for module in modules:
            _listeners[module] = (*_listeners.get(module, ()), listener)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                remaining = tuple(other for other in _listeners[module] if other is not listener)
                if remaining:
                    _listeners[module] = remaining
                else:
                    del _listeners[module]
            for key in wanted:
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
        result = original(module, query, key, value, *args, **kwargs)
        for listener in _listeners.get(id(module), ()):
            mask = args[0] if args else kwargs.get("attention_mask")
            listener(AttentionCall(module, query, key, value, mask, kwargs, result[0]))
        return result

    return attention


def _eager_of(module: nn.Module) -> Attention:
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            eager: Attention = function
            return eager
    raise ModelError(f"'{type(module).__name__}' has no eager attention of its own; use attn='sdpa'")

"""A KV cache that stores some KV heads and keeps a recurrent state for the others.

A model updates its cache before its attention runs, so replacing attention alone frees no memory. A layer of this cache
keeps the columns of the KV heads that stay, and hands the newest keys and values of all to whoever computes the
attention of the freed ones, once: they are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from softgap.errors import UnsupportedError

__all__ = ["StateLayer", "bounded_layers", "cache_bytes", "state_cache"]


class StateLayer(DynamicLayer):
    """One layer: the keys and values of the kept KV heads, and the newest ones of all.

    Attributes
    ----------
    kept, freed
        KV heads, in order.
    fresh
        Newest keys and values of all heads, until they are taken.
    state
        Whatever computes the freed heads keeps it here, so that it lives and dies with the cache.
    closed
        Whether nobody computes the freed heads any more.
    """

    is_croppable = False

    def __init__(self, remaining: Sequence[int], freed: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.remaining, self.freed = tuple(remaining), tuple(freed)
        self.fresh: tuple[Tensor, Tensor] | None = None
        self.state: Any = None
        self.length = 0
        self.closed = False
        self._indices: dict[torch.device, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the columns of the kept heads; all keys and values of those are returned."""
        if self.closed:
            raise UnsupportedError(
                "this cache belongs to a plan that is not applied any more; use it inside the block of its apply()"
            )
        self.length += key_states.shape[2]
        self.fresh = (key_states, value_states)
        if not self.remaining:
            # No heads, as long as the text.
            return tuple(x.new_empty(x.shape[0], 0, self.length, x.shape[3]) for x in self.fresh)  # type: ignore[return-value]
        remaining = self._indices.get(key_states.device)
        if remaining is None:
            remaining = torch.tensor(self.remaining, dtype=torch.long, device=key_states.device)
            self._indices[key_states.device] = remaining
        keys_and_values: tuple[Tensor, Tensor] = super().update(
            key_states.index_select(1, remaining), value_states.index_select(1, remaining)
        )
        return keys_and_values

    def take(self) -> tuple[Tensor, Tensor] | None:
        """The newest keys and values of all heads, if they were not taken yet."""
        fresh, self.fresh = self.fresh, None
        return fresh

    def get_seq_length(self) -> int:
        """Positions seen, whatever is kept of them."""
        return self.length

    def reset(self) -> None:
        """Forget everything."""
        self.keys, self.values, self.is_initialized = None, None, False
        self.fresh, self.state, self.length = None, None, 0

    def crop(self, max_length: int) -> None:
        """A state cannot forget its newest keys."""
        raise UnsupportedError(
            "a state of freed heads cannot be shortened, as assisted decoding asks; generate without an assistant"
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """States are not reordered."""
        raise UnsupportedError("a cache with states of freed heads cannot follow beam search; use num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """States are not copied for several continuations."""
        raise UnsupportedError("a cache with states of freed heads serves one continuation a prompt; repeat the prompt")

    def batch_select_indices(self, indices: Tensor) -> None:
        """States are not picked."""
        self.reorder_cache(indices)


def state_cache(model: PreTrainedModel, freed: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> Cache:
    """A dynamic cache whose layers named by index keep some KV heads only: index -> (kept, freed)."""
    cache = DynamicCache(config=model.config)
    for index, (remaining, gone) in freed.items():
        while len(cache.layers) <= index:
            cache.layers.append(DynamicLayer())
        cache.layers[index] = StateLayer(remaining, gone)
    return cache


def bounded_layers(model: PreTrainedModel) -> set[int]:
    """Indices of layers whose cache does not grow with the text, such as sliding windows: freeing it saves nothing."""
    layers = DynamicCache(config=model.config).layers
    return {index for index, layer in enumerate(layers) if type(layer) is not DynamicLayer}


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys, values and states that a cache holds."""
    total = 0
    for layer in cache.layers:
        tensors = (x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None)
        total += sum(int(x.nbytes) for x in tensors) + int(getattr(getattr(layer, "state", None), "nbytes", 0))
    return total

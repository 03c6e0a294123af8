"""A reference for swapped heads that shares nothing with the swap but the float64 loops of the attention reference.

An override of our own lets the model compute its attention and then writes over the outputs of single heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from softgap.attention import Mechanism, mechanisms, resolve
from softgap.attention.reference import reference_attention
from softgap.models.support import attention_modules
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, observe_attention
from support.model_examples import tiny_llama
from support.probe_cases import ids_of, row

Heads = Sequence[tuple[int, int]]
Swaps = Sequence[tuple[Heads, Mechanism]]

# Two computations in float64: the model's own and ours.
DOUBLE = 1e-9
# Two computations of one model in float32.
SINGLE = 1e-4


WINDOW: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 5}}
IDS = row(ids_of(13))
PAIR = [(0, 1), (1, 0), (1, 1), (1, 3)]  # of 4 heads in 2 KV groups: in layer 1 two of one group and one of the other


def sharp_llama(**settings: Any) -> Any:
    """A tiny Llama in float64 whose weights are large enough that a swapped head matters."""
    model = tiny_llama(**settings).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.dim() < 2 else 2.5)
    return model


def some_heads(model: Any) -> list[tuple[int, int]]:
    """One head of the first layer, and all but one of the last: more of one KV group than of another."""
    first, last = attention_layers(model)[0], attention_layers(model)[-1]
    return [(first.number, 1), *((last.number, head) for head in range(last.heads) if head != 1)]


def attention_registries(model: Any) -> tuple[AttentionInterface, ...]:
    """The distinct registries this model's attention is looked up in; Doge, for one, has its own."""
    return tuple({id(entry.registry): entry.registry for entry in attention_modules(model)}.values())


@contextmanager
def edited(model: Any, swaps: Swaps, queries: Callable[[int], bool] = lambda t: True) -> Iterator[None]:
    """Forwards without a cache in which the outputs of some heads are written over, one head and query at a time.

    Parameters of a mechanism are ``[layer, head, ...]``, their rows in the order in which the layers are called.
    """
    (registry,) = attention_registries(model)
    name = str(model.config._attn_implementation)
    shared = type(registry)._global_mapping.get(name)
    order: list[int] = []

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Any = None, *args: Any, **options: Any
    ) -> Any:
        original: Callable[..., Any] = shared or sys.modules[type(module).__module__].eager_attention_forward
        output, weights = original(module, q, k, v, attention_mask, *args, **options)
        if id(module) not in order:
            order.append(id(module))
        row = order.index(id(module))
        number = row if getattr(module, "layer_idx", None) is None else module.layer_idx
        output = output.clone()
        seen = seen_by(attention_mask, q, k)
        for heads, mechanism in swaps:
            mine = [head for layer, head in heads if layer == number]
            if not mine:
                continue
            scale = options.get("scaling") or q.shape[-1] ** -0.5
            truth = reference_attention(mechanism.for_layers([row]), q, k, v, seen, scale=scale, offset=0)
            for head in mine:
                for t in filter(queries, range(q.shape[2])):
                    output[:, t, head] = truth[:, head, t].to(output.dtype)
        return output, weights

    registry[name] = attention
    try:
        yield
    finally:
        del registry[name]


def seen_by(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor:
    """What each query sees, by the mask that the model hands over."""
    batch, heads, n, _ = q.shape
    if mask is None:
        seen = torch.ones(n, k.shape[2], dtype=torch.bool).tril()[None, None]
    else:
        seen = mask if mask.dtype == torch.bool else mask > -1e4
    return seen[..., : k.shape[2]].expand(batch, heads, n, k.shape[2])


def logits_of(model: Any, ids: Tensor, **settings: Any) -> Tensor:
    """Logits of a forward without a cache and without gradients."""
    with torch.no_grad():
        found: Tensor = model(ids, use_cache=False, **settings).logits
    return found


def calls_of(model: Any, ids: Tensor, **settings: Any) -> list[AttentionCall]:
    """What passes the seam in one forward."""
    calls: list[AttentionCall] = []
    with observe_attention(model, calls.append):
        logits_of(model, ids, **settings)
    return calls


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the size of b; infinite where one of them is no number."""
    worst = float((a.double() - b.double()).abs().max())
    return worst / max(1.0, float(b.double().abs().max())) if worst == worst else float("inf")


def ready_for(model: Any, name: str) -> Mechanism:
    """A mechanism by name, with the model's context where it needs one."""
    found = resolve(name)
    return found.configure(context=model.config.max_position_embeddings) if "context" in found.options else found


def with_random_parameters(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    *,
    key_maps: int | None = None,
    seed: int = 5,
) -> Mechanism:
    """A mechanism that lives on parameters, with random ones; ``key_maps`` of them per layer, or one per KV head."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) * 0.4

    keys, features = key_maps or kv_heads, 5
    parameters = {
        "fitted": lambda: {
            "query_weight": random(layers, heads, features, dim),
            "query_bias": random(layers, heads, features),
            "key_weight": random(layers, keys, features, dim),
            "key_bias": random(layers, keys, features),
            "rate": random(layers, keys, features).abs(),
        },
        "profile": lambda: {"first": random(layers, heads).abs(), "by_distance": random(layers, heads, 6).abs()},
        "constant": lambda: {"mean": random(layers, heads, value_dim)},
    }
    return mechanisms()[name].with_parameters(**parameters[name]())

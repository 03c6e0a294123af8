"""Which attention layers a model has, and with how many heads: seen in a forward over two tokens.

Configurations name these numbers in many ways, some give every layer its own, and a module may be called twice or never
(cross-attention without an encoder). What the model calls is what counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from softgap.errors import ModelError
from softgap.probe.support import attention_modules, check_tappable
from softgap.probe.tap import AttentionCall, tapped

__all__ = ["AttentionLayer", "attention_layers", "layer_numbers"]

TOKENS = (0, 1)


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """One of the attention calls that every forward of a model makes.

    Attributes
    ----------
    number
        What the layer is called, as in ``Trajectories.layers``.
    index
        Its place in the order of the calls: the row of a mechanism's parameters that is for it.
    shared
        Whether one forward calls its module more than once, so that the module does not tell the layer.
    """

    number: int
    index: int
    module: nn.Module
    heads: int
    kv_heads: int
    shared: bool


Seen = tuple[nn.Module, int, int]
_known: WeakKeyDictionary[PreTrainedModel, tuple[list[int], tuple[AttentionLayer, ...]]] = WeakKeyDictionary()


def attention_layers(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model in the order of their calls.

    The first time, the model reads two tokens for it, unseen by recordings and by hooks on the model itself.
    """
    check_tappable(model)
    modules = [id(entry.module) for entry in attention_modules(model)]
    # The layers keep their modules alive, so a module that was exchanged since has another id.
    if model not in _known or _known[model][0] != modules:
        _known[model] = (modules, _laid_out(_calls(model)))
    return _known[model][1]


def layer_numbers(layer_ids: Sequence[int | None]) -> tuple[int, ...]:
    """What layers are called: by their own index, or in the order of the calls where some share one or have none."""
    known = [layer for layer in layer_ids if layer is not None]
    ordered = len(known) == len(layer_ids) and all(a < b for a, b in zip([-1, *known], known, strict=False))
    return tuple(known) if ordered else tuple(range(len(layer_ids)))


def _calls(model: PreTrainedModel) -> list[Seen]:
    seen: list[Seen] = []

    def note(call: AttentionCall) -> None:
        if call.query.shape[2] != len(TOKENS):
            raise ModelError(
                f"'{type(call.module).__name__}' attends with {call.query.shape[2]} queries where {len(TOKENS)} tokens "
                "were fed: its positions are not tokens, so the heads of this model type cannot be told"
            )
        seen.append((call.module, call.query.shape[1], call.key.shape[1]))

    # Dropout draws random numbers, where the model is in training.
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), tapped(model, note, alone=True):
        model.forward(input_ids=torch.tensor([TOKENS], device=model.device), use_cache=False)
    if not seen:
        raise ModelError(f"model type '{model.config.model_type}' made no attention call that the tap could see")
    return seen


def _laid_out(seen: Sequence[Seen]) -> tuple[AttentionLayer, ...]:
    numbers = layer_numbers([getattr(module, "layer_idx", None) for module, _, _ in seen])
    modules = [id(module) for module, _, _ in seen]
    return tuple(
        AttentionLayer(numbers[index], index, module, heads, kv_heads, modules.count(id(module)) > 1)
        for index, (module, heads, kv_heads) in enumerate(seen)
    )

"""The attention layers of a model: their heads, the rotary embedding of each, and their tensors on one text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from softgap.attention import ScoreRule, Visible
from softgap.attention.rotary import Layout, Rotation
from softgap.errors import ModelError, ValueInputError
from softgap.models.placement import input_device, random_devices, weight_of
from softgap.models.support import attention_modules, check_tappable, context_length, layer_numbers
from softgap.probe.tap import AttentionCall, observe_attention
from softgap.probe.token_scores import forward_then_logits
from softgap.probe.visibility import VisibleSets

__all__ = [
    "AttentionLayer",
    "LayerTensors",
    "attention_layers",
    "head_dim",
    "layer_rotations",
    "output_weight",
    "visit_layers",
]


PROBE_TOKENS = (0, 1)


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


CalledLayer = tuple[nn.Module, int, int]


_layouts: WeakKeyDictionary[PreTrainedModel, tuple[list[int], tuple[AttentionLayer, ...]]] = WeakKeyDictionary()


def attention_layers(model: PreTrainedModel) -> tuple[AttentionLayer, ...]:
    """The attention layers of a model in the order of their calls.

    The first time, the model reads two tokens for it, unseen by recordings and by hooks on the model itself.
    """
    check_tappable(model)
    modules = [id(entry.module) for entry in attention_modules(model)]
    # The layers keep their modules alive, so a module that was exchanged since has another id.
    if model not in _layouts or _layouts[model][0] != modules:
        _layouts[model] = (modules, _number_layers(_calls(model)))
    return _layouts[model][1]


def _calls(model: PreTrainedModel) -> list[CalledLayer]:
    seen: list[CalledLayer] = []

    def note(call: AttentionCall) -> None:
        if call.query.shape[2] != len(PROBE_TOKENS):
            raise ModelError(
                f"'{type(call.module).__name__}' attends with {call.query.shape[2]} queries where {len(PROBE_TOKENS)} "
                "tokens were fed: its positions are not tokens, so the heads of this model type cannot be told"
            )
        seen.append((call.module, call.query.shape[1], call.key.shape[1]))

    # Dropout draws random numbers, where the model is in training.
    devices = random_devices(model)
    with torch.no_grad(), torch.random.fork_rng(devices=devices), observe_attention(model, note, alone=True):
        model.forward(input_ids=torch.tensor([PROBE_TOKENS], device=input_device(model)), use_cache=False)
    if not seen:
        raise ModelError(f"model type '{model.config.model_type}' made no attention call that the tap could see")
    return seen


def _number_layers(seen: Sequence[CalledLayer]) -> tuple[AttentionLayer, ...]:
    numbers = layer_numbers([getattr(module, "layer_idx", None) for module, _, _ in seen])
    modules = [id(module) for module, _, _ in seen]
    return tuple(
        AttentionLayer(numbers[index], index, module, heads, kv_heads, modules.count(id(module)) > 1)
        for index, (module, heads, kv_heads) in enumerate(seen)
    )


ROTARY_TOKENS = 12


# A short way, where angles are exact, and nearly the whole context, where frequencies tell and long scalings show.
NEAR, FAR = 5, 8192


TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}


ROUNDED = 5e-2


Vectors = Float[Tensor, "head time dim"]


def layer_rotations(model: PreTrainedModel) -> tuple[Rotation, ...] | None:
    """The rotation of each attention call of a forward; None where one of them is unknown, or none turns anything."""
    frequencies = _frequencies(model)
    if not frequencies or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    context = context_length(model) or FAR
    starts = [0, *(start for start in (NEAR, context - ROTARY_TOKENS) if start > 0)]
    readings = [_queries_and_keys(model, start) for start in starts]
    layers = [list(layer) for layer in zip(*readings, strict=True)] if all(readings) else []
    rotations = [_matching_rotation(layer, starts, frequencies) for layer in layers]
    known = tuple(rotation for rotation in rotations if rotation is not None)
    turning = any(bool(rotation.frequency.any()) for rotation in known)
    return known if turning and len(known) == len(rotations) else None


def _queries_and_keys(model: PreTrainedModel, start: int) -> list[tuple[Vectors, Vectors]]:
    """Queries and keys of every attention call over a few tokens from a position on; empty where none is told."""
    seen: list[tuple[Vectors, Vectors]] = []
    positions = torch.arange(start, start + ROTARY_TOKENS, device=input_device(model))[None]
    untold: list[AttentionCall] = []

    def note(call: AttentionCall) -> None:
        position_ids = call.options.get("position_ids")
        if not isinstance(position_ids, Tensor) or not torch.equal(position_ids.to(positions.device), positions):
            untold.append(call)
        seen.append((call.query[0].detach().clone(), call.key[0].detach().clone()))

    # Dropout draws random numbers, where the model is in training.
    devices = random_devices(model)
    with torch.no_grad(), torch.random.fork_rng(devices=devices), observe_attention(model, note, alone=True):
        model.forward(input_ids=_tokens(model), position_ids=positions, use_cache=False)
    return [] if untold else seen


def _tokens(model: PreTrainedModel) -> Int[Tensor, "1 time"]:
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = np.random.default_rng(0).integers(vocabulary, size=ROTARY_TOKENS)
    return torch.from_numpy(tokens)[None].to(input_device(model))


def _frequencies(model: PreTrainedModel) -> list[Float[Tensor, " pair"]]:
    """Every row of frequencies that a module of the model holds, each once."""
    frequencies: list[Tensor] = []
    for name, buffer in model.named_buffers():
        known = any(torch.equal(buffer.cpu(), other) for other in frequencies)
        if name.endswith("inv_freq") and buffer.dim() == 1 and not known:
            frequencies.append(buffer.detach().cpu())
    return frequencies


def _candidates(frequencies: Sequence[Float[Tensor, " pair"]], dim: int) -> Iterator[Rotation]:
    yield Rotation.of_pairs(torch.zeros(0), dim)
    for frequency in frequencies:
        if 2 * len(frequency) <= dim:
            for layout in get_args(Layout):
                for start in sorted({0, dim - 2 * len(frequency)}):
                    yield Rotation.of_pairs(frequency, dim, layout=layout, start=start)


def _matching_rotation(
    readings: Sequence[tuple[Vectors, Vectors]], starts: Sequence[int], frequencies: Sequence[Float[Tensor, " pair"]]
) -> Rotation | None:
    """The candidate that turns the queries and keys of every reading into those of the next."""
    query, key = readings[0]
    if query.shape[-1] != key.shape[-1]:
        return None
    for rotation in _candidates(frequencies, key.shape[-1]):
        moves = (
            _error(rotation, before, after, b - a) <= _tolerance(key.dtype, b)
            for (a, b), (first, second) in zip(pairwise(starts), pairwise(readings), strict=True)
            for before, after in zip(first, second, strict=True)
        )
        if all(moves):
            return rotation
    return None


def _error(rotation: Rotation, before: Vectors, after: Vectors, shift: int) -> float:
    """Relative error of the turned vectors."""
    x, y = before.cpu().double(), after.cpu().double()
    moved = rotation.turned(x, torch.full((x.shape[1],), shift))
    return float((moved - y).norm() / y.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _tolerance(dtype: torch.dtype, position: int) -> float:
    # Models take the product of position and frequency in float32: far out their own angles are rounded.
    return TOLERANCE.get(dtype, ROUNDED) + position * 2.0**-22


Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class LayerTensors:
    """One layer on one text, in float32: after rotary embedding, KV heads not repeated.

    Attributes
    ----------
    layer
        Its number in the order of the calls.
    scale
        The model's scaling.
    visible
        Which keys each query sees.
    softcap
        Bound of its scores, where it has one.
    rule
        The same with its learned sinks, for exact softmax on some keys.
    """

    layer: int
    query: Float[Tensor, "head query dim"]
    key: Float[Tensor, "kv_head key dim"]
    value: Float[Tensor, "kv_head key value_dim"]
    output: Float[Tensor, "head query value_dim"]
    scale: float
    visible: Visible
    softcap: float | None = None
    rule: ScoreRule = field(default_factory=ScoreRule)


def visit_layers(
    model: PreTrainedModel, token_ids: Sequence[int], visit: Callable[[LayerTensors], Result]
) -> list[Result]:
    """Run a model once over a text and hand every layer's tensors to ``visit``, one layer at a time.

    Only what ``visit`` returns is kept, so memory does not grow with the number of layers.
    """
    if not len(token_ids):
        raise ValueInputError("a text must hold at least one token, got none")
    results: list[Result] = []
    sets = VisibleSets()

    def listen(call: AttentionCall) -> None:
        q, k, v = (x.detach()[0].float() for x in (call.query, call.key, call.value))
        output = call.output.detach()[0].transpose(0, 1).float()
        results.append(
            visit(
                LayerTensors(
                    len(results),
                    q,
                    k,
                    v,
                    output,
                    call.scale,
                    sets.of(call),
                    softcap=call.options.get("softcap"),
                    rule=call.rule,
                )
            )
        )

    with torch.inference_mode(), observe_attention(model, listen):
        inputs = {"input_ids": torch.tensor([list(token_ids)], device=input_device(model)), "use_cache": False}
        # The logits of a long text would be the largest tensor of all, and nobody asks for them.
        forward_then_logits(model, inputs, len(token_ids))
    return results


def head_dim(model: PreTrainedModel) -> int:
    """The dimension of a model's keys, by its settings."""
    config: Any = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")


def output_weight(layer: AttentionLayer, value_dim: int) -> Float[Tensor, "head value_dim model_dim"] | None:
    """The rows of the output projection that each head writes with; None where the module has none of a known name."""
    for name in _PROJECTIONS:
        projection = getattr(layer.module, name, None)
        weight = None if projection is None else weight_of(projection)
        if weight is None or weight.dim() != 2:
            continue
        for matrix in (weight.T, weight):  # linear layers store [out, in], those of GPT-2 [in, out]
            if matrix.shape[0] == layer.heads * value_dim:
                weights: Tensor = matrix.detach().unflatten(0, (layer.heads, value_dim))
                return weights
    return None

"""The rotary embedding of every attention layer of a model: guessed from its frequencies, accepted only if it is so.

A rotary model does not notice where a text begins: moved on by c positions, all its queries and keys are turned by R_c
and nothing else changes. So a model reads a few tokens at several places, and of all candidates (the frequencies that
its modules hold, in both usual layouts, at either end of a head) a layer gets the one that turns what it attended with
at the first place into what it attended with at the others. Layers without rotary embedding are found likewise: nothing
moves. No candidate for a layer, or no position_ids among what its attention is given, and the model has no rotation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from softgap.attention.rotation import Layout, Rotation
from softgap.probe.tap import AttentionCall, tapped

__all__ = ["layer_rotations"]

TOKENS = 12
# A short way, where angles are exact, and nearly the whole context, where frequencies tell and long scalings show.
NEAR, FAR = 5, 8192
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
ROUNDED = 5e-2

Seen = Float[Tensor, "head time dim"]


def layer_rotations(model: PreTrainedModel) -> tuple[Rotation, ...] | None:
    """The rotation of each attention call of a forward; None where one of them is unknown, or none turns anything."""
    frequencies = _frequencies(model)
    if not frequencies or "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or FAR
    starts = [0, *(start for start in (NEAR, context - TOKENS) if start > 0)]
    readings = [_reading(model, start) for start in starts]
    layers = [list(layer) for layer in zip(*readings, strict=True)] if all(readings) else []
    found = [_accepted(layer, starts, frequencies) for layer in layers]
    known = tuple(rotation for rotation in found if rotation is not None)
    turning = any(bool(rotation.frequency.any()) for rotation in known)
    return known if turning and len(known) == len(found) else None


def _reading(model: PreTrainedModel, start: int) -> list[tuple[Seen, Seen]]:
    """Queries and keys of every attention call over a few tokens from a position on; empty where none is told."""
    seen: list[tuple[Seen, Seen]] = []
    positions = torch.arange(start, start + TOKENS, device=model.device)[None]
    untold: list[AttentionCall] = []

    def note(call: AttentionCall) -> None:
        told = call.options.get("position_ids")
        if not isinstance(told, Tensor) or not torch.equal(told, positions):
            untold.append(call)
        seen.append((call.query[0].detach().clone(), call.key[0].detach().clone()))

    # Dropout draws random numbers, where the model is in training.
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices=devices), tapped(model, note, alone=True):
        model.forward(input_ids=_tokens(model), position_ids=positions, use_cache=False)
    return [] if untold else seen


def _tokens(model: PreTrainedModel) -> Int[Tensor, "1 time"]:
    vocabulary = int(model.config.get_text_config().vocab_size)
    drawn = np.random.default_rng(0).integers(vocabulary, size=TOKENS)
    return torch.from_numpy(drawn)[None].to(model.device)


def _frequencies(model: PreTrainedModel) -> list[Float[Tensor, " pair"]]:
    """Every row of frequencies that a module of the model holds, each once."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        known = any(torch.equal(buffer.cpu(), other) for other in found)
        if name.endswith("inv_freq") and buffer.dim() == 1 and not known:
            found.append(buffer.detach().cpu())
    return found


def _candidates(frequencies: Sequence[Float[Tensor, " pair"]], dim: int) -> Iterator[Rotation]:
    yield Rotation.of_pairs(torch.zeros(0), dim)
    for frequency in frequencies:
        if 2 * len(frequency) <= dim:
            for layout in get_args(Layout):
                for start in sorted({0, dim - 2 * len(frequency)}):
                    yield Rotation.of_pairs(frequency, dim, layout=layout, start=start)


def _accepted(
    readings: Sequence[tuple[Seen, Seen]], starts: Sequence[int], frequencies: Sequence[Float[Tensor, " pair"]]
) -> Rotation | None:
    """The candidate that turns the queries and keys of every reading into those of the next."""
    query, key = readings[0]
    if query.shape[-1] != key.shape[-1]:
        return None
    for rotation in _candidates(frequencies, key.shape[-1]):
        moves = (
            _error(rotation, before, after, b - a) <= _allowed(key.dtype, b)
            for (a, b), (one, other) in zip(pairwise(starts), pairwise(readings), strict=True)
            for before, after in zip(one, other, strict=True)
        )
        if all(moves):
            return rotation
    return None


def _error(rotation: Rotation, before: Seen, after: Seen, shift: int) -> float:
    """Relative error of the turned vectors."""
    x, y = before.cpu().double(), after.cpu().double()
    moved = rotation.turned(x, torch.full((x.shape[1],), shift))
    return float((moved - y).norm() / y.norm().clamp(min=torch.finfo(torch.float32).tiny))


def _allowed(dtype: torch.dtype, position: int) -> float:
    # Models take the product of position and frequency in float32: far out their own angles are rounded.
    return TOLERANCE.get(dtype, ROUNDED) + position * 2.0**-22

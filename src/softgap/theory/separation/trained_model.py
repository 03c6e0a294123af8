"""A small attention model as a function of its parameters, with any trainable mechanism; no hidden random state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism, resolve
from softgap.errors import UnsupportedError
from softgap.theory.separation.trained_tasks import TrainedTask

__all__ = ["TRAINABLE", "answer", "mix", "parameters", "trainable"]

Parameters = Mapping[str, Tensor]

WIDTH = 32
HEADS = 2
# Registered mechanisms whose maps can be differentiated and need neither parameters nor positions.
TRAINABLE = (
    *("softmax", "elu1", "relu", "identity", "exp_dim", "hedgehog", "dpfp", "favor", "taylor2", "polynomial"),
    *("relu2_scores", "top_k"),
)


def trainable(name: str) -> Mechanism:
    """The mechanism, refused if it cannot be trained here."""
    chosen = resolve(name)
    if chosen.name not in TRAINABLE:
        raise UnsupportedError(f"mechanism '{name}' cannot be trained here; choose one of: {', '.join(TRAINABLE)}")
    return chosen


def parameters(task: TrainedTask, generator: torch.Generator) -> dict[str, Tensor]:
    """Random parameters, the same in number and distribution for every mechanism."""

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(rows)).requires_grad_()

    made = {"embed": matrix(task.features, WIDTH), "out": matrix(WIDTH, task.outputs)}
    made["bias"] = torch.zeros(task.outputs, requires_grad=True)
    if task.ordered:
        made["position"] = matrix(task.length, WIDTH)
    for layer in range(task.layers):
        for name in ("query", "key", "value", "join"):
            made[f"{name}{layer}"] = matrix(WIDTH, WIDTH)
        made[f"up{layer}"], made[f"down{layer}"] = matrix(WIDTH, 2 * WIDTH), matrix(2 * WIDTH, WIDTH)
        made[f"shift{layer}"] = torch.zeros(2 * WIDTH, requires_grad=True)
    return made


def answer(
    given: Parameters, task: TrainedTask, mechanism: Mechanism, x: Float[Tensor, "sample time feature"]
) -> Float[Tensor, "sample output"]:
    """Embedding, layers of attention and two-layer perceptron, a linear map of the read-out."""
    h = x @ given["embed"]
    if task.ordered:
        h = h + given["position"]
    for layer in range(task.layers):
        z = functional.rms_norm(h, (WIDTH,))
        q, k, v = (
            (z @ given[f"{name}{layer}"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = mix(mechanism, q, k, v).transpose(1, 2).flatten(2) @ given[f"join{layer}"]
        h = h + mixed if task.residual else mixed
        z = functional.rms_norm(h, (WIDTH,))
        h = h + functional.relu(z @ given[f"up{layer}"] + given[f"shift{layer}"]) @ given[f"down{layer}"]
    read = h[:, -1] if task.reads == "last" else h.mean(1)
    return read @ given["out"] + given["bias"]


def mix(
    mechanism: Mechanism,
    q: Float[Tensor, "batch head time dim"],
    k: Float[Tensor, "batch head time dim"],
    v: Float[Tensor, "batch head time dim"],
) -> Float[Tensor, "batch head time dim"]:
    """Attention over the whole sequence, differentiable: `softgap.attention.attend` without a mask.

    Feature maps cost O(T); softmax uses torch's own kernel, so that times compare each at its best.
    """
    scale = q.shape[-1] ** -0.5
    if mechanism.name == "softmax":
        return functional.scaled_dot_product_attention(q, k, v)
    if mechanism.score_weights is not None:
        scores = q @ k.transpose(-1, -2) * scale
        weights = mechanism.score_weights(scores, torch.ones_like(scores, dtype=torch.bool), mechanism.options)
        return weights @ v / _nonzero(weights.sum(-1, keepdim=True))
    if mechanism.scale == "sqrt":
        q, k = q * math.sqrt(scale), k * math.sqrt(scale)
    query, key = _features(mechanism, q), _features(mechanism, k)
    if mechanism.log:
        # A factor per query cancels; keys share one, which cancels too.
        query = (query - query.amax(-1, keepdim=True).detach()).exp()
        key = (key - key.amax((-1, -2), keepdim=True).detach()).exp()
    state, normaliser = key.transpose(-1, -2) @ v, key.sum(-2)[..., None]
    return query @ state / _nonzero(query @ normaliser)


def _features(mechanism: Mechanism, x: Tensor) -> Tensor:
    if mechanism.name == "elu1":  # the registered map works in place, which autograd refuses
        return functional.elu(x) + 1
    if mechanism.query_map is None:
        raise AssertionError(f"mechanism '{mechanism.name}' has no feature map")  # trainable() admits none of these
    return mechanism.query_map(x, mechanism.site(torch.zeros(x.shape[-2], dtype=torch.long), x.dtype))


def _nonzero(sums: Tensor) -> Tensor:
    """Sums kept away from 0, with their sign."""
    tiny = 1e-6
    return torch.where(sums.abs() < tiny, torch.where(sums < 0, -tiny, tiny), sums)

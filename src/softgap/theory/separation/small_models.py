"""Small attention models as functions of their parameters, and the tasks they are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from softgap.attention import Mechanism, resolve
from softgap.errors import UnsupportedError, ValueInputError, unknown_name
from softgap.theory.separation.classes import construct

__all__ = ["DEFAULT_TASKS", "TRAINABLE", "TrainedTask", "answer", "mix", "parameters", "task", "trainable"]


Sample = Callable[[int, torch.Generator], tuple[Float[Tensor, "sample time feature"], Shaped[Tensor, " sample"]]]


_ROWS = 62


# Lower ends and widths of the intervals that the level a of a class is drawn from.
_LEVELS = {
    "separation": (torch.tensor([0.0, 0.7]), torch.tensor([0.1, 0.5])),
    "separation_spread": (torch.tensor([0.7, 0.7]), torch.tensor([0.5, 0.5])),
    "separation_levels": (torch.tensor([0.0, 0.3, 0.6, 0.9]), torch.full((4,), 0.1)),
}


# Without noise every mechanism scores 1 and the tasks tell nothing. In units of L, on every entry.
_NOISE = {
    "separation": 0.2,
    "separation_spread": 0.12,
    "separation_levels": 0.2,
    "separation_number": 0.2,
}


_COUNTING_NOISE = 2.0


_SPREAD = 8


_KEYS, _VALUES = 128, 16


_SYMBOLS = 4


_LONGEST_COUNT = 65536


_LISTOPS_LENGTH = 32


_OPERATORS = ("MAX", "MIN", "MED", "SM")


_DIGITS = 10


_CLOSE = _DIGITS + len(_OPERATORS)


@dataclass(frozen=True, eq=False)
class TrainedTask:
    """Sequences with a known answer.

    Attributes
    ----------
    kind
        ``classes``: the answer is one of ``outputs`` classes; ``number``: it is a number, scored by R^2.
    chance
        The score of the best constant answer.
    reads
        Whether the answer is read off the last token or the mean of all tokens.
    ordered
        Whether the order of the tokens matters, so that the model gets positions.
    residual
        Whether tokens also go around the attention. Without it, as in the network of the source, all that the answer
        can be read off is what attention let through.
    noise
        Standard deviation of the normal noise on every entry, in the unit of the entries. It keeps the best score away
        from 1, so that mechanisms can differ.
    """

    name: str
    kind: Literal["classes", "number"]
    length: int
    features: int
    outputs: int
    chance: float
    reads: Literal["last", "mean"]
    ordered: bool
    layers: int
    sample: Sample
    residual: bool = True
    noise: float = 0.0

    @property
    def measure(self) -> str:
        """What a score is."""
        return "accuracy" if self.kind == "classes" else "R^2"


def _separation(kind: str, noise: float | None = None) -> TrainedTask:
    """Rows of D0 and D1 in random order under noise, with levels a from an interval so that no value gives them away.

    ``separation``: a in [0, 0.1] or [0.7, 1.2]; ``separation_spread``: a in [0.7, 1.2] in one row or spread evenly over
    8 rows, so that the mean of all rows says nothing; ``separation_levels``: four intervals; ``separation_number``: a
    itself.
    """
    size = construct(n=_ROWS, t=1)
    deviation = (_NOISE[kind] if noise is None else noise) * size.unit
    spread, numeric = kind == "separation_spread", kind == "separation_number"
    low, width = _LEVELS.get(kind, _LEVELS["separation"])
    plain = torch.zeros(_ROWS, size.d)
    plain[torch.arange(_ROWS), 1 + torch.arange(_ROWS)] = size.b * size.unit
    plain[:, -1] = size.c * size.unit

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        label = torch.randint(len(low), (count,), generator=generator)
        uniform = torch.rand(count, generator=generator)
        level = 1.2 * uniform if numeric else low[label] + uniform * width[label]
        order = torch.rand(count, _ROWS, generator=generator).argsort(1)
        x = plain[order].clone()
        marked = torch.rand(count, _ROWS, generator=generator).argsort(1)[:, :_SPREAD]
        share = torch.zeros(count, _SPREAD)
        share[:, 0] = 1.0
        if spread:
            share[label == 0] = 1 / _SPREAD
        x[torch.arange(count)[:, None], marked, 0] = share * level[:, None] * size.unit
        x += deviation * torch.randn(x.shape, generator=generator)
        return x, level if numeric else label

    outputs = 1 if numeric else len(low)
    chance = 0.0 if numeric else 1 / outputs
    answers: Literal["classes", "number"] = "number" if numeric else "classes"
    return TrainedTask(
        *(kind, answers, _ROWS, size.d, outputs, chance, "mean", False, 1, sample), residual=False, noise=deviation
    )


def _recall(pairs: int) -> TrainedTask:
    """Associative recall: one token per (key, value) pair, then a key alone; the answer is its value.

    After Arora et al. 2023 (arXiv:2312.04927), with key and value in one token so that one layer can do it.
    """
    if not 2 <= pairs <= _KEYS:
        raise ValueInputError(f"recall takes 2 to {_KEYS} pairs, got {pairs}; for example recall-16")

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        keys = torch.rand(count, _KEYS, generator=generator).argsort(1)[:, :pairs]
        values = torch.randint(_VALUES, (count, pairs), generator=generator)
        queries = torch.randint(pairs, (count,), generator=generator)
        x = torch.zeros(count, pairs + 1, _KEYS + _VALUES)
        x[:, :pairs].scatter_(2, keys[..., None], 1.0).scatter_(2, _KEYS + values[..., None], 1.0)
        rows = torch.arange(count)
        x[rows, pairs, keys[rows, queries]] = 1.0
        return x, values[rows, queries]

    return TrainedTask(
        f"recall-{pairs}", "classes", pairs + 1, _KEYS + _VALUES, _VALUES, 1 / _VALUES, "last", False, 1, sample
    )


def _counting(length: int, noise: float = _COUNTING_NOISE) -> TrainedTask:
    """The share of one symbol among random ones under noise: a mean over all tokens, with no sharp attention."""
    if not 2 <= length <= _LONGEST_COUNT:
        raise ValueInputError(
            f"counting takes a length from 2 to {_LONGEST_COUNT}, got {length}; for example counting-128"
        )

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        share = torch.rand(count, 1, generator=generator)
        hits = torch.rand(count, length, generator=generator) < share
        other = torch.randint(1, _SYMBOLS, (count, length), generator=generator)
        symbols = torch.where(hits, 0, other)
        x = torch.nn.functional.one_hot(symbols, _SYMBOLS).float()
        return x + noise * torch.randn(x.shape, generator=generator), hits.float().mean(1)

    name = f"counting-{length}"
    return TrainedTask(name, "number", length, _SYMBOLS, 1, 0.0, "last", False, 1, sample, noise=noise)


def _listops() -> TrainedTask:
    """Nested expressions over digits, [MAX 4 [MIN 2 7] 1], after ListOps (Nangia and Bowman 2018, arXiv:1804.06028).

    Up to two levels and 32 tokens; MED is the lower median, SM the sum modulo 10; the answer is a digit.
    """

    def sample(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.zeros(count, _LISTOPS_LENGTH, _CLOSE + 1)
        answers = torch.zeros(count, dtype=torch.long)
        for i in range(count):
            tokens, answers[i] = expression(generator, depth=2)
            x[i, torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
        return x, answers

    return TrainedTask("listops", "classes", _LISTOPS_LENGTH, _CLOSE + 1, _DIGITS, 1 / _DIGITS, "mean", True, 2, sample)


def expression(generator: torch.Generator, depth: int) -> tuple[list[int], int]:
    """Tokens and value of a random expression: digits 0 to 9, operators 10 to 13, the closing bracket 14."""

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    operator, tokens, values = number(len(_OPERATORS)), [], []
    for _ in range(2 + number(3)):
        if depth > 1 and number(3) == 0:
            inner, value = expression(generator, depth - 1)
            tokens += inner
        else:
            value = number(_DIGITS)
            tokens.append(value)
        values.append(value)
    ordered = sorted(values)
    outcome = (ordered[-1], ordered[0], ordered[(len(ordered) - 1) // 2], sum(values) % _DIGITS)[operator]
    return [_DIGITS + operator, *tokens, _CLOSE], outcome


_SEPARATIONS = ("separation", "separation_spread", "separation_levels", "separation_number")


TASKS = (*_SEPARATIONS, "recall-<pairs>", "counting-<length>", "listops")


DEFAULT_TASKS = (*_SEPARATIONS, "recall-4", "recall-16", "recall-64", "counting-128", "listops")


def task(name: str) -> TrainedTask:
    """A task by name; ``recall-16`` and ``counting-128`` carry their size."""
    kind, _, size = name.partition("-")
    if name in _SEPARATIONS:
        return _separation(name)
    if name == "listops":
        return _listops()
    if kind in ("recall", "counting") and size.isdigit():
        return _recall(int(size)) if kind == "recall" else _counting(int(size))
    raise unknown_name("task", name, TASKS)


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
    mechanism = resolve(name)
    if mechanism.name not in TRAINABLE:
        raise UnsupportedError(f"mechanism '{name}' cannot be trained here; choose one of: {', '.join(TRAINABLE)}")
    return mechanism


def parameters(task: TrainedTask, generator: torch.Generator) -> dict[str, Tensor]:
    """Random parameters, the same in number and distribution for every mechanism."""

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(rows)).requires_grad_()

    weights = {"embed": matrix(task.features, WIDTH), "out": matrix(WIDTH, task.outputs)}
    weights["bias"] = torch.zeros(task.outputs, requires_grad=True)
    if task.ordered:
        weights["position"] = matrix(task.length, WIDTH)
    for layer in range(task.layers):
        for name in ("query", "key", "value", "join"):
            weights[f"{name}{layer}"] = matrix(WIDTH, WIDTH)
        weights[f"up{layer}"], weights[f"down{layer}"] = matrix(WIDTH, 2 * WIDTH), matrix(2 * WIDTH, WIDTH)
        weights[f"shift{layer}"] = torch.zeros(2 * WIDTH, requires_grad=True)
    return weights


def answer(
    weights: Parameters, task: TrainedTask, mechanism: Mechanism, x: Float[Tensor, "sample time feature"]
) -> Float[Tensor, "sample output"]:
    """Embedding, layers of attention and two-layer perceptron, a linear map of the read-out."""
    h = x @ weights["embed"]
    if task.ordered:
        h = h + weights["position"]
    for layer in range(task.layers):
        z = functional.rms_norm(h, (WIDTH,))
        q, k, v = (
            (z @ weights[f"{name}{layer}"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = mix(mechanism, q, k, v).transpose(1, 2).flatten(2) @ weights[f"join{layer}"]
        h = h + mixed if task.residual else mixed
        z = functional.rms_norm(h, (WIDTH,))
        h = h + functional.relu(z @ weights[f"up{layer}"] + weights[f"shift{layer}"]) @ weights[f"down{layer}"]
    read = h[:, -1] if task.reads == "last" else h.mean(1)
    return read @ weights["out"] + weights["bias"]


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

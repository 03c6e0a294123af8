"""An oracle for the probe that shares no code with it but the float64 reference.

Attention calls are copied by an override of our own, which keys a query sees follows from the config alone (causal,
and the layer's window), and every number is computed by loops in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softgap.attention import Mechanism, resolve
from softgap.attention.reference import reference_attention, reference_comparison
from softgap.probe.tap import overridden_names
from softgap.trajectories import Trajectories
from support.tiny_models import tiny_model

PAIR = ("elu1", "uniform")
# Windows shorter than the texts of the tests, whose sinks leave the window; the tail of one is shrunk.
WINDOWS = ("window:w=4,sinks=2", "razor:w=4,sinks=2", "elu1+window:w=4,sinks=2,f=0.5")
MEASURED = (*PAIR, *WINDOWS)
QUANTITIES = ("divergence", "relative_l2", "norm_ratio")
Hides = Callable[[Tensor, Tensor], Tensor]

# Instrument error in float32 against float64 loops on the very same tensors: the worst seen is 4e-6 (gpt_oss).
SAME_TENSORS = 1e-5
# Two computations of one model in float32 (with and without cache, padded and not): its own rounding adds to that,
# and the worst seen is 1.5e-5 (gpt_oss again, whose experts amplify it).
SAME_MODEL = 1e-4


@dataclass(frozen=True, eq=False)
class Spied:
    """One attention call, copied: q, k, v and output with heads second; where its keys and queries stand."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    scale: float
    softcap: float | None
    sinks: Tensor | None
    first_key: int
    first_query: int


@dataclass(frozen=True, eq=False)
class Expected:
    """What the float64 loops say of one sequence."""

    quantities: dict[str, np.ndarray]  # [mechanism, layer, head, query]
    focus: dict[str, np.ndarray]  # [layer, head, query]
    logits: np.ndarray  # [query, vocabulary]

    def logprob(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """log p of each token, predicted by the queries from ``first`` on."""
        logs = _log_softmax(self.logits)
        return np.array([logs[first + i, token] for i, token in enumerate(tokens)])

    @property
    def entropy(self) -> np.ndarray:
        logs = _log_softmax(self.logits)
        return np.asarray(-(np.exp(logs) * logs).sum(axis=-1))


def ids_of(length: int, seed: int = 0, vocabulary: int = 128) -> list[int]:
    """Tokens that are no special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(3, vocabulary, (length,), generator=generator)]


def tiny_with(model_type: str, *, attn: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny model of this type; ``changes`` go into its config and its weights are drawn anew."""
    model: Any = tiny_model(model_type, attn=attn, dtype=dtype)
    if not changes:
        return model
    config = model.config
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        changed: Any = type(model)._from_config(config, dtype=dtype, attn_implementation=attn)
        for parameter in changed.parameters():
            if parameter.dim() >= 2:
                parameter.data = torch.randn(parameter.shape).to(dtype) * 1.5 / parameter.shape[-1] ** 0.5
    changed.generation_config = model.generation_config
    return changed.eval()


def row(ids: Sequence[int]) -> Tensor:
    """Token ids as a batch of one."""
    return torch.tensor([list(ids)])


def written(model: Any, ids: Sequence[int] | Tensor, n: int, **settings: Any) -> Tensor:
    """The whole sequences of a greedy generation of n tokens, or of whatever the settings say."""
    given = ids if isinstance(ids, Tensor) else row(ids)
    settings.setdefault("attention_mask", torch.ones_like(given))
    sequences: Tensor = model.generate(given, max_new_tokens=n, **settings)
    return sequences


@contextmanager
def spied(model: PreTrainedModel) -> Iterator[list[list[Spied]]]:
    """Copies of every attention call of a model, a list per layer in the order of the calls."""
    name = str(model.config._attn_implementation)
    local: dict[str, Any] = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = local.get(name)
    shared = before or type(ALL_ATTENTION_FUNCTIONS)._global_mapping.get(name)
    own = {id(module) for module in model.modules()}
    layers: list[list[Spied]] = []
    order: dict[int, int] = {}

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *args: Any, **options: Any) -> Any:
        original: Callable[..., Any] = shared or sys.modules[type(module).__module__].eager_attention_forward
        result = original(module, q, k, v, mask, *args, **options)
        if id(module) in own:
            if id(module) not in order:
                order[id(module)] = len(layers)
                layers.append([])
            calls = layers[order[id(module)]]
            seen = calls[-1].first_query + calls[-1].q.shape[2] if calls else 0
            total = seen + q.shape[2]
            calls.append(
                Spied(
                    q=q.detach().clone(),
                    k=k.detach().clone(),
                    v=v.detach().clone(),
                    output=result[0].detach().clone().transpose(1, 2),
                    scale=options.get("scaling") or q.shape[-1] ** -0.5,
                    softcap=options.get("softcap"),
                    sinks=None if options.get("s_aux") is None else options["s_aux"].detach(),
                    first_key=total - k.shape[2],
                    first_query=seen,
                )
            )
        return result

    ALL_ATTENTION_FUNCTIONS[name] = spy
    try:
        yield layers
    finally:
        if before is None:
            del ALL_ATTENTION_FUNCTIONS[name]
        else:
            ALL_ATTENTION_FUNCTIONS[name] = before


def window_of(config: Any, layer: int) -> int | None:
    """The layer's sliding window as its config says."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if kinds is None or kinds[layer] == "sliding_attention" else None


def expected(
    model: Any, ids: Sequence[int], mechanisms: Sequence[str | Mechanism] = MEASURED, *, drop: int = 0
) -> Expected:
    """The numbers of every query of one sequence, from one forward without a cache."""
    with spied(model) as layers, torch.no_grad():
        logits = model(row(ids), use_cache=False).logits
    found = expected_of(layers, model.config, mechanisms, drop=drop)
    return Expected(found.quantities, found.focus, logits[0].double().numpy())


def expected_of(
    layers: Sequence[Sequence[Spied]],
    config: Any,
    mechanisms: Sequence[str | Mechanism] = MEASURED,
    *,
    drop: int = 0,
    of_row: int = 0,
    hides: Hides | None = None,
) -> Expected:
    """The numbers of one row of spied calls; caches that hold the newest keys last, no padding.

    ``hides`` says which keys j are hidden from which queries p beside the rest.
    """
    chosen = [resolve(mechanism) for mechanism in mechanisms]
    quantities: list[np.ndarray] = []
    focus: list[np.ndarray] = []
    for index, calls in enumerate(layers):
        window = window_of(config, index)
        parts = [_of_call(call, window, chosen, drop, of_row, hides) for call in calls]
        quantities.append(np.concatenate([part[0] for part in parts], axis=-1))
        focus.append(np.concatenate([part[1] for part in parts], axis=-1))
    by_quantity = np.stack(quantities, axis=2)
    by_focus = np.stack(focus, axis=1)
    return Expected(
        {name: by_quantity[i] for i, name in enumerate(QUANTITIES)},
        {name: by_focus[i] for i, name in enumerate(("sparsity", "attention_entropy", "largest_weight"))},
        np.empty((0, 0)),
    )


def _of_call(
    call: Spied, window: int | None, mechanisms: Sequence[Mechanism], drop: int, of_row: int, hides: Hides | None
) -> tuple[np.ndarray, np.ndarray]:
    """[quantity, mechanism, head, query] and focus [quantity, head, query] of one call."""
    one = slice(of_row, of_row + 1)
    q, k, v = (x[one].double() for x in (call.q, call.k, call.v))
    _, heads, n, _ = q.shape
    seen, weights, recomputed = softmax_of(call, window, drop=drop, of_row=of_row, hides=hides)
    output = recomputed if drop else call.output[of_row].double().numpy()
    quantities = np.zeros((3, len(mechanisms), heads, n))
    for m, mechanism in enumerate(mechanisms):
        linear = reference_attention(
            mechanism,
            q,
            k,
            v,
            seen.expand(1, heads, -1, -1),
            scale=call.scale,
            offset=call.first_query - call.first_key,
            ordinals=(call.first_key + torch.arange(k.shape[2]))[None],
            softcap=call.softcap,
            sink_logits=call.sinks,
        )
        for h in range(heads):
            for t in range(n):
                quantities[:, m, h, t] = reference_comparison(output[h, t], linear[0, h, t].numpy())
    return quantities, _focus(weights, seen.numpy())


def softmax_of(
    call: Spied, window: int | None, *, drop: int = 0, of_row: int = 0, hides: Hides | None = None
) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """What a row's queries see, their softmax weights [head, query, key] and output, in float64."""
    q, k, v = (x[of_row].double() for x in (call.q, call.k, call.v))
    heads, n, _ = q.shape
    p = (call.first_query + torch.arange(n))[:, None]
    j = call.first_key + torch.arange(k.shape[1])
    seen = (j <= p) & (j >= drop)
    if window is not None:
        seen = seen & (p - j < window)
    if hides is not None:
        seen = seen & ~hides(p, j)
    keys, values = (x.repeat_interleave(heads // x.shape[0], dim=0) for x in (k, v))
    scores = q @ keys.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    relative = torch.exp(scores - scores.amax(dim=-1, keepdim=True)) * seen
    total = relative.sum(dim=-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(call.sinks.double()[:, None, None] - scores.amax(dim=-1, keepdim=True))
    weights = torch.where(total > 0, relative / total, 0.0)
    return seen, weights.numpy(), (weights @ values).numpy()


def _focus(weights: np.ndarray, seen: np.ndarray) -> np.ndarray:
    heads, n, _ = weights.shape
    found = np.full((3, heads, n), np.nan)
    for h in range(heads):
        for t in range(n):
            a = weights[h, t, seen[t]]
            if len(a):
                positive = a[a > 0]
                found[:, h, t] = (
                    np.abs(a).mean() / np.sqrt((a**2).mean()),
                    -(positive * np.log(positive)).sum(),
                    a.max(),
                )
    return found


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True)))


def gap(run: Trajectories, truth: Expected, queries: slice) -> float:
    """Largest difference of any quantity from the oracle's."""
    return max(difference(run.quantities[name], truth.quantities[name][..., queries]) for name in QUANTITIES)


def apart(a: Trajectories, b: Trajectories) -> float:
    """Largest difference between two runs of the same steps, in any quantity."""
    return max(difference(a.quantities[name], b.quantities[name]) for name in QUANTITIES)


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative where b is above 1; infinite for a NaN on one side only, and for another shape."""
    if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
        return float("inf")
    return float(np.nanmax(np.abs(a.astype(np.float64) - b) / np.maximum(1, np.abs(b)), initial=0.0))


def only(runs: Sequence[Trajectories]) -> Trajectories:
    (run,) = runs
    return run


def prompt_of(run: Trajectories) -> Trajectories:
    assert run.prompt is not None
    return run.prompt


def traces(model: nn.Module) -> dict[str, object]:
    """Everything a tap touches."""
    return {
        "local registry": dict(ALL_ATTENTION_FUNCTIONS._local_mapping),
        "overrides": overridden_names(),
        "hooks": [
            (name, list(part._forward_hooks), list(part._forward_pre_hooks), list(part._forward_hooks_with_kwargs))
            for name, part in model.named_modules()
        ],
        "own attributes": {name: sorted(part.__dict__) for name, part in model.named_modules()},
        "attention": [_attention(part) for part in model.modules()],
    }


def _attention(part: Any) -> object:
    return getattr(getattr(part, "config", None), "_attn_implementation", None)

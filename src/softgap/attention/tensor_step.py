"""Decode one position at a time on any device and in any precision, in tensor operations that torch.compile captures.

``TensorStep`` hands the tensors of a ``HybridState`` or ``LinearState`` to ``decode_tensors``, which writes into them.
Blocks of positions and steps may take turns on one state. On the CPU in float32 ``softgap.attention.decode`` is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._pytree import tree_leaves

from softgap.attention import decode_tensors as operations
from softgap.attention.chunked import empty_carry
from softgap.attention.decode import writable, writable_carry
from softgap.attention.decode_tensors import (
    Correction,
    FarTensors,
    Fitted,
    Parts,
    Rule,
    State,
    Window,
    decode_tensors,
)
from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.hybrid import HybridState
from softgap.attention.mechanism import Mechanism
from softgap.attention.streaming import LinearState

__all__ = ["TensorMaps", "TensorStep"]


class TensorMaps:
    """What ``TensorStep`` reads at every step: maps and output correction, on the model's device.

    Parameters
    ----------
    mechanism, heads, kv_heads, weight, bias
        As for ``DecodeMaps``.
    like
        A tensor on that device, in the precision of the state.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        heads: Int[Tensor, " head"],
        kv_heads: Int[Tensor, " kv_head"],
        weight: Float[Tensor, "head value_dim value_dim"] | None = None,
        bias: Float[Tensor, "head value_dim"] | None = None,
        *,
        like: Tensor,
    ) -> None:
        def there(x: Tensor) -> Tensor:
            return x.detach().to(like.device, like.dtype)

        self.mechanism = mechanism
        self.heads, self.kv_heads = heads.to(like.device), kv_heads.to(like.device)
        self.correction = None if weight is None or bias is None else Correction(there(weight), there(bias))
        self.fitted: Fitted | None = None
        tail = mechanism.tail_with_parameters() if mechanism.kind == "hybrid" else mechanism
        if tail is None or tail.kind == "window":
            return
        parameters = {name: x[0] for name, x in mechanism.parameters.items()}
        factor = torch.full((len(heads),), float(mechanism.options.get("f", 1.0)))
        if "tail_factor" in parameters:
            factor = factor * parameters["tail_factor"].float().cpu()
        names = ("key_weight", "key_bias", "rate")
        own = max(len(kv_heads), *(len(parameters[name]) for name in names))
        frequency, turn = parameters.get("frequency"), parameters.get("turn")

        def rows(name: str, count: int) -> Tensor:
            return there(parameters[name]).expand(count, *parameters[name].shape[1:])

        self.fitted = Fitted(
            rows("query_weight", len(heads)),
            rows("query_bias", len(heads)),
            rows("key_weight", own),
            rows("key_bias", own),
            rows("rate", own),
            None if frequency is None else frequency[0].to(like.device),
            None if turn is None else there(turn[0]),
            there(factor),
        )


class TensorStep:
    """The step in tensor operations over one state.

    Parameters
    ----------
    state, scale, rule
        As for ``DecodeStep``; the state may be on any device.
    maps
        The mechanism's maps on that device.
    backend
        Let ``torch.compile`` capture the step, by this backend; None runs the operations one by one.
    """

    nbytes = 0
    """Nothing is kept besides the state."""

    def __init__(
        self,
        state: HybridState | LinearState,
        maps: TensorMaps,
        *,
        scale: float,
        rule: ScoreRule | None = None,
        backend: str | None = None,
    ) -> None:
        self._state, self._maps, self._backend = state, maps, backend
        self._scale, self._rule = float(scale), rule or ScoreRule()
        self._exact = ExactSet.of(maps.mechanism.options) if isinstance(state, HybridState) else None
        self._parts: Parts | None = None
        self._run: Any = decode_tensors
        self._length = -1

    def reserve(self, batch: int) -> None:
        """Nothing is kept besides the state."""

    def __call__(
        self,
        q: Float[Tensor, "batch head 1 dim"],
        k: Float[Tensor, "batch kv_head 1 dim"],
        v: Float[Tensor, "batch kv_head 1 value_dim"],
        out: Float[Tensor, "batch head value_dim"],
        key_valid: Bool[Tensor, "batch 1"] | None = None,
    ) -> None:
        """Append one key per row and write the outputs of its queries; the arguments are those of ``DecodeStep``."""
        state, maps = self._state, self._maps
        q, k, v = (
            x[:, :, 0].index_select(1, own).to(state.dtype)
            for x, own in ((q, maps.heads), (k, maps.kv_heads), (v, maps.kv_heads))
        )
        if self._parts is None or self._length != state.length or self._must_copy() or self._begins_padding(key_valid):
            self._parts = self._take_up(k, v, key_valid is not None)
        parts = self._parts
        if isinstance(state, LinearState) and state._next is not None:
            parts = parts._replace(origin=(state._next - state.length).to(k.device).expand(len(k)).contiguous())
        output = self._run(parts, q, k, v, None if key_valid is None else key_valid[:, 0])
        out.index_copy_(1, maps.heads, output.to(out.dtype))
        if isinstance(state, LinearState):
            state._advance(len(k), 1, key_valid, k.device)
        else:
            state._window.buffer.length += 1
        self._length = state.length

    def _must_copy(self) -> bool:
        """Tensors that were made in inference mode cannot be written to outside of it."""
        return self._parts is not None and self._parts.at.is_inference() and not torch.is_inference_mode_enabled()

    def _begins_padding(self, key_valid: Tensor | None) -> bool:
        window = None if self._parts is None else self._parts.window
        return key_valid is not None and window is not None and window.counts is None

    def _take_up(self, k: Tensor, v: Tensor, padded: bool) -> Parts:
        """The state's tensors, after other code has moved it on."""
        state, maps = self._state, self._maps
        batch, kv_heads = k.shape[:2]
        tail: Any = state._tail if isinstance(state, HybridState) else state
        origin = getattr(tail, "_origin", None)
        window, far, carried = None, None, None
        if isinstance(state, HybridState) and self._exact is not None:
            buffer = state._window.buffer
            buffer._reserve(batch, kv_heads, self._exact.recent, k[:, :, None], v[:, :, None])
            if padded and buffer.counts is None:
                buffer._begin_ordinals(batch, k.device)
            buffer._leave_inference_mode()
            window = Window(*buffer.slots, buffer.ordinals, buffer.counts, buffer.sink_positions)
            if state._far is not None:
                state._far.reserve(batch, kv_heads, *buffer.slots)
                for name in _FAR_TENSORS:
                    setattr(state._far, name, writable(getattr(state._far, name)))
                far = FarTensors(*(getattr(state._far, name) for name in _FAR_TENSORS))
        if maps.fitted is not None:
            carry = tail._carry if isinstance(state, HybridState) else state._carries.get("weights")
            rows, features = batch * len(maps.fitted.rate), maps.fitted.rate.shape[1]
            carry = writable_carry(carry or empty_carry(rows, features, v.shape[-1], k, log=True))
            if isinstance(state, HybridState):
                tail._carry = carry
            else:
                state._carries["weights"] = carry
            carried = State(carry.sums, carry.totals, carry.scale, carry.age)
        logits = self._rule.sink_logits
        parts = Parts(
            sinks=0 if self._exact is None else self._exact.sinks,
            at=torch.full((), state.length, dtype=torch.int64, device=k.device),
            origin=_origin_of(origin, batch, k.device),
            window=window,
            far=far,
            state=carried,
            fitted=maps.fitted,
            rule=Rule(self._scale, self._rule.softcap, None if logits is None else logits[0].to(k.device, k.dtype)),
            correction=maps.correction,
        )
        if self._backend is not None:
            shapes = tuple(str(tuple(x.shape)) for x in tree_leaves((parts, k)) if isinstance(x, Tensor))
            kind = (self._scale, self._rule.softcap, parts.sinks, window is not None, far is not None, padded)
            self._run = _captured((*kind, *shapes), self._backend)
        return parts


_FAR_TENSORS = ("keys", "values", "priorities", "positions", "ordinals", "pending")


def _origin_of(origin: Tensor | None, batch: int, device: torch.device) -> Tensor:
    if origin is None:
        return torch.zeros(batch, dtype=torch.int64, device=device)
    return origin.to(device).expand(batch).clone()


@functools.lru_cache(maxsize=64)
def _captured(shapes: tuple[Any, ...], backend: str) -> Callable[..., Tensor]:
    """``decode_tensors`` as one graph of ``torch.compile``, for parts of these shapes.

    torch counts recompilations by code object and gives up after a few, so each kind of part has a code object of its
    own.
    """
    code = decode_tensors.__code__.replace(co_name=f"decode_tensors_{abs(hash(shapes))}")
    own = FunctionType(code, vars(operations), "decode_tensors", decode_tensors.__defaults__)
    compiled: Callable[..., Tensor] = torch.compile(own, fullgraph=True, dynamic=False, backend=backend)
    return compiled

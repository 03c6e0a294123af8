"""Decode one position at a time: the state of a window, a hybrid or a fitted map, moved on in one step.

``HybridState.attend`` and ``LinearState.attend`` take blocks of any size. Their cost for a single position is that of
some forty small tensor operations. ``DecodeStep`` computes the same in place, on the very tensors of the state, by one
call of ``decode_kernel``, and blocks and steps may take turns. It is for the CPU and float32;
``softgap.attention.tensor_step`` does the same on other devices.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention.chunked import empty_carry
from softgap.attention.exact_set import ExactSet, ScoreRule
from softgap.attention.feature_maps import exp_affine_query
from softgap.attention.hybrid import HybridState
from softgap.attention.mechanism import Mechanism
from softgap.attention.streaming import LinearState

__all__ = ["DecodeMaps", "DecodeStep", "can_decode", "recent_rows", "writable", "writable_carry"]


def can_decode(mechanism: Mechanism) -> bool:
    """Whether a step can follow a mechanism: windows, fitted maps, and hybrids of both."""
    if mechanism.kind == "window":
        return True
    tail = mechanism.tail_with_parameters() if mechanism.kind == "hybrid" else mechanism
    if tail is None or tail.query_map is not exp_affine_query or tail.missing:
        return False
    turn = tail.parameters.get("turn")
    return turn is None or (turn.shape[1] == 1 and _is_quarter_turn(turn[0, 0]))


def recent_rows(recent: int) -> int:
    """Rows of features that the pass keeps for the sums over so many recent keys: chunks, and keys of one chunk."""
    length = _chunk_length(recent)
    return (recent - 1) // length + 1 + length


def _chunk_length(recent: int) -> int:
    return math.isqrt(recent - 1) + 1


def _is_quarter_turn(turn: Float[Tensor, "dim dim"]) -> bool:
    """Whether each row has at most one number, 1 or -1."""
    size = turn.abs()
    return bool(((size == 0) | (size == 1)).all() and (size.sum(dim=1) <= 1).all())


class DecodeMaps:
    """What the compiled pass reads at every step: maps and output correction, contiguous, in float32.

    They share memory with the plan's tensors where those already lie so.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        heads: Int[Tensor, " head"],
        kv_heads: Int[Tensor, " kv_head"],
        weight: Float[Tensor, "head value_dim value_dim"] | None = None,
        bias: Float[Tensor, "head value_dim"] | None = None,
    ) -> None:
        # Here, since it loads numba.
        from softgap.attention.decode_arrays import Maps, Readout

        self.mechanism = mechanism
        self.heads, self.kv_heads = heads.numpy(), kv_heads.numpy()
        n, parameters = len(heads), mechanism.parameters
        tail = mechanism.tail_with_parameters() if mechanism.kind == "hybrid" else mechanism
        if tail is None or tail.kind == "window":
            rotation = _rotation(None, None)
            self.maps = Maps(_none(3), _none(2), _none(3), _none(2), _none(2), *rotation, _none(1))
        else:
            factor = torch.full((n,), float(mechanism.options.get("f", 1.0)))
            if "tail_factor" in parameters:
                factor = factor * parameters["tail_factor"][0].float()
            queries = (_rows(parameters[name], n) for name in ("query_weight", "query_bias"))
            own = max(len(kv_heads), *(parameters[name].shape[1] for name in ("key_weight", "key_bias", "rate")))
            keys = (_rows(parameters[name], own) for name in ("key_weight", "key_bias", "rate"))
            rotation = _rotation(parameters.get("frequency"), parameters.get("turn"))
            arrays: list[Any] = [*queries, *keys, *rotation, factor.numpy()]
            self.maps = Maps(*arrays)
        self.readout = Readout(_none(3), _none(2))
        if weight is not None and bias is not None:
            self.readout = Readout(_rows(weight[None], n), _rows(bias[None], n))

    @property
    def features(self) -> int:
        """Features of the state; 0 where there is none."""
        return int(self.maps.rate.shape[1])


def _rows(x: Float[Tensor, "layer row ..."], rows: int) -> Any:
    return x[0].detach().float().expand(rows, *x.shape[2:]).contiguous().numpy()


def _rotation(frequency: Tensor | None, turn: Tensor | None) -> tuple[Any, Any, Any]:
    if frequency is None or turn is None:
        return np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.float32)
    partner = turn[0, 0].abs().argmax(dim=1)
    sign = turn[0, 0].gather(1, partner[:, None])[:, 0]
    return frequency[0, 0].double().numpy(), partner.numpy(), sign.float().numpy()


class DecodeStep:
    """The compiled pass over one state.

    Parameters
    ----------
    state
        A ``HybridState`` or ``LinearState`` for a mechanism that ``can_decode``.
    maps
        The mechanism's maps, and which heads of the layer it is for.
    scale, rule
        As for the state.
    """

    def __init__(
        self, state: HybridState | LinearState, maps: DecodeMaps, *, scale: float, rule: ScoreRule | None = None
    ) -> None:
        self._state, self._maps = state, maps
        self._scale = np.float32(scale)
        self._rule = rule or ScoreRule()
        exact = ExactSet.of(maps.mechanism.options) if isinstance(state, HybridState) else ExactSet(1)
        self._recent, self._sinks, self._n_far = exact.recent, exact.sinks, exact.far
        self._sums: tuple[Tensor, Tensor] | None = None
        self._arrays: Any = None
        self._origin: Any = None
        self._whole: Any = None
        self._length = -1

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept besides the state: sums of the features of recent keys."""
        return 0 if self._sums is None else sum(x.nbytes for x in self._sums)

    def reserve(self, batch: int) -> None:
        """Make room for the sums of recent keys."""
        maps, like = self._maps, torch.empty(0)
        if self._sums is None and isinstance(self._state, HybridState):
            c, heads = _chunk_length(self._recent), len(maps.maps.rate)
            chunks = recent_rows(self._recent) - c
            self._sums = (
                like.new_zeros(batch, heads, chunks, maps.features),
                like.new_zeros(batch, heads, c, maps.features),
            )

    def __call__(
        self,
        q: Float[Tensor, "batch head 1 dim"],
        k: Float[Tensor, "batch kv_head 1 dim"],
        v: Float[Tensor, "batch kv_head 1 value_dim"],
        out: Float[Tensor, "batch head value_dim"],
        key_valid: Bool[Tensor, "batch 1"] | None = None,
    ) -> None:
        """Append one key per row and write the outputs of its queries.

        All tensors are those of the whole layer, in float32 and contiguous; only the heads of the maps are read, and
        written in ``out``.
        """
        from softgap.attention.decode_arrays import Step
        from softgap.attention.decode_kernel import decode_position

        padded = key_valid is not None and not bool(key_valid.all())
        if self._whole is None or len(self._whole) != k.shape[0]:
            self._whole = np.ones(k.shape[0], np.bool_)
        valid = self._whole if not padded or key_valid is None else key_valid[:, 0].numpy()
        inputs = (q.numpy()[:, :, 0], k.numpy()[:, :, 0], v.numpy()[:, :, 0])
        state = self._state
        if isinstance(state, LinearState):
            length, recent, origin = state.length, 0, self._bind_linear(state, k, v)
        else:
            length, recent, origin = state.length, self._recent, self._bind_hybrid(state, k, v, padded)
        step = Step(length, recent, self._sinks, self._scale)
        places = (self._maps.heads, self._maps.kv_heads, origin, valid)
        exact, far, carried, recent_sums, model_rule = self._arrays
        maps, readout = self._maps.maps, self._maps.readout
        decode_position(step, inputs, places, exact, far, carried, recent_sums, maps, model_rule, readout, out.numpy())
        if isinstance(state, LinearState):
            state._advance(len(k), 1, key_valid if padded else None, k.device)
        else:
            state._window.buffer.length += 1
        self._length = state.length

    def _bind_linear(self, state: LinearState, k: Tensor, v: Tensor) -> Any:
        """Take up the state's tensors; where each row's first key stands."""
        from softgap.attention.decode_arrays import Carried

        carry = state._carries.get("weights")
        if self._length != state.length or carry is None:
            rows = len(k) * len(self._maps.maps.rate)
            carry = writable_carry(carry or empty_carry(rows, self._maps.features, v.shape[-1], k, log=True))
            state._carries["weights"] = carry
            exact, far = _no_exact(), _no_far()
            self._arrays = (exact, far, Carried(*_numpy(carry)), _no_recent(), self._rule_arrays())
        origin = np.zeros(len(k), np.int64)
        return origin if state._next is None else (state._next - state.length).expand(len(k)).numpy()

    def _bind_hybrid(self, state: HybridState, k: Tensor, v: Tensor, padded: bool) -> Any:
        buffer = state._window.buffer
        batch, heads = k.shape[0], len(self._maps.kv_heads)
        fresh = self._length != buffer.length
        if fresh or self._origin is None:
            tail: Any = state._tail
            own = None if tail is None else tail._origin
            self._origin = np.zeros(batch, np.int64) if own is None else own.expand(batch).contiguous().numpy()
        if buffer.ring < self._recent and buffer.ring <= buffer.length:
            buffer._reserve(batch, heads, min(self._recent, buffer.length + 1), k, v)
            fresh = True
        if padded and buffer.counts is None:
            buffer._begin_ordinals(batch, k.device)
            fresh = True
        if fresh:
            self._take_up(state, k, v, self._origin)
        return self._origin

    def _take_up(self, state: HybridState, k: Tensor, v: Tensor, origin: Any) -> None:
        """Take up the state's tensors after other code has moved it on."""
        from softgap.attention.decode_arrays import Carried, Far, Recent, Step
        from softgap.attention.feature_kernel import fill_recent

        buffer, batch = state._window.buffer, len(k)
        keys, values = buffer.slots
        exact = _no_exact()._replace(keys=keys.numpy(), values=values.numpy())
        for name in ("ordinals", "counts", "sink_positions"):
            x = getattr(buffer, name)
            exact = exact if x is None else exact._replace(**{name: x.numpy()})
        far = _no_far()
        if state._far is not None:
            state._far.reserve(batch, len(self._maps.kv_heads), keys, values)
            far = Far(*(x.contiguous().numpy() for x in state._far._tensors() if x is not None))
        carried, recent = _no_carried(), _no_recent()
        tail: Any = state._tail
        if tail is not None:
            rows = batch * len(self._maps.maps.rate)
            tail._carry = writable_carry(
                tail._carry or empty_carry(rows, self._maps.features, v.shape[-1], keys, log=True)
            )
            carried = Carried(*_numpy(tail._carry))
            self.reserve(batch)
            recent = Recent(*(x.numpy() for x in self._sums or ()))
            if self._length != buffer.length and buffer.length:
                step = Step(buffer.length - 1, self._recent, self._sinks, self._scale)
                fill_recent(step, exact, recent, self._maps.maps, origin)
        self._arrays = (exact, far, carried, recent, self._rule_arrays())

    def _rule_arrays(self) -> Any:
        from softgap.attention import decode_arrays

        logits = torch.zeros(0) if self._rule.sink_logits is None else self._rule.sink_logits[0].float()
        return decode_arrays.Rule(np.float32(self._rule.softcap or 0), logits.contiguous().numpy())


def writable(x: Tensor) -> Tensor:
    """A tensor that a step may write into."""
    copy = not x.is_contiguous() or (x.is_inference() and not torch.is_inference_mode_enabled())
    return x.clone(memory_format=torch.contiguous_format) if copy else x


def writable_carry(carry: Any) -> Any:
    """A carry whose tensors a step may write into."""
    names = ("sums", "totals", "scale", "age")
    return replace(carry, **{name: writable(getattr(carry, name)) for name in names})


def _numpy(carry: Any) -> tuple[Any, ...]:
    return tuple(getattr(carry, name).numpy() for name in ("sums", "totals", "scale", "age"))


def _none(axes: int, dtype: Any = np.float32) -> Any:
    return np.zeros((0,) * axes, dtype)


def _no_exact() -> Any:
    from softgap.attention.decode_arrays import Exact

    return Exact(_none(4), _none(4), _none(2, np.int64), _none(1, np.int64), _none(2, np.int64))


def _no_far() -> Any:
    from softgap.attention.decode_arrays import Far

    return Far(_none(4), _none(4), _none(3), _none(3, np.int32), _none(3, np.int32), _none(3))


def _no_carried() -> Any:
    from softgap.attention.decode_arrays import Carried

    return Carried(_none(3), _none(2), _none(2), _none(2))


def _no_recent() -> Any:
    from softgap.attention.decode_arrays import Recent

    return Recent(_none(4), _none(4))

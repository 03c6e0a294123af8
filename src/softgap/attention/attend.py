"""Attend by any mechanism: check the input, choose the form, compute."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from softgap.attention.exact_set import ScoreRule
from softgap.attention.hybrid import HybridState
from softgap.attention.mechanism import Mechanism
from softgap.attention.outputs import Attention
from softgap.attention.quadratic import quadratic, weight_blocks
from softgap.attention.registry import add_window, resolve
from softgap.attention.streaming import LinearState
from softgap.attention.visible import Visible
from softgap.errors import ShapeError, UnsupportedError, ValueInputError, unknown_name

__all__ = [
    "attend",
    "attend_hybrid",
    "attention_weights",
    "choose_form",
    "has_state",
    "new_state",
    "split_states",
    "stacked_states",
]

Form = Literal["quadratic", "chunked"]
# The chunked form costs O(T r d_v) with r features; up to this many it is the default at any length.
FEW_FEATURES = 512


def attend(
    mechanism: str | Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    visible: Visible | None = None,
    scale: float | None = None,
    form: str = "auto",
    dtype: torch.dtype = torch.float32,
    check: bool = True,
    rule: ScoreRule | None = None,
) -> Attention:
    """Attention by any registered mechanism on given queries, keys and values.

    Parameters
    ----------
    mechanism
        A name (``"elu1"``, ``"top_k:k=8"``) or a ``Mechanism``.
    q, k, v
        Post-rotary tensors; query heads are a multiple of KV heads, which are never repeated.
    visible
        Which keys each query sees; None is causal with the queries at the end of the keys.
    scale
        The model's scaling; None is 1 / sqrt(d).
    form
        ``quadratic`` serves everything in memory O(T); ``chunked`` serves factorable mechanisms in time O(T);
        ``auto`` takes the faster one.
    dtype
        Arithmetic is float32 whatever the input, or float64.
    check
        Whether to look for NaN, inf and sequences that see nothing; shapes are always checked.
    rule
        The model's softcap and learned sinks, for windows and hybrids; other mechanisms have no use for them.

    Returns
    -------
    Attention
        ``output`` ``[batch, head, query, value_dim]``, and which rows were flagged.

    Raises
    ------
    ShapeError
        If q, k and v do not fit together.

    Examples
    --------
    Two query heads share one KV head:

    >>> import softgap, torch
    >>> generator = torch.Generator().manual_seed(0)
    >>> q = torch.randn(1, 2, 16, 8, generator=generator)
    >>> k, v = (torch.randn(1, 1, 16, 8, generator=generator) for _ in range(2))
    >>> softgap.attend("elu1", q, k, v).output.shape
    torch.Size([1, 2, 16, 8])
    """
    resolved = resolve(mechanism)
    q, k, v, shown = _check_inputs(q, k, v, visible, dtype, values=check)
    scaling = _scaling(scale, q.shape[-1])
    _check_far(resolved, shown, q.shape[2])
    if _resolve_form(resolved, form, q.shape[-1], shown, k.shape[2]) == "quadratic":
        return quadratic(resolved, q, k, v, visible=shown, scale=scaling, rule=rule)
    stop = (shown.offset or 0) + q.shape[2]
    state = new_state(resolved, window=shown.window, scale=scaling, dtype=dtype, origin=shown.origin, rule=rule)
    valid = None if shown.key_valid is None else shown.key_valid[:, :stop]
    return state.attend(q, k[:, :, :stop], v[:, :, :stop], valid)


def attend_hybrid(
    mechanism: str | Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    window: int,
    **options: Any,
) -> Attention:
    """The hybrid of 0.1, without sinks; ``attend`` takes ``add_window(mechanism, w=window, sinks=0)`` instead."""
    warnings.warn("attend_hybrid is now attend with add_window", DeprecationWarning, stacklevel=2)
    return attend(add_window(mechanism, w=window, sinks=0), q, k, v, check=False, **options)


def new_state(
    mechanism: str | Mechanism,
    *,
    window: int | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
    origin: Int[Tensor, "#batch"] | None = None,
    rule: ScoreRule | None = None,
) -> LinearState | HybridState:
    """The state by which a mechanism follows a growing sequence; the arguments are those of the two classes."""
    resolved = resolve(mechanism)
    if resolved.kind in ("window", "hybrid"):
        return HybridState(resolved, window=window, scale=scale, dtype=dtype, origin=origin, rule=rule)
    return LinearState(resolved, window=window, scale=scale, dtype=dtype, origin=origin)


def has_state(mechanism: Mechanism, d: int, *, window: int | None = None) -> bool:
    """Whether a mechanism follows a growing sequence in constant space, under a window of the model's own or none.

    Under such a window the keys of a tail come and go.
    """
    bare = mechanism.tail is None and not mechanism.options.get("far")
    return mechanism.streams(d) and (window is None or bare)


def stacked_states(states: Sequence[LinearState | HybridState], mechanism: Mechanism) -> LinearState | HybridState:
    """States of several layers as one, along the batch; ``mechanism`` carries the parameters of all of them."""
    linear = [state for state in states if isinstance(state, LinearState)]
    if linear:
        return LinearState.stacked(linear, mechanism)
    return HybridState.stacked([state for state in states if isinstance(state, HybridState)], mechanism)


def split_states(whole: LinearState | HybridState, states: Sequence[LinearState | HybridState]) -> None:
    """Hand each part of a stacked state back to the state it came from."""
    if isinstance(whole, LinearState):
        whole.split_into([state for state in states if isinstance(state, LinearState)])
    else:
        whole.split_into([state for state in states if isinstance(state, HybridState)])


def attention_weights(
    mechanism: str | Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    *,
    visible: Visible | None = None,
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "batch head query key"]:
    """The full matrix of normalised weights: for study at small sizes, O(T^2) numbers."""
    q, k, _, shown = _check_inputs(q, k, k, visible, dtype)
    weights = q.new_zeros(*q.shape[:3], k.shape[2])
    for block in weight_blocks(resolve(mechanism), q, k, visible=shown, scale=_scaling(scale, q.shape[-1])):
        weights[:, :, block.rows, block.keys] = block.weights
    return weights


def choose_form(mechanism: Mechanism, d: int, visible: Visible, n_keys: int) -> Form:
    """The faster form that can serve: chunked for few features or for more keys than features."""
    if mechanism.kind in ("window", "hybrid"):
        stateful = _starts_a_sequence(visible) and has_state(mechanism, d, window=visible.window)
        return "chunked" if stateful else "quadratic"
    features = mechanism.feature_dim(d) if mechanism.factorable(d) and visible.mask is None else None
    return "chunked" if features is not None and (features <= FEW_FEATURES or n_keys >= features) else "quadratic"


def _starts_a_sequence(visible: Visible) -> bool:
    """Whether a state can be built from these keys: it counts them from the first one of the sequence."""
    return visible.mask is None and visible.ordinals is None


def _resolve_form(mechanism: Mechanism, form: str, d: int, visible: Visible, n_keys: int) -> Form:
    if form == "auto":
        return choose_form(mechanism, d, visible, n_keys)
    if form == "chunked":
        if not mechanism.streams(d):
            raise UnsupportedError(
                f"mechanism '{mechanism.name}' does not factor and has no chunked form; use form='quadratic'"
            )
        if visible.mask is not None:
            raise UnsupportedError("the chunked form takes a window and key_valid, not a mask; use form='quadratic'")
        if mechanism.kind in ("window", "hybrid") and not _starts_a_sequence(visible):
            raise UnsupportedError(
                f"the chunked form of mechanism '{mechanism.name}' begins with the first key of a sequence, got keys "
                "that come after others; use form='quadratic'"
            )
        return "chunked"
    if form == "quadratic":
        return "quadratic"
    raise unknown_name("form", form, ("auto", "chunked", "quadratic"))


def _check_far(mechanism: Mechanism, visible: Visible, n_queries: int) -> None:
    """Far keys are chosen by the queries of the whole sequence."""
    offset = visible.offset or 0
    if mechanism.options.get("far") and offset and offset + n_queries > mechanism.options["w"]:
        raise UnsupportedError(
            f"mechanism '{mechanism.label}' chooses far keys by the queries that saw them, got queries from position "
            f"{offset} on without the earlier ones; use its state, or generate with the cache of a plan"
        )


def _scaling(scale: float | None, d: int) -> float:
    if scale is not None and not scale > 0:
        raise ValueInputError(f"scale must be above 0, got {scale}; leave it out for 1 / sqrt(d)")
    return d**-0.5 if scale is None else float(scale)


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, visible: Visible | None, dtype: torch.dtype, *, values: bool = True
) -> tuple[Tensor, Tensor, Tensor, Visible]:
    if dtype not in (torch.float32, torch.float64):
        raise ValueInputError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    _check_shapes(q, k, v)
    shown = (visible or Visible()).fitted_to(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if values:
        _check_values(q, k, v, shown)
    return q.to(dtype), k.to(dtype), v.to(dtype), shown


def _check_values(q: Tensor, k: Tensor, v: Tensor, shown: Visible) -> None:
    valid = shown.row_valid(q.shape[0], q.shape[2], q.device)
    if valid.shape[1] and not bool(valid.any(dim=1).all()):
        empty = int((~valid.any(dim=1)).nonzero()[0])
        raise ValueInputError(
            f"every sequence needs at least one visible key, got none for sequence {empty} of the batch; drop it or "
            "correct its mask"
        )
    hidden = shown.key_valid
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        shown_part = tensor if hidden is None or name == "q" else tensor.masked_fill(~hidden[:, None, :, None], 0)
        # One pass and no copy: the extremes of a tensor are finite iff all of it is.
        if tensor.numel() and not all(bool(torch.isfinite(x)) for x in torch.aminmax(shown_part)):
            raise ValueInputError(f"{name} holds NaN or inf where it is visible; attention needs finite numbers")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ShapeError(f"{name} must be [batch, head, time, dim], got shape {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueInputError(f"{name} must hold floating-point numbers, got {tensor.dtype}")
    if k.shape[:3] != v.shape[:3]:
        raise ShapeError(f"k and v must agree in batch, head and time, got {list(k.shape)} and {list(v.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"q and k must agree in batch and dim, got {list(q.shape)} and {list(k.shape)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(f"query heads must be a multiple of KV heads, got {q.shape[1]} and {k.shape[1]}")

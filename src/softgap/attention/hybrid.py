"""The hybrid: softmax on the nearest keys, any mechanism on the rest, under one normaliser.

With a_j the mechanism's own normalised weights, N_t the keys of query t within the window and F_t those before it,

    o_t = sum_{j in F_t} a_j v_j + rho_t sum_{j in N_t} p_j v_j,     rho_t = sum_{j in N_t} a_j,     p = softmax on N_t:

the near keys share what the mechanism gives to all of them as softmax would. It is the same as the joint normaliser of
LoLCATs (arXiv:2410.10254, eq. 6), sum_F phi(q).phi(k_j) + c_t sum_N exp(s_j), with the factor c_t not learned but set
so that both sides agree on the near keys' total; so the mechanism's scale per row, which a fit on normalised weights
leaves open, does not matter. Weights must not be negative.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention.attend import attend, choose_form
from softgap.attention.mechanism import Mechanism
from softgap.attention.outputs import Attention
from softgap.attention.quadratic import weight_blocks
from softgap.attention.registry import resolve
from softgap.attention.streaming import LinearState
from softgap.attention.visible import Visible
from softgap.errors import UnsupportedError, ValueInputError

__all__ = ["HybridState", "attend_hybrid"]


def attend_hybrid(
    mechanism: str | Mechanism,
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    *,
    window: int,
    visible: Visible | None = None,
    scale: float | None = None,
    form: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> Attention:
    """Softmax on the last ``window`` visible positions, the query's own included, and the mechanism before them.

    The other arguments are those of ``attend``.
    """
    resolved = _check_hybrid(resolve(mechanism), window)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    shown = (visible or Visible()).fitted_to(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    # Under a window of the model's own every key comes and goes: there is no state to gain.
    chunked = shown.window is None and choose_form(resolved, q.shape[-1], shown, k.shape[2]) == "chunked"
    if form == "quadratic" or not chunked:
        return _quadratic(resolved, q, k, v, window, shown, q.shape[-1] ** -0.5 if scale is None else scale)
    stop = (shown.offset or 0) + q.shape[2]
    valid = None if shown.key_valid is None else shown.key_valid[:, :stop]
    state = HybridState(resolved, near=max(1, min(window, stop)), scale=scale, dtype=dtype, origin=shown.origin)
    return state.attend(q, k[:, :, :stop], v[:, :, :stop], valid)


class HybridState:
    """A growing sequence of keys and values in constant space: the mechanism's state, and the nearest keys themselves.

    Parameters
    ----------
    near
        How many of the newest keys softmax sees.
    mechanism, scale, dtype, origin
        As for ``LinearState``.
    """

    def __init__(
        self,
        mechanism: str | Mechanism,
        *,
        near: int,
        scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        origin: Int[Tensor, "#batch"] | None = None,
    ) -> None:
        resolved = _check_hybrid(resolve(mechanism), near)
        self.near = near
        self.dtype = dtype
        self._scale = scale
        self._state = LinearState(resolved, near=near, scale=scale, dtype=dtype, origin=origin)
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._valid: Bool[Tensor, "batch tail"] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the state holds."""
        tail = (self._keys, self._values, self._valid)
        return self._state.nbytes + sum(x.nbytes for x in tail if x is not None)

    @property
    def length(self) -> int:
        """Keys appended so far."""
        return self._state.length

    def attend(
        self,
        q: Float[Tensor, "batch head query dim"],
        k: Float[Tensor, "batch kv_head key dim"],
        v: Float[Tensor, "batch kv_head key value_dim"],
        key_valid: Bool[Tensor, "batch key"] | None = None,
    ) -> Attention:
        """Append keys, then answer the queries, which stand at the last of these keys."""
        whole, near, seen = self._state.sums(q, k, v, key_valid)
        softmax = self._softmax(q, k, v, key_valid)
        tiny = torch.finfo(whole.totals.dtype).tiny
        lost = whole.totals.abs() <= tiny
        total = whole.totals.masked_fill(lost, torch.inf)
        factor = 1.0 if whole.scale is None or near.scale is None else (near.scale - whole.scale).exp()
        share = near.totals * factor / total
        # Both sums are of positive weights and divided by the larger total: their difference loses no digits of o.
        far = (whole.values - near.values * factor) / total
        return Attention(far + share * softmax, seen, lost[..., 0] & seen[:, None])

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, key_valid: Bool[Tensor, "batch key"] | None
    ) -> Float[Tensor, "batch head query value_dim"]:
        q, k, v = q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)
        valid = (
            torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if key_valid is None else key_valid
        )
        if self._keys is not None and self._values is not None and self._valid is not None:
            k, v = torch.cat([self._keys, k], dim=2), torch.cat([self._values, v], dim=2)
            valid = torch.cat([self._valid, valid], dim=1)
        recent = slice(max(0, k.shape[2] - self.near + 1), None)
        # Copies: a slice would keep the whole text alive.
        self._keys, self._values, self._valid = (
            k[:, :, recent].clone(),
            v[:, :, recent].clone(),
            valid[:, recent].clone(),
        )
        near = slice(max(0, k.shape[2] - self.near), None)
        if q.shape[2] == 1 and bool(valid[:, near].all()):
            # A generation asks one query a step: no mask is needed.
            return functional.scaled_dot_product_attention(
                q, k[:, :, near], v[:, :, near], scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        visible = Visible(window=self.near, key_valid=None if bool(valid.all()) else valid)
        return attend("softmax", q, k, v, visible=visible, scale=self._scale, dtype=self.dtype, check=False).output


def _quadratic(
    mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, window: int, visible: Visible, scale: float
) -> Attention:
    if visible.key_valid is not None:
        v = v.masked_fill(~visible.key_valid[:, None, :, None], 0)
    softmax = attend(
        "softmax", q, k, v, visible=_clip_to_window(visible, window, q, k), scale=scale, dtype=q.dtype, check=False
    )
    outputs, flags = [], []
    for block in weight_blocks(mechanism, q, k, visible=visible, scale=scale):
        p = visible.positions(block.rows.start, block.rows.stop, q.device)[:, None]
        near = p - torch.arange(block.keys.start, block.keys.stop, device=q.device) < window
        share = (block.weights * near).sum(dim=-1, keepdim=True)
        grouped = (block.weights * ~near).unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        far = (grouped @ v[:, :, block.keys]).reshape(*share.shape[:3], v.shape[-1])
        outputs.append(far + share * softmax.output[:, :, block.rows])
        flags.append(block.flagged)
    valid = visible.row_valid(q.shape[0], q.shape[2], q.device)
    return Attention(torch.cat(outputs, dim=2), valid, torch.cat(flags, dim=2) & valid[:, None])


def _clip_to_window(visible: Visible, window: int, q: Tensor, k: Tensor) -> Visible:
    """The same set without what lies outside the window."""
    if visible.mask is None:
        return replace(visible, window=min(window, visible.window or window))
    p = visible.positions(0, q.shape[2], q.device)[:, None]
    return replace(visible, mask=visible.mask & (p - torch.arange(k.shape[2], device=k.device) < window))


def _check_hybrid(mechanism: Mechanism, window: int) -> Mechanism:
    if window < 1:
        raise ValueInputError(f"window must be at least 1 key, got {window}; leave the hybrid out for none")
    if mechanism.signed or mechanism.normaliser != "sum" or mechanism.kind == "constant":
        raise UnsupportedError(
            f"a hybrid shares weights that are not negative, and mechanism '{mechanism.name}' has others or none; use "
            "one such as elu1 or fitted"
        )
    return mechanism

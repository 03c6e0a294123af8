"""The model's own softmax attention, recomputed in float32 from the tapped tensors.

The model's output is what softgap compares with; this is for what that output cannot show: whether the tap reads the
model right (parity), how concentrated the weights are (focus), and attention without its first tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.attention import Visible
from softgap.probe.tap import AttentionCall
from softgap.probe.visibility import VisibleSets

__all__ = ["focus_of", "head_shapes", "softmax_output", "softmax_rows"]


BLOCK_NUMBERS = 2**22


class SoftmaxRows(NamedTuple):
    """Weights of the query rows start..stop-1 over the keys first..last-1; learned sinks hold what a row lacks to 1."""

    rows: slice
    keys: slice
    weights: Float[Tensor, "batch head query key"]


@dataclass(frozen=True, eq=False)
class Focus:
    """How concentrated each row of weights is.

    Attributes
    ----------
    sparsity
        S(a) = E|a| / sqrt(E a^2) over the visible keys: 1 is uniform, 1 / sqrt(n) is one key.
    attention_entropy
        - sum a log a, in nats.
    largest_weight
        max a.
    """

    sparsity: Float[Tensor, "batch head query"]
    attention_entropy: Float[Tensor, "batch head query"]
    largest_weight: Float[Tensor, "batch head query"]


def softmax_rows(call: AttentionCall, visible: Visible, dtype: torch.dtype = torch.float32) -> Iterator[SoftmaxRows]:
    """Softmax weights with the model's scaling, softcap, finite biases and learned sinks, in blocks of rows."""
    batch, heads, n_queries, _ = call.query.shape
    n_keys = call.key.shape[2]
    shown = visible.fitted_to(batch, heads, n_queries, n_keys)
    q, k = call.query.to(dtype), call.key.to(dtype)
    rows = max(1, BLOCK_NUMBERS // (batch * heads * n_keys))
    for start in range(0, n_queries, rows):
        stop = min(n_queries, start + rows)
        keys = shown.key_range(start, stop, n_keys)
        seen = shown.rows(start, stop, keys, q.device)
        grouped = q[:, :, start:stop].unflatten(1, (k.shape[1], -1)).flatten(2, 3)
        scores = (grouped @ k[:, :, slice(*keys)].transpose(-1, -2)).reshape(batch, heads, stop - start, -1)
        scores = _add_bias(scores * call.scale, call, slice(start, stop), slice(*keys))
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = call.options.get("s_aux")
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            column = sinks.to(dtype).reshape(1, -1, 1, 1).expand(batch, heads, stop - start, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        # A row that sees nothing is 0 / 0; it is padding and stays zero.
        yield SoftmaxRows(slice(start, stop), slice(*keys), weights.nan_to_num(0.0))


def softmax_output(
    call: AttentionCall, visible: Visible, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "batch head query value_dim"]:
    """The output of the recomputed softmax attention."""
    batch, heads, n_queries, _ = call.query.shape
    v = call.value.to(dtype)
    output = v.new_zeros(batch, heads, n_queries, v.shape[-1])
    for block in softmax_rows(call, visible, dtype):
        grouped = block.weights.unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        output[:, :, block.rows] = (grouped @ v[:, :, block.keys]).reshape(batch, heads, -1, v.shape[-1])
    return output


def focus_of(call: AttentionCall, visible: Visible) -> Focus:
    """S(a), entropy and largest weight of every row, blockwise."""
    batch, heads, n_queries, _ = call.query.shape
    shown = visible.fitted_to(batch, heads, n_queries, call.key.shape[2])
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in softmax_rows(call, visible):
        a = block.weights
        keys = (block.keys.start, block.keys.stop)
        count = shown.rows(block.rows.start, block.rows.stop, keys, a.device).sum(dim=-1).clamp(min=1)
        square = a.square().sum(dim=-1)
        sparsity = a.sum(dim=-1) / (square * count).sqrt()
        parts.append((sparsity, torch.special.entr(a).sum(dim=-1), a.amax(dim=-1)))
    sparsity, entropy, largest = (torch.cat(column, dim=2) for column in zip(*parts, strict=True))
    return Focus(sparsity, entropy, largest)


def _add_bias(
    scores: Float[Tensor, "batch head query key"], call: AttentionCall, rows: slice, keys: slice
) -> Float[Tensor, "batch head query key"]:
    softcap = call.options.get("softcap")
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    bias = call.options.get("position_bias")
    if bias is not None:
        scores = scores + bias[..., rows if bias.shape[-2] > 1 else slice(None), keys].to(scores.dtype)
    if call.mask is not None and call.mask.is_floating_point():
        mask = call.mask.expand(-1, -1, call.query.shape[2], -1)
        scores = scores + mask[..., rows, keys].to(scores.dtype).clamp(min=torch.finfo(scores.dtype).min / 2)
    return scores


def head_shapes(call: AttentionCall) -> dict[str, Float[Tensor, " head"]]:
    """Focus, logit variance and block rank of the softmax weights of every head of one call."""
    visible = VisibleSets().of(call)
    batch, heads, n, _ = call.query.shape
    focus, spread, queries = torch.zeros(heads), torch.zeros(heads), 0
    corner = torch.zeros(heads, n - n // 2, n // 2)
    for block in softmax_rows(call, visible):
        a = block.weights.float().cpu()
        seen = visible.fitted_to(batch, heads, n, call.key.shape[2]).rows(
            block.rows.start, block.rows.stop, (block.keys.start, block.keys.stop), call.query.device
        )
        count = seen.sum(dim=-1).clamp(min=1).cpu()
        focus += (1 - a.sum(-1) / (count * a.square().sum(-1)).sqrt().clamp(min=1e-12)).sum(dim=(0, 2))
        # log a is the score up to a constant per row.
        logs = a.clamp(min=1e-30).log().masked_fill(~seen.cpu(), 0)
        mean = logs.sum(-1) / count
        spread += (logs.square().sum(-1) / count - mean.square()).sum(dim=(0, 2))
        queries += a.shape[0] * a.shape[2]
        first = max(block.rows.start, n // 2)
        if block.rows.stop > first and block.keys.start == 0:
            corner[:, first - n // 2 : block.rows.stop - n // 2] = a[0, :, first - block.rows.start :, : n // 2]
    energy = torch.linalg.svdvals(corner).square()
    share = energy / energy.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    rank = (-(share * share.clamp(min=1e-30).log()).sum(dim=-1)).exp()
    return {"focus": focus / queries, "logit_variance": spread / queries, "block_rank": rank}

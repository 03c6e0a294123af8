"""What a head's own softmax says of it, without any substitute: focus, spread of its scores, rank of its weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from softgap.probe.layout import AttentionLayer
from softgap.probe.softmax import softmax_rows
from softgap.probe.tap import AttentionCall
from softgap.probe.visibility import VisibleSets

__all__ = ["SHAPES", "head_shapes", "output_weight"]

SHAPES: Mapping[str, str] = {
    "focus": "1 - S(a): 0 for the mean of values, near 1 for a single key",
    "logit_variance": "variance of the scores over the visible keys, mean over queries",
    "block_rank": "effective rank of the weights of the second half of the queries on the first half of the keys",
}
_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")


def head_shapes(call: AttentionCall) -> dict[str, Float[Tensor, " head"]]:
    """The three numbers for every head of one call."""
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


def output_weight(layer: AttentionLayer, value_dim: int) -> Float[Tensor, "head value_dim model_dim"] | None:
    """The rows of the output projection that each head writes with; None where the module has none of a known name."""
    for name in _PROJECTIONS:
        weight = getattr(getattr(layer.module, name, None), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        for matrix in (weight.T, weight):  # linear layers store [out, in], those of GPT-2 [in, out]
            if matrix.shape[0] == layer.heads * value_dim:
                found: Tensor = matrix.detach().unflatten(0, (layer.heads, value_dim))
                return found
    return None

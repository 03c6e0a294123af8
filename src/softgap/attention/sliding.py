"""Sliding windows for many positions at once: softmax over recent keys in tiles, and sums of their features.

A tile is a few queries with the keys that they see: one call of torch's blocked attention for the CPU, which never
holds its scores in memory and returns the logarithm of every row's sum beside the output, so that other keys can be
added.

Sums of features over the last w keys come from blocks of w keys (van Herk 1992): every window is the end of one block
and the beginning of the next, so it is the sum of a suffix and of a prefix, and nothing is subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from softgap.attention.feature_maps import LOG_ZERO

__all__ = ["attend_recent", "can_tile", "recent_feature_sums"]

# Queries of a tile, and the keys of a call, of which windows that overlap have copies.
ROWS = 32
KEYS = 8192
# Fewer queries are not worth the copies.
FEWEST = 16
# exp of these is far inside float64 and float32.
WIDEST = 500.0
NARROWEST = -60.0


def can_tile(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the blocked attention can serve these tensors."""
    plain = q.dtype == torch.float32 and q.device.type == "cpu" and q.shape[2] >= FEWEST
    gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    known = hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    return plain and not gradient and known and k.shape[-1] == v.shape[-1]


def attend_recent(
    q: Float[Tensor, "batch head query dim"],
    k: Float[Tensor, "batch kv_head key dim"],
    v: Float[Tensor, "batch kv_head key value_dim"],
    recent: int,
    scale: float,
    valid: Bool[Tensor, "batch key"] | None = None,
) -> tuple[Float[Tensor, "batch head query value_dim"], Float[Tensor, "batch head query 1"]]:
    """The softmax over the last ``recent`` keys of each query, and the logarithm of its sum.

    The queries stand at the last of the keys. Rows that see nothing are 0 and -inf.
    """
    batch, heads, n, _ = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    recent = min(recent, k.shape[2])  # a tile has room for the whole window
    outputs, sums = [], []
    for queries, keys, values, seen in _tiles(q, k, v, recent, valid):
        tiles = queries.shape[1]
        rows = queries.permute(0, 1, 2, 4, 3, 5).reshape(batch * tiles, kv_heads, -1, q.shape[-1])
        own_keys, own_values = (x.reshape(batch * tiles, kv_heads, -1, x.shape[-1]) for x in (keys, values))
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).repeat(1, 1, group, 1)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, own_keys, own_values, attn_mask=mask, scale=scale
        )
        shape = (batch, tiles, kv_heads, group, ROWS)
        output, total = found[0].reshape(*shape, -1), found[1].reshape(*shape, 1)
        if valid is not None:
            empty = ~seen.any(dim=-1).view(batch, tiles, 1, 1, ROWS, 1)
            output, total = output.masked_fill(empty, 0), total.masked_fill(empty, -torch.inf)
        outputs.append(output)
        sums.append(total)
    output, total = (
        torch.cat(parts, dim=1).permute(0, 2, 3, 1, 4, 5).flatten(3, 4).flatten(1, 2)[:, :, :n]
        for parts in (outputs, sums)
    )
    return output, total


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, recent: int, valid: Tensor | None
) -> Iterator[tuple[Tensor, Tensor, Tensor, Bool[Tensor, "#tile 1 row key"]]]:
    """Some tiles at a time: queries, keys and values with an axis of tiles behind the batch, and who sees what."""
    batch, n = q.shape[0], q.shape[2]
    count, length = -(-n // ROWS), ROWS + recent - 1
    first = k.shape[2] - n
    # The first tile's keys may begin before those that are there, and the last one's queries end behind.
    front = max(0, recent - 1 - first)
    begin = first + front - (recent - 1)
    padding = (0, 0, front, count * ROWS - n)
    queries = functional.pad(q, (0, 0, 0, count * ROWS - n)).view(batch, k.shape[1], -1, count, ROWS, q.shape[-1])
    # The copies of the windows overlap; a view of them would not survive the products.
    keys, values = (functional.pad(x, padding)[:, :, begin:].unfold(2, length, ROWS) for x in (k, v))
    apart = torch.arange(ROWS)[:, None] + recent - 1 - torch.arange(length)
    inside = ((apart >= 0) & (apart < recent))[None, None]
    there = None
    if valid is not None:
        there = functional.pad(valid, padding[2:])[:, begin:].unfold(1, length, ROWS)
    step = max(1, KEYS // length // batch)
    for start in range(0, count, step):
        part = slice(start, min(count, start + step))
        seen = inside
        if there is not None:
            seen = (inside & there[:, part, None]).view(-1, 1, ROWS, length)
        elif start * ROWS < front - begin:
            exists = begin + ROWS * torch.arange(start, part.stop)[:, None] + torch.arange(length) >= front
            seen = (inside & exists[:, None, None]).repeat(batch, 1, 1, 1)
        own_keys, own_values = (x[:, :, part].permute(0, 2, 1, 4, 3) for x in (keys, values))
        yield queries[:, :, :, part].permute(0, 3, 1, 4, 2, 5), own_keys, own_values, seen


def recent_feature_sums(
    key: Float[Tensor, "batch key_head key feature"], rate: Float[Tensor, "batch key_head feature"] | None, recent: int
) -> Float[Tensor, "batch key_head query feature"] | None:
    """log sum_j phi(k_j) exp(-rate (t - j)) over the last ``recent`` keys of every position but the first ``recent``.

    ``key`` holds logarithms. None where the decay over a window leaves the range of float64.
    """
    n = key.shape[2] - recent
    fastest = 0.0 if rate is None else float(rate.detach().max()) * recent
    if fastest > WIDEST:
        return None
    count = -(-n // recent) + 1
    # The key before the first window is left out. Block b and the beginning of block b + 1 serve positions from b w on.
    logs = functional.pad(key[:, :, 1:], (0, 0, 0, count * recent - (key.shape[2] - 1)), value=LOG_ZERO)
    logs = logs.unflatten(2, (count, recent))
    narrow = None if fastest > -NARROWEST else _sum_blocks(logs, rate, recent, NARROWEST)
    found = _sum_blocks(logs.double(), rate, recent, None) if narrow is None else narrow
    return None if found is None else found.flatten(2, 3)[:, :, :n].to(key.dtype)


def _sum_blocks(
    logs: Float[Tensor, "batch key_head block recent feature"], rate: Tensor | None, recent: int, lowest: float | None
) -> Float[Tensor, "batch key_head window recent feature"] | None:
    """The logarithms of the sums; None where a term would fall below exp(lowest) of another one."""
    inside = torch.arange(recent, device=logs.device, dtype=logs.dtype)[:, None]
    decay = logs.new_zeros(1, 1, 1, 1, 1) if rate is None else rate[:, :, None, None].to(logs.dtype)
    logs = logs + decay * inside
    # Below this a block holds no key.
    top = logs.amax(dim=3, keepdim=True).clamp(min=LOG_ZERO / 10)
    older, newer = top[:, :, :-1] - decay * recent, top[:, :, 1:]
    scale = torch.maximum(older, newer)
    terms = logs - top
    own, other = older - scale, newer - scale
    if lowest is not None and min(_smallest(x) for x in (terms, own, other)) < lowest:
        return None
    terms = terms.exp_()
    prefix = functional.pad(terms[:, :, 1:, :-1].cumsum(dim=3), (0, 0, 1, 0))
    suffix = terms[:, :, :-1].flip(3).cumsum(dim=3).flip(3)
    total = suffix.mul_(own.exp_()).addcmul_(prefix, other.exp_())
    return total.log_().add_(scale).sub_(decay * (inside - 1)).clamp_(min=LOG_ZERO)


def _smallest(x: Tensor) -> float:
    """The smallest of the logarithms that belong to keys that are there."""
    return float(x.detach().masked_fill(x < LOG_ZERO / 100, 0).amin())

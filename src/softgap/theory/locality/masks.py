"""Keys by their distance from the query: the attention mass on them, and a head's output without them.

For query t the keys that are neither sink (the first ``sinks`` keys) nor t itself are *local* where t - j <= w and
*far* beyond. A mask takes away weight and the rest is scaled up again, as if the scores had been -inf:

    a'_j = a_j (1 - r_j) / (1 - sum_i a_i r_i),        r_j in [0, 1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention import Visible
from softgap.errors import ValueInputError
from softgap.probe.softmax import SoftmaxRows, softmax_rows
from softgap.probe.tap import AttentionCall

__all__ = ["CONTROLS", "KINDS", "KeySets", "Mask", "MaskKind", "MaskedRows", "local_shares", "masked_rows"]


MaskKind = Literal["local", "equal mass", "heaviest", "random"]


KINDS: tuple[MaskKind, ...] = ("local", "equal mass", "heaviest", "random")


"""What a mask hides: the last w keys; the heaviest far keys until as much mass is gone, the last of them in part; the w
heaviest far keys; w random far keys."""


# What the last w keys of a single head are compared with: as much mass, and as many keys.
CONTROLS: tuple[MaskKind, ...] = ("equal mass", "heaviest")


@dataclass(frozen=True)
class Mask:
    """Which keys are hidden from a query.

    Attributes
    ----------
    width
        w: the number of recent keys that are local, the query's own not counted.
    """

    kind: MaskKind
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueInputError(f"a width must be at least 1 key, got {self.width}; 4 is usual")


@dataclass(frozen=True, eq=False)
class KeySets:
    """The local and the far keys of some rows of queries; the head axis may be 1."""

    local: Bool[Tensor, "head row key"]
    far: Bool[Tensor, "head row key"]

    @classmethod
    def of(cls, block: SoftmaxRows, visible: Visible, width: int, sinks: int) -> KeySets:
        """Of one block of rows of the first sequence."""
        device = block.weights.device
        keys = (block.keys.start, block.keys.stop)
        seen = visible.rows(block.rows.start, block.rows.stop, keys, device)[0]
        position = visible.positions(block.rows.start, block.rows.stop, device)[:, None]
        key = torch.arange(*keys, device=device)
        seen = seen & (key >= sinks) & (key != position)
        local = seen & (position - key <= width)
        return cls(local, seen & ~local)


def local_shares(
    call: AttentionCall, visible: Visible, widths: tuple[int, ...], *, start: int, sinks: int = 1
) -> Float[Tensor, "quantity width head"]:
    """Means over the queries from ``start`` on: the share of a head's mass on the last w keys, and w / (t - 1).

    Both are shares of what is neither sink nor the query's own key: of its mass, and of its number of keys.
    """
    _, heads, n, _ = call.query.shape
    shown = visible.fitted_to(1, heads, n, call.key.shape[2])
    sums, rows = torch.zeros(2, len(widths), heads, dtype=torch.float64), 0
    for block in softmax_rows(call, shown):
        part = slice(max(0, start - block.rows.start), None)
        a = block.weights[0, :, part].double()
        rows += a.shape[1]
        for i, width in enumerate(widths):
            sets = KeySets.of(block, shown, width, sinks)
            near, rest = (x[:, part].expand_as(a) for x in (sets.local, sets.far))
            on_near, on_rest = ((a * x).sum(dim=-1) for x in (near, rest))
            n_near, n_rest = (x.double().sum(dim=-1) for x in (near, rest))
            sums[0, i] += (on_near / (on_near + on_rest).clamp(min=1e-30)).sum(dim=-1).cpu()
            sums[1, i] += (n_near / (n_near + n_rest).clamp(min=1)).sum(dim=-1).cpu()
    return sums / rows


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """What some heads pass on under one mask.

    Attributes
    ----------
    output
        Of the queries from the start on.
    removed
        Mean mass that the mask takes away from each head, over these queries.
    """

    output: Float[Tensor, "row head value_dim"]
    removed: Float[Tensor, " head"]


def masked_rows(
    call: AttentionCall,
    visible: Visible,
    mask: Mask,
    *,
    start: int,
    sinks: int = 1,
    generator: torch.Generator | None = None,
) -> MaskedRows:
    """All heads of a call under a mask, for the queries from ``start`` on of its first sequence."""
    _, heads, n, _ = call.query.shape
    shown = visible.fitted_to(len(call.query), heads, n, call.key.shape[2])
    group = heads // call.value.shape[1]
    outputs, removed = [], torch.zeros(heads, dtype=torch.float64)
    has_learned_sinks = call.options.get("s_aux") is not None
    # What a row lacks to 1 is a small difference of large numbers where keys that are left hold little.
    for block in softmax_rows(call, shown, torch.float64 if has_learned_sinks else torch.float32):
        part = slice(max(0, start - block.rows.start), None)
        a = block.weights[0, :, part]
        if not a.shape[1]:
            continue
        sets = KeySets.of(block, shown, mask.width, sinks)
        share = removed_share(a, sets.local[:, part], sets.far[:, part], mask, generator)
        rest = a * (1 - share)
        # What a row lacks to 1 lies on a learned sink, which no mask hides.
        beside = (1 - a.sum(dim=-1, keepdim=True)).clamp(min=0) if has_learned_sinks else 0.0
        values = call.value[0, :, block.keys].to(a.dtype).repeat_interleave(group, dim=0)
        outputs.append((rest @ values) / (rest.sum(dim=-1, keepdim=True) + beside).clamp(min=1e-30))
        removed += (a * share).sum(dim=(1, 2), dtype=torch.float64).cpu()
    output = torch.cat(outputs, dim=1)
    return MaskedRows(output.transpose(0, 1).to(call.output.dtype), removed / output.shape[1])


def removed_share(
    a: Float[Tensor, "head row key"],
    local: Bool[Tensor, "#head row key"],
    far: Bool[Tensor, "#head row key"],
    mask: Mask,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "head row key"]:
    """The share r_j of every key's weight that a mask takes away."""
    local, far = local.expand_as(a), far.expand_as(a)
    if mask.kind == "local":
        return local.to(a.dtype)
    if mask.kind == "random":
        order = torch.rand(a.shape, generator=generator, device="cpu").to(a).masked_fill(~far, -1.0)
        return _first(order, mask.width) * far
    weight = a.masked_fill(~far, -1.0)
    if mask.kind == "heaviest":
        return _first(weight, mask.width) * far
    ranked = weight.sort(dim=-1, descending=True)
    heavy = ranked.values.clamp(min=0)
    wanted = (a * local).sum(dim=-1, keepdim=True)
    before = heavy.cumsum(dim=-1) - heavy
    share = ((wanted - before) / heavy.clamp(min=1e-30)).clamp(0, 1) * (ranked.values >= 0)
    return torch.zeros_like(a).scatter(-1, ranked.indices, share)


def _first(order: Float[Tensor, "head row key"], count: int) -> Float[Tensor, "head row key"]:
    """1 at the so many largest numbers of each row, else 0."""
    places = order.topk(min(count, order.shape[-1]), dim=-1).indices
    return torch.zeros_like(order).scatter(-1, places, 1.0)

"""The chunked causal form: weighted sums over all visible keys in O(T r d_v) time, one block of positions at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from softgap.attention.feature_maps import LOG_ZERO
from softgap.errors import ValueInputError

__all__ = ["PRESENT", "Carry", "apply_decay", "block_sums", "empty_carry", "masked_product", "prefix_sums"]


@dataclass(frozen=True, eq=False)
class Carry:
    """What one block of positions leaves for the next.

    Without a window: ``sums``, the state of all keys so far, relative to ``exp(scale - rate * age)`` per feature. The
    scale stays as the largest key set it and only its age grows: subtracting the rate at every step would add up 8192
    roundings. With a window of w: the features and values of the last w - 1 keys.
    """

    sums: Float[Tensor, "n r e"]
    totals: Float[Tensor, "n r"]
    scale: Float[Tensor, "n r"] | None
    age: Float[Tensor, "n r"] | None
    tail_key: Float[Tensor, "n tail r"]
    tail_value: Float[Tensor, "n tail e"]


def empty_carry(n: int, r: int, e: int, like: Tensor, *, log: bool, window: int | None = None) -> Carry:
    """The carry before the first key."""
    stated = r if window is None else 0
    scale = like.new_full((n, stated), LOG_ZERO) if log else None
    age = like.new_zeros(n, stated) if log else None
    return Carry(
        like.new_zeros(n, stated, e),
        like.new_zeros(n, stated),
        scale,
        age,
        like.new_zeros(n, 0, r),
        like.new_zeros(n, 0, e),
    )


def carry_after(carry: Carry, states: Float[Tensor, "n rows r e"], totals: Float[Tensor, "n rows r"]) -> Carry:
    """The carry behind a block: a copy, since a slice would keep the states of the whole block alive."""
    sums, total = (x[:, -1].clone(memory_format=torch.contiguous_format) for x in (states, totals))
    return replace(carry, sums=sums, totals=total)


CHUNK = 64


# Log-features above this belong to a key that is there.
PRESENT = LOG_ZERO / 2


# exp(-RATE_SPREAD * 16 / 2) is the smallest factor a chunk of 16 must hold: e^-40, far inside float32.
RATE_SPREAD = 5.0


class ScaledSums(NamedTuple):
    """A weighted sum of values and of ones per query row, to be multiplied by exp(scale) (scale None: by 1)."""

    sums: Float[Tensor, "n chunk gc e"]
    totals: Float[Tensor, "n chunk gc 1"]
    scale: Float[Tensor, "n chunk gc 1"] | None


def chunk_length(rate: Float[Tensor, "n r"] | None, positions: int, window: int | None) -> int:
    """The chunk length that is fast for this many positions and safe for these rates of decay."""
    longest = CHUNK
    if rate is not None and rate.shape[-1] > 1:
        # A rate that all features of a head share cancels within each row; only differences can overflow.
        spread = float((rate.amax(-1) - rate.amin(-1)).max())
        if spread > RATE_SPREAD:
            raise ValueInputError(
                f"decay rates of one head may differ by at most {RATE_SPREAD:g}, got a spread of {spread:g}; "
                "clamp them (a feature that decays by exp(-5) a step already sees only its own token)"
            )
        while longest * spread > 16 * RATE_SPREAD:
            longest //= 2
    # A short block under a window still sums window / C states: keep C long there.
    return longest if window is not None else max(1, min(longest, positions))


def block_sums(
    query: Float[Tensor, "n g t r"],
    key: Float[Tensor, "n t r"],
    value: Float[Tensor, "n t e"],
    carry: Carry,
    *,
    rate: Float[Tensor, "n r"] | None,
    log: bool,
    window: int | None,
) -> tuple[Float[Tensor, "n g t e"], Float[Tensor, "n g t 1"], Float[Tensor, "n g t 1"] | None, Carry]:
    """sum_j w_tj v_j and sum_j w_tj for the queries of one block; if ``log``, to be multiplied by exp of the third.

    The block's keys stand at the same positions as its queries; the carry holds what came before.
    """
    g, t = query.shape[1:3]
    c = chunk_length(rate, t, window)
    chunks = -(-t // c)
    full, edges = _window_chunks(window, c)
    before = full + edges
    absent = LOG_ZERO if log else 0.0
    if window is not None:
        key = _pad_front(torch.cat([carry.tail_key, key], dim=1), before * c + t, absent)
        value = _pad_front(torch.cat([carry.tail_value, value], dim=1), before * c + t, 0.0)
    missing = chunks * c - t
    keys = _pad_end(key, missing, absent).unflatten(1, (-1, c))
    values = _pad_end(value, missing, 0.0).unflatten(1, (-1, c))
    # Every product below reads the queries chunk by chunk: one copy here saves one in each.
    queries = _pad_end(query, missing, 0.0).unflatten(2, (chunks, c)).transpose(1, 2).contiguous()

    geometry = _Geometry(c=c, chunks=chunks, t=t, before=before, full=full, window=window)
    parts = [_own_chunk(queries, keys[:, before:], values[:, before:], rate, log, geometry)]
    # The tail and the border of its chunk decide where a state's decay is counted to.
    to_border = apply_decay(keys, rate, geometry.to_border(keys.device, keys.dtype), -1)
    for shift in range(full + 1, before + 1):
        lagged = slice(before - shift, before - shift + chunks)
        parts.append(_edge_chunk(queries, to_border[:, lagged], values[:, lagged], rate, log, geometry, shift))
    if window is None or full:
        whole, after = _whole_chunks(queries, to_border, values, carry, rate, log, geometry)
        parts.append(whole)
        carry = after if window is None else carry
    if window is not None:
        tail = slice(key.shape[1] - (window - 1), None)
        carry = replace(carry, tail_key=key[:, tail].clone(), tail_value=value[:, tail].clone())
    total = _total(parts)

    def by_position(x: Tensor) -> Tensor:
        joined: Tensor = x.unflatten(2, (g, c)).transpose(1, 2).flatten(2, 3)[:, :, :t]
        return joined

    scale = None if total.scale is None else by_position(total.scale)
    return by_position(total.sums), by_position(total.totals), scale, carry


def prefix_sums(
    query: Float[Tensor, "n g t 1"], key: Float[Tensor, "n t 1"], value: Float[Tensor, "n t e"], carry: Carry
) -> tuple[Float[Tensor, "n g t e"], Float[Tensor, "n g t 1"], None, Carry]:
    """The same as ``block_sums`` for a single plain feature, by running sums of values and of features.

    torch adds these in float64.
    """
    sums = (value * key).cumsum(dim=1) + carry.sums
    totals = key.cumsum(dim=1) + carry.totals[:, None]
    after = carry_after(carry, sums[:, :, None], totals)
    return query * sums[:, None], query * totals[:, None], None, after


class _Geometry(NamedTuple):
    """Where the chunks of a block lie: ``before`` chunks of carried keys, then ``chunks`` of its own."""

    c: int
    chunks: int
    t: int
    before: int
    full: int
    window: int | None

    def inside(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "c 1"]:
        return torch.arange(self.c, device=device, dtype=dtype)[:, None]

    def ends(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, " chunk"]:
        """Position behind the last key of each chunk, counted from the block's first."""
        return (torch.arange(1 - self.before, self.chunks + 1, device=device, dtype=dtype) * self.c).clamp(max=self.t)

    def to_border(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "chunk c 1"]:
        """Distance of each key to the position behind its chunk (the last chunk may be short)."""
        length = self.ends(device, dtype) - torch.arange(-self.before, self.chunks, device=device, dtype=dtype) * self.c
        return (length[:, None, None] - self.inside(device, dtype)).clamp(min=0)

    def distance(self, shift: int, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "c c"]:
        """t - j between a chunk's queries and the keys of the chunk ``shift`` before it."""
        inside = self.inside(device, dtype)
        return inside - inside.T + shift * self.c


def _window_chunks(window: int | None, c: int) -> tuple[int, int]:
    """Chunks before a query's own that its window holds whole, and those that its edge runs through."""
    if window is None:
        return 0, 0
    full = max(0, window // c - 1)
    return full, -(-(window - 1) // c) - full


def _pad_front(x: Float[Tensor, "n k f"], length: int, fill: float) -> Float[Tensor, "n length f"]:
    return functional.pad(x, (0, 0, length - x.shape[1], 0), value=fill)


def _pad_end(x: Float[Tensor, "*rows t f"], missing: int, fill: float) -> Float[Tensor, "*rows length f"]:
    return functional.pad(x, (0, 0, 0, missing), value=fill) if missing else x


def apply_decay(x: Tensor, rate: Float[Tensor, "n r"] | None, distance: Tensor, sign: int) -> Tensor:
    """Log-features after ``distance`` positions of decay (sign -1), or before it (sign +1)."""
    if rate is None:
        return x
    return x + sign * distance * rate.view(rate.shape[0], *[1] * (x.dim() - 2), rate.shape[1])


def _own_chunk(
    queries: Float[Tensor, "n chunk g c r"],
    keys: Float[Tensor, "n chunk c r"],
    values: Float[Tensor, "n chunk c e"],
    rate: Float[Tensor, "n r"] | None,
    log: bool,
    geometry: _Geometry,
) -> ScaledSums:
    distance = geometry.distance(0, keys.device, keys.dtype)
    seen = distance >= 0
    if geometry.window is not None:
        seen = seen & (distance < geometry.window)
    if rate is not None:
        from_middle = geometry.inside(keys.device, keys.dtype) - (geometry.c - 1) / 2
        queries, keys = apply_decay(queries, rate, from_middle, -1), apply_decay(keys, rate, from_middle, 1)
    return masked_product(queries, keys, values, seen, log)


def _edge_chunk(
    queries: Float[Tensor, "n chunk g c r"],
    keys: Float[Tensor, "n chunk c r"],
    values: Float[Tensor, "n chunk c e"],
    rate: Float[Tensor, "n r"] | None,
    log: bool,
    geometry: _Geometry,
    shift: int,
) -> ScaledSums:
    seen = geometry.distance(shift, keys.device, keys.dtype) < (geometry.window or 0)
    since_border = geometry.inside(keys.device, keys.dtype) + (shift - 1) * geometry.c
    return masked_product(apply_decay(queries, rate, since_border, -1), keys, values, seen, log)


def masked_product(
    queries: Float[Tensor, "n chunk g c r"],
    keys: Float[Tensor, "n chunk c r"],
    values: Float[Tensor, "n chunk c e"],
    seen: Bool[Tensor, "c c"],
    log: bool,
) -> ScaledSums:
    """The quadratic form of each chunk: explicit weights of the keys that each query sees."""
    g, c = queries.shape[2:4]
    if not log:
        weights = (queries.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (g, c)).mul_(seen).flatten(2, 3)
        return ScaledSums(weights @ values, weights.sum(-1, keepdim=True), None)
    query_top, key_top = queries.amax(-1, keepdim=True), keys.amax(-1, keepdim=True)
    weights = (queries - query_top).exp_().flatten(2, 3) @ (keys - key_top).exp_().transpose(-1, -2)
    key_scale = key_top.transpose(-1, -2)
    shown = seen & (key_scale > PRESENT)
    key_scale = key_scale.masked_fill(~shown, LOG_ZERO)
    row_top = key_scale.amax(-1, keepdim=True)
    factor = (key_scale - row_top).exp_().mul_(shown)
    weights = weights.unflatten(2, (g, c)).mul_(factor[:, :, None]).flatten(2, 3)
    scale = (query_top + row_top[:, :, None]).flatten(2, 3)
    return ScaledSums(weights @ values, weights.sum(-1, keepdim=True), scale)


def _whole_chunks(
    queries: Float[Tensor, "n chunk g c r"],
    keys: Float[Tensor, "n chunks c r"],
    values: Float[Tensor, "n chunks c e"],
    carry: Carry,
    rate: Float[Tensor, "n r"] | None,
    log: bool,
    geometry: _Geometry,
) -> tuple[ScaledSums, Carry]:
    """The sum over the chunks before each query's own, and the carry behind the block (without a window)."""
    device, dtype = keys.device, keys.dtype
    scales = keys.amax(dim=2) if log else None
    features = keys
    if scales is not None:
        present = keys.amax(-1, keepdim=True) > PRESENT
        features = (keys - scales[:, :, None]).exp_().mul_(present)
    states, totals = features.transpose(-1, -2) @ values, features.sum(dim=2)
    starts = torch.arange(geometry.chunks + 1, device=device, dtype=dtype).mul_(geometry.c).clamp_(max=geometry.t)
    row = torch.arange(geometry.chunks + 1, device=device)[:, None]
    column = torch.arange(-geometry.before, geometry.chunks, device=device)
    age = (starts[:, None] - geometry.ends(device, dtype))[None, :, :, None]
    if geometry.window is None:
        # The carry stands for a chunk that ends where the block begins.
        states = torch.cat([carry.sums[:, None], states], dim=1)
        totals = torch.cat([carry.totals[:, None], totals], dim=1)
        column = functional.pad(column, (1, 0), value=-1)
        if scales is not None and carry.scale is not None and carry.age is not None:
            scales = torch.cat([carry.scale[:, None], scales], dim=1)
            carried = carry.age[:, None, None] + starts[:, None, None]
            age = torch.cat([carried, age.expand(len(carried), -1, -1, carried.shape[-1])], dim=2)
        allowed = column < row
    else:
        allowed = (column < row) & (column >= row - geometry.full)
    if scales is None:
        combined = (allowed.to(dtype) @ states.flatten(2)).unflatten(2, states.shape[2:])
        totals = allowed.to(dtype) @ totals
        part = _query_states(queries, combined, totals, None)
        return part, carry_after(carry, combined, totals)
    combined, totals, scale, after = _combine_states(states, totals, scales, age, allowed, rate)
    shifted = apply_decay(queries, rate, geometry.inside(device, dtype), -1) + scale[:, :-1, None, None]
    top = shifted.amax(-1, keepdim=True)
    part = _query_states((shifted - top).exp_(), combined, totals, top.flatten(2, 3))
    return part, replace(carry_after(carry, combined, totals), scale=after[0], age=after[1])


def _query_states(
    queries: Float[Tensor, "n chunk g c r"],
    states: Float[Tensor, "n rows r e"],
    totals: Float[Tensor, "n rows r"],
    scale: Float[Tensor, "n chunk gc 1"] | None,
) -> ScaledSums:
    """What the queries of each chunk get from the state before it (the last row is the carry)."""
    sums = queries.flatten(2, 3) @ states[:, :-1]
    return ScaledSums(sums, (queries * totals[:, :-1, None, None]).sum(-1).flatten(2, 3)[..., None], scale)


def _combine_states(
    states: Float[Tensor, "n chunks r e"],
    totals: Float[Tensor, "n chunks r"],
    scales: Float[Tensor, "n chunks r"],
    age: Float[Tensor, "#n rows chunks #r"],
    allowed: Bool[Tensor, "rows chunks"],
    rate: Float[Tensor, "n r"] | None,
) -> tuple[Float[Tensor, "n rows r e"], Float[Tensor, "n rows r"], Float[Tensor, "n rows r"], tuple[Tensor, Tensor]]:
    """Per row the sum of the allowed chunk states, each decayed by its age; its scale; scale and age of the last."""
    exponent = scales[:, None] if rate is None else scales[:, None] - rate[:, None, None] * age
    exponent = exponent.masked_fill(~allowed[..., None], LOG_ZERO)
    top, largest = exponent.max(dim=2)
    weights = (exponent - top[:, :, None]).exp_().mul_(allowed[..., None])
    summed = (weights.permute(0, 3, 1, 2) @ states.transpose(1, 2)).transpose(1, 2)
    total = (weights * totals[:, None]).sum(dim=2)
    last = largest[:, -1:]
    ages = age[:, -1].expand(len(scales), -1, scales.shape[-1])
    return summed, total, top, (scales.gather(1, last)[:, 0], ages.gather(1, last)[:, 0])


def _total(parts: list[ScaledSums]) -> ScaledSums:
    sums, totals, scale = parts[0]
    if scale is None:
        for part in parts[1:]:
            sums.add_(part.sums)
            totals.add_(part.totals)
        return parts[0]
    scales = torch.stack([part.scale for part in parts if part.scale is not None])
    top = scales.amax(0)
    factors = (scales - top).exp_()
    sums.mul_(factors[0])
    totals.mul_(factors[0])
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        sums.addcmul_(part.sums, factor)
        totals.addcmul_(part.totals, factor)
    return ScaledSums(sums, totals, top)

"""Which keys each query sees: the one description that every form of attention reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from softgap.errors import ShapeError, ValueInputError

__all__ = ["Visible"]


@dataclass(frozen=True, eq=False)
class Visible:
    """The set V_t of keys that query t sees.

    Query t stands at position ``p = offset + t`` and key j at position j. The query sees key j iff

        j <= p,   p - j < window,   key_valid[b, j]

    or, where ``mask`` is given, iff ``mask[b, h, t, j]`` and nothing else counts (positions still come from offset).

    Attributes
    ----------
    offset
        Position of the first query; None puts the queries at the end of the keys. 0 with more keys than queries is
        the prefill of a static cache: the keys behind the queries are never seen.
    window
        Number of positions a query sees, itself included; None for all.
    key_valid
        False marks padding; left, right or holes.
    mask
        Any visible set; only the row-blocked quadratic form can use it.
    origin
        Position that rotary embedding gave the first key of each row that is not padding (under a mask: the first of
        all); None is 0. The others count on from there, padding left out.
    ordinals
        How many keys of its sequence come before each key, padding left out: the sinks of a window are the first keys
        of the sequence. None counts the keys that are shown; other numbers are needed where a sliding cache has
        dropped the first ones, or where some are hidden that are no padding.
    """

    offset: int | None = None
    window: int | None = None
    key_valid: Bool[Tensor, "batch key"] | None = None
    mask: Bool[Tensor, "#batch #head query key"] | None = None
    origin: Int[Tensor, "#batch"] | None = None
    ordinals: Int[Tensor, "#batch key"] | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueInputError(f"window must be at least 1, got {self.window}; use None for no window")
        if self.mask is not None and (self.window is not None or self.key_valid is not None):
            raise ValueInputError("a mask says everything: give window and key_valid only without one")
        for name, tensor in (("key_valid", self.key_valid), ("mask", self.mask)):
            if tensor is not None and tensor.dtype != torch.bool:
                raise ValueInputError(f"{name} must be boolean, got {tensor.dtype}; True marks what is seen")

    def fitted_to(self, batch: int, heads: int, n_queries: int, n_keys: int) -> Visible:
        """The same set with its offset filled in, after checking it against the tensors' sizes."""
        offset = n_keys - n_queries if self.offset is None else self.offset
        if self.mask is not None:
            wanted = (batch, heads, n_queries, n_keys)
            mask_shape = tuple(self.mask.shape)
            fits = len(mask_shape) == 4 and all(g in (1, w) for g, w in zip(mask_shape[:2], wanted[:2], strict=True))
            if not fits or mask_shape[2:] != wanted[2:]:
                raise ShapeError(f"mask must be [batch, head, query, key] = {list(wanted)}, got {list(mask_shape)}")
        elif offset < 0 or offset + n_queries > n_keys:
            raise ShapeError(
                f"queries at positions {offset}..{offset + n_queries - 1} need as many keys, got {n_keys}; "
                "append the keys first or set Visible.offset"
            )
        if self.key_valid is not None and tuple(self.key_valid.shape) != (batch, n_keys):
            raise ShapeError(f"key_valid must be [batch, key] = {[batch, n_keys]}, got {list(self.key_valid.shape)}")
        window = None if self.window is not None and self.window >= offset + n_queries else self.window
        return Visible(offset, window, self.key_valid, self.mask, self.origin, self.ordinals)

    def last_queries(self, n: int) -> Visible:
        """The same set for the last n of its queries."""
        mask = None if self.mask is None else self.mask[:, :, -n:]
        return dataclasses.replace(self, offset=None, mask=mask)

    def positions(self, start: int, stop: int, device: torch.device) -> Int[Tensor, " query"]:
        """Positions of the queries start..stop-1."""
        return torch.arange(start, stop, device=device) + (self.offset or 0)

    def turned_by(self, at: Int[Tensor, " place"]) -> Int[Tensor, "#batch place"]:
        """The positions by which rotary embedding has turned the vectors at these; of no meaning at padding."""
        device = at.device
        index = at[None] if self.key_valid is None else (self.key_valid.to(device).long().cumsum(dim=1) - 1)[:, at]
        return index if self.origin is None else index + self.origin.to(device)[:, None]

    def key_range(self, start: int, stop: int, n_keys: int) -> tuple[int, int]:
        """The smallest range of keys that holds everything the queries start..stop-1 may see."""
        if self.mask is not None:
            return 0, n_keys
        offset = self.offset or 0
        first = 0 if self.window is None else max(0, offset + start - self.window + 1)
        return first, min(n_keys, offset + stop)

    def rows(
        self, start: int, stop: int, keys: tuple[int, int], device: torch.device
    ) -> Bool[Tensor, "batch head query key"]:
        """The visible set of the queries start..stop-1 over a range of keys; batch and head axes may be 1."""
        first, last = keys
        if self.mask is not None:
            return self.mask[:, :, start:stop, first:last]
        p = self.positions(start, stop, device)[:, None]
        j = torch.arange(first, last, device=device)
        seen = j <= p
        if self.window is not None:
            seen = seen & (p - j < self.window)
        if self.key_valid is None:
            return seen[None, None]
        return seen & self.key_valid[:, None, None, first:last]

    def row_valid(self, batch: int, n_queries: int, device: torch.device) -> Bool[Tensor, "batch query"]:
        """Whether each query sees at least one key (under a mask: in at least one head)."""
        if self.mask is not None:
            return self.mask.any(dim=-1).any(dim=1).expand(batch, n_queries)
        if self.key_valid is None:
            return torch.ones(batch, n_queries, dtype=torch.bool, device=device)
        # Counts are integers, so here a prefix difference is exact.
        count = torch.nn.functional.pad(self.key_valid.long().cumsum(dim=1), (1, 0))
        stop = self.positions(0, n_queries, device) + 1
        begin = torch.zeros_like(stop) if self.window is None else (stop - self.window).clamp(min=0)
        return count[:, stop] > count[:, begin]

"""Derive the visible set of each query from a model's attention mask.

A boolean mask is taken as it is; a float mask shows what lies above half the lowest number of its dtype (finite biases
belong to the model's own side only). Without a mask one query sees all keys, and several see causally over as many
first keys (behind them lie the unfilled slots of a static cache; eager attention sees them all). Where the set is
exactly "keys j <= p within a window, padding aside" it becomes that, so that the chunked form can serve it; any other
stays a mask.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from softgap.attention import Visible
from softgap.errors import ModelError
from softgap.probe.tap import AttentionCall

__all__ = ["VisibleSets", "interval_or_mask", "seen_by_mask", "with_origin"]


# A number of positions beyond any cache says that nobody counted them.
UNCOUNTED = 2**62


class VisibleSets:
    """The visible sets of one forward pass; layers that share a mask share the work.

    Parameters
    ----------
    cached
        Positions that were seen before this pass.
    """

    def __init__(self, cached: int = 0) -> None:
        self._cached = cached
        self._cached_set: dict[tuple[int, int, int], tuple[Tensor, Visible]] = {}
        self._placed: dict[tuple[int, ...], tuple[Tensor, Visible, Visible]] = {}

    def of(self, call: AttentionCall) -> Visible:
        """The visible set of one attention call, with the positions that the model was told."""
        visible, position_ids = self._visible_keys(call), call.options.get("position_ids")
        if not isinstance(position_ids, Tensor):
            return self._with_ordinals(visible, call)
        batch, _, n_queries, _ = call.query.shape
        key = (
            id(position_ids),
            id(visible.key_valid),
            id(visible.mask),
            visible.offset or 0,
            n_queries,
            call.key.shape[2],
        )
        if key not in self._placed:
            # Both are kept with the result, so that no id can pass to another tensor meanwhile.
            self._placed[key] = (
                position_ids,
                visible,
                with_origin(visible, position_ids, batch, n_queries, call.key.shape[2]),
            )
        return self._with_ordinals(replace(visible, origin=self._placed[key][2].origin), call)

    def _with_ordinals(self, visible: Visible, call: AttentionCall) -> Visible:
        """The same set with its keys counted on from those that a sliding cache no longer hands over."""
        dropped = self._cached + call.query.shape[2] - call.key.shape[2]
        if dropped <= 0 or self._cached >= UNCOUNTED:
            return visible
        if visible.mask is not None:
            shown = visible.mask.any(dim=2).any(dim=1)
        elif visible.key_valid is not None:
            shown = visible.key_valid
        else:
            shown = torch.ones(1, call.key.shape[2], dtype=torch.bool, device=call.key.device)
        ordinals = shown.cumsum(dim=1) - 1
        # Some of the dropped keys may be padding: positions do not count it.
        first = dropped if visible.origin is None else visible.origin.clamp(max=dropped)[:, None]
        return replace(visible, ordinals=ordinals + first)

    def _visible_keys(self, call: AttentionCall) -> Visible:
        n_queries, n_keys = call.query.shape[2], call.key.shape[2]
        if call.mask is None:
            return _without_mask(n_queries, n_keys, call)
        key = (id(call.mask), n_queries, n_keys)
        if key not in self._cached_set:
            # Behind the queries lie a static cache's empty slots; before them a sliding cache may have dropped some.
            offset = max(0, min(self._cached, n_keys - n_queries))
            visible = interval_or_mask(seen_by_mask(call.mask, n_queries, n_keys), offset)
            if visible.key_valid is not None and len(visible.key_valid) == 1:
                # One mask for all sequences.
                visible = replace(visible, key_valid=visible.key_valid.expand(len(call.query), -1))
            # The mask is kept with the result, so that its id cannot pass to another tensor meanwhile.
            self._cached_set[key] = (call.mask, visible)
        return self._cached_set[key][1]


def seen_by_mask(
    mask: Bool[Tensor, "batch head query key"] | Float[Tensor, "batch head query key"], n_queries: int, n_keys: int
) -> Bool[Tensor, "batch head query key"]:
    """What a model's mask lets each query see, over exactly the keys that were handed over."""
    if mask.dim() != 4 or mask.shape[2] not in (1, n_queries) or 1 < mask.shape[3] < n_keys:
        raise ModelError(
            f"an attention mask must be [batch, head, {n_queries}, {n_keys}] to be read, got {list(mask.shape)}; "
            "this model type cannot be recorded this way, try the other attention implementation"
        )
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return seen[..., :n_keys].expand(-1, -1, n_queries, n_keys)


def with_origin(
    visible: Visible, position_ids: Int[Tensor, "#batch query"], batch: int, n_queries: int, n_keys: int
) -> Visible:
    """The same set with the place of its positions: the first query that is not padding says what it was told."""
    if position_ids.dim() != 2 or position_ids.shape[1] != n_queries or len(position_ids) not in (1, batch):
        return visible
    shown = visible.fitted_to(batch, 1 if visible.mask is None else visible.mask.shape[1], n_queries, n_keys)
    at, position_ids = shown.positions(0, n_queries, position_ids.device), position_ids.expand(batch, -1)
    real = shown.row_valid(batch, n_queries, position_ids.device) if shown.key_valid is None else shown.key_valid[:, at]
    first = real.int().argmax(dim=1, keepdim=True)
    counted = replace(shown, origin=None).turned_by(at).expand(batch, -1)
    origin = (position_ids - counted).gather(1, first)[:, 0].masked_fill(~real.any(dim=1), 0)
    return replace(visible, origin=origin if bool(origin.any()) else None)


def interval_or_mask(seen: Bool[Tensor, "batch head query key"], offset: int) -> Visible:
    """The same visible set as an interval of keys per query where that is exact, else as a mask.

    ``offset`` is the place of the first query's own key. A mask cannot tell: queries may be hidden from themselves.
    """
    whole = Visible(offset, mask=seen)
    rows = seen[:, 0]
    n_queries, n_keys = rows.shape[1:]
    shown = rows.any(dim=-1)
    if seen.shape[1] > 1 or offset + n_queries > n_keys or not bool(shown.any()):
        return whole
    query = torch.arange(n_queries, device=rows.device)
    first = rows.to(torch.uint8).argmax(dim=-1)
    window = max(1, int((offset + query - first)[shown].max()) + 1)
    valid = rows.any(dim=1)
    # Keys behind the last query are seen by none and never needed; they do not make padding.
    padding = None if bool(valid[:, : offset + n_queries].all()) else valid
    for candidate in (Visible(offset, None, padding), Visible(offset, window, padding), Visible(offset, window, None)):
        if torch.equal(candidate.rows(0, n_queries, (0, n_keys), rows.device)[:, 0].expand_as(rows), rows):
            return candidate
    return whole


def _without_mask(n_queries: int, n_keys: int, call: AttentionCall) -> Visible:
    if n_queries == 1:
        return Visible(offset=n_keys - 1)
    # No eager attention knows of causality: what it should not see is in its mask.
    eager = getattr(getattr(call.module, "config", None), "_attn_implementation", None) == "eager"
    if call.is_causal and not eager:
        return Visible(offset=0)
    return Visible(mask=torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool, device=call.query.device))

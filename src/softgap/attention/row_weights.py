"""Relative weights of the mechanisms that are no feature maps: functions of the scores, or of positions alone.

Each returns weights for one block of query rows; the caller zeroes what is not visible and divides by the row's sum.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from softgap.attention.mechanism import Options, Site

__all__ = [
    "first_token",
    "polynomial",
    "previous_token",
    "profile",
    "relu2",
    "self_token",
    "softmax",
    "taylor2",
    "top_k",
]

Scores = Float[Tensor, "batch head query key"]
Seen = Bool[Tensor, "batch head query key"]


def softmax(scores: Scores, seen: Seen, options: Options) -> Scores:
    """exp(s_j), relative to the largest visible score."""
    lowest = torch.finfo(scores.dtype).min
    top = scores.masked_fill(~seen, lowest).amax(dim=-1, keepdim=True)
    return (scores - top).clamp(max=0).exp()


def relu2(scores: Scores, seen: Seen, options: Options) -> Scores:
    """relu(s_j)^2."""
    return functional.relu(scores).square()


def polynomial(scores: Scores, seen: Seen, options: Options) -> Scores:
    """s_j^p for even p, relative to the largest visible |s_j| so that no power overflows."""
    top = scores.abs().masked_fill(~seen, 0).amax(dim=-1, keepdim=True)
    return (scores / top.clamp(min=torch.finfo(scores.dtype).tiny)) ** options["p"]


def taylor2(scores: Scores, seen: Seen, options: Options) -> Scores:
    """1 + s_j + s_j^2 / 2, at least one half."""
    return 1 + scores + scores.square() / 2


def top_k(scores: Scores, seen: Seen, options: Options) -> Scores:
    """exp(s_j) on the k largest visible scores, 0 elsewhere; scores equal to the k-th are all kept."""
    hidden = scores.masked_fill(~seen, -torch.inf)
    k = min(int(options["k"]), hidden.shape[-1])
    threshold = hidden.topk(k, dim=-1).values[..., -1:]
    return softmax(scores, seen, options).masked_fill(hidden < threshold, 0)


def self_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the last visible key (the token itself under causal attention)."""
    return _last_seen(seen)


def previous_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the last visible key but one, or on the only one."""
    last = _last_seen(seen)
    before = _last_seen(seen & (last == 0))
    return torch.where(before.any(dim=-1, keepdim=True), before, last)


def first_token(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """All weight on the first visible key (token 0 unless a window or padding hides it)."""
    return _first_seen(seen).float()


def profile(p: Int[Tensor, "query 1"], j: Int[Tensor, " key"], seen: Seen, site: Site) -> Scores:
    """A weight for the first visible key, and one by distance for the others; the last distance serves all beyond."""
    by_distance = site.parameters["by_distance"]
    distance = (p - j).abs().clamp(max=by_distance.shape[-1] - 1)
    return torch.where(_first_seen(seen), site.parameters["first"][..., None, None], by_distance[..., distance])


def _first_seen(seen: Seen) -> Seen:
    return seen & (seen.cumsum(dim=-1) == 1)


def _last_seen(seen: Seen) -> Scores:
    return _first_seen(seen.flip(-1)).flip(-1).float()

"""The road to infinite dimension: sparsity and error of favor and of polynomial maps as their features grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from softgap.attention import Mechanism, Visible, attention_weights, compare_outputs, resolve
from softgap.attention.mechanism import Options
from softgap.theory.focus.concentration import row_sparsity

__all__ = ["FAMILIES", "Milestone", "closes_gap", "feature_road", "milestones"]

FAMILIES = ("favor", "polynomial", "shifted")


@dataclass(frozen=True)
class Milestone:
    """One map on the road, against softmax on the same queries and keys; means over heads and queries.

    Attributes
    ----------
    family
        ``favor``, ``polynomial`` (s^p) or ``shifted`` ((1 + s / p)^p, which tends to exp(s)); ``softmax`` is the end.
    setting
        Its number of random features, or its power p.
    features
        Dimension of its feature map.
    sparsity
        S of its weights.
    weight_error
        |A - A_softmax| / |A_softmax| over all rows.
    divergence
        1 - cos of its output and softmax's.
    """

    family: str
    setting: float
    features: float
    sparsity: float
    weight_error: float
    divergence: float


def milestones(
    d: int, *, random: Sequence[int] = (16, 64, 256, 1024), powers: Sequence[int] = (2, 4, 8, 16)
) -> list[tuple[str, float, float, Mechanism]]:
    """Family, setting, feature count and mechanism of every stop, softmax last."""
    stops: list[tuple[str, float, float, Mechanism]] = [
        ("favor", m, m, resolve("favor").configure(features=m)) for m in random
    ]
    # Monomials of degree p in d variables; with the constant in front, of degree up to p.
    stops += [("polynomial", p, math.comb(d + p - 1, p), resolve("polynomial").configure(p=p)) for p in powers]
    stops += [("shifted", p, math.comb(d + p, p), _shifted(p)) for p in powers]
    return [*stops, ("softmax", math.nan, math.inf, resolve("softmax"))]


def feature_road(
    query: Float[Tensor, "head query dim"],
    key: Float[Tensor, "kv_head key dim"],
    value: Float[Tensor, "kv_head key value_dim"],
    *,
    scale: float,
    visible: Visible | None = None,
    stops: Sequence[tuple[str, float, float, Mechanism]] | None = None,
) -> list[Milestone]:
    """Every stop on one layer; the queries are the last of the keys' positions."""
    v = value.repeat_interleave(query.shape[0] // value.shape[0], dim=0)
    road = milestones(query.shape[-1]) if stops is None else stops
    exact = attention_weights("softmax", query[None], key[None], visible=visible, scale=scale)[0]
    output = exact @ v
    # Counted on uniform weights: those of softmax may underflow.
    even = attention_weights("uniform", query[None, :1], key[None, :1], visible=visible, scale=scale)
    n = (even[0, 0] > 0).sum(dim=-1)
    found = []
    for family, setting, features, mechanism in road:
        weights = attention_weights(mechanism, query[None], key[None], visible=visible, scale=scale)[0]
        s = row_sparsity(weights, n)
        error = (weights - exact).norm() / exact.norm()
        far = compare_outputs(output, weights @ v).divergence.mean()
        found.append(Milestone(family, setting, features, s.nanmean().item(), error.item(), far.item()))
    return found


def closes_gap(road: Sequence[Milestone], family: str) -> bool:
    """Whether the error of the weights at least halves from the first stop of a family to its last.

    With the default stops theory promises a factor of 8 twice: m random features err as m^(-1/2), from 16 to 1024 of
    them, and (1 + s / p)^p errs as s^2 / 2p, from p = 2 to 16. A family that does not even reach 2 does not close it.
    """
    stops = [stop for stop in road if stop.family == family]
    return stops[-1].weight_error < 0.5 * stops[0].weight_error


def _shifted(p: int) -> Mechanism:
    def weigh(
        scores: Float[Tensor, "batch head query key"], seen: Bool[Tensor, "batch head query key"], options: Options
    ) -> Float[Tensor, "batch head query key"]:
        base = (1 + scores / p).abs()
        top = base.masked_fill(~seen, 0).amax(dim=-1, keepdim=True)
        return torch.pow(base / top.clamp(min=torch.finfo(scores.dtype).tiny), p)

    return Mechanism("shifted", "(1 + s_j / p)^p", "limit of exp", "scores", scale="scores", score_weights=weigh)

"""Softmax over sliding windows in tiles, and sums of features over them, against rows written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from softgap.attention.feature_maps import LOG_ZERO
from softgap.attention.sliding import attend_recent, can_tile, recent_feature_sums

ROUNDING = 2e-6


def window_mask(n: int, keys: int, recent: int, valid: Tensor | None) -> Tensor:
    apart = torch.arange(keys - n, keys)[:, None] - torch.arange(keys)
    mask = ((apart >= 0) & (apart < recent))[None, None].expand(2, 1, -1, -1)
    return mask if valid is None else mask & valid[:, None, None]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(
    ("n", "keys", "recent"),
    [(200, 200, 30), (130, 300, 94), (20, 70, 100), (150, 150, 1), (64, 64, 64), (129, 160, 5), (40, 90, 2**40)],
)
def test_tiles_are_the_masked_softmax(n: int, keys: int, recent: int, holes: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, n, 16, generator=generator)
    k, v = (torch.randn(2, 2, keys, 16, generator=generator) for _ in range(2))
    valid = None
    if holes:
        valid = torch.ones(2, keys, dtype=torch.bool)
        valid[0, :9] = False
        valid[1, keys // 2 : keys // 2 + 3] = False
    assert can_tile(q, k, v)
    output, total = attend_recent(q, k, v, recent, 0.25, valid)
    groups = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    own_k, own_v = groups
    scores = q.double() @ own_k.transpose(-1, -2) * 0.25
    scores = scores.masked_fill(~window_mask(n, keys, recent, valid), -torch.inf)
    assert (output - scores.softmax(dim=-1).nan_to_num(0) @ own_v).abs().max() < ROUNDING
    exact = scores.logsumexp(dim=-1, keepdim=True)
    assert torch.equal(total.isfinite(), exact.isfinite())
    assert (total - exact)[exact.isfinite()].abs().max() < ROUNDING


def test_a_gradient_takes_the_other_form() -> None:
    q, k = torch.randn(1, 1, 64, 4, requires_grad=True), torch.randn(1, 1, 64, 4)
    assert not can_tile(q, k, k)
    assert not can_tile(k.double(), k.double(), k.double())
    with torch.no_grad():
        assert can_tile(q, k, k)


@pytest.mark.parametrize(("recent", "n"), [(1, 1), (1, 9), (5, 3), (5, 40), (30, 31), (94, 70)])
@pytest.mark.parametrize(("spread", "decay"), [(1.0, 0.1), (40.0, 0.0), (5.0, 3.0)])
def test_sums_of_features_are_those_of_every_window(recent: int, n: int, spread: float, decay: float) -> None:
    """Also where single precision would lose small features beside large ones."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randn(2, 3, recent + n, 4, generator=generator) * spread
    key[0, :, ::3] = LOG_ZERO
    key[1, 0] = LOG_ZERO
    rate = torch.rand(2, 3, 4, generator=generator) * decay
    found = recent_feature_sums(key, rate, recent)
    assert found is not None
    apart = torch.arange(recent, recent + n)[:, None] - torch.arange(recent + n)
    hidden = ~((apart >= 0) & (apart < recent))[None, None, :, :, None]
    terms = key.double()[:, :, None] - rate.double()[:, :, None, None] * apart[..., None]
    exact = terms.masked_fill(hidden, LOG_ZERO).logsumexp(dim=3)
    there = exact > LOG_ZERO / 2
    assert (found - exact)[there].abs().max() < 1e-4 * max(1.0, spread * decay)
    assert bool((found[~there] <= LOG_ZERO / 2).all())


def test_decay_beyond_double_precision_is_left_to_the_chunks() -> None:
    key, rate = torch.zeros(1, 1, 300, 2), torch.full((1, 1, 2), 4.0)
    assert recent_feature_sums(key, rate, 200) is None
    assert recent_feature_sums(key, rate / 4, 200) is not None

"""The compiled pass over logits gives what float64 gives, for any length, dtype and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention.simd import LANES
from softgap.probe.logit_scores import ADDED, score, score_by_operations


def exact(logits: Tensor, tokens: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy in float64, one row at a time."""
    rows, targets = logits.double().flatten(0, 1).numpy(), tokens.flatten().tolist()
    found = []
    for row, target in zip(rows, targets, strict=True):
        x = row - row.max()
        p = np.exp(x) / np.exp(x).sum()
        logprob = x[target] - np.log(np.exp(x).sum()) if target >= 0 else np.nan
        found.append((logprob, -sum(float(a * np.log(a)) for a in p if a > 0)))
    values = np.array(found).reshape(*tokens.shape, 2)
    return values[..., 0], values[..., 1]


def drawn(batch: int, time: int, size: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, size, (batch, time), generator=rng)
    return torch.randn(batch, time, size, generator=rng) * spread, tokens


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 3),
    time=st.integers(1, 4),
    size=st.one_of(st.integers(1, 3 * LANES), st.sampled_from([ADDED - 1, ADDED, ADDED + LANES + 1])),
    spread=st.sampled_from([0.0, 0.1, 3.0, 40.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_it_is_float64_at_rounding_error(batch: int, time: int, size: int, spread: float, seed: int) -> None:
    logits, tokens = drawn(batch, time, size, spread, seed)
    for pair in zip(score(logits, tokens), exact(logits, tokens), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-6, atol=2e-6)


def test_tokens_that_are_ruled_out_count_nothing() -> None:
    logits, tokens = drawn(2, 3, 2 * LANES + 5, 3.0, 1)
    logits[:, :, 3 : LANES + 2] = -torch.inf
    logits[..., -1] = -torch.inf
    tokens[:] = 0
    logprob, entropy = score(logits, tokens)
    with np.errstate(divide="ignore"):
        expected = exact(logits, tokens)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(logprob, expected[0], rtol=1e-6, atol=1e-6)
    assert bool((score(logits, torch.full_like(tokens, 4))[0] == -torch.inf).all())


@pytest.mark.parametrize("place", [0, LANES, -1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_none_are_not_hidden(place: int, value: float) -> None:
    logits, tokens = drawn(1, 2, 2 * LANES + 3, 1.0, 2)
    tokens[:] = 1
    logits[0, 1, place] = value
    logprob, entropy = score(logits, tokens)
    assert logprob[0].isnan().tolist() == entropy[0].isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_dtypes(dtype: torch.dtype) -> None:
    logits, tokens = drawn(3, 40, 301, 3.0, 3)
    logits = logits.to(dtype)
    expected = score(logits.float().contiguous(), tokens)
    strided = logits.transpose(1, 2).contiguous().transpose(1, 2)
    wider = torch.cat([logits, logits], dim=-1)[:, :, :301]
    backwards = logits.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for given_logits in (logits, strided, wider, backwards):
        found = score(given_logits, tokens)
        assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(found, expected, strict=True))


def test_other_devices_get_the_same_from_operations() -> None:
    logits, tokens = drawn(2, 5, 1000, 3.0, 4)
    tokens.clamp_(min=0)
    logits[:, :, 7] = -torch.inf
    assert torch.allclose(score_by_operations(logits, tokens), torch.stack(score(logits, tokens)), rtol=1e-5, atol=1e-5)

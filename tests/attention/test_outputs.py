"""Divergence, relative L2 and norm ratio: against the reference, at zero vectors, and near agreement."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from softgap.attention import compare_outputs, divergence, norm_ratio, relative_l2
from softgap.attention.reference import reference_comparison

vectors = st.lists(st.floats(-100, 100).filter(lambda x: x == 0 or abs(x) > 1e-3), min_size=3, max_size=3)


@given(o=vectors, m=vectors)
def test_the_three_quantities_match_the_reference(o: list[float], m: list[float]) -> None:
    first, second = torch.tensor(o, dtype=torch.float64), torch.tensor(m, dtype=torch.float64)
    found = compare_outputs(first, second)
    expected = reference_comparison(first.numpy(), second.numpy())
    for value, reference in zip((found.divergence, found.relative_l2, found.norm_ratio), expected, strict=True):
        assert float(value) == pytest.approx(reference, rel=1e-9, abs=1e-11, nan_ok=True)


def test_zero_vectors_are_defined() -> None:
    o = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0]])
    m = torch.tensor([[0.0, 0.0], [0.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    found = compare_outputs(o, m)
    assert found.divergence.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert found.flagged.tolist() == [False, True, True, False]
    assert found.norm_ratio[0] == 0
    assert found.relative_l2[0] == 1
    assert torch.isnan(found.relative_l2[1:3]).all()
    assert torch.isnan(found.norm_ratio[1:3]).all()


def test_opposite_and_orthogonal() -> None:
    o, m = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[-2.0, 0.0], [0.0, 5.0]])
    assert divergence(o, m).tolist() == pytest.approx([2.0, 1.0], abs=2e-7)
    assert norm_ratio(o, m).tolist() == [2.0, 5.0]
    assert relative_l2(o, m)[0] == 3.0


def test_small_divergences_keep_their_digits_in_float32() -> None:
    """An angle of 1e-4 is a divergence of 5e-9: 1 - cos in float32 would give 0 or 6e-8."""
    angle = 1e-4
    o, m = torch.tensor([1.0, 0.0]), torch.tensor([math.cos(angle), math.sin(angle)])
    assert float(divergence(o, m)) == pytest.approx(angle**2 / 2, rel=1e-3)


def test_half_precision_outputs_are_compared_in_float32() -> None:
    o = torch.tensor([300.0, 400.0], dtype=torch.float16)
    assert compare_outputs(o, o * 2).norm_ratio.dtype == torch.float32
    assert float(compare_outputs(o, o * 2).norm_ratio) == 2.0


@pytest.mark.parametrize("ratio", [1e-10, 1e-5, 1e-3, 0.1, 1.0, 10.0, 1e3, 1e5, 1e10])
@pytest.mark.parametrize("agreement", [0.0, 0.9, 0.999])
def test_float32_keeps_its_digits_at_any_ratio_of_norms(ratio: float, agreement: float) -> None:
    rng = torch.Generator().manual_seed(7)
    o, other = torch.randn(2, 500, 64, generator=rng)
    m = (agreement * o + (1 - agreement) * other) * ratio
    found, exact = compare_outputs(o, m), compare_outputs(o.double(), m.double())
    assert torch.allclose(found.divergence.double(), exact.divergence, rtol=2e-6, atol=0)
    assert torch.allclose(found.norm_ratio.double(), exact.norm_ratio, rtol=1e-6, atol=0)
    assert ((found.relative_l2 - exact.relative_l2).abs() <= 4e-7 * (1 + exact.norm_ratio)).all()

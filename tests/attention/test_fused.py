"""The pass that computes and compares at once: against the float64 reference, in any blocks, at zero vectors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import LinearState, Visible, attend, compare_heads, mechanisms
from softgap.attention.fused import MOST_FEATURES, supports
from softgap.attention.reference import reference_comparison
from support.attention_cases import Case, cases, equipped, reference

SERVED = tuple(name for name in mechanisms() if name != "relu_affine" and supports(mechanisms()[name], 6))


def compared(name: str, case: Case, output: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The quantities of a case in float32, in blocks of these sizes in turn."""
    state = LinearState(equipped(name, case))
    t, parts, start, valid = case.k.shape[2], [], 0, case.visible.key_valid
    for size in itertools.cycle(sizes):
        part = slice(start, min(t, start + size))
        shown = None if valid is None else valid[:, part]
        q, k, v, o = (x[:, :, part].float() for x in (case.q, case.k, case.v, output))
        parts.append(state.compare(q, k, v, o, shown))
        start += size
        if start >= t:
            return torch.cat(parts, dim=-1)
    raise AssertionError


def test_the_common_mechanisms_are_served() -> None:
    assert {"elu1", "relu", "uniform", "focused", "dpfp", "l2_normalised"} <= set(SERVED)
    # Signed, decaying, logarithmic or large: each left to the chunked form.
    for name in ("identity", "inline", "decay", "favor", "hedgehog", "softmax", "top_k"):
        assert name not in SERVED
    assert not supports(mechanisms()["taylor2"], 64)
    assert supports(mechanisms()["elu1"], MOST_FEATURES)
    assert not supports(mechanisms()["elu1"], MOST_FEATURES + 1)


@settings(deadline=None, max_examples=40)
@given(case=cases(longest=70, ahead=False), name=st.sampled_from(SERVED), sizes=st.tuples(*[st.integers(1, 20)] * 3))
def test_it_matches_the_reference(case: Case, name: str, sizes: tuple[int, ...]) -> None:
    case = Case(case.q, case.k, case.v, type(case.visible)(key_valid=case.visible.key_valid))
    output = torch.randn(*case.q.shape[:3], case.v.shape[-1], generator=torch.Generator().manual_seed(1)).double()
    expected = reference(equipped(name, case), case)
    found = compared(name, case, output, sizes)
    for place in np.ndindex(*found.shape[1:]):
        o, linear = output[place].numpy(), expected[place].numpy()
        if np.abs(linear).max() < 1e-3:  # relu features that are all off, or nearly
            continue
        exact = reference_comparison(o, linear)
        assert [float(found[(i, *place)]) for i in range(3)] == pytest.approx(exact, rel=2e-4, abs=2e-5), (place, name)


@pytest.mark.parametrize("name", SERVED)
def test_it_is_what_the_chunked_form_gives(name: str) -> None:
    rng = torch.Generator().manual_seed(3)
    q, o = torch.randn(2, 2, 6, 333, 16, generator=rng)
    k, v = torch.randn(2, 2, 2, 333, 16, generator=rng)
    valid = torch.ones(2, 333, dtype=torch.bool)
    valid[1, :9] = False
    state, other = LinearState(name), LinearState(name)
    parts = [slice(0, 100), slice(100, 101), slice(101, 333)]
    found = torch.cat([state.compare(q[:, :, p], k[:, :, p], v[:, :, p], o[:, :, p], valid[:, p]) for p in parts], -1)
    expected = compare_heads(o, other.attend(q, k, v, valid).output)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    # And the two states go on alike, whichever way they came.
    more = [torch.randn(2, heads, 5, 16, generator=rng) for heads in (6, 2, 2)]
    assert torch.allclose(state.attend(*more).output, other.attend(*more).output, rtol=1e-4, atol=1e-5)


def test_how_positions_come_in_blocks_changes_no_bit_beyond_pairs() -> None:
    rng = torch.Generator().manual_seed(3)
    q, o = torch.randn(2, 1, 3, 64, 8, generator=rng)
    k, v = torch.randn(2, 1, 1, 64, 8, generator=rng)
    whole = LinearState("elu1").compare(q, k, v, o)
    for size in (2, 6, 32):
        state = LinearState("elu1")
        parts = [slice(at, at + size) for at in range(0, 64, size)]
        again = torch.cat([state.compare(q[:, :, p], k[:, :, p], v[:, :, p], o[:, :, p]) for p in parts], -1)
        assert torch.equal(again, whole)


def test_zero_vectors_are_those_of_compare_outputs() -> None:
    q = torch.tensor([[[[1.0], [-1.0], [1.0], [1.0]]]])
    k, v = torch.ones(1, 1, 4, 1), torch.tensor([[[[2.0], [2.0], [-4.0], [3.0]]]])
    o = torch.tensor([[[[0.0], [1.0], [0.0], [-1.0]]]])
    found = LinearState("relu").compare(q, k, v, o)
    expected = compare_heads(o, attend("relu", q, k, v).output)
    assert torch.equal(found[0], expected[0])
    assert torch.allclose(found, expected, equal_nan=True)
    assert found[0, 0, 0].tolist() == [1.0, 1.0, 0.0, 2.0]


def test_half_precision_and_strided_tensors() -> None:
    rng = torch.Generator().manual_seed(3)
    q, o = torch.randn(2, 1, 40, 6, 8, generator=rng).bfloat16().transpose(2, 3)
    k, v = torch.randn(2, 1, 40, 3, 8, generator=rng).bfloat16().transpose(2, 3)
    found = LinearState("elu1").compare(q, k, v, o)
    expected = LinearState("elu1").compare(*(x.float().contiguous() for x in (q, k, v, o)))
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_long_texts_keep_their_digits() -> None:
    """A running sum over 8,192 keys with a sink of ten times the usual norm, against float64."""
    rng = torch.Generator().manual_seed(3)
    q, o = torch.randn(2, 1, 2, 8192, 32, generator=rng)
    k, v = torch.randn(2, 1, 1, 8192, 32, generator=rng)
    k[:, :, 0] *= 10
    for name in ("elu1", "relu", "uniform"):
        exact = compare_heads(o.double(), attend(name, q, k, v, dtype=torch.float64).output)
        found = LinearState(name).compare(q, k, v, o)
        assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("per_group", [1, 2, 4, 7])
@pytest.mark.parametrize("name", ["elu1", "uniform", "relu"])
def test_any_number_of_heads_in_a_group_and_nothing_of_the_padding(name: str, per_group: int) -> None:
    rng = torch.Generator().manual_seed(3)
    q, o = torch.randn(2, 2, 2 * per_group, 37, 20, generator=rng)
    k, v = torch.randn(2, 2, 2, 37, 20, generator=rng)
    valid = torch.ones(2, 37, dtype=torch.bool)
    valid[1, :9] = False
    for x in (k, v):
        x[1, :, :9] = torch.nan
    state = LinearState(name)
    parts = [slice(0, 5), slice(5, 37)]
    found = torch.cat([state.compare(q[:, :, p], k[:, :, p], v[:, :, p], o[:, :, p], valid[:, p]) for p in parts], -1)
    known = [x.nan_to_num() for x in (k, v)]
    expected = compare_heads(o.double(), attend(name, q, *known, visible=Visible(key_valid=valid)).output.double())
    seen = (slice(None), 1, slice(None), slice(9, None))
    assert torch.allclose(found[:, 0].double(), expected[:, 0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(found[seen].double(), expected[seen], rtol=1e-4, atol=1e-5)

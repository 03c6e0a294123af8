"""Quadratic = chunked = streaming = reference, over drawn shapes, windows and padding."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from softgap.attention import Visible, attend, mechanisms, resolve
from support.attention_cases import (
    ALL,
    FACTORABLE,
    TOLERANCE,
    Case,
    cases,
    computed,
    equipped,
    reference,
    rotations_of,
    streamed,
    with_rotation,
    without_cancelled,
    worst_error,
)

FIRST = ("elu1", "relu", "uniform", "hedgehog", "decay", "inline", "fitted")


@pytest.mark.parametrize("name", ALL)
@given(case=cases(longest=140))
@settings(max_examples=12)
def test_quadratic_form_matches_the_reference(name: str, case: Case) -> None:
    mechanism = equipped(name, case)
    found = computed(mechanism, case, "quadratic")
    assert worst_error(found, reference(mechanism, case)) < TOLERANCE
    seen = case.seen[:, 0].any(dim=-1)
    assert not (found.valid & ~seen).any()
    assert mechanism.kind == "window" or torch.equal(found.valid, seen)


@pytest.mark.parametrize("name", FACTORABLE)
@pytest.mark.parametrize("form", ["chunked", "streaming"])
@given(case=cases(longest=140))
@settings(max_examples=12)
def test_state_forms_match_the_reference(name: str, form: str, case: Case) -> None:
    mechanism = equipped(name, case)
    assume(mechanism.kind != "hybrid" or case.fitted.window is None)  # keys of a tail would come and go
    found, truth = computed(mechanism, case, form), reference(mechanism, case)
    # A row that is not flagged may have lost six digits of sixteen among its terms, and no more.
    assert worst_error(found, truth) < (10 * TOLERANCE if mechanism.cancels else TOLERANCE)
    assert worst_error(without_cancelled(found, mechanism, case), truth) < TOLERANCE
    # A window may hold no key of a row that sees only keys before it, all of them behind padding.
    seen = case.seen[:, 0].any(dim=-1)
    assert torch.equal(found.valid, computed(mechanism, case, "quadratic").valid)
    assert not (found.valid & ~seen).any()
    assert mechanism.kind == "window" or torch.equal(found.valid, seen)


@pytest.mark.parametrize("name", FIRST)
@given(case=cases(longest=400), sizes=st.lists(st.integers(1, 130), min_size=1, max_size=4).map(tuple))
@settings(max_examples=12)
def test_the_three_forms_agree_at_length(name: str, case: Case, sizes: tuple[int, ...]) -> None:
    mechanism = equipped(name, case)
    expected = computed(mechanism, case, "quadratic")
    for found in (computed(mechanism, case, "chunked"), streamed(mechanism, case, sizes)):
        assert worst_error(found, expected.output) < TOLERANCE
        assert torch.equal(found.valid, expected.valid)
        assert torch.equal(found.flagged, expected.flagged)


@given(case=cases(longest=90), form=st.sampled_from(["quadratic", "chunked", "streaming"]))
def test_key_maps_per_query_head(case: Case, form: str) -> None:
    mechanism = equipped("fitted", case, key_map_per_query_head=True)
    if case.q.shape[1] == case.k.shape[1] == 1:
        return
    assert worst_error(computed(mechanism, case, form), reference(mechanism, case)) < TOLERANCE


@given(
    case=cases(longest=60),
    form=st.sampled_from(["quadratic", "chunked", "streaming"]),
    origins=st.one_of(st.none(), st.lists(st.integers(-9, 9000), min_size=2, max_size=2)),
    per_query_head=st.booleans(),
)
@settings(max_examples=30)
def test_maps_of_vectors_before_rotation_too(
    case: Case, form: str, origins: list[int] | None, per_query_head: bool
) -> None:
    if origins is not None:
        origin = torch.tensor(origins[: len(case.q)])
        case = dataclasses.replace(case, visible=dataclasses.replace(case.visible, origin=origin))
    narrow = equipped("fitted", case, key_map_per_query_head=per_query_head)
    mechanism = with_rotation(narrow, rotations_of(case))
    if case.q.shape[1] == case.k.shape[1] == 1 and per_query_head:
        return
    assert worst_error(computed(mechanism, case, form), reference(mechanism, case)) < TOLERANCE


@given(case=cases(longest=60), form=st.sampled_from(["quadratic", "chunked", "streaming"]))
def test_layers_stacked_along_the_batch_equal_layers_alone(case: Case, form: str) -> None:
    """Parameters per layer reach the kernels along the batch axis: no loop over layers or heads."""
    batch = case.q.shape[0]
    template = equipped("fitted", case)
    scales = torch.tensor([0.3, 0.6, 0.9], dtype=torch.float64)
    per_layer = mechanisms()["fitted"].with_parameters(
        **{name: torch.stack([x[0] * s for s in scales]) for name, x in template.parameters.items()}
    )
    valid = case.visible.key_valid
    layers = [2, 0]
    q, k, v = (torch.cat([x, x * 0.7]) for x in (case.q, case.k, case.v))
    stacked = Case(
        q,
        k,
        v,
        dataclasses.replace(case.visible, key_valid=None if valid is None else torch.cat([valid, valid])),
    )
    together = computed(per_layer.for_layers(layers, repeat=batch), stacked, form).output
    for i, layer in enumerate(layers):
        rows = slice(i * batch, (i + 1) * batch)
        alone = Case(q[rows], k[rows], v[rows], case.visible)
        expected = computed(per_layer.for_layers([layer]), alone, form).output
        assert torch.allclose(together[rows], expected, rtol=1e-12, atol=1e-12)


@given(case=cases(longest=40, ahead=False), seed=st.integers(0, 2**31), name=st.sampled_from(ALL))
@settings(max_examples=60)
def test_quadratic_form_takes_any_mask(case: Case, seed: int, name: str) -> None:
    """A mask of any pattern, another in each head, future keys and rows that see nothing included."""
    generator = torch.Generator().manual_seed(seed)
    n = case.q.shape[2]
    mask = torch.rand(case.q.shape[0], case.q.shape[1], n, n, generator=generator) < 0.6
    mask[:, :, -1, 0] = True
    masked = Case(case.q, case.k, case.v, Visible(mask=mask))
    mechanism = equipped(name, masked)
    # A decay grows towards the future unless distance is taken without its sign; cosformer is defined for the past.
    if name in ("decay", "fitted", "profile", "cosformer"):
        mask &= torch.ones(n, n).tril().bool()
    found = attend(mechanism, masked.q, masked.k, masked.v, visible=masked.visible, dtype=torch.float64)
    assert worst_error(found, reference(mechanism, masked)) < TOLERANCE
    assert torch.equal(found.valid, mask.any(dim=-1).any(dim=1))


def test_a_constant_is_zero_in_a_head_that_sees_nothing() -> None:
    q, k, v = (torch.zeros(1, 2, 2, 1, dtype=torch.float64) for _ in range(3))
    mask = torch.tensor([[[[True, False], [True, True]], [[False, False], [True, False]]]])
    case = Case(q, k, v, Visible(mask=mask))
    mechanism = resolve("constant").with_parameters(mean=torch.tensor([[[2.0], [3.0]]]))
    found = attend(mechanism, q, k, v, visible=case.visible, dtype=torch.float64)
    assert found.output[0, :, :, 0].tolist() == [[2, 2], [0, 3]]
    assert worst_error(found, reference(mechanism, case)) == 0


@given(case=cases(longest=200), name=st.sampled_from(FACTORABLE))
def test_hidden_slots_may_hold_anything(case: Case, name: str) -> None:
    """A hidden key or value never reaches an output, NaN included (the empty slots of a static cache)."""
    if case.visible.key_valid is None:
        return
    hidden = ~case.visible.key_valid[:, None, :, None]
    spoilt = Case(case.q, case.k.masked_fill(hidden, torch.nan), case.v.masked_fill(hidden, torch.inf), case.visible)
    mechanism = equipped(name, case)
    assume(mechanism.kind != "hybrid" or case.fitted.window is None)
    for form in ("quadratic", "chunked", "streaming"):
        expected, found = computed(mechanism, case, form), computed(mechanism, spoilt, form)
        assert torch.equal(found.output, expected.output)

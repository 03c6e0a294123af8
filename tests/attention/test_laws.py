"""Exact identities of the mechanisms, in float64 at 1e-12."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softgap.attention import attend, attention_weights, compare_outputs, mechanisms
from support.attention_cases import Case, cases, computed, equipped

TIGHT = 1e-12
# Position-free, normalised, and a denominator that is positive whatever the query and key.
POSITIVE = ("softmax", "elu1", "exp_dim", "hedgehog", "favor", "taylor2", "l2_normalised", "inline", "uniform")
# The same wherever the common score is not zero.
POSITIVE_SCORE = ("relu", "relu_affine", "focused", "dpfp", "identity", "polynomial", "relu2_scores")


def mean_of_values(case: Case) -> torch.Tensor:
    seen = case.seen.double()
    group = case.q.shape[1] // case.k.shape[1]
    return (seen @ case.v.repeat_interleave(group, dim=1)) / seen.sum(-1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize("name", POSITIVE + POSITIVE_SCORE)
@given(case=cases(longest=100))
@settings(max_examples=15)
def test_equal_keys_give_the_mean_of_values(name: str, case: Case) -> None:
    key = case.k[:, :, :1].abs() + 0.1
    q = case.q.abs() + 0.1 if name in POSITIVE_SCORE else case.q
    equal = Case(q, key.expand_as(case.k).contiguous(), case.v, case.visible)
    mechanism = equipped(name, equal)
    for form in mechanism.forms:
        found = computed(mechanism, equal, form)
        if name == "relu_affine":  # the seeded map may still switch every feature off
            expected = mean_of_values(equal).masked_fill(found.flagged[..., None], 0)
        else:
            expected = mean_of_values(equal)
            if not (name == "dpfp" and q.shape[-1] == 1):  # one dimension: relu(x) relu(-x) = 0
                assert not found.flagged.any()
            else:
                expected = expected * 0
        assert torch.allclose(found.output, expected, rtol=TIGHT, atol=TIGHT)


@given(case=cases(longest=60), factor=st.floats(0.01, 100))
def test_relu_weights_ignore_the_length_of_the_query(case: Case, factor: float) -> None:
    plain = attention_weights("relu", case.q, case.k, visible=case.visible, dtype=torch.float64)
    scaled = attention_weights("relu", case.q * factor, case.k, visible=case.visible, dtype=torch.float64)
    assert torch.allclose(plain, scaled, rtol=1e-11, atol=TIGHT)


@given(case=cases(longest=60), factor=st.floats(1.5, 10))
def test_softmax_weights_do_not(case: Case, factor: float) -> None:
    scores = case.q @ case.k.repeat_interleave(case.q.shape[1] // case.k.shape[1], dim=1).transpose(-1, -2)
    spread = scores.masked_fill(~case.seen, -1e9).amax(-1) - scores.masked_fill(~case.seen, 1e9).amin(-1)
    plain = attention_weights("softmax", case.q, case.k, visible=case.visible, dtype=torch.float64)
    scaled = attention_weights("softmax", case.q * factor, case.k, visible=case.visible, dtype=torch.float64)
    moved = (plain - scaled).abs().amax(-1)
    assert (moved[(spread > 0.1) & (spread < 10)] > 1e-4).all()


@given(case=cases(longest=120))
def test_inline_weights_sum_to_one(case: Case) -> None:
    weights = attention_weights("inline", case.q, case.k, visible=case.visible, dtype=torch.float64)
    total = weights.sum(-1)
    seen = case.seen.any(-1)
    assert torch.allclose(total[seen], torch.ones_like(total[seen]), rtol=0, atol=1e-11)
    assert (total[~seen] == 0).all()


@pytest.mark.parametrize("form", ["quadratic", "chunked", "streaming"])
@given(case=cases(longest=200))
@settings(max_examples=25)
def test_decay_without_decay_is_uniform(form: str, case: Case) -> None:
    still = mechanisms()["decay"].configure(lam=1)
    uniform = computed(mechanisms()["uniform"], case, form).output
    assert torch.allclose(computed(still, case, form).output, uniform, rtol=TIGHT, atol=TIGHT)


@given(case=cases(longest=60), name=st.sampled_from([n for n, m in mechanisms().items() if not m.needs]))
def test_adding_a_constant_to_the_values_adds_it_to_the_output(case: Case, name: str) -> None:
    """Normalised weights sum to one, so outputs move with the values (rows that are flagged or see nothing aside)."""
    if name == "zero":
        return
    plain = attend(name, case.q, case.k, case.v, visible=case.visible, dtype=torch.float64)
    moved = attend(name, case.q, case.k, case.v + 3, visible=case.visible, dtype=torch.float64)
    fine = plain.valid[:, None] & ~plain.flagged
    assert torch.allclose((moved.output - plain.output)[fine], torch.tensor(3.0).double(), rtol=0, atol=1e-8)


@given(case=cases(longest=40), factor=st.floats(1e-3, 1e3))
def test_divergence_ignores_a_positive_factor_and_the_ratio_shows_it(case: Case, factor: float) -> None:
    o, m = case.v, case.v.flip(-1) + 0.3
    plain, scaled = compare_outputs(o, m), compare_outputs(o, m * factor)
    assert torch.allclose(plain.divergence, scaled.divergence, rtol=1e-9, atol=1e-11)
    assert torch.allclose(plain.norm_ratio * factor, scaled.norm_ratio, rtol=1e-11)
    assert ((plain.divergence >= 0) & (plain.divergence <= 2)).all()

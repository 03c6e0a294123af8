"""Windows and hybrids: every form against the float64 loops, where they become softmax, and the memory they take."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import LinearState, Mechanism, ScoreRule, Visible, add_window, attend, new_state, resolve
from softgap.attention.reference import reference_attention
from softgap.errors import SoftgapError
from support.linearize_cases import DOUBLE, apart, with_random_parameters

FITTED = with_random_parameters("fitted", 1, 4, 2, 8, 5)
HYBRIDS: list[str | Mechanism] = [
    "window:w=9,sinks=3",
    "window:w=1,sinks=0",
    "razor:w=9,sinks=3",
    "elu1+window:w=9,sinks=3",
    "uniform+window:w=1,sinks=0",
    "decay:lam=0.8+window:w=9,sinks=2,f=0.5",
    "hedgehog+window:w=4,sinks=0",
    "taylor2+window:w=9,sinks=3",
    add_window(FITTED, w=9, sinks=3, f=0.5),
    add_window(FITTED, w=9, sinks=0),
]
WITHOUT_STATE = ["top_k:k=4+window:w=5,sinks=2", "self_token+window:w=5,sinks=2"]
FAR: list[str | Mechanism] = [
    "window:w=9,sinks=3,far=5",
    "window:w=1,sinks=0,far=1",
    "razor:w=9,sinks=3,far=5",
    "elu1+window:w=9,sinks=3,far=5",
    "decay:lam=0.8+window:w=9,sinks=2,f=0.5,far=7",
    "taylor2+window:w=9,sinks=3,far=2",
    "cosformer:context=128+window:w=9,sinks=3,far=3",
    "uniform+window:w=20,sinks=1,far=60",
    add_window(FITTED, w=9, sinks=3, f=0.5, far=6),
]
T = 70
PADDED = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [7]])


def tensors(t: int = T) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, t, 8), (2, 2, t, 8), (2, 2, t, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, 2 * k, v


def by_loops(mechanism: Any, visible: Visible) -> Tensor:
    q, k, v = tensors()
    shown = visible.fitted_to(2, 4, T, T)
    seen = shown.rows(0, T, (0, T), q.device).expand(2, 4, T, T)
    turned = shown.turned_by(torch.arange(T)).expand(2, T)
    ordinals = None if visible.key_valid is None else visible.key_valid.cumsum(dim=1) - 1
    return reference_attention(
        resolve(mechanism), q, k, v, seen, scale=8**-0.5, offset=0, turned_by=turned, ordinals=ordinals
    )


def streamed(mechanism: Any, cuts: list[tuple[int, int]], valid: Tensor | None, **options: Any) -> Tensor:
    q, k, v = tensors()
    state = new_state(mechanism, dtype=torch.float64, **options)
    parts = []
    for a, b in cuts:
        padding = None if valid is None else valid[:, a:b]
        parts.append(state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], padding).output)
    assert state.length == cuts[-1][1]
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", HYBRIDS, ids=str)
def test_every_form_is_the_formula(mechanism: Any, padded: bool) -> None:
    q, k, v = tensors()
    visible = Visible(key_valid=PADDED if padded else None)
    truth = by_loops(mechanism, visible)
    for form in ("auto", "quadratic", "chunked"):
        answer = attend(mechanism, q, k, v, visible=visible, form=form, dtype=torch.float64)
        assert apart(answer.output, truth) < DOUBLE
        for last in (1, 3):
            few = attend(mechanism, q[:, :, -last:], k, v, visible=visible, form=form, dtype=torch.float64)
            assert apart(few.output, truth[:, :, -last:]) < DOUBLE
    cuts = [(0, 3), *((t, t + 1) for t in range(3, 40)), (40, 65), (65, 66), (66, T)]
    assert apart(streamed(mechanism, cuts, PADDED if padded else None), truth) < DOUBLE


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", FAR, ids=str)
def test_far_keys_are_the_formula_in_every_form(mechanism: Any, padded: bool) -> None:
    q, k, v = tensors()
    visible = Visible(key_valid=PADDED if padded else None)
    truth = by_loops(mechanism, visible)
    for form in ("auto", "quadratic", "chunked"):
        answer = attend(mechanism, q, k, v, visible=visible, form=form, dtype=torch.float64)
        assert apart(answer.output, truth) < DOUBLE
    cuts = [(0, 3), *((t, t + 1) for t in range(3, 40)), (40, 65), (65, 66), (66, T)]
    assert apart(streamed(mechanism, cuts, PADDED if padded else None), truth) < DOUBLE


@pytest.mark.parametrize("mechanism", WITHOUT_STATE)
def test_a_tail_without_a_state_has_the_quadratic_form(mechanism: str) -> None:
    q, k, v = tensors()
    assert apart(attend(mechanism, q, k, v, dtype=torch.float64).output, by_loops(mechanism, Visible())) < DOUBLE
    with pytest.raises(SoftgapError, match="does not factor"):
        attend(mechanism, q, k, v, form="chunked")


@settings(max_examples=60, deadline=None)
@given(
    w=st.integers(1, 80),
    sinks=st.integers(0, 80),
    steps=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    start=st.integers(0, 9),
    holes=st.booleans(),
    name=st.sampled_from(["window", "razor", "elu1+window"]),
    far=st.one_of(st.just(0), st.integers(1, 80)),
)
def test_blocks_of_any_size_give_the_same(
    w: int, sinks: int, steps: list[int], start: int, holes: bool, name: str, far: int
) -> None:
    bounds = [0]
    for step in steps:
        bounds.append(min(T, bounds[-1] + step))
    bounds.append(T)
    cuts = [(a, b) for a, b in itertools.pairwise(bounds) if b > a]
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [start]])
    if holes:
        valid = valid & (torch.arange(T) % 5 != 3)
    mechanism = f"{name}:w={w},sinks={sinks},far={far}"
    q, k, v = tensors()
    truth = attend(
        mechanism, q, k, v, visible=Visible(key_valid=valid), form="quadratic", dtype=torch.float64, check=False
    )
    shown = truth.valid[:, None, :, None]
    assert apart(streamed(mechanism, cuts, valid) * shown, truth.output * shown) < DOUBLE


def test_a_window_over_everything_is_softmax() -> None:
    q, k, v = tensors()
    truth = attend("softmax", q, k, v, dtype=torch.float64).output
    for name in ("window", "razor", "elu1+window"):
        for w in (T, 500):
            assert apart(attend(f"{name}:w={w},sinks=2", q, k, v, dtype=torch.float64).output, truth) < DOUBLE
    single = attend(f"window:w={T}", q.float(), k.float(), v.float()).output
    assert apart(single, truth) < 1e-5


def test_a_window_much_longer_than_the_text_takes_no_memory_for_it() -> None:
    q, k, v = (x.float() for x in tensors())
    for name in ("window", "razor", "elu1+window"):
        state = new_state(f"{name}:w={2**40},sinks=2")
        state.attend(q[:, :, :40], k[:, :, :40], v[:, :, :40])
        last = state.attend(q[:, :, 40:], k[:, :, 40:], v[:, :, 40:]).output
        assert apart(last, attend("softmax", q, k, v).output[:, :, 40:]) < 1e-5
        assert state.nbytes < 3 * (k.nbytes + v.nbytes)


def test_single_precision_is_enough() -> None:
    q, k, v = tensors()
    for mechanism in (*HYBRIDS, *FAR):
        truth = attend(mechanism, q, k, v, form="quadratic", dtype=torch.float64).output
        assert apart(attend(mechanism, q.float(), k.float(), v.float()).output, truth) < 2e-5


def test_softcap_and_learned_sinks_belong_to_the_exact_keys() -> None:
    q, k, v = tensors()
    rule = ScoreRule(softcap=2.0, sink_logits=torch.tensor([[0.3, -1.0, 2.0, 0.0]], dtype=torch.float64))
    scores = 2 * torch.tanh((q @ k.repeat_interleave(2, dim=1).transpose(-1, -2)) / 8**0.5 / 2)
    hidden = torch.ones(T, T).triu(1).bool()
    column = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)[None, :, None, None].expand(2, 4, T, 1)
    weights = torch.cat([scores.masked_fill(hidden, -torch.inf), column], dim=-1).softmax(-1)[..., :-1]
    truth = weights @ v.repeat_interleave(2, dim=1)
    for form in ("quadratic", "chunked"):
        answer = attend(f"window:w={T}", q, k, v, form=form, rule=rule, dtype=torch.float64)
        assert apart(answer.output, truth) < DOUBLE
    for mechanism in (*HYBRIDS, *FAR):
        whole, cut = (
            attend(mechanism, q, k, v, form=form, rule=rule, dtype=torch.float64).output
            for form in ("quadratic", "chunked")
        )
        assert apart(whole, cut) < DOUBLE
        assert apart(whole, attend(mechanism, q, k, v, dtype=torch.float64).output) > 1e-3


def test_a_sliding_window_of_the_model_hides_keys_and_sinks() -> None:
    q, k, v = tensors()
    sliding = Visible(window=12)
    for mechanism in ("window:w=5,sinks=3", "window:w=40,sinks=3"):
        truth = by_loops("window:w=5,sinks=0" if "w=5" in mechanism else "softmax", sliding)
        for form in ("quadratic", "chunked"):
            answer = attend(mechanism, q, k, v, visible=sliding, form=form, dtype=torch.float64).output
            assert apart(answer[:, :, 15:], truth[:, :, 15:]) < DOUBLE
    hybrid = attend("elu1+window:w=5,sinks=0", q, k, v, visible=sliding, dtype=torch.float64).output
    assert apart(hybrid, by_loops("elu1+window:w=5,sinks=0", sliding)) < DOUBLE


def test_no_tail_is_the_window_alone() -> None:
    q, k, v = tensors()
    alone = attend("window:w=6,sinks=2", q, k, v, dtype=torch.float64).output
    assert apart(attend("elu1+window:w=6,sinks=2,f=0", q, k, v, dtype=torch.float64).output, alone) < DOUBLE
    by_head = add_window("elu1", w=6, sinks=2).with_parameters(
        tail_factor=torch.tensor([[0.0, 1.0, 0.0, 1.0]]).double()
    )
    mixed = attend(by_head, q, k, v, dtype=torch.float64).output
    whole = attend("elu1+window:w=6,sinks=2", q, k, v, dtype=torch.float64).output
    assert apart(mixed[:, ::2], alone[:, ::2]) < DOUBLE
    assert apart(mixed[:, 1::2], whole[:, 1::2]) < DOUBLE


def test_a_map_that_gives_recent_keys_nothing_is_flagged() -> None:
    q, k, v = tensors()
    q, k = q.abs(), k.abs()
    k[:, :, 20:] = -k[:, :, 20:]  # relu is 0 there
    for form in ("quadratic", "chunked"):
        answer = attend("relu+window:w=4,sinks=1", q, k, v, form=form, dtype=torch.float64)
        assert bool(answer.flagged[:, :, 24:].all())
        assert not bool(answer.flagged[:, :, :4].any())
        alone = attend("window:w=4,sinks=1", q, k, v, form=form, dtype=torch.float64).output
        assert apart(answer.output[:, :, 24:], alone[:, :, 24:]) < DOUBLE


@pytest.mark.parametrize("mechanism", [*HYBRIDS, *FAR[:-2], FAR[-1]], ids=str)
def test_the_state_does_not_grow(mechanism: Any) -> None:
    state = new_state(mechanism)
    q, k, v = (x.float() for x in tensors())
    sizes = []
    for t in range(T):
        state.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1])
        sizes.append(state.nbytes)
    assert sizes[14] == sizes[-1] > 0


@pytest.mark.parametrize("mechanism", ["elu1", "hedgehog", FITTED], ids=str)
def test_single_positions_are_the_quadratic_form(mechanism: str | Mechanism) -> None:
    """A state that takes one position at a time, as in a generation, and then a block."""
    q, k, v = tensors()
    visible = Visible(key_valid=PADDED)
    truth = attend(mechanism, q, k, v, visible=visible, form="quadratic", dtype=torch.float64).output
    state = LinearState(mechanism, dtype=torch.float64)
    cuts = [*((t, t + 1) for t in range(50)), (50, 65), *((t, t + 1) for t in range(65, T))]
    parts = [state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], PADDED[:, a:b]).output for a, b in cuts]
    assert apart(torch.cat(parts, dim=2), truth) < DOUBLE


def test_bad_input_is_one_sentence() -> None:
    for name in ("identity", "inline", "zero", "window"):
        with pytest.raises(SoftgapError, match=f"mechanism '{name}' has others or none"):
            resolve(f"{name}+window:w=4")
    for name, message in (
        ("window:w=0", "w must be a whole number of keys from 1 on, got 0"),
        ("window:w=2.5", "w must be a whole number of keys from 1 on, got 2.5"),
        ("window:sinks=-1", "sinks must be a whole number of keys from 0 on, got -1"),
        ("window:far=-1", "far must be a whole number of keys from 0 on, got -1"),
        ("window:far=1.5", "far must be a whole number of keys from 0 on, got 1.5"),
        ("window:w=1000000,far=4", "with far keys, a window's w must be at most 65536, got 1e"),
        ("elu1+window:w=4,f=1.5", "f must be from 0 to 1, got 1.5"),
        ("elu1+windows:w=4", "a hybrid is written TAIL"),
        ("window:width=4", "option of mechanism 'window'"),
    ):
        with pytest.raises(SoftgapError, match=message):
            resolve(name)


def test_far_keys_replace_a_window_that_misses_them() -> None:
    """One far key that every query asks for: the window loses it, a far key of the same memory keeps it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (0.1 * torch.randn(1, 1, 60, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    q[..., 0], k[:, :, 10, 0] = 10, 10
    truth = attend("softmax", q, k, v, dtype=torch.float64).output[:, :, 30:]
    near, far = (
        attend(name, q, k, v, dtype=torch.float64).output[:, :, 30:]
        for name in ("window:w=9,sinks=0", "window:w=8,sinks=0,far=1")
    )
    assert apart(far, truth) < 1e-6 < 0.01 < apart(near, truth)


def test_far_keys_need_the_queries_that_chose_them() -> None:
    q, k, v = tensors()
    for form in ("auto", "quadratic", "chunked"):
        with pytest.raises(SoftgapError, match="got queries from position 69 on without the earlier ones"):
            attend("window:w=9,sinks=3,far=5", q[:, :, -1:], k, v, form=form)
    with pytest.raises(SoftgapError, match="no state under a sliding window of the model"):
        new_state("window:w=9,sinks=3,far=5", window=12)
    sliding = Visible(window=30)
    answer = attend("window:w=5,sinks=0,far=3", q, k, v, visible=sliding, dtype=torch.float64).output
    assert apart(answer, by_loops("window:w=5,sinks=0,far=3", sliding)) < DOUBLE


@pytest.mark.parametrize("name", ["window:w=3,sinks=4", "razor:w=3,sinks=4", "elu1+window:w=3,sinks=4"])
def test_sinks_are_the_first_keys_of_the_sequence_even_if_others_are_handed_over(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mechanism, seen = resolve(name), torch.ones(12, 12).tril().bool() & (torch.arange(12) >= 2)
    whole = attend(
        mechanism, q, k, v, visible=Visible(mask=seen[None, None], ordinals=torch.arange(12)[None]), dtype=torch.float64
    )
    truth = reference_attention(mechanism, q, k, v, seen.expand(1, 2, 12, 12), scale=8**-0.5, offset=0)
    assert apart(whole.output[:, :, 2:], truth[:, :, 2:]) < 1e-12
    # A cache that has dropped the first two keys.
    later = Visible(ordinals=torch.arange(2, 12)[None])
    part = attend(mechanism, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], visible=later, dtype=torch.float64)
    assert apart(part.output, whole.output[:, :, 2:]) < 1e-12
    uncounted = attend(mechanism, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], dtype=torch.float64)
    assert apart(part.output, uncounted.output) > 0.01
    with pytest.raises(SoftgapError, match="begins with the first key of a sequence"):
        attend(mechanism, q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], visible=later, form="chunked")

"""The hybrid of softmax and another mechanism: its formula in loops, all forms, and where it becomes one of the two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from softgap.attention import HybridState, LinearState, Visible, attend, attend_hybrid, attention_weights
from softgap.errors import SoftgapError
from softgap.linearize import heads_of_layer, swap
from support.linearize_cases import DOUBLE, IDS, WINDOW, apart, logits_of, with_random_parameters
from support.probe_cases import tiny_with

FITTED = with_random_parameters("fitted", 1, 4, 2, 8, 5)
MECHANISMS = ["elu1", "uniform", "hedgehog", "decay:lam=0.8", "taylor2", FITTED]
T = 70


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, T, 8), (2, 2, T, 8), (2, 2, T, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, 2 * k, v


PADDED = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [7]])


def by_loops(mechanism: Any, window: int, visible: Visible) -> Tensor:
    """One query and head at a time, from the mechanism's own normalised weights."""
    q, k, v = tensors()
    weights = attention_weights(mechanism, q, k, visible=visible, dtype=torch.float64)
    output = torch.zeros(2, 4, T, 5, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for t in range(T):
                seen = [j for j in range(t + 1) if visible.key_valid is None or bool(visible.key_valid[b, j])]
                near = [j for j in seen if t - j < window]
                if not near:
                    continue
                scores = torch.stack([q[b, h, t] @ k[b, h // 2, j] / math.sqrt(8) for j in near]).softmax(0)
                share = sum(float(weights[b, h, t, j]) for j in near)
                for j in seen:
                    a = share * scores[near.index(j)] if j in near else weights[b, h, t, j]
                    output[b, h, t] += a * v[b, h // 2, j]
    return output


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_every_form_is_the_formula(mechanism: Any, padded: bool) -> None:
    q, k, v = tensors()
    visible = Visible(key_valid=PADDED if padded else None)
    for window in (1, 9):
        truth = by_loops(mechanism, window, visible)
        for form in ("auto", "quadratic"):
            found = attend_hybrid(mechanism, q, k, v, window=window, visible=visible, form=form, dtype=torch.float64)
            assert apart(found.output, truth) < DOUBLE
            for last in (1, 3):
                asked = q[:, :, -last:]
                few = attend_hybrid(
                    mechanism, asked, k, v, window=window, visible=visible, form=form, dtype=torch.float64
                )
                assert apart(few.output, truth[:, :, -last:]) < DOUBLE
        state = HybridState(mechanism, near=window, dtype=torch.float64)
        cuts = ((0, 40), (40, 41), (41, 69), (69, T))
        valid = [PADDED[:, a:b] if padded else None for a, b in cuts]
        parts = [
            state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], m) for (a, b), m in zip(cuts, valid, strict=True)
        ]
        assert apart(torch.cat([part.output for part in parts], dim=2), truth) < DOUBLE
        assert state.length == T


def test_a_window_over_everything_is_softmax_and_single_precision_is_enough() -> None:
    q, k, v = (x.float() for x in tensors())
    truth = attend("softmax", q.double(), k.double(), v.double(), dtype=torch.float64).output
    assert apart(attend_hybrid("elu1", q, k, v, window=T).output, truth) < 1e-5
    far = attend_hybrid(FITTED, q.double(), k.double(), v.double(), window=8, dtype=torch.float64).output
    assert apart(attend_hybrid(FITTED, q, k, v, window=8).output, far) < 1e-5


def test_a_swap_takes_a_window() -> None:
    for model_type in ("llama", "mistral"):
        model = tiny_with(model_type, dtype=torch.float64, **WINDOW.get(model_type, {}))
        heads = heads_of_layer(model, 1)
        plain = logits_of(model, IDS)
        with swap(model, heads, "elu1", window=64):
            assert apart(logits_of(model, IDS), plain) < DOUBLE
        with swap(model, heads, "elu1"):
            linear = logits_of(model, IDS)
        with swap(model, heads, "elu1", window=3):
            found = logits_of(model, IDS)
        assert apart(found, plain) > 1e-3
        assert apart(found, linear) > 1e-3


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_single_positions_are_the_quadratic_form(mechanism: Any) -> None:
    """A state that takes one position at a time, as in a generation, and then a block."""
    q, k, v = tensors()
    visible = Visible(key_valid=PADDED)
    truth = attend(mechanism, q, k, v, visible=visible, form="quadratic", dtype=torch.float64).output
    state = LinearState(mechanism, dtype=torch.float64)
    cuts = [*((t, t + 1) for t in range(50)), (50, 65), *((t, t + 1) for t in range(65, T))]
    parts = [state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], PADDED[:, a:b]).output for a, b in cuts]
    assert apart(torch.cat(parts, dim=2), truth) < DOUBLE


def test_the_state_does_not_grow() -> None:
    state = HybridState(FITTED, near=4)
    q, k, v = (x.float() for x in tensors())
    sizes = []
    for t in range(T):
        state.attend(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1])
        sizes.append(state.nbytes)
    assert sizes[10] == sizes[-1] > 0


def test_bad_input_is_one_sentence() -> None:
    q, k, v = tensors()
    for name in ("identity", "inline", "zero"):
        with pytest.raises(SoftgapError, match=f"mechanism '{name}' has others or none"):
            attend_hybrid(name, q, k, v, window=4)
    with pytest.raises(SoftgapError, match="window must be at least 1 key, got 0"):
        attend_hybrid("elu1", q, k, v, window=0)
    with (
        pytest.raises(SoftgapError, match="window must be from 1 to 1048576 keys, got -2"),
        swap(tiny_with("llama"), [(0, 0)], "elu1", window=-2),
    ):
        pass

"""The compiled pass over windows with far keys: against the float64 loops, in blocks of any size, with one state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import ScoreRule, Visible, add_window, attend, new_state, resolve
from softgap.attention.far_keys import FarKeys
from softgap.attention.reference import reference_attention
from support.linearize_cases import apart, with_random_parameters

ROUNDING = 1e-5
T = 53
FITTED = with_random_parameters("fitted", 1, 6, 2, 8, 5)
BY_HEAD = with_random_parameters("fitted", 1, 6, 2, 8, 5, key_maps=6)
MECHANISMS: list[Any] = [
    "window:w=9,sinks=3,far=5",
    "window:w=7,sinks=0,far=1",
    "window:w=60,sinks=2,far=4",
    "window:w=20,sinks=1,far=70",
    "razor:w=9,sinks=3,far=5",
    "elu1+window:w=9,sinks=3,far=5",
    add_window(FITTED, w=9, sinks=3, f=0.5, far=6),
    add_window(BY_HEAD, w=5, sinks=2, far=4),
]


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, T, 8), (2, 2, T, 8), (2, 2, T, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, 2 * k, v


def by_loops(mechanism: Any, valid: Tensor | None, **rule: Any) -> Tensor:
    shown = Visible(key_valid=valid).fitted_to(2, 6, T, T)
    seen = shown.rows(0, T, (0, T), torch.device("cpu")).expand(2, 6, T, T)
    turned = shown.turned_by(torch.arange(T)).expand(2, T)
    ordinals = None if valid is None else valid.cumsum(dim=1) - 1
    return reference_attention(
        resolve(mechanism), *tensors(), seen, scale=8**-0.5, offset=0, turned_by=turned, ordinals=ordinals, **rule
    )


def by_blocks(mechanism: Any, sizes: list[int], valid: Tensor | None = None, rule: ScoreRule | None = None) -> Tensor:
    """Outputs in float32, block by block; blocks of fewer than four positions take the tensor form."""
    q, k, v = (x.float() for x in tensors())
    state, parts = new_state(mechanism, rule=rule), []
    bounds = [t for t in (0, *itertools.accumulate(sizes)) if t < T]
    with torch.no_grad():
        for a, b in itertools.pairwise([*bounds, T]):
            padding = None if valid is None else valid[:, a:b]
            parts.append(state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], padding).output)
    return torch.cat(parts, dim=2)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_the_pass_is_the_formula(mechanism: Any, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    own = FarKeys.take_in_pass

    def noted(self: Any, q: Tensor, *args: Any) -> Any:
        passes.append(q.shape[2])
        return own(self, q, *args)

    monkeypatch.setattr(FarKeys, "take_in_pass", noted)
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [6]]) if padded else None
    truth = by_loops(mechanism, valid)
    shown = torch.ones(2, 1, T, 1) if valid is None else valid[:, None, :, None]
    for sizes in ([T], [5, 1, 20, 2, 1, 9]):
        assert apart(by_blocks(mechanism, sizes, valid) * shown, truth * shown) < ROUNDING
    # One block, and those of the others that are long enough.
    assert passes == [T, 5, 20, 9, 15]


@pytest.mark.parametrize("mechanism", [MECHANISMS[0], MECHANISMS[6]], ids=str)
def test_softcap_and_learned_sinks_belong_to_the_exact_keys(mechanism: Any) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])
    truth = by_loops(mechanism, None, softcap=3.0, sink_logits=logits)
    assert apart(by_blocks(mechanism, [T], None, ScoreRule(3.0, logits[None])), truth) < ROUNDING
    assert apart(truth, by_loops(mechanism, None)) > 1e-2


@settings(max_examples=25, deadline=None)
@given(
    w=st.integers(2, 60),
    sinks=st.integers(0, 50),
    far=st.integers(1, 60),
    sizes=st.lists(st.integers(1, 30), max_size=6),
    start=st.integers(0, 9),
    holes=st.booleans(),
    tail=st.booleans(),
)
def test_blocks_of_any_size_are_the_quadratic_form(
    w: int, sinks: int, far: int, sizes: list[int], start: int, holes: bool, tail: bool
) -> None:
    name = f"window:w={w},sinks={sinks},far={far}"
    mechanism = add_window(FITTED, w=w, sinks=sinks, far=far) if tail else resolve(name)
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [start]])
    if holes:
        valid = valid & (torch.arange(T) % 5 != 3)
    truth = attend(
        mechanism, *tensors(), visible=Visible(key_valid=valid), form="quadratic", dtype=torch.float64, check=False
    )
    rows = valid[:, None, :, None]
    assert apart(by_blocks(mechanism, sizes, valid) * rows, truth.output * rows) < ROUNDING


def test_threads_share_the_heads_and_change_nothing() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(by_blocks(MECHANISMS[6], [20, 33]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)

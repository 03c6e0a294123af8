"""The compiled pass over the tail of a hybrid: against the float64 loops, in blocks of any size, and when it runs."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import Mechanism, Visible, add_window, attend, new_state, resolve
from softgap.attention import hybrid as hybrids
from softgap.attention.reference import reference_attention
from support.linearize_cases import apart, with_random_parameters

ROUNDING = 1e-5
T = 47


def tensors(heads: int, kv_heads: int, t: int = T, value_dim: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, t, 8), (2, kv_heads, t, 8), (2, kv_heads, t, value_dim))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, 2 * k, v


def fitted(heads: int, kv_heads: int, features: int = 5, **maps: int) -> Mechanism:
    return with_random_parameters("fitted", 1, heads, kv_heads, 8, features, **maps)


def by_blocks(mechanism: Any, x: tuple[Tensor, ...], sizes: list[int], valid: Tensor | None = None) -> Tensor:
    """Outputs in float32, block by block."""
    q, k, v = (y.float() for y in x)
    state, parts = new_state(mechanism), []
    bounds = [0, *itertools.accumulate(sizes)]
    with torch.no_grad():
        for a, b in itertools.pairwise([*(t for t in bounds if t < k.shape[2]), k.shape[2]]):
            padding = None if valid is None else valid[:, a:b]
            parts.append(state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], padding).output)
    return torch.cat(parts, dim=2)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The positions of every block that the pass took."""
    taken: list[int] = []
    own = hybrids._FeatureTail.add_in_pass

    def noted(self: Any, q: Tensor, *args: Any) -> Any:
        found = own(self, q, *args)
        if found is not None:
            taken.append(q.shape[2])
        return found

    monkeypatch.setattr(hybrids._FeatureTail, "add_in_pass", noted)
    return taken


CASES = [
    # Query heads, KV heads, recent keys, sinks, features.
    pytest.param(4, 2, 9, 3, 5, {}, id="grouped heads"),
    pytest.param(7, 1, 6, 0, 33, {}, id="one KV head for seven"),
    pytest.param(3, 3, 1, 0, 16, {}, id="a window of one key"),
    pytest.param(4, 2, 100, 2, 5, {}, id="a window longer than the text"),
    pytest.param(4, 2, 46, 1, 5, {}, id="a window that the last key leaves"),
    pytest.param(4, 2, 7, 2, 70, {"key_maps": 4}, id="a key map for each query head"),
]


@pytest.mark.parametrize(("padded", "segment"), [(False, 1), (False, 20), (True, 1), (True, 282)])
@pytest.mark.parametrize(("heads", "kv_heads", "w", "sinks", "features", "maps"), CASES)
def test_the_pass_is_the_formula(
    heads: int,
    kv_heads: int,
    w: int,
    sinks: int,
    features: int,
    maps: Any,
    padded: bool,
    segment: int,
    passes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hybrids, "SEGMENT_POSITIONS", segment)
    x = tensors(heads, kv_heads)
    mechanism = add_window(fitted(heads, kv_heads, features, **maps), w=w, sinks=sinks, f=0.7)
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [6]]) if padded else None
    shown = Visible(key_valid=valid).fitted_to(2, heads, T, T)
    seen = shown.rows(0, T, (0, T), x[0].device).expand(2, heads, T, T)
    turned = shown.turned_by(torch.arange(T)).expand(2, T)
    ordinals = None if valid is None else valid.cumsum(dim=1) - 1
    truth = reference_attention(mechanism, *x, seen, scale=8**-0.5, offset=0, turned_by=turned, ordinals=ordinals)
    rows = torch.ones(2, 1, T, 1) if valid is None else valid[:, None, :, None]
    for sizes in ([T], [5, 1, 20, 4]):
        assert apart(by_blocks(mechanism, x, sizes, valid) * rows, truth * rows) < ROUNDING
    assert bool(passes) == (w < T)


@settings(max_examples=25, deadline=None)
@given(
    w=st.integers(1, 60),
    sinks=st.integers(0, 50),
    sizes=st.lists(st.integers(1, 30), max_size=6),
    start=st.integers(0, 9),
    group=st.integers(1, 4),
    decay=st.sampled_from([0.0, 0.05, 3.0]),
    spread=st.sampled_from([0.3, 6.0]),
    segment=st.integers(1, 60),
)
def test_blocks_of_any_size_are_the_quadratic_form(
    w: int, sinks: int, sizes: list[int], start: int, group: int, decay: float, spread: float, segment: int
) -> None:
    """Also where features of one key are e^30 times those of another, and in segments of any size."""
    x = tensors(2 * group, 2)
    own = fitted(2 * group, 2)
    maps = {name: own.parameters[name] * spread for name in ("query_weight", "key_weight")}
    own = own.with_parameters(**maps, rate=own.parameters["rate"] * decay)
    mechanism = add_window(own, w=w, sinks=sinks)
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [start]])
    truth = attend(mechanism, *x, visible=Visible(key_valid=valid), form="quadratic", dtype=torch.float64, check=False)
    rows = valid[:, None, :, None]
    with patch.object(hybrids, "SEGMENT_POSITIONS", segment):
        found = by_blocks(mechanism, x, sizes, valid)
    error = apart(found * rows, truth.output * rows)
    # Logarithms of size 100 have digits down to 1e-5 in float32.
    assert error < ROUNDING * (1 if spread < 1 else 20)


def test_other_logarithms_are_served_too(passes: list[int]) -> None:
    x = tensors(4, 2)
    mechanism = resolve("hedgehog+window:w=5,sinks=1")
    truth = attend(mechanism, *x, form="quadratic", dtype=torch.float64).output
    assert apart(by_blocks(mechanism, x, [T]), truth) < ROUNDING
    assert passes == [T]


@pytest.mark.parametrize("mechanism", ["elu1+window:w=5,sinks=1", "window:w=5,sinks=1", "razor:w=5,sinks=1"])
def test_what_has_no_logarithms_is_left_to_the_tensor_form(mechanism: str, passes: list[int]) -> None:
    x = tensors(4, 2)
    truth = attend(mechanism, *x, form="quadratic", dtype=torch.float64).output
    assert apart(by_blocks(mechanism, x, [T]), truth) < ROUNDING
    assert passes == []


def test_gradients_and_float64_take_the_tensor_form(passes: list[int]) -> None:
    q, k, v = tensors(4, 2)
    mechanism = add_window(fitted(4, 2), w=6, sinks=1)
    new_state(mechanism, dtype=torch.float64).attend(q, k, v)
    single = [x.float().requires_grad_() for x in (q, k, v)]
    found = new_state(mechanism).attend(*single).output
    assert passes == []
    # What a gradient needs is still there.
    assert found.requires_grad


def test_threads_share_the_heads_and_change_nothing() -> None:
    x = tensors(6, 3)
    mechanism = add_window(fitted(6, 3), w=6, sinks=1)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(by_blocks(mechanism, x, [20, 27]))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_key_map_that_gives_recent_keys_nothing_is_flagged() -> None:
    """Features of the recent keys that are absent leave the tail without a normaliser."""
    own = fitted(2, 1)
    mechanism = add_window(own, w=4, sinks=0)
    q, k, v = (x.float() for x in tensors(2, 1))
    valid = torch.ones(2, T, dtype=torch.bool)
    # Keys that are hidden while the window holds nothing else.
    valid[:, 20:30] = False
    with torch.no_grad():
        found = new_state(mechanism).attend(q, k, v, valid)
    exact = new_state(mechanism, dtype=torch.float64).attend(*tensors(2, 1), valid)
    assert torch.equal(found.flagged, exact.flagged)
    assert torch.equal(found.valid, exact.valid)

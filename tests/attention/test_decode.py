"""The steps of one position against the float64 loops, in turn with blocks, and what they keep."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from softgap.attention import Mechanism, ScoreRule, Visible, add_window, attend, new_state, resolve
from softgap.attention.decode import DecodeMaps, DecodeStep, can_decode, recent_rows
from softgap.attention.memory import derived_numbers, kept_numbers
from softgap.attention.reference import reference_attention
from softgap.attention.rotary import Rotation
from softgap.attention.tensor_step import TensorMaps, TensorStep
from support.attention_cases import with_rotation
from support.linearize_cases import DOUBLE, apart, with_random_parameters
from support.simulated_device import simulated_devices

# One computation in float32, the other in float64.
ROUNDING = 1e-5
T = 70
PADDED = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [7]])
FITTED = with_random_parameters("fitted", 1, 4, 2, 8, 5)
BY_HEAD = with_random_parameters("fitted", 1, 4, 2, 8, 5, key_maps=4)
ROTATED = with_rotation(FITTED, [Rotation.of_pairs(torch.tensor([1.0, 0.3, 0.1]), 8, layout="neighbours", start=2)])
FOLLOWED: list[Any] = [
    "window:w=9,sinks=3",
    "window:w=1,sinks=0",
    "window:w=90,sinks=2",
    "window:w=9,sinks=3,far=5",
    FITTED,
    BY_HEAD,
    ROTATED,
    add_window(FITTED, w=9, sinks=3, f=0.5),
    add_window(FITTED, w=1, sinks=0),
    add_window(FITTED, w=90, sinks=4),
    add_window(BY_HEAD, w=7, sinks=1),
    add_window(ROTATED, w=16, sinks=4),
    add_window(FITTED, w=9, sinks=3, far=6),
    add_window(ROTATED, w=5, sinks=2, far=4),
    add_window(BY_HEAD, w=5, sinks=2, far=4),
]


def tensors(t: int = T, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, t, 8), (2, kv_heads, t, 8), (2, kv_heads, t, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return q, 2 * k, v


def by_loops(mechanism: Any, valid: Tensor | None, **rule: Any) -> Tensor:
    q, k, v = tensors()
    shown = Visible(key_valid=valid).fitted_to(2, 4, T, T)
    seen = shown.rows(0, T, (0, T), q.device).expand(2, 4, T, T)
    turned = shown.turned_by(torch.arange(T)).expand(2, T)
    ordinals = None if valid is None else valid.cumsum(dim=1) - 1
    return reference_attention(
        resolve(mechanism), q, k, v, seen, scale=8**-0.5, offset=0, turned_by=turned, ordinals=ordinals, **rule
    )


def decoded(
    mechanism: Any, cuts: list[tuple[int, int]], valid: Tensor | None, rule: ScoreRule | None = None
) -> tuple[Tensor, Any, DecodeStep]:
    """Blocks by the state, single positions by the compiled step, which take turns on one state."""
    q, k, v = (x.float() for x in tensors(cuts[-1][1]))
    mechanism = single(mechanism)
    state = new_state(mechanism, rule=rule)
    step = DecodeStep(state, DecodeMaps(mechanism, torch.arange(4), torch.arange(2)), scale=8**-0.5, rule=rule)
    parts = []
    for a, b in cuts:
        own_q, own_k, own_v = (x[:, :, a:b].contiguous() for x in (q, k, v))
        padding = None if valid is None else valid[:, a:b]
        if b - a == 1:
            out = torch.full((2, 4, 5), torch.nan)
            step(own_q, own_k, own_v, out, padding)
            parts.append(out[:, :, None])
        else:
            parts.append(state.attend(own_q, own_k, own_v, padding).output)
    assert state.length == cuts[-1][1]
    return torch.cat(parts, dim=2), state, step


def tensor_steps(
    mechanism: Any, cuts: list[tuple[int, int]], valid: Tensor | None, rule: ScoreRule | None = None, **settings: Any
) -> tuple[Tensor, Any, TensorStep]:
    """The same by the step in tensor operations, in float64."""
    q, k, v = tensors(cuts[-1][1])
    mechanism = resolve(mechanism)
    state = new_state(mechanism, rule=rule, dtype=torch.float64)
    maps = TensorMaps(mechanism, torch.arange(4), torch.arange(2), like=q)
    step = TensorStep(state, maps, scale=8**-0.5, rule=rule, **settings)
    parts = []
    for a, b in cuts:
        own_q, own_k, own_v = (x[:, :, a:b] for x in (q, k, v))
        padding = None if valid is None else valid[:, a:b]
        if b - a == 1:
            out = torch.full((2, 4, 5), torch.nan, dtype=torch.float64)
            step(own_q, own_k, own_v, out, padding)
            parts.append(out[:, :, None])
        else:
            parts.append(state.attend(own_q, own_k, own_v, padding).output)
    assert state.length == cuts[-1][1]
    return torch.cat(parts, dim=2), state, step


def single(mechanism: Any) -> Mechanism:
    """The mechanism with parameters in float32, as plans have them."""
    found = resolve(mechanism)
    return found.with_parameters(**{name: x.float() for name, x in found.parameters.items()})


ALONE = [(t, t + 1) for t in range(T)]
MIXED = [(0, 3), *((t, t + 1) for t in range(3, 40)), (40, 65), (65, 66), (66, 69), (69, T)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", FOLLOWED, ids=str)
def test_single_positions_are_the_formula(mechanism: Any, padded: bool) -> None:
    valid = PADDED if padded else None
    truth = by_loops(mechanism, valid)
    shown = torch.ones(2, 1, T, 1) if valid is None else valid[:, None, :, None]
    for cuts in (ALONE, MIXED):
        found, _, _ = decoded(mechanism, cuts, valid)
        assert apart(found * shown, truth * shown) < ROUNDING


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mechanism", FOLLOWED, ids=str)
def test_tensor_operations_are_the_formula(mechanism: Any, padded: bool) -> None:
    valid = PADDED if padded else None
    shown = torch.ones(2, 1, T, 1) if valid is None else valid[:, None, :, None]
    found, _, _ = tensor_steps(mechanism, MIXED, valid)
    assert apart(found * shown, by_loops(mechanism, valid) * shown) < DOUBLE


@pytest.mark.parametrize("mechanism", ["window:w=9,sinks=3", FOLLOWED[7], FOLLOWED[12]], ids=str)
def test_softcap_and_learned_sinks_belong_to_the_exact_keys(mechanism: Any) -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0])
    truth = by_loops(mechanism, None, softcap=3.0, sink_logits=logits)
    found, _, _ = decoded(mechanism, MIXED, None, ScoreRule(3.0, logits[None]))
    assert apart(found, truth) < ROUNDING
    assert apart(tensor_steps(mechanism, MIXED, None, ScoreRule(3.0, logits[None]))[0], truth) < DOUBLE
    assert apart(found, by_loops(mechanism, None)) > 1e-2


@settings(max_examples=25, deadline=None)
@given(
    w=st.integers(1, 80),
    sinks=st.integers(0, 80),
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    start=st.integers(0, 9),
    holes=st.booleans(),
    tail=st.sampled_from([None, FITTED, BY_HEAD, ROTATED]),
    far=st.one_of(st.just(0), st.integers(1, 80)),
)
def test_steps_and_blocks_in_any_order_give_the_same(
    w: int, sinks: int, steps: list[int], start: int, holes: bool, tail: Mechanism | None, far: int
) -> None:
    # In a window of one key every key receives all of the attention: rounding would choose among the far keys.
    assume(w > 1 or not far)
    bounds = [0]
    for step in steps:
        bounds.append(min(T, bounds[-1] + step))
    cuts = [(a, b) for a, b in itertools.pairwise(bounds) if b > a] + [(t, t + 1) for t in range(bounds[-1], T)]
    valid = torch.arange(T)[None].expand(2, T) >= torch.tensor([[0], [start]])
    if holes:
        valid = valid & (torch.arange(T) % 5 != 3)
    name = f"window:w={w},sinks={sinks},far={far}"
    mechanism = resolve(name) if tail is None else add_window(tail, w=w, sinks=sinks, far=far)
    q, k, v = tensors()
    truth = attend(
        mechanism, q, k, v, visible=Visible(key_valid=valid), form="quadratic", dtype=torch.float64, check=False
    )
    shown = valid[:, None, :, None]
    assert apart(decoded(mechanism, cuts, valid)[0] * shown, truth.output * shown) < ROUNDING
    assert apart(tensor_steps(mechanism, cuts, valid)[0] * shown, truth.output * shown) < DOUBLE


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mechanism", ["window:w=9,sinks=3", ROTATED, FOLLOWED[12]], ids=str)
def test_torch_captures_the_step_as_one_graph(mechanism: Any, backend: str) -> None:
    """``fullgraph=True`` refuses a graph break; a graph for each position would be as many compilations."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    found, _, _ = tensor_steps(mechanism, MIXED, None, backend=backend)
    assert apart(found, by_loops(mechanism, None)) < DOUBLE
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("mechanism", ["window:w=9,sinks=3,far=4", FITTED, FOLLOWED[13]], ids=str)
def test_other_devices_take_tensor_operations(mechanism: Any) -> None:
    """No operation mixes devices or reads a number on the host."""
    q, k, v = (x.float() for x in tensors())
    mechanism = single(mechanism)
    with simulated_devices() as (device, _):
        there = [x.to(device) for x in (q, k, v)]
        state = new_state(mechanism)
        maps = TensorMaps(mechanism, torch.arange(4), torch.arange(2), like=there[0])
        step, parts = TensorStep(state, maps, scale=8**-0.5), []
        for t in range(30):
            out = torch.zeros(2, 4, 5, device=device)
            own_q, own_k, own_v = (x[:, :, t : t + 1] for x in there)
            step(own_q, own_k, own_v, out)
            parts.append(out.to("cpu"))
    assert apart(torch.stack(parts, dim=2), by_loops(mechanism, None)[:, :, :30]) < ROUNDING


def test_what_was_made_in_inference_mode_is_copied_outside() -> None:
    mechanism = FOLLOWED[12]
    q, k, v = tensors()
    state = new_state(mechanism, dtype=torch.float64)
    step = TensorStep(state, TensorMaps(mechanism, torch.arange(4), torch.arange(2), like=q), scale=8**-0.5)
    found = []
    for t in range(T):
        out = torch.zeros(2, 4, 5, dtype=torch.float64)
        with torch.inference_mode(t < 30), torch.no_grad():
            own_q, own_k, own_v = (x[:, :, t : t + 1] for x in (q, k, v))
            step(own_q, own_k, own_v, out)
        found.append(out)
    assert apart(torch.stack(found, dim=2), by_loops(mechanism, None)) < DOUBLE


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "tensors"])
def test_rounding_does_not_build_up(compiled: bool, steps: int) -> None:
    """A sink whose features are e^18 times the others': sums by subtraction would keep its rounding for ever."""
    q, k, v = tensors(steps)
    large = FITTED.parameters["key_weight"][0, :, 0] * 12
    k[:, :, 0] += large
    mechanism = add_window(FITTED, w=30, sinks=0)
    truth = attend(mechanism, q, k, v, form="quadratic", dtype=torch.float64).output
    own = single(mechanism)
    state, places, out = new_state(own), (torch.arange(4), torch.arange(2)), torch.empty(2, 4, 5)
    step: Any = TensorStep(state, TensorMaps(own, *places, like=out), scale=8**-0.5)
    if compiled:
        step = DecodeStep(state, DecodeMaps(own, *places), scale=8**-0.5)
    for t in range(steps):
        own_q, own_k, own_v = (x[:, :, t : t + 1].float().contiguous() for x in (q, k, v))
        step(own_q, own_k, own_v, out)
        assert apart(out, truth[:, :, t]) < 1e-4


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (3, 3), (8, 2)])
def test_groups_of_any_size_share_their_keys(heads: int, kv_heads: int) -> None:
    q, k, v = tensors(40, heads, kv_heads)
    own = with_random_parameters("fitted", 1, heads, kv_heads, 8, 5)
    mechanism, places = add_window(own, w=9, sinks=2, far=3), (torch.arange(heads), torch.arange(kv_heads))
    truth = attend(mechanism, q, k, v, form="quadratic", dtype=torch.float64).output
    compiled = DecodeStep(new_state(single(mechanism)), DecodeMaps(single(mechanism), *places), scale=8**-0.5)
    state = new_state(mechanism, dtype=torch.float64)
    in_tensors = TensorStep(state, TensorMaps(mechanism, *places, like=q), scale=8**-0.5)
    for t in range(40):
        own_q, own_k, own_v = (x[:, :, t : t + 1].contiguous() for x in (q, k, v))
        found, exact = torch.empty(2, heads, 5), torch.empty(2, heads, 5, dtype=torch.float64)
        compiled(own_q.float(), own_k.float(), own_v.float(), found)
        in_tensors(own_q, own_k, own_v, exact)
        assert apart(found, truth[:, :, t]) < ROUNDING
        assert apart(exact, truth[:, :, t]) < DOUBLE


def test_only_its_own_heads_are_read_and_written_and_corrected() -> None:
    """The second and third of three KV heads, of six query heads, with an output correction."""
    q, k, v = tensors(12, 6, 3)
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(4, 5, 5, generator=generator), torch.randn(4, 5, generator=generator)
    mechanism = single(add_window(FITTED, w=4, sinks=1))
    own = attend(mechanism, q[:, 2:], k[:, 1:], v[:, 1:], form="quadratic", dtype=torch.float64).output
    truth = own @ weight.double().transpose(-1, -2) + bias.double()[:, None]
    maps = DecodeMaps(mechanism, torch.arange(2, 6), torch.tensor([1, 2]), weight, bias)
    step = DecodeStep(new_state(mechanism), maps, scale=8**-0.5)
    places = (torch.arange(2, 6), torch.tensor([1, 2]))
    in_tensors = TensorMaps(mechanism, *places, weight, bias, like=torch.zeros(0))
    for each in (step, TensorStep(new_state(mechanism), in_tensors, scale=8**-0.5)):
        for t in range(12):
            out = torch.full((2, 6, 5), 7.0)
            own_q, own_k, own_v = (x[:, :, t : t + 1].float().contiguous() for x in (q, k, v))
            each(own_q, own_k, own_v, out)
            assert apart(out[:, 2:], truth[:, :, t]) < ROUNDING
            assert bool((out[:, :2] == 7).all())


@pytest.mark.parametrize("mechanism", FOLLOWED, ids=str)
def test_bytes_counted_are_bytes_allocated(mechanism: Any) -> None:
    _, state, step = decoded(mechanism, [(t, t + 1) for t in range(100)], None)
    units = 2 * 2
    kept, derived = kept_numbers(mechanism, 8, 5, kv_heads=2), derived_numbers(mechanism, kv_heads=2)
    # A linear state also notes which rows have seen a key: one byte each.
    assert state.nbytes - 4 * units * kept in (0, 2)
    assert step.nbytes == 4 * units * derived
    _, state, tensor_step = tensor_steps(mechanism, [(t, t + 1) for t in range(100)], None)
    # Ordinals and positions of far keys are whole numbers of 8 bytes there, too.
    assert state.nbytes - 8 * units * kept in (0, 2)
    assert tensor_step.nbytes == 0


def test_sums_of_recent_keys_take_about_two_square_roots() -> None:
    assert [recent_rows(w) for w in (1, 2, 3, 4, 5, 94, 100)] == [2, 3, 4, 4, 5, 20, 20]


def test_what_is_no_affine_map_is_left_to_the_tensor_form() -> None:
    for name in ("elu1", "elu1+window:w=4,sinks=1", "razor:w=9,sinks=3", "hedgehog", "constant", "fitted"):
        assert not can_decode(resolve(name))
    assert all(can_decode(resolve(mechanism)) for mechanism in FOLLOWED)


def test_the_exponential_is_that_of_the_library() -> None:
    from softgap.attention.simd import exponentials

    x = np.concatenate([np.linspace(-87, 88, 100_001), [-np.inf, -1e30, -88.0, 0.0]]).astype(np.float32)
    found = x.copy()
    exponentials(found, np.empty(x.size, np.int32))
    exact = np.exp(x.astype(np.float64))
    assert np.all(np.abs(found[:-4] - exact[:-4]) <= 3e-7 * exact[:-4])
    assert found[-4:].tolist() == [0, 0, 0, 1]

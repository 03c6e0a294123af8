"""Heads of one model become several mechanisms: swapped, cached, corrected, saved, and counted in bytes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from softgap.attention import add_window, resolve
from softgap.errors import SoftgapError
from softgap.intervene.state_cache import cache_bytes
from softgap.intervene.swap import heads_by_layer
from softgap.linearize import (
    Mixture,
    Plan,
    Readout,
    Substitute,
    apply,
    distil_substitute,
    fit_output_correction,
    load_plan,
    swap,
)
from softgap.linearize.plan import cache_bytes_at, memory_of
from softgap.linearize.sequences import Sequences
from softgap.models.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
from softgap.report.figures import draw_plan, save_figure
from support.linearize_cases import DOUBLE, SINGLE, apart, edited, sharp_llama, with_random_parameters
from support.model_examples import tiny_llama

FITTED = with_random_parameters("fitted", 2, 4, 2, 8, 8)
CONSTANT = with_random_parameters("constant", 2, 4, 2, 8, 8)
WINDOW = resolve("window:w=3,sinks=2")
# KV head 1 of layer 0 and both of layer 1, each another mechanism; one head of KV head 0 in layer 0 keeps its cache.
PARTS = [
    ([(0, 0), (1, 2), (1, 3)], FITTED),
    ([(0, 2), (0, 3)], WINDOW),
    ([(1, 0), (1, 1)], CONSTANT),
]
HEADS = ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
GROUPS = ((0, 1), (1, 0), (1, 1))
IDS = torch.randint(3, 100, (2, 19), generator=torch.Generator().manual_seed(3))
FIT = Sequences(IDS, torch.ones(2, 18, dtype=torch.bool))


def readout() -> Readout:
    generator = torch.Generator().manual_seed(0)
    return Readout(torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 4, 8, generator=generator))


def plan_for(model: Any, mixture: Substitute) -> Plan:
    memory = memory_of(model, GROUPS, mixture)
    return Plan("tiny", model_fingerprint(model), HEADS, GROUPS, (1,), mixture, memory=memory)


def test_a_mixture_swaps_each_head_by_its_own_mechanism() -> None:
    """Against heads that are written over one by one from the float64 reference."""
    model = sharp_llama()
    with torch.no_grad(), edited(model, PARTS):
        truth = model(IDS[:1], use_cache=False).logits
    with torch.no_grad(), swap(model, HEADS, Mixture(PARTS)):
        swapped = model(IDS[:1], use_cache=False).logits
    with torch.no_grad(), swap(model, *PARTS[0]), swap(model, *PARTS[1]), swap(model, *PARTS[2]):
        one_by_one = model(IDS[:1], use_cache=False).logits
    assert apart(swapped, truth) < DOUBLE
    assert torch.equal(swapped, one_by_one)


@pytest.mark.parametrize("corrected", [False, True])
def test_states_of_several_kinds_equal_the_swap(corrected: bool) -> None:
    model = tiny_llama().double()
    mixture = Mixture(PARTS, readout() if corrected else None)
    with torch.no_grad(), swap(model, HEADS, mixture):
        truth = model(IDS, use_cache=False).logits
    with torch.no_grad(), apply(model, plan_for(model, mixture)) as applied:
        cache = applied.cache()
        cuts = (0, 9, 10, 11, 16, 19)
        steps = [model(IDS[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in itertools.pairwise(cuts)]
    assert apart(torch.cat(steps, dim=1), truth) < 1e-6
    with torch.no_grad():
        assert apart(model(IDS, use_cache=False).logits, truth) > 1e-3


def test_bytes_foretold_are_bytes_allocated() -> None:
    model = tiny_llama(max_position_embeddings=256)
    plan = plan_for(model, Mixture(PARTS))
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        for part in IDS.repeat(1, 4)[:1].split(20, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    # A linear state has one flag per row: whether it has seen a key.
    assert repr(plan)
    assert cache_bytes(cache) - cache_bytes_at(plan.memory, 76) == 1
    # The window keeps 5 keys and values of 8 numbers, the fitted map its state, the constant nothing.
    state = memory_of(model, [(1, 1)], Substitute(FITTED))["states"]
    assert plan.memory["states"] == 4 * 5 * 16 + state


@pytest.mark.parametrize("corrected", [False, True])
def test_a_mixed_plan_survives_the_disk(tmp_path: Path, corrected: bool) -> None:
    model = tiny_llama()
    parts = [*PARTS[:2], ([(1, 0)], add_window(FITTED, w=4)), ([(1, 1)], CONSTANT)]
    plan = plan_for(model, Mixture(parts, readout() if corrected else None))
    path = plan.save(tmp_path / "plan.json")
    loaded = load_plan(path)
    assert isinstance(loaded.substitute, Mixture)
    assert [heads for heads, _ in loaded.substitute.parts] == [tuple(heads) for heads, _ in parts]
    assert loaded.substitute.name == plan.substitute.name
    becomes = "fitted (3 heads), window (2 heads), hybrid (1 head), constant (1 head)"
    sentence = f"The plan replaces softmax by {becomes}{', output corrected' * corrected} in 7 of 8 heads. It frees "
    assert loaded.sentence(8, 4).startswith(sentence)
    assert loaded.substitute.digest == plan.substitute.digest
    with torch.no_grad(), apply(model, plan):
        saved = model(IDS).logits
    with torch.no_grad(), apply(model, loaded):
        assert torch.equal(model(IDS).logits, saved)
    # What two parts share is written once.
    assert loaded.memory["parameters"] == memory_of(model, GROUPS, loaded.substitute)["parameters"]
    names = loaded.substitute.tensors()
    assert not any(name.startswith("part2.") for name in names)


def test_each_part_gets_the_output_correction_of_its_heads() -> None:
    model = sharp_llama().float()
    whole = fit_output_correction(model, FIT, HEADS, Mixture(PARTS))
    assert isinstance(whole, Mixture)
    assert whole.readout is not None
    # Layer 0 comes first, so that its heads see what they see when they are swapped alone.
    for heads, mechanism in PARTS[:2]:
        own = [head for head in heads if head[0] == 0]
        alone = fit_output_correction(model, FIT, own, mechanism)
        assert alone.readout is not None
        for layer, head in own:
            assert apart(alone.readout.weight[layer, head], whole.readout.weight[layer, head]) < SINGLE


def test_distillation_trains_the_maps_of_a_mixture() -> None:
    model = sharp_llama().float()
    trained = distil_substitute(model, FIT, HEADS, Mixture(PARTS), steps=2)
    assert isinstance(trained, Mixture)
    before, after = FITTED.parameters, trained.parts[0][1].parameters
    assert not torch.equal(before["key_weight"][1, 1], after["key_weight"][1, 1])
    assert torch.equal(trained.parts[2][1].parameters["mean"], CONSTANT.parameters["mean"])
    assert trained.parts[0][1].origin != FITTED.origin


def test_bad_mixtures_are_refused_in_one_sentence() -> None:
    model = tiny_llama()
    with pytest.raises(SoftgapError, match="each head once"):
        Mixture([([(0, 0)], FITTED), ([(0, 0)], WINDOW)])
    with pytest.raises(SoftgapError, match="at least one head"):
        Mixture([])
    with pytest.raises(SoftgapError, match=r"no mechanism for head \(0, 1\)"), swap(model, [(0, 1)], Mixture(PARTS)):
        pass
    with pytest.raises(SoftgapError, match="takes no window"), swap(model, HEADS, Mixture(PARTS), window=3):
        pass
    with pytest.raises(SoftgapError, match="read its parts"):
        _ = Mixture(PARTS).mechanism


def test_heads_of_a_layer_come_in_ascending_order() -> None:
    from softgap.intervene.substitute import swapped_layer

    model = tiny_llama()
    layers = attention_layers(model)
    for layer, heads in heads_by_layer(layers, HEADS):
        assert swapped_layer(layer, heads, Mixture(PARTS), len(layers)).heads.tolist() == heads


def test_the_picture_shows_every_kind(tmp_path: Path) -> None:
    plan = plan_for(tiny_llama(), Mixture(PARTS))
    drawn = save_figure(draw_plan(plan, [4, 4], [2, 2], [0, 1]), tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert "7 of 8 heads without softmax, 3 KV groups freed" in drawn
    for word in ("constant 2", "window 2", "fitted 3", "softmax 1"):
        assert word in drawn

"""Rotary embedding undone: found in models and checked against them, and positions that survive caches and padding."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from softgap.attention import HybridState, LinearState, Mechanism, Visible, add_window, attend
from softgap.attention.rotary import Rotation, TurnTable
from softgap.linearize import Plan, Substitute, apply, swap
from softgap.models.fingerprint import model_fingerprint
from softgap.probe import read_ids, record
from softgap.probe.layout import layer_rotations
from support.attention_cases import with_rotation
from support.linearize_cases import IDS, PAIR, SINGLE, WINDOW, apart, calls_of, logits_of, with_random_parameters
from support.model_examples import tiny_llama
from support.probe_cases import SAME_MODEL, difference, ids_of, row, tiny_with, written

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_neox": {},  # a part of each head is turned
    "cohere": {},  # neighbours are partners
    "deepseek_v3": {},  # the end of each head is turned
    "gemma3_text": {},  # two rotary embeddings
    "smollm3": {},
}
UNKNOWN = {"gpt2": "sdpa", "opt": "sdpa", "bloom": "eager", "persimmon": "sdpa"}


def unrotated_keys(model: Any, rotation: Rotation, layer: int = 0) -> Tensor:
    """Keys of one token at many positions, before rotary embedding."""
    ids = torch.full((1, 24), 7)
    key = calls_of(model, ids)[layer].key[0]
    return rotation.turned(key, -torch.arange(24))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rotations_are_found_and_undone(model_type: str) -> None:
    model = tiny_with(model_type, **FAMILIES[model_type])
    rotations = layer_rotations(model)
    assert rotations is not None
    key = unrotated_keys(model, rotations[0])
    assert apart(key, key[:, :1].expand_as(key)) < 1e-5
    turned = calls_of(model, torch.full((1, 24), 7))[0].key[0]
    assert apart(turned, turned[:, :1].expand_as(turned)) > 1e-2


def test_layers_may_differ() -> None:
    rotations = layer_rotations(tiny_with("gemma3_text"))
    assert rotations is not None
    kinds = {tuple(rotation.frequency.tolist()) for rotation in rotations}
    assert len(kinds) == 2  # sliding layers turn faster
    still = layer_rotations(tiny_with("smollm3"))
    assert still is not None
    assert {bool(rotation.frequency.any()) for rotation in still} == {True, False}


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_other_models_have_none(model_type: str) -> None:
    assert layer_rotations(tiny_with(model_type, attn=UNKNOWN[model_type])) is None


def test_a_frequency_that_the_model_does_not_use_is_not_believed() -> None:
    model = tiny_with("llama")
    own = model.model.rotary_emb.inv_freq
    assert layer_rotations(model) is not None
    forward = model.model.rotary_emb.forward

    def twice(x: Tensor, position_ids: Tensor) -> Any:
        return forward(x, 2 * position_ids)

    model.model.rotary_emb.forward = twice
    assert layer_rotations(model) is None
    model.model.rotary_emb.register_buffer("faster_inv_freq", 2 * own, persistent=False)
    found = layer_rotations(model)
    assert found is not None
    assert torch.equal(found[0].frequency[: len(own)], 2 * own)


def test_low_precision_finds_the_same() -> None:
    whole, rounded = (layer_rotations(tiny_with("llama", dtype=x)) for x in (torch.float32, torch.bfloat16))
    assert whole is not None
    assert rounded is not None
    assert apart(whole[1].frequency, rounded[1].frequency) < 1e-2


def test_angles_keep_their_digits_far_out() -> None:
    rotation = Rotation.of_pairs(1 / 10000 ** (torch.arange(4) / 4), 8)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    mechanism = with_rotation(with_random_parameters("fitted", 1, 2, 2, 8, 8), [rotation])
    far = Visible(origin=torch.tensor([130_000]))
    exact = attend(mechanism, q, k, v, visible=far, dtype=torch.float64).output
    assert apart(attend(mechanism, q, k, v, visible=far).output, exact) < 1e-5
    assert apart(attend(mechanism, q, k, v, dtype=torch.float64).output, exact) > 1e-2
    at = 130_000 + torch.arange(40)
    angle = at[:, None].double() * rotation.frequency[:4].double()
    turned = torch.complex(k[0, ..., :4], k[0, ..., 4:]) * torch.polar(torch.ones_like(angle), -angle)
    by_hand = torch.cat([turned.real, turned.imag], dim=-1)
    assert apart(rotation.turned(k[0], -at), by_hand) < 1e-9
    assert apart(TurnTable(rotation, 130_040).before(k.float()[0], at.expand(2, -1)), by_hand) < 1e-6


def fitted_for(model: Any, *, rotated: bool = True) -> Mechanism:
    """A random fitted map of vectors before and after the model's rotary embedding."""
    rotations = layer_rotations(model)
    assert rotations is not None
    call = calls_of(model, IDS)[0]
    shape = (call.query.shape[1], call.key.shape[1], call.key.shape[-1], call.value.shape[-1])
    return with_rotation(with_random_parameters("fitted", len(rotations), *shape), rotations, rotated=rotated)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_features_before_rotation_do_not_see_where_a_text_begins(model_type: str, window: int | None) -> None:
    model = tiny_with(model_type, dtype=torch.float64, **WINDOW.get(model_type, {}))
    moved = 30 + torch.arange(IDS.shape[1])[None]
    for rotated in (False, True):
        mechanism = fitted_for(model, rotated=rotated)
        with swap(model, PAIR, mechanism, window=window):
            change = apart(logits_of(model, IDS, position_ids=moved), logits_of(model, IDS))
        assert (change > 1e-3) if rotated else (change < 1e-6)
        with record(model, [mechanism], logits=False) as recording:
            for position_ids in (moved, moved - 30):
                logits_of(model, IDS, position_ids=position_ids)
        there, here = (run.divergence for run in recording.trajectories())
        assert (difference(there, here) > 1e-3) if rotated else (difference(there, here) < 1e-5)


GENERATED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("llama", {}, {"cache_implementation": "static"}),
    ("llama", {}, {"prefill_chunk_size": 4}),
    ("mistral", {"sliding_window": 5}, {}),
    ("mistral", {"sliding_window": 5}, {"cache_implementation": "static"}),
    ("gemma3_text", {}, {}),
]


@pytest.mark.parametrize(("model_type", "changes", "settings"), GENERATED, ids=str)
def test_a_generation_is_its_text_read(model_type: str, changes: Any, settings: Any) -> None:
    """A left-padded batch with a cache against each text alone without one: swapped, and recorded."""
    model = tiny_with(model_type, **changes)
    mechanism, new = fitted_for(model), 8
    short = row(ids_of(6, seed=3))
    batch = torch.cat([IDS, torch.cat([torch.zeros(1, 7, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :7] = 0
    with swap(model, PAIR, mechanism):
        result = model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        for index, text in enumerate((IDS, short)):
            alone = torch.cat([text, result.sequences[index : index + 1, 13:-1]], dim=1)
            generated = torch.stack(result.logits, dim=1)[index]
            assert apart(generated, logits_of(model, alone)[0, -new:]) < SINGLE
    with record(model, [mechanism, "elu1"], block=3) as recording:
        tokens = model.generate(batch, attention_mask=mask, max_new_tokens=new, **settings)
    for index, run in enumerate(recording.trajectories()):
        ids = tokens[index, 7 * index : -1].tolist()
        read = read_ids(model, [ids], mechanisms=[mechanism, "elu1"])[0]
        assert difference(run.divergence, read.divergence[..., -new:]) < SAME_MODEL


def test_a_batch_to_read_is_its_rows() -> None:
    model = tiny_with("llama")
    mechanism, rows = fitted_for(model), [ids_of(13), ids_of(6, seed=3)]
    for sinks in (0, 2):
        together = read_ids(model, rows, mechanisms=[mechanism], drop_sinks=sinks)
        for ids, run in zip(rows, together, strict=True):
            alone = read_ids(model, [ids], mechanisms=[mechanism], drop_sinks=sinks)[0]
            assert difference(run.divergence, alone.divergence) < SAME_MODEL


def test_dropped_sinks_leave_positions_as_they_were() -> None:
    model = tiny_with("llama", dtype=torch.float64)
    mechanism = fitted_for(model)
    call = calls_of(model, IDS)[0]
    found = read_ids(model, [IDS[0].tolist()], mechanisms=[mechanism], drop_sinks=2)[0].divergence[0]
    tensors = (call.query, call.key, call.value)
    seen = torch.ones(13, 13).tril().bool()
    seen[:, :2] = False
    own, other = (
        attend(m, *tensors, visible=Visible(mask=seen[None, None]), scale=call.scale, dtype=torch.float64).output[0]
        for m in ("softmax", mechanism.for_layers([0]))
    )
    truth = 1 - torch.cosine_similarity(own, other, dim=-1)
    assert difference(found, truth[:, 2:].numpy()) < SAME_MODEL


@pytest.mark.parametrize("window", [None, 4])
def test_a_plan_with_its_cache_is_the_swap(window: int | None) -> None:
    model = tiny_llama().double()
    heads = ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
    chosen = Substitute(fitted_for(model), window=window)
    plan = Plan("tiny", model_fingerprint(model), heads, ((0, 1), (1, 0), (1, 1)), (1,), chosen)
    ids = torch.randint(3, 100, (2, 19), generator=torch.Generator().manual_seed(3))
    moved = 20 + torch.arange(19)[None]
    with torch.no_grad(), swap(model, heads, chosen):
        truth = model(ids, use_cache=False, position_ids=moved).logits
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        steps = [
            model(ids[:, a:b], past_key_values=cache, use_cache=True, position_ids=moved[:, a:b]).logits
            for a, b in itertools.pairwise((0, 9, 10, 11, 16, 19))
        ]
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        padded = written(model, ids, 6, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
        alone = written(model, ids[:1, 5:], 6, past_key_values=applied.cache(), do_sample=False)
    assert apart(torch.cat(steps, dim=1), truth) < 1e-6
    assert torch.equal(padded[0, 5:], alone[0])


def test_states_of_one_length_are_one_state() -> None:
    generator = torch.Generator().manual_seed(2)
    rotations = [Rotation.of_pairs(torch.rand(4, generator=generator), 8) for _ in range(2)]
    mechanism = with_rotation(with_random_parameters("fitted", 2, 4, 2, 8, 5), rotations)
    q, k, v = (
        torch.randn(2, 2, heads, 30, dim, generator=generator, dtype=torch.float64)
        for heads, dim in ((4, 8), (2, 8), (2, 5))
    )
    valid = torch.arange(30)[None] >= torch.tensor([[0], [6]])
    layers = [mechanism.for_layers([i]) for i in range(2)]
    truth = [
        attend(m, q[i], k[i], v[i], visible=Visible(key_valid=valid), dtype=torch.float64).output
        for i, m in enumerate(layers)
    ]
    states = [LinearState(m, dtype=torch.float64) for m in layers]
    found = []
    for part in (slice(0, 4), slice(4, 17), slice(17, 30)):
        whole = LinearState.stacked(states, mechanism.for_layers([0, 1], repeat=2))
        asked, keys, values = (x[:, :, :, part].flatten(0, 1) for x in (q, k, v))
        output = whole.attend(asked, keys, values, valid[:, part].repeat(2, 1)).output
        found.append(output.unflatten(0, (2, 2)))
        whole.split_into(states)
    assert apart(torch.cat(found, dim=3), torch.stack(truth)) < 1e-9


def test_a_hybrid_state_is_the_quadratic_form() -> None:
    generator = torch.Generator().manual_seed(4)
    rotation = Rotation.of_pairs(torch.rand(3, generator=generator), 8, layout="neighbours", start=2)
    mechanism = with_rotation(with_random_parameters("fitted", 1, 4, 2, 8, 5), [rotation])
    shapes = ((2, 4, 30, 8), (2, 2, 30, 8), (2, 2, 30, 5))
    q, k, v = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    origin = torch.tensor([3, 500])
    visible = Visible(key_valid=torch.arange(30)[None] >= torch.tensor([[0], [6]]), origin=origin)
    assert visible.key_valid is not None
    options: dict[str, Any] = {"visible": visible, "dtype": torch.float64}
    hybrid = add_window(mechanism, w=4, sinks=2)
    truth = attend(hybrid, q, k, v, form="quadratic", **options).output
    state = HybridState(hybrid, dtype=torch.float64, origin=origin)
    parts = [
        state.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], visible.key_valid[:, a:b]).output
        for a, b in itertools.pairwise((0, 1, 9, 30))
    ]
    assert apart(torch.cat(parts, dim=2), truth) < 1e-9
    assert apart(attend(hybrid, q, k, v, **options).output, truth) < 1e-9

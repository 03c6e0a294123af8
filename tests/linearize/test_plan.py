"""A plan survives the disk, is for its model only, and its state of constant size computes what the swap does."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap.attention import HybridState, Mechanism, resolve
from softgap.errors import SoftgapError, StoreError
from softgap.intervals import Interval
from softgap.intervene.state_cache import bounded_layers, cache_bytes
from softgap.linearize import Plan, Readout, Substitute, apply, load_plan, swap
from softgap.linearize.plan import memory_of, plan_of
from softgap.models.fingerprint import model_fingerprint
from softgap.probe.layout import attention_layers
from softgap.probe.tap import AttentionCall, replace_attention
from support.linearize_cases import SINGLE, apart, seen_by, with_random_parameters
from support.model_examples import tiny_llama
from support.probe_cases import tiny_with, written

# Layer 0: all of KV head 1, and one query head of KV head 0; layer 1: everything.
HEADS = ((0, 0), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3))
IDS = torch.randint(3, 100, (2, 19), generator=torch.Generator().manual_seed(3))


def plan_for(model: Any, chosen: Substitute, heads: Any = HEADS) -> Plan:
    """Two query heads share each KV head: a group is freed with both, a layer with all."""
    swapped = set(heads)
    groups = [(layer, g) for layer in (0, 1) for g in (0, 1) if {(layer, 2 * g), (layer, 2 * g + 1)} <= swapped]
    layers = tuple(layer for layer in (0, 1) if {(layer, 0), (layer, 1)} <= set(groups))
    return Plan("tiny", model_fingerprint(model), tuple(heads), tuple(groups), layers, chosen)


def substitutes() -> list[Any]:
    fitted = with_random_parameters("fitted", 2, 4, 2, 8, 8)
    generator = torch.Generator().manual_seed(0)
    readout = Readout(torch.randn(2, 4, 8, 8, generator=generator), torch.randn(2, 4, 8, generator=generator))
    return [
        pytest.param(Substitute(resolve("elu1")), id="elu1"),
        pytest.param(Substitute(fitted), id="fitted"),
        pytest.param(Substitute(fitted, window=4), id="hybrid"),
        pytest.param(Substitute(fitted, window=4, readout=readout), id="hybrid, repaired"),
        pytest.param(Substitute(resolve("uniform"), readout=readout), id="uniform, repaired"),
        pytest.param(Substitute(with_random_parameters("constant", 2, 4, 2, 8, 8)), id="mean"),
        pytest.param(Substitute(resolve("zero"), readout=readout), id="zero, repaired"),
    ]


@pytest.mark.parametrize("chosen", substitutes())
def test_the_state_equals_the_quadratic_form(chosen: Substitute) -> None:
    """Prefill, then token by token and in blocks, against one forward of the whole text under the swap."""
    model = tiny_llama().double()
    with torch.no_grad(), swap(model, HEADS, chosen):
        truth = model(IDS, use_cache=False).logits
    with torch.no_grad(), apply(model, plan_for(model, chosen)) as applied:
        cache = applied.cache()
        cuts = (0, 9, 10, 11, 16, 19)
        steps = [model(IDS[:, a:b], past_key_values=cache, use_cache=True).logits for a, b in itertools.pairwise(cuts)]
        assert cache.get_seq_length() == 19
        whole = model(IDS, use_cache=False).logits
    assert apart(torch.cat(steps, dim=1), truth) < 1e-6
    assert apart(whole, truth) < 1e-9
    with torch.no_grad():
        assert apart(model(IDS, use_cache=False).logits, truth) > 1e-3


def test_left_padding_stays_unseen() -> None:
    model = tiny_llama().double()
    chosen = Substitute(with_random_parameters("fitted", 2, 4, 2, 8, 8))
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with torch.no_grad(), apply(model, plan_for(model, chosen)) as applied:
        found = written(model, IDS, 6, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
        alone = written(model, IDS[:1, 5:], 6, past_key_values=applied.cache(), do_sample=False)
        plain = written(model, IDS, 6, attention_mask=mask, do_sample=False)
    assert torch.equal(found[0, 5:], alone[0])
    assert torch.equal(found, plain)


def test_freed_groups_take_no_memory_that_grows() -> None:
    model = tiny_llama(max_position_embeddings=256)
    chosen = Substitute(with_random_parameters("fitted", 2, 4, 2, 8, 8))
    sizes = []
    with torch.no_grad(), apply(model, plan_for(model, chosen)) as applied:
        for length in (50, 100, 200):
            cache = applied.cache()
            model(torch.ones(1, length, dtype=torch.long), past_key_values=cache, use_cache=True)
            sizes.append(cache_bytes(cache))
    # One of four KV heads is kept: 8 keys and 8 values of 4 bytes per token.
    assert sizes[1] - sizes[0] == 50 * 64
    assert sizes[2] - sizes[1] == 100 * 64


@pytest.mark.parametrize("chosen", [x for x in substitutes() if x.id in ("fitted", "hybrid, repaired")])
def test_autocast_leaves_the_state_alone(chosen: Substitute) -> None:
    model = tiny_llama()
    with torch.no_grad(), apply(model, plan_for(model, chosen)) as applied, torch.autocast("cpu", dtype=torch.bfloat16):
        cache = applied.cache()
        for part in IDS.split(1, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    states: Any = cache.layers[1].state
    (state,) = states.by_part.values()
    if isinstance(state, HybridState):
        assert {x.dtype for x in state._window.buffer.slots} == {torch.float32}
        tail: Any = state._tail
        assert tail._carry.sums.dtype == torch.float32
    else:
        assert {x.sums.dtype for x in state._carries.values()} == {torch.float32}


def test_a_cache_outlives_its_plan_only_to_say_so() -> None:
    model = tiny_llama()
    with torch.no_grad(), apply(model, plan_for(model, Substitute(resolve("elu1")))) as applied:
        cache = applied.cache()
        model(IDS, past_key_values=cache, use_cache=True)
    with torch.no_grad(), pytest.raises(SoftgapError, match="belongs to a plan that is not applied any more"):
        model(IDS[:, :1], past_key_values=cache, use_cache=True)


def test_layers_of_constant_size_keep_their_cache() -> None:
    model = tiny_with("phi3")
    heads = [(layer.number, head) for layer in attention_layers(model) for head in range(layer.heads)]
    plan = Plan("tiny", model_fingerprint(model), tuple(heads), (), (), Substitute(resolve("elu1")))
    assert bounded_layers(model) == {layer.number for layer in attention_layers(model)}
    assert memory_of(model, [], plan.substitute)["per_token_original"] == 0
    with torch.no_grad(), apply(model, plan) as applied:
        stated = written(model, IDS, 8, past_key_values=applied.cache(), do_sample=False)
        plain = written(model, IDS, 8, do_sample=False)
    assert torch.equal(stated, plain)


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_plan_foretells_the_bytes_of_its_cache(window: int | None, key_heads: int) -> None:
    model = tiny_llama(max_position_embeddings=256)
    chosen = Substitute(with_random_parameters("fitted", 2, 4, key_heads, 8, 8), window=window)
    plan = plan_for(model, chosen)
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        for part in IDS.repeat(1, 10)[:1].split(120, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    told = memory_of(model, plan.groups, chosen)
    assert told["saved_per_token"] == 3 * 64
    # What is left: a linear state notes which rows have seen a key, a byte for each of them in each layer.
    assert 0 <= cache_bytes(cache) - told["states"] - 190 * told["per_token"] <= 2


WINDOWS = [
    "window:w=5,sinks=2",
    "window:w=6,sinks=0",
    "razor:w=5,sinks=2",
    "elu1+window:w=5,sinks=2,f=0.7",
    "hedgehog+window:w=1,sinks=3",
]
FAR = ["window:w=5,sinks=2,far=3", "elu1+window:w=4,sinks=1,f=0.7,far=4"]


def masked_softmax(call: AttentionCall, recent: int, sinks: int) -> torch.Tensor:
    """Softmax with a mask over sinks and recent keys, with a model's own softcap and learned sinks, in float64."""
    q, k, v = (x.double() for x in (call.query, call.key, call.value))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    seen = seen_by(call.mask, q, k)
    order = seen[:, :, -1:].long().cumsum(dim=-1)  # the last query sees every key that is no padding
    distance = torch.arange(k.shape[2] - q.shape[2], k.shape[2])[:, None] - torch.arange(k.shape[2])
    scores = q @ k.transpose(-1, -2) * call.scale
    softcap, logits = call.options.get("softcap"), call.options.get("s_aux")
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~(seen & ((distance < recent) | (order <= sinks))), -torch.inf)
    if logits is not None:
        learned = logits.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, learned], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[2]].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2).to(call.output.dtype)


def every_full_layer(model: Any) -> list[tuple[int, int]]:
    bounded = bounded_layers(model)
    return [(x.number, head) for x in attention_layers(model) if x.number not in bounded for head in range(x.heads)]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["window:w=5,sinks=2", "window:w=6,sinks=0", "window:w=40,sinks=4"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_a_window_in_a_cache_is_the_masked_softmax(model_type: str, name: str, padding: int) -> None:
    """Also with a softcap (gemma2) and learned sinks (gpt_oss), and with a padded text beside another."""
    model = tiny_with(model_type, attn="eager")
    heads = every_full_layer(model)
    layers = {id(x.module) for x in attention_layers(model) if (x.number, 0) in heads}
    window = resolve(name)
    plan = Plan("tiny", model_fingerprint(model), tuple(heads), (), (), Substitute(window))
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0

    def masked(call: AttentionCall) -> torch.Tensor:
        if id(call.module) not in layers:
            return call.output
        return masked_softmax(call, int(window.options["w"]), int(window.options["sinks"]))

    with torch.no_grad(), replace_attention(model, masked):
        truth = model(IDS, attention_mask=mask, use_cache=False).logits
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        steps = [
            model(IDS[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True).logits
            for a, b in itertools.pairwise((0, 9, 10, 11, 16, 19))
        ]
        stated = written(model, IDS, 8, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
        plain = written(model, IDS, 8, attention_mask=mask, do_sample=False)
    assert heads
    counted = mask.bool()
    assert apart(torch.cat(steps, dim=1)[counted], truth[counted]) < SINGLE
    with torch.no_grad():
        different = apart(model(IDS, attention_mask=mask, use_cache=False).logits[counted], truth[counted])
    assert different < SINGLE if "w=40" in name else different > 100 * SINGLE
    assert torch.equal(stated, plain)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_windows_and_hybrids_stream_in_a_cache(model_type: str, name: str, padding: int) -> None:
    model = tiny_with(model_type, attn="eager")
    heads = every_full_layer(model)
    chosen = Substitute(resolve(name))
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    with torch.no_grad(), swap(model, heads, chosen):
        truth = model(IDS, attention_mask=mask, use_cache=False).logits
        swapped = written(model, IDS, 8, attention_mask=mask, do_sample=False)
    plan = Plan("tiny", model_fingerprint(model), tuple(heads), (), (), chosen)
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        steps = [
            model(IDS[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True).logits
            for a, b in itertools.pairwise((0, 9, 10, 11, 16, 19))
        ]
        stated = written(model, IDS, 8, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
    counted = mask.bool()
    assert apart(torch.cat(steps, dim=1)[counted], truth[counted]) < SINGLE
    assert torch.equal(stated, swapped)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", FAR)
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_far_keys_stream_in_a_cache(model_type: str, name: str, padding: int) -> None:
    """A swap knows only the newest query of a generation and refuses; a plan's cache remembers the choice."""
    model = tiny_with(model_type, attn="eager")
    heads = every_full_layer(model)
    chosen = Substitute(resolve(name))
    mask = torch.ones_like(IDS)
    mask[0, :padding] = 0
    plan = Plan("tiny", model_fingerprint(model), tuple(heads), (), (), chosen)
    with torch.no_grad(), apply(model, plan) as applied:
        truth = model(IDS, attention_mask=mask, use_cache=False).logits
        cache = applied.cache()
        steps = [
            model(IDS[:, a:b], attention_mask=mask[:, :b], past_key_values=cache, use_cache=True).logits
            for a, b in itertools.pairwise((0, 9, 10, 11, 16, 19))
        ]
        stated = written(model, IDS, 4, attention_mask=mask, past_key_values=applied.cache(), do_sample=False)
        with pytest.raises(SoftgapError, match="without the earlier ones; use its state, or generate with the cache"):
            written(model, IDS, 4, attention_mask=mask, do_sample=False)
    counted = mask.bool()
    assert apart(torch.cat(steps, dim=1)[counted], truth[counted]) < SINGLE
    assert torch.equal(stated[:, -4], truth[:, -1].argmax(dim=-1))


@pytest.mark.parametrize("name", [*WINDOWS, *FAR])
def test_windows_take_the_bytes_that_are_foretold(name: str) -> None:
    model = tiny_llama(max_position_embeddings=256)
    # A head that is swapped alone has no state that could choose far keys.
    heads = HEADS if name in WINDOWS else [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    plan = plan_for(model, Substitute(resolve(name)), heads)
    with torch.no_grad(), apply(model, plan) as applied:
        cache = applied.cache()
        for part in IDS.repeat(1, 4)[:1].split(20, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    states = sum(layer.state.nbytes for layer in cache.layers)
    assert states == memory_of(model, plan.groups, plan.substitute)["states"]


@pytest.mark.parametrize("name", [*WINDOWS, *FAR])
def test_plans_of_windows_survive_the_disk(name: str, tmp_path: Path) -> None:
    model = tiny_llama()
    plan = plan_for(model, Substitute(resolve(name)))
    again = load_plan(plan.save(tmp_path / "plan.json"))
    assert again.substitute.name == plan.substitute.name
    both = []
    for each in (plan, again):
        with torch.no_grad(), apply(model, each):
            both.append(model(IDS, use_cache=False).logits)
    assert torch.equal(*both)


@pytest.mark.parametrize("model_type", ["gpt2", "olmo2", "gpt_neox", "gemma3_text"])
def test_other_families_generate_under_a_plan(model_type: str) -> None:
    model = tiny_with(model_type)
    heads = [(layer.number, head) for layer in attention_layers(model) for head in range(layer.heads)][:-1]
    plan = Plan("tiny", model_fingerprint(model), tuple(heads), (), (), Substitute(resolve("elu1")))
    with torch.no_grad(), apply(model, plan) as applied:
        stated = written(model, IDS, 8, past_key_values=applied.cache(), do_sample=False)
        plain = written(model, IDS, 8, do_sample=False)
    assert torch.equal(stated, plain)


def test_a_search_goes_on_only_with_the_same_numbers() -> None:
    """What is kept of a search lies under a hash of these."""
    digests = [x.values[0].digest for x in substitutes()]
    assert digests[0] == ""
    assert digests[1] == digests[2] != digests[3]  # a window is no number, a readout is
    assert len({digests[3], *digests[4:6]}) == 3


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    model = tiny_llama()
    fitted = with_random_parameters("fitted", 2, 4, 2, 8, 8)
    chosen = Substitute(fitted, window=4, readout=Readout.identity(2, 4, 8))
    plan = Plan(
        "tiny", model_fingerprint(model), HEADS, ((0, 1), (1, 0), (1, 1)), (1,), chosen,
        original={"loss": 5.0}, expected={"loss": Interval(0.1, 0.05, 0.2)}, memory={"per_token": 256.0},
        provenance={"seed": 3},
    )  # fmt: skip
    again = load_plan(plan.save(tmp_path / "plan.json"))
    assert (again.heads, again.groups, again.layers, again.expected) == (HEADS, plan.groups, (1,), plan.expected)
    assert again.substitute.window == 4
    with torch.no_grad(), swap(model, HEADS, chosen):
        truth = model(IDS, use_cache=False).logits
    with torch.no_grad(), apply(model, again):
        assert torch.equal(model(IDS, use_cache=False).logits, truth)
    assert json.loads((tmp_path / "plan.json").read_text())["mechanism"]["name"] == "fitted+window"


def test_bad_plans_are_refused_in_one_sentence(tmp_path: Path) -> None:
    model = tiny_llama()
    fitted = with_random_parameters("fitted", 2, 4, 2, 8, 8)
    plan = plan_for(model, Substitute(fitted))
    with pytest.raises(SoftgapError, match="the plan is for the model"), apply(tiny_llama(seed=1), plan):
        pass
    with (
        pytest.raises(SoftgapError, match="heads of layer 1 are 0 to 3"),
        apply(model, plan_for(model, Substitute(fitted), heads=[(1, 7)])),
    ):
        pass
    path = plan.save(tmp_path / "plan.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(SoftgapError, match="is no plan of softgap"):
        load_plan(tmp_path / "no.json")
    with pytest.raises(SoftgapError, match="cannot read the plan"):
        load_plan(tmp_path / "nowhere.json")
    plan_for(model, Substitute(with_random_parameters("constant", 2, 4, 2, 8, 8))).save(tmp_path / "other.json")
    (tmp_path / "other.safetensors").replace(tmp_path / "plan.safetensors")
    with pytest.raises(SoftgapError, match="are not those of the plan"):
        load_plan(path)


def test_a_recording_under_a_plan_measures_what_the_model_passes_on() -> None:
    model = tiny_llama()
    chosen = Substitute(with_random_parameters("fitted", 2, 4, 2, 8, 8))
    runs = []
    for under in (apply(model, plan_for(model, chosen)), swap(model, HEADS, chosen)):
        with under, softgap.record(model, [chosen.mechanism, "elu1"]) as recording:
            written(model, IDS[:1], 5)
        runs.append(recording.trajectories()[0])
    by_plan, by_swap = runs
    assert by_plan.divergence.shape == (2, 4, 5)
    assert np.array_equal(by_plan.select("elu1").divergence, by_swap.select("elu1").divergence)
    # A swapped head is at no distance from its own mechanism, and the one that keeps softmax is.
    swapped = np.zeros((2, 4), dtype=bool)
    swapped[tuple(np.array(HEADS).T)] = True
    assert float(by_plan.divergence[swapped].max()) < 1e-6
    assert float(by_plan.divergence[~swapped].min()) > 0.01


@pytest.mark.parametrize("heads", [HEADS, [(1, 0), (1, 1)]], ids=["all layers", "one layer"])
def test_a_recording_is_refused_where_a_state_answers(heads: Any) -> None:
    model = tiny_llama()
    plan = plan_for(model, Substitute(resolve("elu1")), heads=heads)
    refused = pytest.raises(SoftgapError, match="a recording cannot see layers that a plan's cache computes")
    with apply(model, plan) as applied:
        with softgap.record(model), refused:
            written(model, IDS[:1], 3, past_key_values=applied.cache())
        with (
            swap(model, [(0, 1)], "zero"),
            pytest.raises(SoftgapError, match="heads cannot be swapped a second time in layers that a plan's cache"),
        ):
            written(model, IDS[:1], 3, past_key_values=applied.cache())
        # Afterwards everything is as before: the plan generates, and a recording without its cache is whole.
        assert torch.equal(
            written(model, IDS[:1], 3, past_key_values=applied.cache(), do_sample=False),
            written(model, IDS[:1], 3, do_sample=False),
        )
        with softgap.record(model) as recording:
            written(model, IDS[:1], 3)
    assert recording.trajectories()[0].divergence.shape == (2, 4, 3)


def test_a_plan_that_frees_no_group_is_recorded_with_its_cache() -> None:
    model = tiny_llama()
    plan = plan_for(model, Substitute(resolve("elu1")), heads=[(0, 0), (1, 3)])
    with apply(model, plan) as applied, softgap.record(model, ["elu1"]) as recording:
        written(model, IDS[:1], 4, past_key_values=applied.cache())
    divergence = recording.trajectories()[0].divergence
    assert float(max(divergence[0, 0].max(), divergence[1, 3].max())) < 1e-6
    assert float(divergence[1, 0].min()) > 1e-4


def test_what_cannot_stream_says_so() -> None:
    model = tiny_llama()
    top: Mechanism = resolve("top_k:k=3")
    with apply(model, plan_for(model, Substitute(top))) as applied:
        assert written(model, IDS, 3).shape == (2, 22)
        with pytest.raises(SoftgapError, match="mechanism 'top_k' has no state of constant size and cannot stream"):
            applied.cache()
    with (
        apply(model, plan_for(model, Substitute(resolve("elu1")))) as applied,
        pytest.raises(SoftgapError, match="cannot follow beam search"),
    ):
        written(model, IDS, 3, past_key_values=applied.cache(), num_beams=2)
    sinks = tiny_with("gpt_oss", attn="eager")  # one learned number per head, which its attention wants all of
    plan = Plan("tiny", model_fingerprint(sinks), ((1, 0), (1, 1)), (), (), Substitute(resolve("elu1")))
    with (
        apply(sinks, plan) as applied,
        pytest.raises(SoftgapError, match=r"cannot be computed for 2 of its 4 heads alone .*; free whole layers"),
    ):
        written(sinks, IDS, 3, past_key_values=applied.cache())


def test_an_interval_on_disk_has_the_keys_it_always_had() -> None:
    found = Interval(0.1, 0.05, 0.2)
    assert found.to_json() == {"value": 0.1, "low": 0.05, "high": 0.2}
    assert Interval(**found.to_json()) == found


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("groups", ((1, 0), (1, 1)), "read group 1 of layer 1; make the plan again"),
        ("layers", (1,), "keeps softmax in some of layer 1; make the plan again"),
    ],
)
def test_a_plan_that_frees_keys_which_are_still_read_is_refused(name: str, value: Any, sentence: str) -> None:
    model = tiny_llama()  # two layers, each with four query heads on two KV groups
    sound = plan_of(model, [(1, 0), (1, 1), (1, 2)], Substitute(resolve("elu1")))
    sound.check(model)
    assert sound.groups == ((1, 0),)
    with pytest.raises(StoreError, match=sentence):
        replace(sound, **{name: value}).check(model)


def test_a_plan_that_frees_a_group_which_the_model_has_not_is_refused() -> None:
    model = tiny_llama()
    sound = plan_of(model, [(1, 2), (1, 3)], Substitute(resolve("elu1")))
    assert sound.groups == ((1, 1),)
    with pytest.raises(StoreError, match=r"frees group 2 of layer 1, which has 2; make the plan again"):
        replace(sound, groups=((1, 1), (1, 2))).check(model)
    with pytest.raises(StoreError, match=r"frees group 0 of layer 9, which has 0; make the plan again"):
        replace(sound, groups=((9, 0),)).check(model)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "dim"), [(1, 4, 2, 8), (2, 3, 2, 8), (2, 4, 1, 8), (2, 4, 2, 4)]
)
def test_a_plan_with_numbers_of_another_shape_is_refused(layers: int, heads: int, kv_heads: int, dim: int) -> None:
    model = tiny_llama()
    plan = plan_for(model, Substitute(with_random_parameters("fitted", 2, 4, 2, 8, 8)))
    plan.check(model)
    other = Substitute(with_random_parameters("fitted", layers, heads, kv_heads, dim, 8))
    with pytest.raises(StoreError, match=r"^the plan does not fit the model: its tensor 'mechanism\..*; make the plan"):
        replace(plan, substitute=other).check(model)
    readout = Readout.identity(layers, heads, dim)
    if (layers, heads) != (2, 4):
        other = plan.substitute.with_readout(readout)
        with pytest.raises(StoreError, match=r"^the plan does not fit the model: its tensor 'readout\..*; make the"):
            replace(plan, substitute=other).check(model)


DOCUMENT_EDITS: dict[str, tuple[str, Any]] = {
    "a head twice": ("heads", [[0, 0], [0, 0]]),
    "no head": ("heads", []),
    "a group of no swapped head": ("groups", [[0, 99]]),
    "a group of another layer": ("groups", [[7, 0]]),
    "a group twice": ("groups", [[1, 0], [1, 0]]),
    "more groups than heads": ("groups", [[0, 0], [0, 1], [0, 2], [0, 3]]),
    "a group without its heads": ("groups", [[0, 1], [1, 3], [1, 0]]),
    "a whole layer with a group left": ("groups", [[1, 1]]),
    "a layer that is not swapped": ("layers", [9]),
    "a layer with heads left": ("layers", [0]),
    "a cost that is no number": ("original", {"loss": float("nan")}),
    "an infinite cost": ("expected", {"loss": {"value": float("inf"), "low": 0.0, "high": 1.0}}),
    "an interval the wrong way round": ("expected", {"loss": {"value": 0.5, "low": 1.0, "high": 0.0}}),
    "memory below zero": ("memory", {"per_token": -1.0}),
    "recall that is no number": ("recall", {"lists": float("nan")}),
    "a window of nothing": ("mechanism", {"name": "elu1", "options": {}, "calibration": "", "window": 0}),
    "a window beyond all": ("mechanism", {"name": "elu1", "options": {}, "calibration": "", "window": 10**30}),
}


@pytest.mark.parametrize("case", DOCUMENT_EDITS)
def test_a_plan_out_of_range_is_refused_when_it_is_loaded(tmp_path: Path, case: str) -> None:
    path = plan_for(tiny_llama(), Substitute(resolve("elu1"))).save(tmp_path / "plan.json")
    assert load_plan(path).heads == HEADS
    name, value = DOCUMENT_EDITS[case]
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(SoftgapError, match=r"is no plan of softgap \(.*\); make one with 'softgap linearize'$"):
        load_plan(path)

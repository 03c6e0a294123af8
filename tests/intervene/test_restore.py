"""A swap leaves nothing behind, shows in recordings, keeps to its model, and says what is wrong with its input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from softgap.errors import ModelError, ShapeError, SoftgapError, UnknownNameError, UnsupportedError, ValueInputError
from softgap.linearize import heads_of_group, heads_of_layer, swap
from softgap.probe import record, tap
from softgap.probe.layout import attention_layers
from support.linearize_cases import SINGLE, apart, logits_of, with_random_parameters
from support.probe_cases import ids_of, only, prompt_of, row, tiny_with, traces, written

IDS = row(ids_of(11))
HEADS = [(0, 1), (1, 2)]


@pytest.fixture
def model() -> Iterator[Any]:
    subject = tiny_with("llama")
    before, plain = traces(subject), logits_of(subject, IDS)
    yield subject
    assert traces(subject) == before
    assert tap._taps == {}
    assert torch.equal(logits_of(subject, IDS), plain)


def broken(*_: Any) -> None:
    raise RuntimeError("mine")


def test_a_swap_leaves_nothing(model: Any) -> None:
    with swap(model, HEADS, "elu1"):
        written(model, IDS, 3)
        assert tap.overridden_names() == ("sdpa",)


def test_an_exception_in_the_block_leaves_nothing(model: Any) -> None:
    with pytest.raises(RuntimeError, match="mine"), swap(model, HEADS, "elu1"), swap(model, [(0, 0)], "uniform"):
        broken()


def test_an_exception_in_the_model_leaves_nothing(model: Any) -> None:
    with swap(model, HEADS, "elu1"):
        before = logits_of(model, IDS)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="mine"):
            logits_of(model, IDS)
        hook.remove()
        assert torch.equal(logits_of(model, IDS), before)


def test_an_exception_in_the_mechanism_leaves_nothing(model: Any) -> None:
    kept, model.config.max_position_embeddings = model.config.max_position_embeddings, 4
    with swap(model, HEADS, "cosformer"), pytest.raises(ValueInputError, match="positions below its context M = 4"):
        logits_of(model, IDS)
    model.config.max_position_embeddings = kept


def test_refused_input_leaves_nothing(model: Any) -> None:
    with pytest.raises(ValueInputError), swap(model, [(7, 0)], "elu1"):
        raise AssertionError("never reached")


def test_blocks_that_end_in_the_order_they_began(model: Any) -> None:
    first, second = swap(model, [(0, 1)], "zero"), swap(model, [(0, 2)], "uniform")
    with swap(model, [(0, 2)], "uniform"):
        alone = logits_of(model, IDS)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(logits_of(model, IDS), alone)
    second.__exit__(None, None, None)


def test_an_override_of_the_user_is_used_and_put_back() -> None:
    calls = []
    shared = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return shared(*args, **kwargs)

    model = tiny_with("llama")
    attention_layers(model)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = mine
    try:
        with swap(model, HEADS, "elu1"):
            logits_of(model, IDS)
        assert len(calls) == 2
        assert ALL_ATTENTION_FUNCTIONS._local_mapping["sdpa"] is mine
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
def test_a_recording_measures_the_swapped_model(around: bool, settings: dict[str, Any]) -> None:
    model = tiny_with("llama")
    swapping, recording = swap(model, HEADS, "elu1"), record(model, ["elu1", "uniform"])
    if around:
        with recording as found, swapping:
            written(model, IDS, 6, **settings)
    else:
        with swapping, recording as found:
            written(model, IDS, 6, **settings)
    run = only(found.trajectories())
    for part in (run, prompt_of(run)):
        for layer in range(2):
            for head in range(4):
                distance = part.relative_l2[layer, head]
                assert (distance.max() < 1e-5) == ((layer, head) in HEADS)
    assert run.n_steps == 6


def test_a_recording_does_not_notice_how_heads_are_found(model: Any) -> None:
    state = torch.get_rng_state()
    seen: list[object] = []
    hook = model.register_forward_hook(lambda *args: seen.append(args))
    with record(model, ["elu1"]) as recording:
        hooked = model.model.layers[1].mlp.register_forward_pre_hook(broken)
        with pytest.raises(RuntimeError, match="mine"):
            logits_of(model, IDS)
        hooked.remove()
        assert heads_of_layer(model, 0) == [(0, h) for h in range(4)]
        with swap(model, HEADS, "elu1", positions=(3, 5)), swap(model, [(1, 0)], "zero"):
            logits_of(model, IDS)
    hook.remove()
    assert only(recording.trajectories()[-1:]).n_steps == 11
    assert [run.n_steps for run in recording.trajectories()] == [11]
    assert len(seen) == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_finding_heads_leaves_random_numbers_as_they_were_in_training() -> None:
    model = tiny_with("gpt2")
    model.train()
    state = torch.get_rng_state()
    assert len(attention_layers(model)) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_another_model_is_not_swapped(model: Any) -> None:
    other = tiny_with("llama")
    plain = logits_of(other, IDS)
    with swap(model, HEADS, "zero"):
        assert torch.equal(logits_of(other, IDS), plain)
        assert apart(logits_of(model, IDS), plain) > 1e-3


def test_two_models_in_two_threads_do_not_mix() -> None:
    subjects = [(tiny_with("llama"), "elu1"), (tiny_with("qwen2"), "zero"), (tiny_with("gpt2"), "uniform")]
    before = [traces(model) for model, _ in subjects]
    alone = []
    for model, name in subjects:
        with swap(model, HEADS, name):
            alone.append((written(model, IDS, 20), logits_of(model, IDS)))
    together: dict[int, list[Any]] = {}
    start = threading.Barrier(len(subjects))

    def work(index: int) -> None:
        model, name = subjects[index]
        start.wait()
        found = []
        for _ in range(3):
            with swap(model, HEADS, name):
                found.append((written(model, IDS, 20), logits_of(model, IDS)))
        together[index] = found

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(subjects))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, (tokens, logits) in enumerate(alone):
        assert len(together[index]) == 3
        for other_tokens, other_logits in together[index]:
            assert torch.equal(other_tokens, tokens)
            assert torch.equal(other_logits, logits)
    assert [traces(model) for model, _ in subjects] == before


def test_layers_are_found_anew_when_modules_are_exchanged(model: Any) -> None:
    first = attention_layers(model)
    assert attention_layers(model) is first
    exchanged = model.model.layers[0].self_attn
    model.model.layers[0].self_attn = type(exchanged)(model.config, 0).eval()
    assert attention_layers(model) is not first
    with swap(model, heads_of_layer(model, 0), "zero"):
        assert torch.isfinite(logits_of(model, IDS)).all()
    model.model.layers[0].self_attn = exchanged


def test_cross_attention_that_is_never_called_is_no_layer() -> None:
    assert [layer.number for layer in attention_layers(tiny_with("bart"))] == [0, 1]


def refusals() -> list[Any]:
    fitted = with_random_parameters("fitted", 3, 4, 2, 16, 16)
    means = with_random_parameters("constant", 2, 3, 2, 16, 16)
    return [
        (
            [],
            "elu1",
            {},
            ValueInputError,
            "heads must name at least one .* pair, got none; heads_of_layer lists",
        ),
        ([(2, 0)], "elu1", {}, ValueInputError, "attention layers of this model are 0 to 1, got 2$"),
        ([(-1, 0)], "elu1", {}, ValueInputError, "attention layers of this model are 0 to 1, got -1$"),
        ([(1, 4)], "elu1", {}, ValueInputError, r"heads of layer 1 are 0 to 3, got \(1, 4\)$"),
        ([(1, -1)], "elu1", {}, ValueInputError, r"heads of layer 1 are 0 to 3, got \(1, -1\)$"),
        ([(0, 1), (1, 1), (0, 1)], "elu1", {}, ValueInputError, r"each head may be named once, got \(0, 1\) twice"),
        ([3], "elu1", {}, ValueInputError, r"a head is a \(layer, head\) pair of whole numbers, got 3$"),
        ([(0, 1, 2)], "elu1", {}, ValueInputError, r"whole numbers, got \(0, 1, 2\)$"),
        ([(0, 1.5)], "elu1", {}, ValueInputError, r"whole numbers, got \(0, 1.5\)$"),
        ([(0, 1)], "unifrom", {}, UnknownNameError, r"unknown mechanism 'unifrom'; did you mean 'uniform'\?"),
        (
            [(0, 1)],
            "fitted",
            {},
            UnsupportedError,
            "'fitted' needs the parameters query_weight, .*there is no calibration",
        ),
        (
            [(0, 1)],
            fitted,
            {},
            ShapeError,
            "parameter 'query_weight' of mechanism 'fitted' must be for 2 layers and, in layer 0, 4 heads or 2 KV "
            r"heads \(or 1 for all\), got 3 and 4; use parameters made for this model",
        ),
        ([(0, 1)], means, {}, ShapeError, "parameter 'mean' .* got 2 and 3; use parameters"),
        ([(0, 1)], "elu1", {"positions": (4, 4)}, ValueInputError, r"positions must run .* got \(4, 4\)"),
        ([(0, 1)], "elu1", {"positions": range(0, 9, 2)}, ValueInputError, r"steps of 1, got range\(0, 9, 2\)"),
        ([(0, 1)], "elu1", {"positions": (-1, 4)}, ValueInputError, r"positions must run .* got \(-1, 4\)"),
        (
            [(0, 1)],
            "elu1",
            {"positions": 4},
            ValueInputError,
            r"must be range\(start, stop\) or .*, got 4$",
        ),
    ]


@pytest.mark.parametrize(("heads", "mechanism", "settings", "error", "text"), refusals())
def test_bad_input_is_one_sentence(
    model: Any, heads: Any, mechanism: Any, settings: dict[str, Any], error: type[SoftgapError], text: str
) -> None:
    with pytest.raises(error, match=text), swap(model, heads, mechanism, **settings):
        raise AssertionError("never reached")


def test_layers_with_numbers_of_their_own_are_listed() -> None:
    with pytest.raises(ValueInputError, match="attention layers of this model are 1, 3, got 0"):
        heads_of_layer(tiny_with("qwen3_next"), 0)


def test_groups_that_do_not_exist(model: Any) -> None:
    with pytest.raises(ValueInputError, match=r"KV groups of layer 1 are 0 to 1, got 2$"):
        heads_of_group(model, 1, 2)
    with pytest.raises(ValueInputError, match=r"KV groups of layer 0 are 0 only, got 1$"):
        heads_of_group(tiny_with("llama", num_key_value_heads=1), 0, 1)


def test_models_that_cannot_be_tapped() -> None:
    refused = tiny_with("bloom", attn="eager")
    with pytest.raises(ModelError, match="'bloom' computes attention in code of its own"), swap(refused, HEADS, "elu1"):
        raise AssertionError("never reached")
    wrapped = nn.Sequential(tiny_with("llama"))
    with pytest.raises(ModelError, match="must be a transformers PreTrainedModel, got Sequential"):
        heads_of_layer(wrapped, 0)


@pytest.mark.parametrize("model_type", ["diffllama", "hrm_text"])
def test_modules_that_serve_several_layers(model_type: str) -> None:
    model = tiny_with(model_type)
    with pytest.raises(UnsupportedError, match=r"layer 0 shares its module '.*Attention' with another attention call"):
        heads_of_layer(model, 0)


def test_positions_need_a_forward_of_the_whole_model(model: Any) -> None:
    with swap(model, HEADS, "elu1", positions=(0, 4)):
        with pytest.raises(ModelError, match="positions are known in forwards of the whole model only"):
            model.model(IDS)
        logits_of(model, IDS)


def test_a_model_changed_inside_the_block(model: Any) -> None:
    layer: Any = model.model.layers[1].self_attn
    kept = layer.q_proj, layer.num_key_value_groups, layer.o_proj
    with swap(model, HEADS, "elu1"):
        layer.q_proj, layer.num_key_value_groups = nn.Linear(64, 32, bias=False), 1
        layer.o_proj = nn.Linear(32, 64, bias=False)
        with pytest.raises(ModelError, match="layer 1 had 4 heads when the swap began and has 2 now"):
            logits_of(model, IDS)
        layer.q_proj, layer.num_key_value_groups, layer.o_proj = kept
        assert apart(logits_of(model, IDS), logits_of(model, IDS)) < SINGLE

"""Whatever code calls the model inside a recording: generations, bare forwards, decode loops, conversations."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from softgap.attention import Visible
from softgap.errors import ModelError, NonFiniteWarning, UnsupportedError, ValueInputError
from softgap.probe import Step, generate, read, read_ids, record
from softgap.probe.meter import Meter
from softgap.probe.tap import AttentionCall, overridden_names
from softgap.trajectories import Trajectories
from support.model_examples import byte_tokenizer, overflowing_llama, tiny_llama
from support.probe_cases import (
    MEASURED,
    PAIR,
    SAME_MODEL,
    SAME_TENSORS,
    Expected,
    apart,
    difference,
    expected,
    expected_of,
    gap,
    ids_of,
    only,
    prompt_of,
    row,
    spied,
    tiny_with,
    written,
)

IDS = ids_of(11)


def check(run: Trajectories, truth: Expected, first: int, tokens: list[int]) -> None:
    """The run's queries stand from ``first`` on and predict these tokens; -1 for one that is not known."""
    steps = slice(first, first + len(tokens))
    assert run.positions.tolist() == list(range(first, first + len(tokens)))
    assert run.token_ids.tolist() == tokens
    assert gap(run, truth, steps) < SAME_MODEL
    known = [i for i, token in enumerate(tokens) if token >= 0]
    logprob = np.array([truth.logprob([tokens[i]], first=first + i)[0] for i in known])
    assert difference(run.logprob[known], logprob) < SAME_MODEL
    assert bool(np.isnan(np.delete(run.logprob, known)).all())
    assert difference(run.entropy, truth.entropy[steps]) < SAME_MODEL


def test_generations_one_after_the_other_are_runs_in_order() -> None:
    model = tiny_with("llama")
    with record(model, MEASURED) as recording:
        first = written(model, IDS, 5)[0].tolist()
        second = written(model, torch.tensor([IDS[:4], IDS[4:8]]), 7).tolist()
        third = written(model, IDS, 5)[0].tolist()
    runs = recording.trajectories()
    assert [run.n_steps for run in runs] == [5, 7, 7, 5]
    assert [run.sample_id for run in runs] == ["0", "1", "2", "3"]
    assert first == third
    assert apart(runs[0], runs[3]) == 0
    for run, tokens, n_prompt in zip(runs, [first, *second, third], [11, 4, 4, 11], strict=True):
        check(run, expected(model, tokens[:-1]), n_prompt - 1, tokens[n_prompt:])


def test_a_recording_can_be_read_while_it_goes_on() -> None:
    model = tiny_with("llama")
    tokens = ids_of(9, seed=4)
    truth = expected(model, tokens)
    with torch.no_grad(), record(model, MEASURED) as recording:
        cache = model(row(tokens[:5])).past_key_values
        check(only(recording.trajectories()), truth, 0, [*tokens[1:5], -1])
        for token in tokens[5:]:
            cache = model(row([token]), past_key_values=cache).past_key_values
            recording.trajectories()
    check(only(recording.trajectories()), truth, 0, [*tokens[1:], -1])
    assert recording.trajectories()[0].equals(recording.trajectories()[0])


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("positional", [True, False])
def test_a_bare_forward_is_a_text_read(use_cache: bool, positional: bool) -> None:
    model = tiny_with("llama")
    mask = torch.ones(1, 11, dtype=torch.long)
    with record(model, MEASURED) as recording:
        if positional:
            model(row(IDS), mask, use_cache=use_cache)
        else:
            model(input_ids=row(IDS), attention_mask=mask, use_cache=use_cache)
    check(only(recording.trajectories()), expected(model, IDS), 0, [*IDS[1:], -1])


def test_forwards_without_cache_are_runs_of_their_own() -> None:
    model = tiny_with("llama")
    with torch.no_grad(), record(model, MEASURED) as recording:
        for length in (3, 4, 5):
            model(row(IDS[:length]), use_cache=False)
    for run, length in zip(recording.trajectories(), (3, 4, 5), strict=True):
        check(run, expected(model, IDS[:length]), 0, [*IDS[1:length], -1])


@pytest.mark.parametrize("block", [1, 4, 32])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_decode_loop_is_one_run(model_type: str, block: int) -> None:
    model = tiny_with(model_type)
    tokens = list(IDS)
    with torch.no_grad(), record(model, MEASURED, block=block) as recording:
        output = model(row(IDS))
        for _ in range(14):
            logits = output.logits[:, -1]
            # In place, as loops do: what was recorded must not change with it.
            logits.div_(0.5)[:, 7] = -torch.inf
            tokens.append(int(logits.argmax()))
            output = model(row(tokens)[:, -1:], past_key_values=output.past_key_values)
    check(only(recording.trajectories()), expected(model, tokens), 0, [*tokens[1:], -1])


def test_several_tokens_at_a_time_continue_a_run() -> None:
    model = tiny_with("llama")
    tokens = ids_of(40, seed=4)
    cache = None
    with torch.no_grad(), record(model, MEASURED, block=6) as recording:
        for start, stop in itertools.pairwise([0, 3, 4, 20, 29, 30, 40]):
            cache = model(row(tokens[start:stop]), past_key_values=cache).past_key_values
    check(only(recording.trajectories()), expected(model, tokens), 0, [*tokens[1:], -1])


@pytest.mark.parametrize("block", [1, 3, 32])
@pytest.mark.parametrize("four_axes", [False, True])
def test_tokens_that_are_hidden_later_count_no_more(block: int, four_axes: bool) -> None:
    # An evicting loop: from position 14 on, the tokens at 3, 4 and 5 are seen by nobody.
    model = tiny_with("llama")
    tokens = ids_of(22, seed=4)
    with torch.no_grad(), spied(model) as layers, record(model, [*PAIR, "top_k:k=4"], block=block) as recording:
        cache = model(row(tokens[:11])).past_key_values
        for at in range(11, 22):
            mask = torch.ones(1, at + 1, dtype=torch.long)
            mask[:, 3:6] = at < 14
            given = mask[:, None, None].bool() if four_axes else mask
            model(row([tokens[at]]), attention_mask=given, position_ids=row([at]), past_key_values=cache)
    run = only(recording.trajectories())
    truth = expected_of(layers, model.config, [*PAIR, "top_k:k=4"], hides=lambda p, j: (p >= 14) & (j >= 3) & (j < 6))
    assert run.positions.tolist() == list(range(22))
    assert gap(run, truth, slice(None)) < SAME_TENSORS


def test_a_cropped_cache_begins_a_new_run() -> None:
    model = tiny_with("llama")
    with torch.no_grad(), record(model, MEASURED) as recording:
        cache = model(row(IDS)).past_key_values
        cache.crop(-4)
        model(row([5, 6, 8]), past_key_values=cache)
    first, second = recording.trajectories()
    check(first, expected(model, IDS), 0, [*IDS[1:], -1])
    check(second, expected(model, [*IDS[:7], 5, 6, 8]), 7, [6, 8, -1])


def test_a_reordered_cache_begins_a_new_run() -> None:
    model = tiny_with("llama")
    one, other = ids_of(9, seed=1), ids_of(9, seed=2)
    with torch.no_grad(), record(model, MEASURED) as recording:
        cache = model(torch.cat([row(one[:7]), row(other[:7])])).past_key_values
        cache.reorder_cache(torch.tensor([1, 0]))
        for at in (7, 8):
            model(torch.tensor([[other[at]], [one[at]]]), past_key_values=cache)
    runs = recording.trajectories()
    assert [run.positions.tolist() for run in runs] == [list(range(7))] * 2 + [[7, 8]] * 2
    for run, tokens in zip(runs[2:], (other, one), strict=True):
        assert gap(run, expected(model, tokens), slice(7, 9)) < SAME_MODEL


@pytest.mark.parametrize("batch", [1, 3])
def test_ordinary_steps_are_only_noted(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    looked_at: list[int] = []
    look = Meter.observe

    def counted(self: Meter, index: int, call: AttentionCall, visible: Visible) -> None:
        looked_at.append(call.query.shape[2])
        look(self, index, call, visible)

    monkeypatch.setattr(Meter, "observe", counted)
    model = tiny_with("llama")
    texts = [ids_of(30, seed=seed) for seed in range(batch)]
    with torch.no_grad(), record(model, MEASURED, block=4) as recording:
        cache = None
        # Steps, then several tokens at once, then steps again: whichever way they came, one run.
        for start, stop in itertools.pairwise([0, 8, *range(9, 19), 21, *range(22, 31)]):
            tokens = torch.tensor(texts)[:, start:stop]
            cache = model(tokens, past_key_values=cache).past_key_values
    assert looked_at == [8, 8, 3, 3]
    for run, text in zip(recording.trajectories(), texts, strict=True):
        assert gap(run, expected(model, text), slice(None)) < SAME_MODEL


def test_turns_of_two_conversations_do_not_mix() -> None:
    model = tiny_with("llama")
    one, other = ids_of(6, seed=1), ids_of(6, seed=2)
    with torch.no_grad(), record(model, MEASURED) as recording:
        caches = [model(row(tokens[:4])).past_key_values for tokens in (one, other)]
        for at in (4, 5):
            for tokens, cache in zip((one, other), caches, strict=True):
                model(row([tokens[at]]), past_key_values=cache)
    runs = recording.trajectories()
    # The turn goes to and fro, and each turn is a run of its own at the right place of its conversation.
    assert [run.positions.tolist() for run in runs] == [[0, 1, 2, 3]] * 2 + [[4]] * 2 + [[5]] * 2
    for tokens, mine in ((one, runs[0::2]), (other, runs[1::2])):
        truth = expected(model, tokens)
        for run in mine:
            assert gap(run, truth, slice(int(run.positions[0]), int(run.positions[-1]) + 1)) < SAME_MODEL


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("only_new", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
def test_a_conversation_continues_a_cache(model_type: str, only_new: bool, chunk: int | None) -> None:
    model = tiny_with(model_type)
    cache = DynamicCache(config=model.config)
    with record(model, MEASURED) as recording:
        first = written(model, IDS, 9, past_key_values=cache)
        said = torch.cat([first, row(ids_of(7, seed=8))], dim=1)
        given = said[:, cache.get_seq_length() :] if only_new else said
        second = written(
            model,
            given,
            6,
            past_key_values=cache,
            attention_mask=torch.ones_like(said),
            prefill_chunk_size=chunk if not only_new else None,
        )
    runs = recording.trajectories()
    new = second[0, -6:].tolist()
    whole = [*said[0].tolist(), *new]
    truth = expected(model, whole[:-1])
    check(runs[0], expected(model, whole[:19]), 10, whole[11:20])
    check(runs[1], truth, 26, new)
    assert [run.n_prompt for run in runs] == [11, 27]
    # The last token of the first answer was never fed: the second prompt begins with it, at position 19.
    prompt = prompt_of(runs[1])
    assert prompt.positions.tolist() == list(range(19, 26))
    assert prompt.token_ids.tolist() == whole[20:27]
    assert gap(prompt, truth, slice(19, 26)) < SAME_MODEL


def test_padded_conversations_keep_their_positions() -> None:
    model = tiny_with("llama")
    ids = torch.tensor([IDS, [0, 0, 0, *IDS[:8]]])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    cache = DynamicCache(config=model.config)
    with record(model, MEASURED) as recording:
        first = written(model, ids, 4, attention_mask=mask, past_key_values=cache)
        said = torch.cat([first, ids[:, 5:9]], dim=1)
        longer = torch.cat([mask, mask.new_ones(2, 8)], dim=1)
        second = written(model, said, 3, attention_mask=longer, past_key_values=cache)
    runs = recording.trajectories()
    for run, b, padding in ((runs[2], 0, 0), (runs[3], 1, 3)):
        whole = second[b, padding:].tolist()
        check(run, expected(model, whole[:-1]), 18 - padding, whole[-3:])
        assert prompt_of(run).positions.tolist() == list(range(14 - padding, 18 - padding))


def test_embeddings_instead_of_tokens() -> None:
    model = tiny_with("llama")
    embeddings = model.get_input_embeddings()(row(IDS)).detach()
    with record(model, MEASURED) as recording:
        new = model.generate(inputs_embeds=embeddings, attention_mask=torch.ones(1, 11).long(), max_new_tokens=6)
        model(inputs_embeds=embeddings)
    generated, read = recording.trajectories()
    tokens = [*IDS, *new[0].tolist()]
    check(generated, expected(model, tokens[:-1]), 10, new[0].tolist())
    assert prompt_of(generated).token_ids.tolist() == [-1] * 10
    truth = expected(model, IDS)
    assert gap(read, truth, slice(None)) < SAME_MODEL
    assert read.token_ids.tolist() == [-1] * 11
    assert difference(read.entropy, truth.entropy) < SAME_MODEL
    assert bool(np.isnan(read.logprob).all())


def test_part_of_a_model_called_on_its_own_is_no_step() -> None:
    model = tiny_with("llama")
    with torch.no_grad(), record(model, MEASURED) as recording:
        model.model(row(IDS))
        cache = model(row(IDS)).past_key_values
        model.model(row(IDS[:5]))
        model(row([9]), past_key_values=cache)
        model.model(row(IDS))
    check(only(recording.trajectories()), expected(model, [*IDS, 9]), 0, [*IDS[1:], 9, -1])


def test_reading_inside_a_recording() -> None:
    model = tiny_with("llama")
    ids = ids_of(150)
    with record(model, MEASURED) as outer:
        inner = only(read_ids(model, [ids], mechanisms=MEASURED))
        written(model, IDS, 3)
    assert [run.n_steps for run in outer.trajectories()] == [150, 3]
    assert apart(outer.trajectories()[0], inner) < SAME_TENSORS


@pytest.mark.parametrize(
    ("settings", "mode"),
    [
        ({"num_beams": 3}, "beam search"),
        ({"num_beams": 3, "do_sample": True}, "beam sample"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation"),
        ({"guidance_scale": 2.0}, "classifier-free guidance"),
        ({"custom_generate": lambda *args, **kwargs: None}, "a custom generation"),
    ],
)
def test_other_kinds_of_generation_are_refused(settings: dict[str, Any], mode: str) -> None:
    model = tiny_with("llama")
    with record(model, MEASURED) as recording:
        with pytest.raises(UnsupportedError) as caught:
            written(model, IDS, 3, **settings)
        tokens = written(model, IDS, 3)[0].tolist()
    assert str(caught.value) == (
        f"live recording follows greedy search and sampling, got {mode}; generate without recording, then replay the "
        "text with softgap.read"
    )
    check(only(recording.trajectories()), expected(model, tokens[:-1]), 10, tokens[11:])
    assert "generate" not in model.__dict__


def test_an_assistant_is_refused() -> None:
    model = tiny_with("llama")
    with record(model, MEASURED), pytest.raises(UnsupportedError, match="got assisted generation"):
        written(model, IDS, 3, assistant_model=tiny_with("llama"))


def test_generation_without_cache_is_refused_before_it_runs() -> None:
    model = tiny_with("llama")
    with (
        record(model, MEASURED) as recording,
        pytest.raises(UnsupportedError, match="needs the KV cache, got use_cache=False"),
    ):
        written(model, IDS, 3, use_cache=False)
    assert recording.trajectories() == []
    assert recording.streams == []


def test_a_processor_that_asks_the_model_itself_is_refused() -> None:
    model = tiny_with("llama")

    def ask(ids: Tensor, scores: Tensor) -> Tensor:
        model(ids[:, -1:], past_key_values=DynamicCache())
        return scores

    with record(model, MEASURED), pytest.raises(UnsupportedError, match="follows one cache"):
        written(model, IDS, 3, logits_processor=[ask])


def test_a_forward_without_input_is_refused() -> None:
    model = tiny_with("llama")
    with record(model, MEASURED), pytest.raises(ModelError, match="needs input_ids or inputs_embeds, got neither"):
        model(attention_mask=torch.ones(1, 3))


def test_bad_settings_are_refused() -> None:
    model = tiny_with("llama")
    for settings, message in (
        ({"mechanisms": []}, "at least one, got none"),
        ({"block": 0}, "block must be at least 1 step, got 0"),
        ({"drop_sinks": -1}, "drop_sinks must not be negative, got -1"),
    ):
        with pytest.raises(ValueInputError, match=message), record(model, **settings):
            raise AssertionError("never reached")


def test_nothing_run_gives_no_trajectories() -> None:
    with record(tiny_with("llama")) as recording:
        pass
    assert recording.trajectories() == []


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    model: Any = tiny_llama(max_position_embeddings=64)
    with record(model, MEASURED) as recording:
        with pytest.raises(ValueInputError, match=r"^the model's context is 64 tokens, got 200; shorten the text$"):
            model(torch.ones(1, 200, dtype=torch.long))
        with pytest.raises(ValueInputError, match=r"^the model's context is 64 tokens, got 65; shorten the text$"):
            model.generate(torch.ones(1, 60, dtype=torch.long), max_new_tokens=20, eos_token_id=None)
    assert [run.n_steps for run in recording.trajectories()] == [5]


def test_padding_takes_no_position() -> None:
    model: Any = tiny_llama(max_position_embeddings=64)
    mask = torch.ones(2, 66, dtype=torch.long)
    mask[:, :4] = 0
    with record(model, MEASURED) as recording:
        model.generate(torch.ones_like(mask), attention_mask=mask, max_new_tokens=3, eos_token_id=None)
    assert [run.n_steps for run in recording.trajectories()] == [3, 3]


def test_sampling_from_logits_that_are_none_is_refused() -> None:
    model = overflowing_llama().half()
    with pytest.raises(ModelError, match=r"^a model must give finite logits to sample from, got NaN or infinity; "):
        generate(model, byte_tokenizer(), "a fox", 4, seed=1)


def test_numbers_that_are_not_finite_are_told() -> None:
    model = overflowing_llama().half()
    with pytest.warns(NonFiniteWarning, match=r"64 of 128 divergences \(50 %\) and 4 of 4 log-probabilities"):
        run = generate(model, byte_tokenizer(), "a fox", 4)
    assert run.non_finite.scores == 4
    with pytest.warns(NonFiniteWarning):
        read(model, byte_tokenizer(), "a fox")


def test_a_second_thread_is_refused_and_the_first_is_right() -> None:
    model: Any = tiny_llama(max_position_embeddings=1024)
    tokenizer = byte_tokenizer()
    alone = generate(model, tokenizer, "a fox", 12)
    inside, refused = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def wait(step: Step) -> None:
        if step.index == 3:
            inside.set()
            assert refused.wait(60)

    def intrude() -> None:
        assert inside.wait(60)
        intrusions: list[Callable[[], Any]] = [
            lambda: generate(model, tokenizer, "an owl", 4),
            lambda: read(model, tokenizer, "an owl"),
            lambda: model.generate(torch.tensor([IDS]), max_new_tokens=2),
            lambda: model(torch.tensor([IDS])),
        ]
        for intrusion in intrusions:
            try:
                intrusion()
            except Exception as error:
                errors.append(error)
        refused.set()

    thread = threading.Thread(target=intrude, name="second")
    thread.start()
    run = generate(model, tokenizer, "a fox", 12, listener=wait)
    thread.join(60)
    said = "one thread at a time may measure a model, but the thread 'MainThread' is measuring this one; wait until"
    assert [type(error) for error in errors] == [UnsupportedError] * 4
    assert all(str(error).startswith(said) for error in errors)
    np.testing.assert_allclose(run.divergence, alone.divergence, atol=SAME_MODEL)
    assert run.token_ids.tolist() == alone.token_ids.tolist()
    assert "generate" not in model.__dict__
    assert overridden_names() == ()


def test_a_thread_of_its_own_may_generate() -> None:
    model: Any = tiny_llama()
    with record(model, MEASURED) as recording:
        for _ in range(2):
            thread = threading.Thread(target=model.generate, args=(torch.tensor([IDS]),), kwargs={"max_new_tokens": 3})
            thread.start()
            thread.join()
    assert [run.n_steps for run in recording.trajectories()] == [3, 3]


def test_generate_is_put_back_in_whatever_order_recordings_end() -> None:
    model: Any = tiny_llama()
    first, second = record(model, MEASURED), record(model, MEASURED)
    outer = first.__enter__()
    inner = second.__enter__()
    model.generate(torch.tensor([IDS]), max_new_tokens=3)
    first.__exit__(None, None, None)
    model.generate(torch.tensor([IDS]), max_new_tokens=3)
    second.__exit__(None, None, None)
    assert [len(recording.trajectories()) for recording in (outer, inner)] == [1, 2]
    assert "generate" not in model.__dict__

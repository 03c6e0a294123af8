"""What a step is: its query, the token it predicts, the raw distribution that token came from, and who hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softgap.errors import ValueInputError
from softgap.probe import Step, generate, read, read_ids, record
from softgap.probe.logit_scores import score
from softgap.trajectories import Trajectories
from support import model_examples as examples
from support.probe_cases import (
    SAME_MODEL,
    SAME_TENSORS,
    apart,
    difference,
    expected,
    ids_of,
    only,
    prompt_of,
    tiny_with,
    written,
)

SAMPLING = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.3}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def test_step_0_is_the_last_prompt_token_and_predicts_the_first_new_one() -> None:
    model = tiny_with("llama")
    ids = ids_of(6)
    with record(model) as recording:
        tokens = written(model, ids, 4)[0].tolist()
    run = only(recording.trajectories())
    assert run.positions.tolist() == [5, 6, 7, 8]
    assert run.token_ids.tolist() == tokens[6:]
    assert (run.n_steps, run.n_prompt) == (4, 6)
    assert prompt_of(run).positions.tolist() == [0, 1, 2, 3, 4]
    assert prompt_of(run).token_ids.tolist() == ids[1:]
    assert prompt_of(run).part == "prompt"
    assert not np.isnan(run.logprob).any()
    # Greedy: the predicted token is the most probable one, so its probability is at least exp(-entropy).
    assert bool((run.logprob >= -run.entropy - 1e-5).all())


def test_log_probabilities_are_those_of_the_raw_logits_under_sampling() -> None:
    model = tiny_with("llama")
    ids = ids_of(6)
    with seeded(5), record(model) as recording:
        tokens = written(model, ids, 30, **SAMPLING)[0].tolist()
    run = only(recording.trajectories())
    truth = expected(model, tokens[:-1])
    assert run.token_ids.tolist() == tokens[6:]
    assert difference(run.logprob, truth.logprob(tokens[6:], first=5)) < SAME_MODEL
    assert difference(run.entropy, truth.entropy[5:]) < SAME_MODEL
    # What the sampler saw is something else.
    sharpened = truth.logits[5:] / 0.7
    logs = sharpened - np.log(np.exp(sharpened).sum(-1, keepdims=True))
    assert np.abs(run.logprob - logs[np.arange(30), tokens[6:]]).max() > 0.1


def test_a_ruled_out_token_counts_nothing_towards_entropy() -> None:
    logits = torch.tensor([[[0.0, 0.0, -torch.inf], [5.0, 5.0, 5.0]]])
    logprob, entropy = score(logits, torch.tensor([[0, -1]]))
    assert entropy[0].tolist() == pytest.approx([np.log(2), np.log(3)], abs=1e-6)
    assert float(logprob[0, 0]) == pytest.approx(-np.log(2), abs=1e-6)
    assert np.isnan(float(logprob[0, 1]))
    # And has no probability where a text holds it all the same.
    assert float(score(logits, torch.tensor([[2, 2]]))[0][0, 0]) == -np.inf


@pytest.mark.parametrize("settings", [{"do_sample": False}, SAMPLING], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    ("model_type", "attn"), [("llama", "sdpa"), ("gpt2", "eager"), ("gemma2", "eager"), ("mistral", "sdpa")]
)
def test_recording_changes_no_bit_of_the_model(model_type: str, attn: str, settings: dict[str, Any]) -> None:
    model = tiny_with(model_type, attn=attn)
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, **settings}
    given = torch.tensor([ids_of(11)])

    def run() -> Any:
        with seeded(5):
            return model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=20, **asked)

    plain = run()
    with record(model, ["elu1", "top_k", "uniform"], focus=True, drop_sinks=2, listener=lambda step: None):
        recorded = run()
    assert torch.equal(plain.sequences, recorded.sequences)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, recorded.logits, strict=True))
    with record(model), torch.no_grad():
        inside = model(given).logits
    with torch.no_grad():
        assert torch.equal(inside, model(given).logits)


def test_a_seed_makes_sampling_repeatable_and_leaves_the_global_state_alone() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    torch_before, numpy_before = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    first, again, other = (generate(model, tokenizer, "hello", 12, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert str(np.random.get_state()) == numpy_before  # noqa: NPY002
    assert first.token_ids.tolist() == again.token_ids.tolist()
    assert first.token_ids.tolist() != other.token_ids.tolist()
    assert apart(first, again) == 0
    assert difference(first.logprob, again.logprob) == 0
    assert (first.manifest.seed, first.manifest.options["do_sample"]) == (3, True)
    greedy = generate(model, tokenizer, "hello", 12)
    assert (greedy.manifest.seed, greedy.manifest.options["do_sample"]) == (None, False)
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_generating_text() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    model.generation_config.eos_token_id = None
    run = generate(model, tokenizer, "hello", 7)
    assert (run.n_steps, run.n_prompt, run.prompt_text) == (7, 5, "hello")
    assert run.completion_text == tokenizer.decode(run.token_ids.tolist(), skip_special_tokens=True)
    assert run.tokens == tuple(tokenizer.decode([token]) for token in run.token_ids.tolist())
    assert prompt_of(run).tokens == tuple("ello")
    replay = only(read_ids(model, [tokenizer("hello")["input_ids"]], [run.token_ids.tolist()]))
    assert apart(run, replay) < SAME_MODEL
    assert run.manifest.options["mode"] == "live"


def test_generating_a_batch_of_texts() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    prompts = ["hello there", "x", "abc"]
    runs = generate(model, tokenizer, prompts, 7)
    assert [run.prompt_text for run in runs] == prompts
    for run, prompt in zip(runs, prompts, strict=True):
        alone = generate(model, tokenizer, prompt, 7)
        assert run.token_ids.tolist() == alone.token_ids.tolist()
        assert run.positions.tolist() == alone.positions.tolist()
        assert apart(run, alone) < SAME_MODEL


def test_generating_several_answers_to_each_text() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    runs: list[Trajectories] = generate(model, tokenizer, ["hello", "x"], 7, seed=1, num_return_sequences=2)
    assert [run.prompt_text for run in runs] == ["hello", "hello", "x", "x"]
    assert [run.n_prompt for run in runs] == [5, 5, 1, 1]
    alone: Any = generate(model, tokenizer, "hello", 7, seed=1, num_return_sequences=2)
    assert [run.prompt_text for run in alone] == ["hello", "hello"]


def test_bad_generations_are_refused() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    with pytest.raises(ValueInputError, match="max_new_tokens must be at least 1, got 0"):
        generate(model, tokenizer, "hello", 0)
    with pytest.raises(ValueInputError, match="must hold some text, got ''"):
        generate(model, tokenizer, "")
    with pytest.raises(ValueInputError, match="context is 64 tokens, got 5 tokens and 60 new ones"):
        generate(model, tokenizer, "hello", 60)
    with pytest.raises(ValueInputError, match="has no chat template"):
        read(model, tokenizer, "hello", "x", chat=True)


@pytest.mark.parametrize("prefill", [None, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_listener_hears_every_step_in_order_while_the_model_writes(batch: int, prefill: int | None) -> None:
    model = tiny_with("gemma2", attn="eager")
    heard: list[Step] = []
    forwards: list[int] = []
    progress: list[tuple[int, int]] = []

    def listen(step: Step) -> None:
        heard.append(step)
        progress.append((step.index, len(forwards)))

    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    given = torch.tensor([ids_of(11, seed) for seed in range(batch)])
    with record(model, listener=listen) as recording:
        sequences = written(model, given, 9, prefill_chunk_size=prefill)
    hook.remove()
    runs = recording.trajectories()
    assert [step.index for step in heard] == list(range(9))
    # Each step is told once its token is known: before the forward that takes the token in.
    prefills = 1 if prefill is None else 4
    assert progress == [(i, prefills + i) for i in range(9)]
    assert np.stack([step.token_ids for step in heard], axis=-1).tolist() == sequences[:, 11:].tolist()
    for b, run in enumerate(runs):
        told = np.stack([step.quantities[:, :, :, b] for step in heard], axis=-1)
        for i, name in enumerate(("divergence", "relative_l2", "norm_ratio")):
            assert difference(told[i], run.quantities[name]) == 0
    plain = _recorded(model, given)
    assert all(apart(a, b) < SAME_TENSORS for a, b in zip(runs, plain, strict=True))


def test_a_listener_hears_layers_of_different_widths() -> None:
    model = tiny_with("inkling_text", attn="eager", swa_num_attention_heads=2, swa_num_key_value_heads=1)
    heard: list[Step] = []
    with record(model, listener=heard.append) as recording:
        written(model, ids_of(11), 4)
    run = only(recording.trajectories())
    assert run.heads_per_layer == (2, 4, 2, 4)
    told = np.stack([step.quantities[0, :, :, 0] for step in heard], axis=-1)
    assert difference(told, run.quantities["divergence"]) == 0


def test_what_is_generated_may_be_no_row_of_tokens() -> None:
    model = tiny_with("musicgen_melody", attn="eager")
    with record(model) as recording:
        codes = written(model, [5, 6, 7, 8], 3)
    assert codes.dim() == 3
    assert only(recording.trajectories()).token_ids.tolist()[-1] == -1


def _recorded(model: Any, given: Tensor) -> list[Trajectories]:
    with record(model) as recording:
        written(model, given, 9)
    return recording.trajectories()


def test_what_a_listener_raises_ends_the_generation() -> None:
    model = tiny_with("llama")

    def listen(step: Step) -> None:
        if step.index == 3:
            raise RuntimeError("enough")

    with record(model, listener=listen) as recording, pytest.raises(RuntimeError, match="enough"):
        written(model, ids_of(5), 20)
    run = only(recording.trajectories())
    assert run.n_steps == 4
    assert "generate" not in model.__dict__


@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_streamed_is_what_the_trajectories_hold_at_the_end(batch: int) -> None:
    model = tiny_with("llama")
    heard: list[Step] = []
    seen: list[list[Trajectories]] = []

    def listen(step: Step) -> None:
        heard.append(step)
        seen.append(step.so_far())

    given = torch.tensor([ids_of(7, seed) for seed in range(batch)])
    with record(model, ["elu1", "taylor2"], listener=listen) as recording:
        written(model, given, 6)
    runs = recording.trajectories()
    for b, run in enumerate(runs):
        assert np.array_equal(np.array([step.logprob[b] for step in heard]), run.logprob)
        assert np.array_equal(np.array([step.entropy[b] for step in heard]), run.entropy)
        for n, so_far in enumerate(seen, start=1):
            early = so_far[b]
            assert early.token_ids.tolist() == run.token_ids[:n].tolist()
            assert np.array_equal(early.quantities["divergence"], run.quantities["divergence"][..., :n])
            assert np.array_equal(early.logprob, run.logprob[:n])
            assert difference(prompt_of(early).divergence, prompt_of(run).divergence) == 0


def test_a_generation_that_is_asked_to_stop_is_the_beginning_of_the_whole_one() -> None:
    model, tokenizer = examples.tiny_llama(), examples.byte_tokenizer()
    heard: list[int] = []
    whole = generate(model, tokenizer, "hello", 12)
    part = generate(
        model, tokenizer, "hello", 12, listener=lambda step: heard.append(step.index), stop=lambda: len(heard) >= 3
    )
    assert part.n_steps < whole.n_steps
    assert part.token_ids.tolist() == whole.token_ids[: part.n_steps].tolist()
    assert -1 not in part.token_ids
    assert difference(part.divergence, whole.divergence[..., : part.n_steps]) < SAME_TENSORS
    assert part.manifest.options == whole.manifest.options

"""Rows of a batch are measured as if each were alone: left padding, early stops, several answers to one prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from softgap.probe import read_ids, record
from softgap.trajectories import Trajectories
from support.probe_cases import (
    MEASURED,
    SAME_MODEL,
    apart,
    difference,
    expected,
    gap,
    ids_of,
    only,
    prompt_of,
    row,
    tiny_with,
    written,
)

PROMPTS = [ids_of(17), ids_of(1, seed=1), ids_of(9, seed=2)]
NEW = 20


def left_padded(prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def together(model: Any, prompts: list[list[int]], **settings: Any) -> tuple[list[Trajectories], list[list[int]]]:
    """Recorded runs of a left-padded batch, and the new tokens of each row."""
    ids, mask = left_padded(prompts)
    with record(model, MEASURED, block=settings.pop("block", 32)) as recording:
        sequences = written(model, ids, NEW, attention_mask=mask, **settings)
    return recording.trajectories(), sequences[:, ids.shape[1] :].tolist()


def check_alone(model: Any, run: Trajectories, prompt: list[int], new: list[int]) -> None:
    """The run is that of this prompt and these tokens alone, by the oracle and by a recording of its own."""
    tokens = prompt + new
    truth = expected(model, tokens[:-1])
    steps = slice(len(prompt) - 1, len(tokens) - 1)
    assert run.n_prompt == len(prompt)
    assert run.positions.tolist() == list(range(len(prompt) - 1, len(tokens) - 1))
    assert run.token_ids.tolist() == new
    assert gap(run, truth, steps) < SAME_MODEL
    assert difference(run.logprob, truth.logprob(new, first=len(prompt) - 1)) < SAME_MODEL
    assert difference(run.entropy, truth.entropy[steps]) < SAME_MODEL
    if len(prompt) > 1:
        assert prompt_of(run).positions.tolist() == list(range(len(prompt) - 1))
        assert prompt_of(run).token_ids.tolist() == prompt[1:]
        assert gap(prompt_of(run), truth, slice(0, len(prompt) - 1)) < SAME_MODEL
    else:
        assert run.prompt is None


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    ("model_type", "attn"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        ("gpt2", "sdpa"),
        ("mistral", "sdpa"),
        ("gemma2", "eager"),
        ("gpt_oss", "eager"),
        ("deepseek_v3", "sdpa"),
    ],
)
def test_left_padded_rows_are_as_if_alone(model_type: str, attn: str, cache: str | None) -> None:
    model = tiny_with(model_type, attn=attn)
    runs, new = together(model, PROMPTS, cache_implementation=cache)
    for run, prompt, tokens in zip(runs, PROMPTS, new, strict=True):
        check_alone(model, run, prompt, tokens)


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("chunk", [None, 4])
def test_padding_with_other_blocks_and_chunked_prefill(block: int, chunk: int | None) -> None:
    # In chunks of 4 the shortest rows are nothing but padding for three chunks.
    for model_type in ("llama", "mistral"):
        model = tiny_with(model_type)
        runs, new = together(model, PROMPTS, block=block, prefill_chunk_size=chunk)
        for run, prompt, tokens in zip(runs, PROMPTS, new, strict=True):
            check_alone(model, run, prompt, tokens)


def test_a_padded_row_equals_the_same_row_recorded_alone() -> None:
    model = tiny_with("llama")
    runs, _ = together(model, PROMPTS)
    for run, prompt in zip(runs, PROMPTS, strict=True):
        with record(model, MEASURED) as recording:
            written(model, prompt, NEW)
        alone = only(recording.trajectories())
        assert run.token_ids.tolist() == alone.token_ids.tolist()
        assert run.positions.tolist() == alone.positions.tolist()
        assert apart(run, alone) < SAME_MODEL
        assert difference(run.logprob, alone.logprob) < SAME_MODEL


def test_a_batch_that_is_all_padding_on_the_left() -> None:
    model = tiny_with("llama")
    ids, mask = torch.tensor([[0, 0, *PROMPTS[2]]]), torch.tensor([[0, 0] + [1] * 9])
    with record(model, MEASURED) as recording:
        new = written(model, ids, NEW, attention_mask=mask)[0, 11:].tolist()
    check_alone(model, only(recording.trajectories()), PROMPTS[2], new)


@pytest.mark.parametrize("as_config", [False, True])
def test_rows_that_stop_early_have_as_many_steps_as_tokens(as_config: bool) -> None:
    model = tiny_with("llama")
    _, free = together(model, PROMPTS)
    # A token that one row says early and another late or never.
    ends = free[0][4]
    counts = [tokens.index(ends) + 1 if ends in tokens else NEW for tokens in free]
    assert counts[0] <= 5
    assert max(counts) > counts[0]
    if as_config:
        model.generation_config.eos_token_id = [ends, 2]
        runs, new = together(model, PROMPTS)
    else:
        runs, new = together(model, PROMPTS, eos_token_id=ends)
    assert [run.n_steps for run in runs] == counts
    for run, prompt, tokens, count in zip(runs, PROMPTS, new, counts, strict=True):
        assert tokens[count:] == [0] * (len(tokens) - count)
        check_alone(model, run, prompt, tokens[:count])


def test_rows_that_a_criterion_stops_have_as_many_steps_as_tokens() -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Third(StoppingCriteria):
        """Stops the second row after three new tokens."""

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            done = torch.zeros(len(input_ids), dtype=torch.bool)
            done[1] = input_ids.shape[1] >= 17 + 3
            return done

    model = tiny_with("llama")
    # Padding follows a stopped row only where there is an end token, here one that never comes.
    runs, new = together(model, PROMPTS, stopping_criteria=StoppingCriteriaList([Third()]), eos_token_id=2)
    assert all(2 not in tokens for tokens in new)
    assert [run.n_steps for run in runs] == [NEW, 3, NEW]
    check_alone(model, runs[1], PROMPTS[1], new[1][:3])


def test_settings_given_as_a_generation_config() -> None:
    from transformers import GenerationConfig

    model = tiny_with("llama")
    _, free = together(model, PROMPTS)
    # The model's own default says where to stop; the given config does not.
    model.generation_config.eos_token_id = free[0][4]
    ids, mask = left_padded(PROMPTS)
    with record(model, MEASURED) as recording:
        model.generate(ids, GenerationConfig(max_new_tokens=NEW), attention_mask=mask)
    assert recording.trajectories()[0].n_steps == free[0].index(free[0][4]) + 1


def test_two_answers_to_one_prompt_are_two_runs() -> None:
    model = tiny_with("llama")
    with torch.random.fork_rng(devices=[]), record(model, MEASURED) as recording:
        torch.manual_seed(3)
        sequences = written(model, PROMPTS[0], NEW, do_sample=True, num_return_sequences=2)
    runs = recording.trajectories()
    assert [run.sample_id for run in runs] == ["0", "1"]
    assert sequences[0].tolist() != sequences[1].tolist()
    for run, tokens in zip(runs, sequences[:, 17:].tolist(), strict=True):
        check_alone(model, run, PROMPTS[0], tokens)


def test_reading_equals_generating_the_same_tokens_in_a_batch() -> None:
    model = tiny_with("qwen2")
    runs, new = together(model, PROMPTS)
    for run, replay in zip(runs, read_ids(model, PROMPTS, new, mechanisms=MEASURED), strict=True):
        assert run.positions.tolist() == replay.positions.tolist()
        assert run.token_ids.tolist() == replay.token_ids.tolist()
        assert run.n_prompt == replay.n_prompt
        assert apart(run, replay) < SAME_MODEL
        assert difference(run.logprob, replay.logprob) < SAME_MODEL
        assert difference(run.entropy, replay.entropy) < SAME_MODEL


def test_a_padded_forward_without_cache() -> None:
    model = tiny_with("llama")
    ids, mask = left_padded(PROMPTS)
    with torch.no_grad(), record(model, MEASURED) as recording:
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    runs = recording.trajectories()
    for run, prompt in zip(runs, PROMPTS, strict=True):
        truth = expected(model, prompt)
        assert run.positions.tolist() == list(range(len(prompt)))
        assert run.token_ids.tolist() == [*prompt[1:], -1]
        assert gap(run, truth, slice(None)) < SAME_MODEL
        assert difference(run.entropy, truth.entropy) < SAME_MODEL
        assert np.isnan(run.logprob[-1])
    assert row(PROMPTS[0]).shape == (1, 17)

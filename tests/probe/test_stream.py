"""A generation that is recorded while it runs equals its text read afterwards, whatever the cache and the block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from softgap.models import load_model
from softgap.probe import Recording, read_ids, record
from softgap.trajectories import Trajectories
from support.probe_cases import (
    MEASURED,
    SAME_MODEL,
    SAME_TENSORS,
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

NEW = 24


def live(
    model: Any, ids: list[int], n: int = NEW, *, block: int = 32, **settings: Any
) -> tuple[Trajectories, list[int]]:
    """A recorded generation, and all its tokens."""
    with record(model, MEASURED, block=block) as recording:
        sequences = written(model, ids, n, **settings)
    return only(recording.trajectories()), sequences[0].tolist()


def check(model: Any, run: Trajectories, tokens: list[int], n_prompt: int, tolerance: float = SAME_MODEL) -> None:
    """The run is that of these tokens, by the oracle and by replay."""
    truth = expected(model, tokens[:-1])
    steps = slice(n_prompt - 1, len(tokens) - 1)
    assert run.positions.tolist() == list(range(n_prompt - 1, len(tokens) - 1))
    assert run.token_ids.tolist() == tokens[n_prompt:]
    assert run.n_prompt == n_prompt
    assert gap(run, truth, steps) < tolerance
    assert difference(run.logprob, truth.logprob(tokens[n_prompt:], first=n_prompt - 1)) < tolerance
    assert difference(run.entropy, truth.entropy[steps]) < tolerance
    replay = only(read_ids(model, [tokens[:n_prompt]], [tokens[n_prompt:]], mechanisms=MEASURED))
    assert apart(run, replay) < tolerance
    assert replay.positions.tolist() == run.positions.tolist()
    assert replay.token_ids.tolist() == run.token_ids.tolist()
    if n_prompt > 1:
        assert prompt_of(run).positions.tolist() == list(range(n_prompt - 1))
        assert prompt_of(run).token_ids.tolist() == tokens[1:n_prompt]
        assert gap(prompt_of(run), truth, slice(0, n_prompt - 1)) < tolerance
        assert apart(prompt_of(run), prompt_of(replay)) < tolerance
    else:
        assert run.prompt is None


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("llama", "sdpa", {"num_key_value_heads": 1}),
    ("gpt2", "sdpa", {}),
    ("gpt2", "eager", {}),
    ("mistral", "sdpa", {"sliding_window": 5}),
    ("mistral", "eager", {"sliding_window": 5}),
    ("gemma2", "eager", {}),
    ("gpt_oss", "eager", {}),
    ("deepseek_v3", "sdpa", {}),
    ("qwen2", "sdpa", {}),
    ("qwen2", "eager", {}),
]
NAMES = [f"{model_type}-{attn}{'-changed' if changes else ''}" for model_type, attn, changes in CASES]


@pytest.mark.parametrize("length", [1, 11, 23])
@pytest.mark.parametrize(("model_type", "attn", "changes"), CASES, ids=NAMES)
def test_a_generation_equals_the_oracle_and_its_replay(
    model_type: str, attn: str, changes: dict[str, Any], length: int
) -> None:
    # Windows are 5 and 16: prompts below, across and beyond them, and the generation always beyond.
    model = tiny_with(model_type, attn=attn, **changes)
    run, tokens = live(model, ids_of(length))
    assert len(tokens) == length + NEW
    check(model, run, tokens, length)


@pytest.mark.parametrize("length", [1, 11, 23])
@pytest.mark.parametrize(
    ("model_type", "attn", "changes"),
    [
        ("llama", "sdpa", {}),
        ("llama", "eager", {}),
        ("mistral", "sdpa", {"sliding_window": 5}),
        ("gemma2", "eager", {}),
        ("gpt_oss", "eager", {}),
        ("gpt2", "sdpa", {}),
    ],
)
def test_static_caches_count_no_empty_slot(model_type: str, attn: str, changes: dict[str, Any], length: int) -> None:
    model = tiny_with(model_type, attn=attn, **changes)
    run, tokens = live(model, ids_of(length), cache_implementation="static")
    check(model, run, tokens, length)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
@pytest.mark.parametrize(
    ("model_type", "attn"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("qwen2", "eager")]
)
def test_chunked_prefill_changes_nothing(model_type: str, attn: str, chunk: int, cache: str | None) -> None:
    model = tiny_with(model_type, attn=attn)
    run, tokens = live(model, ids_of(21), prefill_chunk_size=chunk, cache_implementation=cache)
    check(model, run, tokens, 21)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(
    ("model_type", "attn"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("deepseek_v3", "sdpa")]
)
def test_the_block_does_not_matter(model_type: str, attn: str, cache: str | None) -> None:
    model = tiny_with(model_type, attn=attn)
    runs = [live(model, ids_of(9), block=block, cache_implementation=cache)[0] for block in (1, 3, 32, 1000)]
    for run in runs[1:]:
        # Sums are taken in another order: equal up to float32, not bit by bit.
        assert apart(runs[0], run) < SAME_TENSORS
        assert apart(prompt_of(runs[0]), prompt_of(run)) < SAME_TENSORS
        assert difference(runs[0].logprob, run.logprob) < 1e-6
        assert difference(runs[0].entropy, run.entropy) < 1e-6
        assert runs[0].token_ids.tolist() == run.token_ids.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_half_precision_is_measured_in_float32(model_type: str, dtype: torch.dtype) -> None:
    # The oracle sees the very tensors of the recorded pass, so the tolerance is the instrument's alone.
    model = tiny_with(model_type, dtype=dtype)
    with spied(model) as layers, record(model, MEASURED, block=5) as recording:
        written(model, ids_of(11), NEW)
    run = only(recording.trajectories())
    truth = expected_of(layers, model.config)
    assert gap(run, truth, slice(10, None)) < SAME_TENSORS
    assert gap(prompt_of(run), truth, slice(0, 10)) < SAME_TENSORS


# With and without cache a model rounds differently; its outputs then differ by some units in the last place of its
# dtype (2^-8 in bfloat16, 2^-11 in float16), and the divergence by as much. The worst seen are 0.006 and 0.0016.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.03), (torch.float16, 0.006)])
def test_live_equals_replay_in_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    model = tiny_with("llama", dtype=dtype)
    run, tokens = live(model, ids_of(11))
    replay = only(read_ids(model, [tokens[:11]], [tokens[11:]], mechanisms=MEASURED))
    assert difference(run.divergence, replay.divergence) < tolerance


def test_a_full_cache_under_a_sliding_mask() -> None:
    # The window is in the mask alone, and no key is ever dropped.
    model = tiny_with("mistral", sliding_window=5)
    run, tokens = live(model, ids_of(11), past_key_values=DynamicCache())
    check(model, run, tokens, 11)


def test_autocast_does_not_reach_the_instrument() -> None:
    model = tiny_with("llama")
    with torch.autocast("cpu", torch.bfloat16), spied(model) as layers, record(model, MEASURED) as recording:
        written(model, ids_of(11), NEW)
        run = only(recording.trajectories())
    truth = expected_of(layers, model.config)
    assert gap(run, truth, slice(10, None)) < SAME_TENSORS
    assert gap(prompt_of(run), truth, slice(0, 10)) < SAME_TENSORS


def test_the_embedded_model_live_equals_replay_and_the_oracle() -> None:
    model, tokenizer = load_model()
    ids = tokenizer("The lighthouse keeper counted")["input_ids"]
    with spied(model) as layers, record(model, MEASURED, tokenizer=tokenizer, block=4) as recording:
        tokens = written(model, ids, 8, do_sample=False, pad_token_id=0)[0].tolist()
    run = only(recording.trajectories())
    assert isinstance(recording, Recording)
    assert len(run.layers) == 30
    truth = expected_of(layers, model.config)
    assert gap(run, truth, slice(len(ids) - 1, None)) < SAME_MODEL
    replay = only(read_ids(model, [ids], [tokens[len(ids) :]], mechanisms=MEASURED))
    assert apart(run, replay) < 2e-3
    assert "".join(run.tokens) == tokenizer.decode(tokens[len(ids) :])


def test_row_is_a_batch_of_one() -> None:
    assert row([1, 2]).tolist() == [[1, 2]]

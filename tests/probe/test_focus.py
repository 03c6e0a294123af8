"""Focus of the weights, and attention without its first tokens, against softmax weights in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import Mechanism, mechanisms
from softgap.probe import read_ids, record
from softgap.trajectories import FOCUS, Trajectories
from support.probe_cases import (
    MEASURED,
    PAIR,
    SAME_MODEL,
    SAME_TENSORS,
    WINDOWS,
    apart,
    difference,
    expected,
    gap,
    ids_of,
    only,
    prompt_of,
    row,
    softmax_of,
    spied,
    tiny_with,
    window_of,
    written,
)

MODELS = [
    ("llama", "sdpa"),
    ("gpt2", "eager"),
    ("mistral", "sdpa"),
    ("gemma2", "eager"),
    ("gpt_oss", "eager"),
    ("deepseek_v3", "sdpa"),
]
IDS = ids_of(23)


def live(model: Any, **settings: Any) -> tuple[Trajectories, list[int]]:
    cache = settings.pop("cache_implementation", None)
    with record(model, **settings) as recording:
        tokens = written(model, IDS, 12, cache_implementation=cache)[0].tolist()
    return only(recording.trajectories()), tokens


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize(("model_type", "attn"), MODELS)
def test_focus_equals_the_oracle(model_type: str, attn: str, cache: str | None) -> None:
    model = tiny_with(model_type, attn=attn)
    run, tokens = live(model, focus=True, cache_implementation=cache)
    truth = expected(model, tokens[:-1], PAIR)
    replay = only(read_ids(model, [tokens[:-1]], focus=True))
    for name in FOCUS:
        assert difference(run.focus[name], truth.focus[name][..., 22:]) < SAME_MODEL
        assert difference(prompt_of(run).focus[name], truth.focus[name][..., :22]) < SAME_MODEL
        assert difference(replay.focus[name], truth.focus[name]) < SAME_TENSORS
    assert gap(run, truth, slice(22, None)) < SAME_MODEL


def test_focus_has_the_values_that_a_known_row_has() -> None:
    model = tiny_with("llama")
    run = only(read_ids(model, [IDS], focus=True))
    # The first query sees one key.
    assert run.focus["sparsity"][..., 0].tolist() == [[1.0] * 4] * 2
    assert run.focus["attention_entropy"][..., 0].tolist() == [[0.0] * 4] * 2
    assert run.focus["largest_weight"][..., 0].tolist() == [[1.0] * 4] * 2
    n = np.arange(1, 24)
    assert bool((run.focus["sparsity"] >= 1 / np.sqrt(n) - 1e-6).all())
    assert bool((run.focus["sparsity"] <= 1 + 1e-6).all())
    assert bool((run.focus["attention_entropy"] <= np.log(n) + 1e-5).all())


def test_focus_of_padded_rows_is_that_of_the_row_alone() -> None:
    model = tiny_with("mistral")
    ids = torch.tensor([IDS, [0] * 9 + IDS[9:]])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with record(model, focus=True, drop_sinks=2) as recording:
        written(model, ids, 6, attention_mask=mask)
    padded = recording.trajectories()[1]
    with record(model, focus=True, drop_sinks=2) as recording:
        written(model, IDS[9:], 6)
    alone = only(recording.trajectories())
    for name in FOCUS:
        assert difference(padded.focus[name], alone.focus[name]) < SAME_MODEL
    assert padded.positions.tolist() == alone.positions.tolist()
    assert prompt_of(padded).positions.tolist() == prompt_of(alone).positions.tolist() == list(range(2, 13))
    assert difference(padded.divergence, alone.divergence) < SAME_MODEL
    assert difference(prompt_of(padded).divergence, prompt_of(alone).divergence) < SAME_MODEL


def test_nothing_is_measured_that_was_not_asked_for() -> None:
    run, _ = live(tiny_with("llama"))
    assert run.focus == {}
    assert run.manifest.dropped_sinks == 0


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("drop", [1, 4, 18])
@pytest.mark.parametrize(("model_type", "attn"), MODELS)
def test_dropped_sinks_are_gone_from_both_sides(model_type: str, attn: str, drop: int, cache: str | None) -> None:
    # Windows are 16: with 18 keys dropped, some layers' early queries see nothing but dropped keys.
    names = [*MEASURED, "top_k:k=4"]
    model = tiny_with(model_type, attn=attn)
    run, tokens = live(model, mechanisms=names, drop_sinks=drop, focus=True, cache_implementation=cache)
    truth = expected(model, tokens[:-1], names, drop=drop)
    assert prompt_of(run).positions.tolist() == list(range(drop, 22))
    assert run.positions.tolist() == list(range(22, 34))
    assert gap(run, truth, slice(22, None)) < SAME_MODEL
    assert gap(prompt_of(run), truth, slice(drop, 22)) < SAME_MODEL
    assert difference(run.focus["largest_weight"], truth.focus["largest_weight"][..., 22:]) < SAME_MODEL
    assert run.manifest.dropped_sinks == drop
    replay = only(read_ids(model, [tokens[:-1]], mechanisms=names, drop_sinks=drop))
    assert replay.positions.tolist() == list(range(drop, 34))
    # With a key and a learned sink alone an output may be 1e-3 of the linear one, which costs its cosine digits.
    assert gap(replay, truth, slice(drop, None)) < SAME_MODEL


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("drop", [0, 2])
@pytest.mark.parametrize(
    ("model_type", "attn"), [("glm_moe_dsa", "sdpa"), ("minimax_m3_vl_text", "eager"), ("llama4_text", "sdpa")]
)
def test_sparse_attention_keeps_its_positions(model_type: str, attn: str, drop: int, cache: str | None) -> None:
    # A query of these models may not even see itself, so that its mask does not tell where it stands.
    by_distance = torch.rand(1, 1, 30, generator=torch.Generator().manual_seed(0))
    profile = mechanisms()["profile"].with_parameters(first=torch.ones(1, 1), by_distance=by_distance)
    names: list[str | Mechanism] = ["elu1", profile, "previous_token", "top_k:k=4", *WINDOWS]
    model = tiny_with(model_type, attn=attn)
    run, tokens = live(model, mechanisms=names, drop_sinks=drop, cache_implementation=cache)
    replay = only(read_ids(model, [tokens[:23]], [tokens[23:]], mechanisms=names, drop_sinks=drop))
    assert run.positions.tolist() == replay.positions.tolist() == list(range(22, 34))
    assert apart(run, replay) < SAME_MODEL
    assert apart(prompt_of(run), prompt_of(replay)) < SAME_MODEL


def test_dropping_more_than_the_prompt_leaves_the_steps_that_see_something() -> None:
    model = tiny_with("llama")
    run, tokens = live(model, drop_sinks=25)
    assert run.positions.tolist() == list(range(25, 34))
    assert run.token_ids.tolist() == tokens[26:]
    assert run.prompt is None
    assert gap(run, expected(model, tokens[:-1], PAIR, drop=25), slice(25, None)) < SAME_MODEL


def test_the_oracles_weights_are_the_models() -> None:
    # Focus and dropped sinks rest on the oracle's own softmax: it must reproduce what the model put out.
    for model_type, attn in MODELS:
        model = tiny_with(model_type, attn=attn)
        with spied(model) as layers, torch.no_grad():
            model(row(IDS))
        for layer, (call,) in enumerate(layers):
            _, _, output = softmax_of(call, window_of(model.config, layer))
            assert difference(output, call.output[0].numpy()) < SAME_TENSORS

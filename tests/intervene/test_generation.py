"""A swap with a cache, with padding and at some positions only is the same swap in one forward over the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softgap.linearize import swap
from support.linearize_cases import (
    DOUBLE,
    IDS,
    PAIR,
    SINGLE,
    WINDOW,
    apart,
    edited,
    logits_of,
    ready_for,
    some_heads,
    with_random_parameters,
)
from support.probe_cases import ids_of, row, tiny_with

GENERATED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama", "sdpa", {}, {}),
    ("llama", "eager", {}, {}),
    ("llama", "sdpa", {"num_key_value_heads": 1}, {}),
    ("llama", "sdpa", {"num_key_value_heads": 4}, {}),
    ("llama", "sdpa", {}, {"cache_implementation": "static"}),
    ("llama", "eager", {}, {"cache_implementation": "static"}),
    ("llama", "sdpa", {}, {"prefill_chunk_size": 4}),
    ("llama", "sdpa", {}, {"use_cache": False}),
    ("mistral", "sdpa", {"sliding_window": 5}, {}),
    ("mistral", "eager", {"sliding_window": 5}, {}),
    ("mistral", "sdpa", {"sliding_window": 5}, {"cache_implementation": "static"}),
    ("gemma3_text", "sdpa", {}, {}),
    ("gpt2", "sdpa", {}, {}),
    ("deepseek_v3", "sdpa", {}, {}),
    ("qwen3_next", "sdpa", {}, {}),
]


@pytest.mark.parametrize("name", ["elu1", "decay:lam=0.8", "top_k:k=3", "cosformer", "previous_token"])
@pytest.mark.parametrize(("model_type", "attn", "changes", "settings"), GENERATED, ids=str)
def test_a_generation_is_its_text_read(
    model_type: str, attn: str, changes: dict[str, Any], settings: dict[str, Any], name: str
) -> None:
    model = tiny_with(model_type, attn=attn, **changes)
    new = 20  # more than any window of the tiny models
    with swap(model, some_heads(model), name):
        result = model.generate(
            IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=new,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        read = logits_of(model, result.sequences[:, :-1])
    generated = torch.stack(result.logits, dim=1)
    assert apart(generated, read[:, -new:]) < SINGLE
    assert apart(generated, logits_of(model, result.sequences[:, :-1])[:, -new:]) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["fitted", "profile", "constant"])
def test_a_calibrated_mechanism_in_a_generation(name: str, settings: dict[str, Any]) -> None:
    model = tiny_with("llama")
    with swap(model, PAIR, with_random_parameters(name, 2, 4, 2, 16, 16)):
        result = model.generate(
            IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=12,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        read = logits_of(model, result.sequences[:, :-1])
    assert apart(torch.stack(result.logits, dim=1), read[:, -12:]) < SINGLE


def padded(short: Tensor, long: Tensor) -> tuple[Tensor, Tensor]:
    """Two texts as one left-padded batch, and its mask."""
    missing = long.shape[1] - short.shape[1]
    hidden = torch.zeros(1, missing, dtype=torch.long)
    mask = torch.cat([torch.ones_like(long), torch.cat([hidden, torch.ones_like(short)], dim=1)])
    return torch.cat([long, torch.cat([hidden, short], dim=1)]), mask


@pytest.mark.parametrize("positions", [None, range(4, 16)], ids=str)
@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["elu1", "decay:lam=0.8", "first_token"])
@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_rows_of_a_padded_batch_are_those_of_each_text_alone(
    model_type: str, name: str, settings: dict[str, Any], positions: range | None
) -> None:
    model = tiny_with(model_type, **WINDOW.get(model_type, {}))
    short = row(ids_of(6, seed=3))
    batch, mask = padded(short, IDS)
    with swap(model, PAIR, name, positions=positions):
        result = model.generate(
            batch,
            attention_mask=mask,
            max_new_tokens=8,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        generated = torch.stack(result.logits, dim=1)
        for index, text in enumerate((IDS, short)):
            alone = torch.cat([text, result.sequences[index : index + 1, 13:-1]], dim=1)
            assert apart(generated[index], logits_of(model, alone)[0, -8:]) < SINGLE


def test_a_padded_forward_without_position_ids_counts_positions_by_its_mask() -> None:
    model = tiny_with("opt")  # finds its own positions by the mask
    short = row(ids_of(6, seed=3))
    batch, mask = padded(short, IDS)
    with swap(model, PAIR, "uniform", positions=(2, 5)):
        found = logits_of(model, batch, attention_mask=mask)
        for index, text in enumerate((IDS, short)):
            assert apart(found[index, -text.shape[1] :], logits_of(model, text)[0]) < SINGLE
    assert apart(found[1, -6:], logits_of(model, short)[0]) > 1e-3


@pytest.mark.parametrize("positions", [range(4, 7), (4, 7), (12, 40)], ids=str)
def test_some_positions_only(positions: range | tuple[int, int]) -> None:
    model = tiny_with("llama", dtype=torch.float64)
    inside = range(*positions) if isinstance(positions, tuple) else positions
    with edited(model, [(PAIR, ready_for(model, "elu1"))], lambda t: t in inside):
        truth = logits_of(model, IDS)
    plain = logits_of(model, IDS)
    with swap(model, PAIR, "elu1", positions=positions):
        found = logits_of(model, IDS)
    assert apart(found, truth) < DOUBLE
    assert torch.equal(found[:, : inside.start], plain[:, : inside.start])
    assert all(apart(found[:, t], plain[:, t]) > 1e-4 for t in range(inside.start, 13))


@pytest.mark.parametrize("settings", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 4}], ids=str)
@pytest.mark.parametrize("model_type", ["llama", "opt", "gpt2"])
def test_some_steps_of_a_generation(model_type: str, settings: dict[str, Any]) -> None:
    model = tiny_with(model_type)
    span = range(13 - 1 + 3, 13 - 1 + 6)  # steps 3, 4 and 5
    with swap(model, PAIR, "uniform", positions=span):
        result = model.generate(
            IDS,
            attention_mask=torch.ones_like(IDS),
            max_new_tokens=10,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
        read = logits_of(model, result.sequences[:, :-1])
    generated = torch.stack(result.logits, dim=1)
    plain = logits_of(model, result.sequences[:, :-1])[:, -10:]
    assert apart(generated, read[:, -10:]) < SINGLE
    assert [bool(apart(generated[:, i], plain[:, i]) > 1e-3) for i in range(10)][:6] == [False] * 3 + [True] * 3


def test_positions_follow_from_the_cache_where_nobody_tells_them() -> None:
    model = tiny_with("llama")
    with swap(model, PAIR, "uniform", positions=(10, 12)), torch.no_grad():
        whole = logits_of(model, IDS)
        cache = model(IDS[:, :9]).past_key_values
        found = model(IDS[:, 9:], past_key_values=cache).logits
    assert apart(found, whole[:, 9:]) < SINGLE
    assert [bool(apart(whole[:, t], logits_of(model, IDS)[:, t]) > 1e-3) for t in (9, 10, 11)] == [False, True, True]

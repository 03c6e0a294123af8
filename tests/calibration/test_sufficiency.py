"""What suffices for each head: simulated heads of every kind get their label, and real ones an honest interval."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from softgap.attention import Mechanism, Visible, add_window, attend, resolve
from softgap.calibration import sufficiency as module
from softgap.calibration.sufficiency import KindErrors, Sufficiency, far_lengths, label_heads, measure_kinds
from softgap.errors import ValueInputError
from softgap.kinds import KINDS, counts_from_numbers, kinds_sentence, numbers_of_counts
from softgap.probe.layout import LayerTensors
from support.linearize_cases import with_random_parameters
from support.model_examples import tiny_llama

T, DIM = 200, 8
HEADS = len(KINDS)


def kinds() -> dict[str, Mechanism]:
    """A mechanism of each kind for six heads without KV groups."""
    fitted = with_random_parameters("fitted", 1, HEADS, HEADS, DIM, DIM)
    other = with_random_parameters("fitted", 1, HEADS, HEADS, DIM, DIM, seed=6)
    return {
        "constant": with_random_parameters("constant", 1, HEADS, HEADS, DIM, DIM),
        "profile": with_random_parameters("profile", 1, HEADS, HEADS, DIM, DIM),
        "window": resolve("window:w=9,sinks=2"),
        "fitted": fitted,
        "hybrid": add_window(other, w=5, sinks=1),
    }


def simulated_layer(seed: int, noise: float = 0.0) -> LayerTensors:
    """One layer whose head i is of kind i: it outputs what a mechanism of that kind would, the last one a far value."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(HEADS, T, DIM, generator=generator) for _ in range(3))
    k = 3 * k
    rows = torch.arange(T)
    far = (torch.rand(T, generator=generator) * (rows - 20).clamp(min=1)).long()
    output = torch.zeros(HEADS, T, DIM)
    for head, mechanism in enumerate(kinds().values()):
        output[head] = attend(mechanism, q[None], k[None], v[None], scale=1.0).output[0, head]
    output[-1] = v[-1, far]
    output = output + noise * torch.randn(output.shape, generator=generator)
    return LayerTensors(0, q, k, v, output, 1.0, Visible())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts are seeds: every one of them shows the simulated layer."""

    def visit(model: Any, ids: Sequence[int], visit: Callable[[LayerTensors], np.ndarray]) -> list[np.ndarray]:
        return [visit(simulated_layer(ids[0]))]

    monkeypatch.setattr(module, "visit_layers", visit)


def texts(n: int) -> list[list[int]]:
    return [[seed] * T for seed in range(n)]


@pytest.mark.usefixtures("simulated")
def test_heads_of_known_kind_get_their_label() -> None:
    (errors,) = measure_kinds(None, texts(3), kinds())  # type: ignore[arg-type]
    assert errors.labels().tolist() == [list(range(HEADS))]
    gap_left, energy_left = errors.left()
    assert np.abs(np.diagonal(energy_left[:, 0, :-1])).max() < 1e-6
    assert energy_left[:, 0, -1].min() > 0.5
    assert gap_left[:, 0, -1].min() > 0.5


@pytest.mark.usefixtures("simulated")
def test_the_result_counts_kinds_and_survives_json() -> None:
    result = label_heads(tiny_llama(), texts(4), kinds(), far=[[9] * 3000])
    assert result.labels == (KINDS,)
    assert {kind: count.value for kind, count in result.counts.items()} == dict.fromkeys(KINDS, 1.0)
    assert all(count.low <= count.value <= count.high for count in result.counts.values())
    assert result.stability["two halves of the text"] == 1.0
    assert {"2,048 tokens", "3,000 tokens"} <= set(result.stability)
    assert result.keys_worth["constant"] == 0
    assert result.keys_worth["profile"] is None
    assert result.sentence == (
        "Of 6 heads, 1 need only a constant, 1 a positional profile, 1 a window, 1 a fitted map, 1 a hybrid; "
        "1 need softmax. Window, fitted map and hybrid keep as much as 11 keys per KV head."
    )
    assert Sufficiency.from_json(result.to_json()) == result
    numbers = numbers_of_counts(result.counts, result.keys_worth["window"])
    assert kinds_sentence(*counts_from_numbers(numbers)) == result.sentence
    assert counts_from_numbers({"need_window": 3.0}) == ({}, None)
    assert label_heads(tiny_llama(), texts(2), kinds(), stability=False).stability == {}


@pytest.mark.parametrize(("tokens", "lengths"), [(1000, []), (1500, [1500]), (2048, [2048]), (8192, [2048, 8192])])
def test_long_texts_are_labelled_at_two_thousand_tokens_and_at_their_end(tokens: int, lengths: list[int]) -> None:
    assert far_lengths(tokens) == lengths


def errors_of(divergence: list[float], error: list[float], uniform: float = 1.0) -> KindErrors:
    """One head in one text of ten positions, by the mean of each quantity."""
    left, wrong = (np.array(values, dtype=float).reshape(-1, 1, 1, 1) * 10 for values in (divergence, error))
    names = ("constant", "window")[: len(divergence)]
    return KindErrors(names, left, wrong, np.full((1, 1, 1), 10 * uniform), np.full((1, 1, 1), 10.0), np.array([10]))


def test_a_kind_suffices_only_by_gap_and_by_energy() -> None:
    assert errors_of([0.1, 0.0], [0.1, 0.0]).labels() == 0
    assert errors_of([0.11, 0.0], [0.1, 0.0]).labels() == 1  # too much of the gap
    assert errors_of([0.1, 0.0], [0.11, 0.0]).labels() == 1  # too much of the energy
    assert errors_of([0.5, 0.5], [0.5, 0.5]).labels() == 2  # nothing does
    assert errors_of([0.019, 0.0], [0.1, 0.0], uniform=0.019).labels() == 0  # no gap to close
    assert errors_of([0.5, 0.5], [0.5, 0.5]).labels(limit=0.5) == 0


def test_the_energy_weighs_large_outputs_more() -> None:
    """An error at a query with a large output counts as much as it does in the sum of squares."""
    layer = simulated_layer(1)
    large = layer.output.clone()
    large[:, 150:] *= 10
    wrong = dataclasses.replace(layer, output=large)
    sums = module._layer_sums(wrong, [resolve("zero")], 64, [range(64, T)])
    assert np.allclose(sums[0, 1], sums[0, 2])
    assert np.allclose(sums[0, 2, 0], large[:, 64:].double().square().sum(dim=(1, 2)).numpy())


def test_bad_input_is_one_sentence() -> None:
    with pytest.raises(ValueInputError, match=r"limit must be above 0 and below 1, got 1\.5"):
        label_heads(tiny_llama(), texts(2), kinds(), limit=1.5)
    with pytest.raises(ValueInputError, match="texts must be longer than 64 tokens"):
        measure_kinds(tiny_llama(), [[1] * 10], kinds())

"""The ladder at equal memory: equal it is, the best choice is taken on text of the fit, and shares are measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from softgap.attention import resolve
from softgap.attention.memory import keys_per_feature
from softgap.calibration import Recipe
from softgap.calibration.activations import Activations, gather
from softgap.calibration.held_out import HeldLayer, divergences, gap_closed, held_layers
from softgap.calibration.memory_ladder import (
    OWN_SHARES,
    SINKS,
    SUBSTITUTES,
    Division,
    MemoryLadder,
    _best_choice,
    choose_division,
    climb_memory,
)
from softgap.calibration.texts import Corpus, corpus_of
from softgap.errors import ValueInputError
from softgap.probe.layout import layer_rotations
from support.model_examples import attending_llama, byte_tokenizer

RECIPE = Recipe(steps=3)
KEYS = (16, 64)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    text = " ".join(f"The {i}th boat left with {i * i % 97} barrels." for i in range(400))
    return corpus_of(attending_llama(max_position_embeddings=1024), byte_tokenizer(), [text], positions=256)


@pytest.fixture(scope="module")
def gathered(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Activations:
    model = attending_llama(max_position_embeddings=1024)
    folder = tmp_path_factory.mktemp("gathered")
    rotations = layer_rotations(model)
    return gather(model, corpus.fitted, folder, sample=corpus.held_out[0], distances=64, rotations=rotations)


@pytest.fixture(scope="module")
def layers(corpus: Corpus) -> tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]]:
    model = attending_llama(max_position_embeddings=1024)
    held_out, fit_text = (held_layers(model, texts[:2], [0, 1]) for texts in (corpus.held_out, corpus.fitted))
    return held_out, fit_text


@pytest.fixture(scope="module")
def ladder(layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]], gathered: Activations) -> MemoryLadder:
    return climb_memory(*layers, gathered, RECIPE, keys=KEYS)


def test_every_substitute_of_a_rung_has_its_memory(ladder: MemoryLadder) -> None:
    assert [rung.keys for rung in ladder.rungs] == list(KEYS)
    for rung in ladder.rungs:
        for name in SUBSTITUTES:
            assert getattr(rung, name).keys_worth == pytest.approx(rung.keys, rel=0.05)
        assert rung.window.features == rung.fitted.recent == rung.fitted.sinks == 0
        assert rung.window.recent + rung.window.sinks == rung.keys
        assert min(rung.hybrid.features, rung.hybrid.recent, rung.fitted.features) > 0


def test_the_best_choice_on_text_of_the_fit_is_taken(ladder: MemoryLadder) -> None:
    for rung in ladder.rungs:
        sinks = {int(choice): closed for choice, closed in rung.window.choices.items()}
        assert set(sinks) == {n for n in SINKS if n <= rung.keys // 2}
        assert rung.window.sinks == max(sinks, key=lambda n: sinks[n])
        shares = {float(choice): closed for choice, closed in rung.hybrid.choices.items()}
        best = max(shares, key=lambda share: shares[share])
        assert rung.hybrid.features == pytest.approx(best * rung.fitted.features, abs=1)
        assert rung.hybrid.sinks <= rung.window.sinks


def test_shares_are_those_of_the_chosen_window(
    ladder: MemoryLadder, layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]]
) -> None:
    held_out, fit_text = layers
    for rung in ladder.rungs:
        window = resolve(f"window:w={rung.window.recent},sinks={rung.window.sinks}")
        by_layer = [divergences(window, layer.texts) for layer in held_out]
        values = [np.stack(text) for text in zip(*by_layer, strict=True)]
        uniform = [np.stack(text) for text in zip(*(layer.uniform for layer in held_out), strict=True)]
        closed = gap_closed(values, uniform, rng=np.random.default_rng(0))
        assert closed is not None
        assert rung.window.gap_closed.value == pytest.approx(closed.value)
        left, gap = (
            sum(float(x[:, 64:].sum()) for layer in parts for x in layer)
            for parts in ([divergences(window, layer.texts) for layer in fit_text], [x.uniform for x in fit_text])
        )
        assert rung.window.choices[str(rung.window.sinks)] == pytest.approx(1 - left / gap)


def test_more_memory_leaves_less_to_a_window_and_all_of_it_nothing(
    layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]], gathered: Activations, ladder: MemoryLadder
) -> None:
    (whole,) = climb_memory(*layers, gathered, RECIPE, keys=[256]).rungs
    closed = [rung.window.gap_closed.value for rung in (*ladder.rungs, whole)]
    assert closed == sorted(closed)
    assert closed[-1] == pytest.approx(1, abs=1e-4)


def test_the_same_settings_give_the_same_ladder_whatever_the_workers(
    layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]], gathered: Activations, ladder: MemoryLadder
) -> None:
    shares: list[float] = []
    assert climb_memory(*layers, gathered, RECIPE, keys=KEYS, workers=2, report=shares.append) == ladder
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_ladder_is_read_back_whole(ladder: MemoryLadder) -> None:
    assert MemoryLadder.from_json(json.loads(json.dumps(ladder.to_json()))) == ladder
    assert ladder.curve == {str(rung.fitted.features): rung.fitted.gap_closed for rung in ladder.rungs}


def best(closed: Mapping[str, float], usual: float) -> float:
    """The number that closes most of the gap; the usual one, unless that is at least 0.01 more."""
    by_number = {float(choice): share for choice, share in closed.items()}
    largest = max(by_number, key=lambda number: by_number[number])
    return largest if by_number[largest] >= by_number.get(usual, -1) + 0.01 else usual


@pytest.mark.parametrize(("other", "taken"), [(0.809, "4"), (0.811, "16"), (0.7, "4")])
def test_the_usual_choice_is_kept_unless_another_closes_much_more(other: float, taken: str) -> None:
    assert _best_choice({"1": 0.5, "4": 0.8, "16": other}, "4") == taken
    assert _best_choice({"1": 0.5, "2": other}, "4") == "2"


def test_a_calibration_divides_its_memory_as_text_of_the_fit_does_best(
    layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]], gathered: Activations
) -> None:
    _, fit_text = layers
    recipe = replace(RECIPE, features=32)
    division = choose_division(fit_text, gathered, recipe)
    keys = round(32 * keys_per_feature(gathered.sites[0].dim))
    assert {int(n) for n in division.by_sinks} == {n for n in SINKS if n <= keys // 2}
    assert division.sinks == best(division.by_sinks, 4)
    assert {float(share) for share in division.by_share} == set(OWN_SHARES)
    assert division.share == best(division.by_share, 0.25)
    left = sum(
        float(x[:, 64:].sum())
        for layer in fit_text
        for x in divergences(f"window:w={keys - division.sinks},sinks={division.sinks}", layer.texts)
    )
    gap = sum(float(x[:, 64:].sum()) for layer in fit_text for x in layer.uniform)
    assert division.by_sinks[str(division.sinks)] == pytest.approx(1 - left / gap)
    assert Division.from_json(json.loads(json.dumps(division.to_json()))) == division


@pytest.mark.parametrize("share", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("sinks", [0, 1, 4, 16])
def test_a_divided_memory_stays_what_it_was(share: float, sinks: int) -> None:
    features, exact = Division(sinks, share).hybrid(128, 64, 64)
    assert features * keys_per_feature(64) + exact.size == pytest.approx(67, abs=0.5)
    assert features == pytest.approx(128 * share, abs=1)
    assert exact.sinks == min(sinks, exact.size // 2)


def test_a_memory_too_small_to_divide_keeps_the_usual_share(
    layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]], gathered: Activations
) -> None:
    division = choose_division(layers[1], gathered, replace(RECIPE, features=2))
    assert division.by_share == {}
    assert division.share == 0.25
    assert division.hybrid(2, 64, 64)[0] == 2


@pytest.mark.parametrize("keys", [(), (1, 16)])
def test_bad_input_is_one_sentence(
    keys: tuple[int, ...],
    layers: tuple[tuple[HeldLayer, ...], tuple[HeldLayer, ...]],
    gathered: Activations,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueInputError, match=r"^keys must be numbers from 2 on, got \[.*\]; 16 to 256 is usual$"):
        climb_memory(*layers, gathered, RECIPE, keys=keys)

"""The cost of each command counts the work that the command does."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest

from softgap.calibration import Recipe, calibrate
from softgap.costs import Curve, Probe, calibration_cost, evaluation_cost, measurement_cost, search_cost
from softgap.evaluation import evaluate
from softgap.evaluation.answers import score_answers
from softgap.study import StudySettings, plan_study
from softgap.tasks import Prompt
from support.model_examples import attending_llama, byte_tokenizer

Loaded = tuple[Any, Any]

TEXT = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(200))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return attending_llama(max_position_embeddings=2048), byte_tokenizer()


@pytest.fixture
def seconds_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which every stage takes a second per token."""
    monkeypatch.setattr(Curve, "through", classmethod(lambda cls, *points: cls(1.0)))


def calibration(loaded: Loaded, **settings: Any) -> Any:
    recipe = Recipe(features=8, steps=settings.pop("steps", 5))
    return calibration_cost(*loaded, [TEXT], Probe(loaded[0]), recipe=recipe, **settings)


def test_a_calibration_counts_texts_and_steps(loaded: Loaded, seconds_per_token: None) -> None:
    cost = calibration(loaded, positions=512, stability=False)
    # One sequence of 512 tokens and four of 128 are fitted on; half as many tokens are generated from 24 beginnings.
    assert cost.counts["tokens"] == 1024
    assert cost.counts["generated_tokens"] == 512
    assert cost.stages["reading"] == 1024 + 24 * (512 // 24)
    assert cost.scratch_bytes == 2 * 2 * (4 + 2) * 8 * (1024 + 512)
    longer = calibration(loaded, positions=512, stability=True)
    assert longer.stages["labelling heads"] >= cost.stages["labelling heads"]


def test_a_calibration_with_more_steps_takes_longer_and_minutes_are_taken_at_their_word(loaded: Loaded) -> None:
    few, many = (calibration(loaded, positions=256, steps=steps) for steps in (10, 1000))
    assert many.stages["fitting"] > 10 * few.stages["fitting"]
    assert calibration(loaded, positions=256, minutes=2.0).stages["fitting"] == 240


def test_the_disk_of_a_calibration_is_what_it_saves(loaded: Loaded, tmp_path: Any) -> None:
    cost = calibration(loaded, positions=256)
    file = tmp_path / "fitted.safetensors"
    calibrate(*loaded, [TEXT], recipe=Recipe(features=8, steps=1), positions=256, stability=False, out=file)
    assert cost.disk_bytes == pytest.approx(file.stat().st_size, rel=0.5)


def test_measuring_counts_samples_and_tokens(loaded: Loaded) -> None:
    def cost(n: int) -> Any:
        prompts = [Prompt(str(i), "Boat one left. " * 4) for i in range(n)]
        settings = StudySettings(mechanisms=("elu1", "uniform"), max_new_tokens=6, batch_size=2, chat=False)
        return measurement_cost(plan_study(prompts, loaded, settings), loaded, Probe(loaded[0]))

    few, many = cost(2), cost(40)
    assert (few.counts["samples"], few.counts["batches"], few.counts["new_tokens"]) == (2, 1, 12)
    assert many.counts["batches"] == 20
    assert many.disk_bytes == 20 * few.disk_bytes
    assert many.stages["reading"] + many.stages["writing"] > 5 * (few.stages["reading"] + few.stages["writing"])
    assert few.note == "answers that end early cost less"


def test_an_evaluation_counts_the_contexts_that_it_may_draw(loaded: Loaded, seconds_per_token: None) -> None:
    def cost(**settings: Any) -> Any:
        return evaluation_cost(*loaded, ["recall", "loss"], Probe(loaded[0]), lengths=[256], pairs=[4], **settings)

    plain = cost(generation=False)
    assert plain.counts["contexts"] == 200 + 64
    assert plain.stages["recall, original"] == 200 * 256
    assert cost(generation=False, contexts=3).counts["contexts"] == 6
    assert cost(contexts=3).stages["recall, original"] > 2 * 3 * 256


def test_the_contexts_of_an_evaluation_are_those_that_it_draws(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: Counter[str] = Counter()

    def counted(model: Any, context: Any) -> Any:
        drawn["contexts"] += 1
        return score_answers(model, context)

    monkeypatch.setattr("softgap.evaluation.sampling.score_answers", counted)
    evaluate(*loaded, "recall", lengths=[256], pairs=[4], contexts=5, generation=False)
    cost = evaluation_cost(*loaded, ["recall"], Probe(loaded[0]), lengths=[256], pairs=[4], contexts=5)
    assert drawn["contexts"] == cost.counts["contexts"] == 5


def test_a_search_counts_candidates(loaded: Loaded, seconds_per_token: None) -> None:
    search = functools.partial(search_cost, *loaded, [TEXT])
    single = search("elu1", Probe(loaded[0]), tokens=1024, length=64, baselines=False, by="groups", correct=False)
    # Four KV groups: nothing or one to four of them are swapped, which bisection tells apart in three steps.
    assert single.counts["candidates"] == 1 + 3
    assert single.stages["choosing"] == (1 + 4) * 4 * 64
    assert "baselines" not in single.stages
    several = search(None, Probe(loaded[0]), tokens=1024, length=64, budget_bytes=1.0, recall_budget=None)
    # A constant, windows of 16 and of 32 keys, and the longer one with far keys.
    assert several.counts["options"] == 4
    assert several.stages["baselines"] > 0
    assert several.note == ""

"""softgap.evaluate: oracles score 1 and chance, changes are paired, and an interrupted evaluation resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import softgap
from softgap.attention import resolve
from softgap.errors import SoftgapError, UnsupportedError
from softgap.evaluation import TASKS, sampling
from softgap.evaluation.answers import _decode, new_cache, score_answers
from softgap.evaluation.sampling import _narrow, _octave
from softgap.intervals import Interval
from softgap.intervene.swap import swap
from softgap.linearize import Plan, Substitute, apply
from softgap.models import model_fingerprint
from softgap.tasks.long_context import Context
from support.linearize_cases import sharp_llama
from support.model_examples import attending_llama, byte_tokenizer
from support.oracles import END, Oracle, guess, oracle

ACCURACIES = ("first", "whole", "generated_first", "generated_whole")
ASKED = [name for name in TASKS if name != "loss"]


@pytest.fixture(scope="module")
def model() -> Any:
    return attending_llama(max_position_embeddings=2048)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def quick(model: Any, tokenizer: Any, tasks: Any = "recall", **settings: Any) -> Any:
    return softgap.evaluate(
        model, tokenizer, tasks, **{"lengths": [512], "pairs": [4], "contexts": 2, "progress": False, **settings}
    )


@pytest.mark.parametrize("task", ASKED)
def test_a_perfect_oracle_scores_one(model: Any, tokenizer: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with oracle(model, monkeypatch):
        found = quick(model, tokenizer, task, lengths=[1024])
    for metric in ACCURACIES:
        (row,) = found.select(metric=metric, distance=None)
        assert (row.original.value, row.original.high, row.contexts) == (1, 1, 2)
    assert found.select(metric="answer_loss", distance=None)[0].original.value < 0.1


@pytest.mark.parametrize("task", ASKED)
def test_an_oracle_that_is_always_wrong_scores_nothing(
    model: Any, tokenizer: Any, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oracle(model, monkeypatch, lambda context, place: (context.ids[place] + 1) % model.config.vocab_size):
        found = quick(model, tokenizer, task, lengths=[1024])
    rows = [row for metric in ACCURACIES for row in found.select(metric=metric, distance=None)]
    assert [row.original.value for row in rows] == [0, 0, 0, 0]
    assert {row.verdict for row in rows} == {"not measurable with this model"}


@pytest.mark.parametrize("pairs", [2, 8])
def test_a_guess_scores_chance(model: Any, tokenizer: Any, pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with oracle(model, monkeypatch, guess(np.random.default_rng(0))):
        found = quick(model, tokenizer, pairs=[pairs], contexts=60)
    for metric in ("whole", "generated_whole"):
        (row,) = found.select(metric=metric, distance=None)
        assert row.floor == 1 / pairs
        error = 4 * (row.floor * (1 - row.floor) / row.questions) ** 0.5
        assert abs(row.original.value - row.floor) < error


def test_a_first_token_alone_is_no_whole_answer(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def first_only(context: Context, place: int) -> int:
        starts = {question.start for question in context.questions}
        return context.ids[place] if place in starts else END

    with oracle(model, monkeypatch, first_only):
        found = quick(model, tokenizer, "needle")
    values = [found.select(metric=metric, distance=None)[0].original.value for metric in ACCURACIES]
    assert values == [1, 0, 1, 0]


def test_answers_inside_the_window_do_not_count_as_long_range(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An oracle that knows the near answers only: without a window it scores between 0 and 1, beyond it nothing."""
    limit = 200

    def near(context: Context, place: int) -> int:
        far = any(
            question.start <= place < question.stop and (question.distance or 0) > limit
            for question in context.questions
        )
        return END if far else context.ids[place]

    with oracle(model, monkeypatch, near):
        every, beyond = (quick(model, tokenizer, lengths=[1024], contexts=4, window=w) for w in (0, limit))
    assert 0 < every.select(metric="whole", distance=None)[0].original.value < 1
    (row,) = beyond.select(metric="whole", distance=None)
    assert (row.original.value, row.long_range) == (0, True)
    assert row.questions < every.select(metric="whole", distance=None)[0].questions
    flags = {row.distance: row.long_range for row in beyond.rows if row.distance is not None}
    assert flags == {octave: octave[0] > limit for octave in flags}
    assert {(128, 256), (256, 512)} <= set(flags)


def test_rows_by_distance_hold_every_answer_once(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with oracle(model, monkeypatch) as made:
        found = quick(model, tokenizer, lengths=[1024], contexts=4)
    rows = [row for row in found.select(metric="first") if row.distance is not None]
    asked = [question.distance for context in made.contexts for question in context.questions]
    assert {row.distance: row.questions for row in rows} == {
        octave: sum(_octave(distance or 0) == octave for distance in asked)
        for octave in {_octave(distance or 0) for distance in asked}
    }


@pytest.mark.parametrize(
    ("interval", "low", "wider"),
    [
        ((1.0, 1.0, 1.0), 0.0, (1.0, 0.97, 1.0)),
        ((0.0, 0.0, 0.0), 0.0, (0.0, 0.0, 0.03)),
        ((0.0, 0.0, 0.0), -1.0, (0.0, -0.03, 0.03)),
        ((0.5, 0.4, 0.6), 0.0, (0.5, 0.4, 0.6)),
    ],
)
def test_answers_that_all_agree_leave_three_over_their_number(interval: Any, low: float, wider: Any) -> None:
    assert sampling.rule_of_three(Interval(*interval), 100, low) == Interval(*wider)


@pytest.mark.parametrize(
    ("place", "octave"), [(0, (0, 128)), (127, (0, 128)), (128, (128, 256)), (255, (128, 256)), (2048, (2048, 4096))]
)
def test_octaves(place: int, octave: tuple[int, int]) -> None:
    assert _octave(place) == octave


@contextmanager
def forgetting(model: Any, patch: Any, contexts: list[Context], share: float) -> Iterator[None]:
    """A model that answers right, but for some of the questions of every context."""

    def some(context: Context, place: int) -> int:
        for number, question in enumerate(context.questions):
            if question.start <= place < question.stop and number < share * len(context.questions):
                return END
        return context.ids[place]

    made = Oracle(model.config.vocab_size, some)
    made.contexts = contexts
    with patch.context() as inner:
        inner.setattr(model, "forward", made)
        yield


@pytest.mark.parametrize(("share", "verdict"), [(0.0, "equivalent"), (0.5, "worse")])
def test_a_change_is_paired_with_the_original(
    model: Any, tokenizer: Any, share: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"contexts": 40, "generation": False, "label": "x"}
    with oracle(model, monkeypatch) as made:
        found = quick(model, tokenizer, under=lambda: forgetting(model, monkeypatch, made.contexts, share), **settings)
    (row,) = found.select(metric="first", distance=None)
    far = 3 / 160
    assert row.original == Interval(1, 1 - far, 1)
    assert row.changed == Interval(1 - share, 1 - share - far, min(1, 1 - share + far))
    assert row.change == Interval(-share, -share - far, -share + far)
    assert (row.verdict, row.margin, found.label) == (verdict, 0.02, "x")


def test_loss_by_position_is_that_of_the_forward(model: Any, tokenizer: Any) -> None:
    text = " ".join(f"Boat {i} left with {i * i % 97} barrels of salt." for i in range(40))
    found = quick(model, tokenizer, "loss", texts=text, contexts=2)
    ids = torch.tensor([tokenizer(text)["input_ids"][:1024]]).view(2, 512)
    with torch.no_grad():
        logs = model(ids).logits.log_softmax(dim=-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    for octave, part in [(None, slice(None)), ((0, 128), slice(0, 128)), ((256, 512), slice(256, None))]:
        (row,) = found.select(metric="loss", distance=octave)
        assert row.original.value == pytest.approx(-float(logs[:, part].mean()), abs=1e-4)
    assert found.select(metric="loss", distance=None)[0].floor == pytest.approx(np.log(model.config.vocab_size))


def test_own_questions_are_a_task(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with oracle(model, monkeypatch):
        found = quick(model, tokenizer, [], questions=[("2 + 2 =", "4"), ("Say: ", "ab cd")])
    rows = found.select(task="own", distance=None)
    assert {row.metric: row.original.value for row in rows if row.metric in ACCURACIES} == dict.fromkeys(ACCURACIES, 1)
    assert {row.contexts for row in rows} == {2}


def test_own_questions_are_named_alone_or_with_others(model: Any, tokenizer: Any) -> None:
    questions = [("2 + 2 =", "4"), ("Say: ", "ab cd")]
    alone = quick(model, tokenizer, "own", questions=questions)
    assert {row.task for row in alone.rows} == {"own"}
    assert {row.task for row in quick(model, tokenizer, ["own", "loss"], questions=questions).rows} == {"loss", "own"}


def test_generation_under_a_plan_uses_its_cache(model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[list[int]] = []

    class Applied:
        def cache(self) -> list[int]:
            caches.append([])
            return caches[-1]

    @contextmanager
    def under() -> Iterator[Applied]:
        yield Applied()

    with oracle(model, monkeypatch) as made:
        found = quick(model, tokenizer, under=under, label="x")
    assert len(caches) == 2
    assert {id(cache) for _, cache in made.calls if cache is not None} >= set(map(id, caches))
    (row,) = found.select(metric="generated_whole", distance=None)
    assert row.changed is not None
    assert row.changed.value == 1
    assert new_cache(None) is None


def test_a_real_plan_is_evaluated_with_and_without_a_streaming_cache(model: Any, tokenizer: Any) -> None:
    plan = Plan("tiny", model_fingerprint(model), ((0, 0), (0, 1)), ((0, 0),), (), Substitute(resolve("elu1")))
    found = quick(model, tokenizer, "needle", under=lambda: apply(model, plan), label="plan", contexts=1)
    (row,) = found.select(metric="answer_loss", distance=None)
    assert row.change is not None
    assert row.change.value != 0
    with swap(model, plan.heads, plan.substitute):
        alone = quick(model, tokenizer, "needle", contexts=1)
    assert alone.select(metric="answer_loss", distance=None)[0].original == row.changed
    top = Plan("tiny", plan.fingerprint, plan.heads, plan.groups, (), Substitute(resolve("top_k")))
    with apply(model, top) as applied, pytest.raises(UnsupportedError):
        applied.cache()
    assert quick(model, tokenizer, "needle", under=lambda: apply(model, top), label="top", contexts=1).rows


@pytest.mark.parametrize("name", ["elu1", "window:w=32,sinks=2"])
def test_the_cache_of_a_plan_generates_what_the_model_s_own_does(tokenizer: Any, name: str) -> None:
    model = sharp_llama(max_position_embeddings=512, tie_word_embeddings=False)
    with torch.no_grad():
        for weights in (weights for key, weights in model.named_parameters() if "q_proj" in key or "o_proj" in key):
            weights.mul_(6)  # so that softmax is far from the mean of values, and heads decide
    heads = tuple((layer, head) for layer in (0, 1) for head in range(4))[:7]
    groups = ((0, 0), (0, 1), (1, 0))
    plan = Plan("tiny", model_fingerprint(model), heads, groups, (), Substitute(resolve(name)))
    ids = np.random.default_rng(0).integers(3, 200, 200).tolist()
    with torch.inference_mode():
        alone = _decode(model, tokenizer, ids, None, 30)[0]
        with apply(model, plan) as applied:
            cache = new_cache(applied)
            streamed, used, _ = _decode(model, tokenizer, ids, cache, 30)
            whole = _decode(model, tokenizer, ids, None, 30)[0]
    assert used is cache
    assert streamed == whole
    assert len(whole) > 1
    assert whole != alone


def test_an_interrupted_evaluation_resumes(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[Context] = []

    limit = [9]

    def counting(model: Any, context: Context) -> Any:
        if len(scored) == limit[0]:
            raise InterruptedError
        scored.append(context)
        return score_answers(model, context)

    settings = {"contexts": 12, "generation": False, "folder": tmp_path / "parts"}
    with monkeypatch.context() as patch:
        patch.setattr("softgap.evaluation.sampling.score_answers", counting)
        with pytest.raises(InterruptedError):
            quick(model, tokenizer, **settings)
        limit[0] = 99
        scored.clear()
        found = quick(model, tokenizer, **settings)
    assert len(scored) == 4, "a finished block of 8 is not scored again"
    assert found.to_json() == quick(model, tokenizer, contexts=12, generation=False).to_json()


def test_two_changes_are_compared_with_each_other(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    def under(name: str) -> Any:
        return lambda: swap(model, [(0, 0), (1, 2)], name)

    settings = {"generation": False, "folder": tmp_path}
    alone = [
        quick(model, tokenizer, "needle", under=under(name), label=name, **settings) for name in ("elu1", "uniform")
    ]
    both = quick(
        model, tokenizer, "needle", under=under("elu1"), label="elu1",
        against=under("uniform"), against_label="uniform", generation=False,
    )  # fmt: skip
    first, second = (found.select(metric="answer_loss", distance=None)[0] for found in alone)
    (row,) = both.select(metric="answer_loss", distance=None)
    assert (row.changed, row.original) == (first.changed, second.changed)
    assert (both.label, both.against, alone[0].against) == ("elu1", "uniform", "")
    assert row.change is not None
    assert row.change.value == pytest.approx(first.changed.value - second.changed.value)


def test_finished_work_of_another_change_is_not_used(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    def under(name: str) -> Any:
        return lambda: swap(model, [(0, 0), (1, 2)], name)

    first, second = (
        quick(model, tokenizer, "needle", under=under(name), label=name, folder=tmp_path, generation=False)
        for name in ("elu1", "uniform")
    )
    rows = [found.select(metric="answer_loss", distance=None)[0] for found in (first, second)]
    assert rows[0].original == rows[1].original
    assert rows[0].changed != rows[1].changed


def test_contexts_are_drawn_until_the_intervals_are_narrow(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oracle(model, monkeypatch):
        sure = quick(model, tokenizer, contexts=None, generation=False)
        one_each = quick(model, tokenizer, "needle", contexts=None, generation=False)
    (row,) = sure.select(metric="first", distance=None)
    assert (row.contexts, row.questions) == (sampling.FEWEST, 64)
    (row,) = one_each.select(metric="first", distance=None)
    assert row.contexts == 32, "32 answers that agree leave 3 / 32 on one side"
    assert row.measurable
    rng = np.random.default_rng(0)
    with oracle(model, monkeypatch, guess(rng)):
        unsure = quick(model, tokenizer, pairs=[2], contexts=40, generation=False)
    assert unsure.select(metric="first", distance=None)[0].contexts == 40
    wide = [row for row in unsure.rows if row.metric == "whole" and row.distance is None]
    assert not _narrow(wide, headline=False)


def test_progress_tells_the_task_and_the_length(model: Any, tokenizer: Any) -> None:
    told: list[tuple[str, float]] = []
    quick(model, tokenizer, ["needle", "loss"], progress=lambda stage, share: told.append((stage, share)))
    assert told == [("needle at 512 tokens", 0.0), ("loss at 512 tokens", 0.5)]


def test_what_does_not_fit_is_left_out_with_a_note(model: Any, tokenizer: Any) -> None:
    found = quick(model, tokenizer, ["recall", "loss"], pairs=[40])
    assert {row.task for row in found.rows} == {"loss"}
    assert re.match(r"recall at 512 tokens was left out: a context of 512 tokens is too short", found.notes[0])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tasks": ["recal"]}, "unknown task 'recal'; did you mean 'recall'?"),
        ({"lengths": [4096]}, "lengths must be a whole number from 64 to 2048, got 4096; the model's own context is"),
        ({"lengths": [3]}, "lengths must be a whole number from 64 to 2048, got 3"),
        ({"pairs": [0]}, "pairs must be a whole number from 1, got 0"),
        ({"contexts": 0}, "contexts must be a whole number from 1, got 0"),
        ({"window": -1}, "window must be a whole number from 0, got -1"),
        ({"pairs": [50], "tasks": "recall"}, "recall at 512 tokens was left out: a context of 512 tokens is too short"),
        ({"tasks": []}, "no task was given; name at least one"),
        ({"tasks": "own"}, "the task 'own' takes your own questions, got none; give them as questions=, or as --quest"),
        ({"tasks": [], "questions": [("a" * 3000, "b")]}, "a prompt with its answer must fit into the model's context"),
        ({"folder": "parts", "under": lambda: None}, "a change needs a label where a folder is given, got none"),
    ],
)
def test_bad_input_is_one_sentence(model: Any, tokenizer: Any, settings: Any, sentence: str) -> None:
    with pytest.raises(SoftgapError, match=re.escape(sentence)):
        quick(model, tokenizer, **settings)

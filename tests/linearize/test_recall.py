"""Recall counts first tokens, and whole answers beside them, on as many lists as two hundredths take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softgap.errors import SoftgapError
from softgap.linearize import Sequences, find_plan, load_plan, recall_sequences
from softgap.linearize.recall import (
    BLOCK_LISTS,
    FEWEST_LISTS,
    HALF_WIDTH,
    MOST_LISTS,
    RecallTest,
    half_widths,
)
from softgap.linearize.sequences import Reading, correct_tokens, read_swapped, score_forward
from support.linearize_cases import sharp_llama
from support.model_examples import byte_tokenizer

TEXT = " ".join(f"Cart {i} carried {i * 7 % 31} crates of apples over the bridge." for i in range(60))
QUESTIONS = 12


@pytest.fixture(scope="module")
def small() -> Any:
    return sharp_llama(max_position_embeddings=512).float()


@pytest.fixture(scope="module")
def recall_lists(small: Any) -> Sequences:
    return recall_sequences(small, byte_tokenizer(), 5, pairs=6, seed=1)


def knowing(small: Any, recall_lists: Sequences, known: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A forward whose top token is the right one where ``known``, and another one elsewhere."""

    def forward(input_ids: Any, **settings: Any) -> Any:
        rows = [int((recall_lists.ids[:, :-1] == ids).all(dim=-1).int().argmax()) for ids in input_ids]
        wanted = recall_lists.ids[rows, 1:]
        said = torch.where(known[rows], wanted, (wanted + 1) % small.config.vocab_size)
        logits = torch.nn.functional.one_hot(said, small.config.vocab_size).float()
        return type("Output", (), {"logits": logits, "past_key_values": None})()

    monkeypatch.setattr(small, "forward", forward)
    return small


def test_first_tokens_alone_are_recall_without_whole_answers(
    small: Any, recall_lists: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert recall_lists.first is not None
    assert (recall_lists.scored.sum() > 2 * recall_lists.first.sum()).item(), "words are several bytes"
    model = knowing(small, recall_lists, recall_lists.first, monkeypatch)
    found = read_swapped(model, None, recall_lists, [], None)
    assert found.recall.tolist() == [1] * 5
    assert found.whole_answers.tolist() == [0] * 5


def test_later_tokens_alone_are_no_recall(small: Any, recall_lists: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    model = knowing(small, recall_lists, recall_lists.scored & ~recall_lists.first, monkeypatch)  # type: ignore[operator]
    found = read_swapped(model, None, recall_lists, [], None)
    assert found.recall.tolist() == [0] * 5
    assert found.whole_answers.tolist() == [0] * 5


def test_answers_count_one_by_one(small: Any, recall_lists: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    """All right in the first list; half of the answers whole in the second; one wrong last token in the third."""
    assert recall_lists.first is not None
    known = recall_lists.scored.clone()
    number = recall_lists.first.cumsum(dim=-1)
    known[1] &= number[1] <= 3
    last = int(recall_lists.scored[2].nonzero()[-1])
    known[2, last] = False
    known[3] = False
    found = read_swapped(knowing(small, recall_lists, known, monkeypatch), None, recall_lists, [], None)
    np.testing.assert_allclose(found.recall, [1, 3 / 6, 1, 0, 1])
    np.testing.assert_allclose(found.whole_answers, [1, 3 / 6, 5 / 6, 0, 1])


def test_every_answer_begins_once(recall_lists: Sequences) -> None:
    assert recall_lists.first is not None
    assert recall_lists.first.sum(dim=-1).tolist() == [6] * 5
    assert not (recall_lists.first & ~recall_lists.scored).any()
    before = torch.nn.functional.pad(recall_lists.scored, (1, 0))[:, :-1]
    assert torch.equal(recall_lists.first, recall_lists.scored & ~before), "a line break stands between two answers"


def test_right_tokens_are_those_of_a_whole_forward(small: Any, recall_lists: Sequences) -> None:
    whole = score_forward(small, recall_lists.ids, None).right * recall_lists.scored
    assert torch.equal(correct_tokens(small, recall_lists), whole)


def test_further_lists_are_others(small: Any) -> None:
    together, one, two = (
        recall_sequences(small, byte_tokenizer(), n, pairs=4, skip=skip) for n, skip in ((4, 0), (2, 0), (2, 2))
    )
    width = min(together.ids.shape[1], two.ids.shape[1])
    assert torch.equal(together.ids[2:, : width - 8], two.ids[:, : width - 8])
    assert not torch.equal(one.ids[:, :60], two.ids[:, :60])


class Simulated:
    """Lists of twelve questions with known chances, in the place of a model; the swapped one loses ``drop``."""

    def __init__(self, recall: float, drop: float, spread: float = 0.0) -> None:
        self.rng = np.random.default_rng(5)
        self.recall, self.drop, self.spread = recall, drop, spread
        self.lists: list[tuple[np.ndarray, np.ndarray]] = []

    def read(self, model: Any, text: Any, block: Any, heads: Any, chosen: Any, workers: Any) -> Reading:
        start, n = block
        while len(self.lists) < start + n:
            chance = np.clip(self.recall + self.spread * self.rng.standard_normal(), 0, 1)
            right = self.rng.random(QUESTIONS) < chance
            self.lists.append((right, right & (self.rng.random(QUESTIONS) >= self.drop)))
        rows = np.array([pair[bool(heads)].mean() for pair in self.lists[start : start + n]])
        return Reading(np.zeros(0), np.zeros(0), rows, rows)

    def test(self, monkeypatch: pytest.MonkeyPatch, lists: int | None = None) -> RecallTest:
        monkeypatch.setattr("softgap.linearize.recall.read_swapped", self.read)
        monkeypatch.setattr("softgap.linearize.recall.digest_of_sequences", str)
        return RecallTest(None, lambda skip, n: (skip, n), lists)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(("recall", "drop"), [(1.0, 0.0), (0.95, 0.02), (0.75, 0.05), (0.5, 0.5), (0.8, 0.9)])
def test_enough_lists_are_asked_for_two_hundredths(recall: float, drop: float, monkeypatch: pytest.MonkeyPatch) -> None:
    original, swapped = Simulated(recall, drop).test(monkeypatch).compare([(0, 0)], lambda: None)
    n = len(original.recall)
    assert FEWEST_LISTS <= n < MOST_LISTS
    assert len(swapped.recall) == n
    assert max(half_widths(original, swapped).values()) <= HALF_WIDTH == 0.02
    change = swapped.change_from(original)["recall"]
    assert change.half_width == pytest.approx((change.high - change.low) / 2)
    assert abs(change.value + recall * drop) < 2 * HALF_WIDTH
    if n > FEWEST_LISTS:
        fewer = [Reading(x.loss, x.accuracy, x.recall[:-BLOCK_LISTS], x.recall) for x in (original, swapped)]
        assert max(half_widths(*fewer).values()) > HALF_WIDTH, "one block less would not have been enough"


def test_the_half_width_is_that_of_lists_not_of_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that differ in difficulty need more of them than independent questions would."""
    easy, uneven = (
        len(Simulated(0.6, 0.1, spread).test(monkeypatch).compare([(0, 0)], lambda: None)[0].recall)
        for spread in (0.0, 0.2)
    )
    assert uneven > 1.5 * easy


def test_asking_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that are all right or all wrong: the cap holds, and the half-width says that it was not enough."""
    original, swapped = Simulated(0.5, 0.0, spread=9.0).test(monkeypatch).compare([(0, 0)], lambda: None)
    assert len(original.recall) == MOST_LISTS
    assert half_widths(original, swapped)["original"] > HALF_WIDTH


def test_a_given_number_of_lists_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    original, swapped = Simulated(0.5, 0.3).test(monkeypatch, lists=7).compare([(0, 0)], lambda: None)
    assert len(original.recall) == len(swapped.recall) == 7


def test_lists_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated(0.75, 0.05)
    test = simulated.test(monkeypatch)
    told: list[int] = []
    test.report = told.append
    first = test.compare([(0, 0)], lambda: None)
    recall_lists = len(told)
    again = test.compare([(0, 0)], lambda: None)
    np.testing.assert_array_equal(first[1].recall, again[1].recall)
    assert len(told) == recall_lists
    more = test.compare([(0, 0)], lambda: None, fewest=len(first[0].recall) + 1)
    assert len(more[0].recall) == len(first[0].recall) + BLOCK_LISTS


def test_a_plan_says_how_well_it_knows_recall(tmp_path: Path) -> None:
    small = sharp_llama(max_position_embeddings=512, num_hidden_layers=1).float()
    settings: dict[str, Any] = {"budget": 10.0, "length": 64, "score": "divergence", "correct": False, "by": "groups"}
    plan = find_plan(small, byte_tokenizer(), [TEXT], "elu1", recall_budget=1.0, **settings)
    assert plan.recall["decided_on"] >= FEWEST_LISTS, "a decision rests on as many lists as the report"
    assert plan.recall["lists"] >= plan.recall["decided_on"]
    assert plan.recall["questions"] == QUESTIONS * plan.recall["lists"]
    assert max(plan.recall["half_width"], plan.recall["half_width_original"]) <= HALF_WIDTH
    assert plan.recall["half_width"] == pytest.approx(plan.expected["recall"].half_width)
    assert set(plan.expected) == {"loss", "accuracy", "recall", "whole_answers"} == set(plan.original)
    document = json.loads(plan.save(tmp_path / "plan.json").read_text())
    assert document["recall"] == plan.recall
    assert load_plan(tmp_path / "plan.json").recall == plan.recall
    assert f"95 % half-width of its change is {plan.recall['half_width']:.3f}" in plan.recall_words()


def test_a_plan_of_version_0_1_still_loads(small: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"budget": 10.0, "length": 64, "score": "divergence", "correct": False, "recalls": 2}
    path = find_plan(small, byte_tokenizer(), [TEXT], "elu1", **settings).save(tmp_path / "plan.json")
    document = json.loads(path.read_text())
    del document["recall"], document["original"]["whole_answers"], document["expected"]["whole_answers"]
    path.write_text(json.dumps(document))
    old = load_plan(path)
    assert old.recall == {}
    assert old.recall_words() == ""
    assert set(old.expected) == {"loss", "accuracy", "recall"}


@pytest.mark.parametrize("distance", [0, 40, 150, (20, 180), (0, 30)])
def test_every_value_lies_farther_back_than_the_distance(small: Any, distance: int | tuple[int, ...]) -> None:
    """By token positions: a byte is a token here. Lists at several distances are asked for from the nearest on."""
    distances = (distance,) if isinstance(distance, int) else distance
    tokenizer = byte_tokenizer()
    filler = tokenizer("Nothing in this text is asked for, and it goes on and on. " * 5)["input_ids"]
    lists = recall_sequences(small, tokenizer, 3, pairs=4, seed=2, filler=filler, distance=distance)
    assert lists.first is not None
    for ids, first in zip(lists.ids, lists.first, strict=True):
        tokens = [str(tokenizer.decode([token])) for token in ids.tolist()]
        assert all(len(token) == 1 for token in tokens)
        text = "".join(tokens)
        places = (torch.nonzero(first)[:, 0] + 1).tolist()
        assert len(places) == 4 * len(distances)
        for number, place in enumerate(places):
            key = text[text[:place].rindex("\n") + 1 : place]
            source = text.index(f"\n{key}") + 1 + len(key)
            assert text[source : source + 3] == text[place : place + 3]
            assert distances[number // 4] < place - source
    with pytest.raises(SoftgapError, match="from 0 to the 5 tokens of other text"):
        recall_sequences(small, tokenizer, 1, filler=filler[:5], distance=6)

"""Generated long contexts: their answers are right, and their distances are what the token positions say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softgap.errors import SoftgapError
from softgap.tasks.generators import WORDS
from softgap.tasks.long_context import (
    COMMON,
    HOPS,
    LONG_TASKS,
    NEAREST,
    Context,
    Draw,
    Question,
    filler_sentences,
    filler_text,
    read_questions,
)

BEGIN = (1,)
VOCABULARY = range(2000, 2300)
SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.sampled_from([512, 777, 1024, 2048])


class WordTokens:
    """A tokenizer of words, spaces before them included, single punctuation marks and line breaks."""

    def __init__(self) -> None:
        self.pieces = ["<unk>", "<s>"]

    def encode(self, text: str) -> list[int]:
        ids = []
        for piece in re.findall(r" ?\w+|\n| ?[^\w\s]|\s", text):
            if piece not in self.pieces:
                self.pieces.append(piece)
            ids.append(self.pieces.index(piece))
        return ids

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self.pieces[i] for i in ids)


def drawn(task: str, seed: int, length: int = 1024, number: int = 0, pairs: int = 12) -> tuple[Context, WordTokens]:
    tokens = WordTokens()
    vocabulary = VOCABULARY if task == "induction" else ()
    draw = Draw(tokens.encode, length, np.random.default_rng(seed), number, BEGIN, vocabulary, pairs)
    return LONG_TASKS[task].make(draw), tokens


def read(context: Context, tokens: WordTokens, question: Question) -> tuple[str, str, str]:
    """What stands before a question, the question, and its answer, decoded."""
    before, asked = context.ids[1 : question.asked], context.ids[question.asked : question.start]
    return tokens.decode(before), tokens.decode(asked), tokens.decode(context.ids[question.start : question.stop])


def after_example(text: str) -> str:
    """The text of a task behind its example."""
    return text.split("\n\n", 1)[1]


@pytest.mark.parametrize("task", LONG_TASKS)
@settings(max_examples=15)
@given(seed=SEEDS, length=LENGTHS, number=st.integers(0, 9))
def test_a_context_has_its_length_and_its_questions_follow_one_another(
    task: str, seed: int, length: int, number: int
) -> None:
    context, _ = drawn(task, seed, length, number)
    assert 0.75 * length <= len(context.ids) <= length
    assert context.ids[:1] == BEGIN
    assert context.questions[-1].stop == len(context.ids)
    ends = [context.questions[0].asked, *(question.stop for question in context.questions[:-1])]
    for question, end in zip(context.questions, ends, strict=True):
        assert question.asked == end < question.start < question.stop
        assert 0 <= question.chance[1] <= question.chance[0] < 1


@settings(max_examples=25)
@given(seed=SEEDS, length=LENGTHS, number=st.integers(0, 9), pairs=st.integers(1, 20))
def test_recall_asks_every_pair_once_at_the_distance_of_its_line(
    seed: int, length: int, number: int, pairs: int
) -> None:
    context, tokens = drawn("recall", seed, length, number, pairs)
    before = tokens.decode(context.ids[1 : context.questions[0].asked])
    partner = dict(re.findall(r"^(\w+): (\w+)$", before, flags=re.MULTILINE))
    assert len(partner) == len(context.questions) == pairs
    asked = set()
    for question in context.questions:
        _, words, answer = read(context, tokens, question)
        key = words.strip().split("\n")[-1].removesuffix(":")
        asked.add(key)
        assert answer == f" {partner[key]}"
        assert question.items == (partner[key],)
        assert question.chance == (1 / pairs, 1 / pairs)
        # The line is found anew in the tokens: a break, the key, a colon, the value.
        line = tuple(tokens.encode(f"\n{key}: {partner[key]}\n"))
        places = [i for i in range(question.asked) if context.ids[i : i + len(line)] == line]
        source = places[0] + 3
        assert context.ids[source] == context.ids[question.start]
        assert question.distance == question.start - source
    assert asked == set(partner)


@settings(max_examples=25)
@given(seed=SEEDS, number=st.integers(0, 3))
def test_recall_takes_the_octaves_of_distance_in_turn(seed: int, number: int) -> None:
    context, _ = drawn("recall", seed, 2048, number, 8)
    least = NEAREST * 2 ** (number % 4)
    # Whole sentences of filler stop short of the gap by less than one sentence.
    assert all(least - 30 <= (question.distance or 0) < 2 * least + 30 for question in context.questions)


@pytest.mark.parametrize(("task", "asked"), [("needle", 1), ("multi-key", 1), ("multi-query", 4)])
@settings(max_examples=25)
@given(seed=SEEDS)
def test_needles_ask_for_the_words_of_their_keys(task: str, asked: int, seed: int) -> None:
    context, tokens = drawn(task, seed)
    (question,) = context.questions
    before, words, answer = read(context, tokens, question)
    secret = dict(re.findall(r"The secret word of the (\w+) is (\w+)\.", after_example(before)))
    assert len(secret) == (1 if task == "needle" else 4)
    keys = re.findall(r"the (\w+)(?=,| and| is| are)", words.partition(" of ")[2])
    assert len(keys) == asked
    assert answer == " " + ", ".join(secret[key] for key in keys)
    assert question.items == tuple(secret[key] for key in keys)
    assert question.distance == _from_last(context, tokens, question, [secret[key] for key in keys])


@settings(max_examples=25)
@given(seed=SEEDS)
def test_multi_value_asks_for_all_words_of_a_key_in_order(seed: int) -> None:
    context, tokens = drawn("multi-value", seed)
    (question,) = context.questions
    before, words, answer = read(context, tokens, question)
    found = re.findall(r"One secret word of the (\w+) is (\w+)\.", after_example(before))
    assert len(found) == 4
    assert {key for key, _ in found} == set(re.findall(r"of the (\w+) are", words))
    assert answer == " " + ", ".join(value for _, value in found)
    assert question.distance == _from_last(context, tokens, question, [value for _, value in found])


def _from_last(context: Context, tokens: WordTokens, question: Question, values: list[str]) -> int:
    """Positions from the last of these words before the question to the answer."""
    ids = {tokens.encode(f" {value}")[0] for value in values}
    return question.start - max(i for i in range(question.asked) if context.ids[i] in ids)


@settings(max_examples=25)
@given(seed=SEEDS)
def test_variables_are_those_that_reach_the_number(seed: int) -> None:
    context, tokens = drawn("variables", seed)
    (question,) = context.questions
    before, words, answer = read(context, tokens, question)
    value: dict[str, str] = {}
    for name, given_value in re.findall(r"Let (\w+) be (?:the value of )?(\w+)\.", after_example(before)):
        value[name] = value.get(given_value, given_value)
    (number,) = re.findall(r"whose value is (\d+) are", words)
    right = [name for name, its in value.items() if its == number]
    assert len(value) == 2 * (HOPS + 1)
    assert len(right) == HOPS + 1
    assert answer == " " + ", ".join(right)
    assert question.distance == _from_last(context, tokens, question, right[-1:])


@pytest.mark.parametrize("task", ["common-words", "frequent-words"])
@settings(max_examples=25)
@given(seed=SEEDS, length=st.one_of(st.integers(160, 300), LENGTHS))
def test_common_and_frequent_words_are_those_that_come_most_often(task: str, seed: int, length: int) -> None:
    context, tokens = drawn(task, seed, length)
    (question,) = context.questions
    before, _, answer = read(context, tokens, question)
    listed = after_example(before).removeprefix("A list of words:").split()
    counts = Counter(listed)
    answers = answer.strip().split(", ")
    assert len(answers) == COMMON
    others = max((count for word, count in counts.items() if word not in answers), default=0)
    assert min(counts[word] for word in answers) > others
    if task == "common-words":
        assert answers == sorted(answers, key=listed.index)
        assert {counts[word] for word in answers} == {counts[answers[0]]}
    else:
        assert [counts[word] for word in answers] == sorted({counts[word] for word in answers}, reverse=True)
    assert question.distance is None


def test_frequent_words_differ_in_their_counts_in_the_shortest_lists_too() -> None:
    differ = []
    for length in range(60, 160):
        try:
            context, tokens = drawn("frequent-words", length, length)
        except SoftgapError:
            continue
        before, _, answer = read(context, tokens, context.questions[0])
        counts = Counter(after_example(before).split())
        top = [counts[word] for word in answer.strip().split(", ")]
        rest = [count for word, count in counts.items() if word not in answer and len(word) == 4]
        differ.append(top[0] > top[1] > top[2] > max(rest))
    assert len(differ) > 10
    assert all(differ)


@settings(max_examples=25)
@given(seed=SEEDS, length=LENGTHS, number=st.integers(0, 9))
def test_copies_repeat_their_source_at_their_distance(seed: int, length: int, number: int) -> None:
    context, tokens = drawn("copying", seed, length, number)
    for question in context.questions:
        assert question.distance is not None
        answer = context.ids[question.start : question.stop]
        last = question.start - question.distance
        assert context.ids[last - len(answer) + 1 : last + 1] == answer
        assert last < context.questions[0].asked
        assert tokens.decode(answer).split() == list(question.items)


@settings(max_examples=25)
@given(seed=SEEDS, length=st.sampled_from([64, 100, 512, 1024]), number=st.integers(0, 9))
def test_random_tokens_come_again_at_their_distance(seed: int, length: int, number: int) -> None:
    context, _ = drawn("induction", seed, length, number)
    for question in context.questions:
        assert question.stop == question.start + 1
        assert question.distance is not None
        source = question.start - question.distance
        # The three tokens before the answer stand before its source too, and nowhere else before.
        assert context.ids[source - 3 : source + 1] == context.ids[question.start - 3 : question.stop]
        assert context.ids[: question.start].count(context.ids[source]) == 1


OUTCOMES: dict[str, Callable[[list[str]], list[str]]] = {
    "repeat": lambda words: words[:1] * 3,
    "reverse": lambda words: words[::-1],
    "capitals": lambda words: [words[0].upper()],
    "second": lambda words: words[1:2],
}


@settings(max_examples=25)
@given(seed=SEEDS, number=st.integers(0, 9))
def test_instructions_have_the_outcome_that_they_ask_for(seed: int, number: int) -> None:
    context, tokens = drawn("instructions", seed, number=number)
    (question,) = context.questions
    before, _, answer = read(context, tokens, question)
    instruction = after_example(before).split("\n")[0]
    words = [word for word in re.findall(r"\w+", instruction) if word in WORDS]
    assert answer.split() == OUTCOMES[context.setting](words)
    assert question.distance == _from_last(context, tokens, question, words)


@given(seed=SEEDS)
@settings(max_examples=10)
def test_filler_holds_no_word_that_is_asked_for(seed: int) -> None:
    sentences = filler_sentences(np.random.default_rng(seed))
    words = {word for _ in range(200) for word in re.findall(r"\w+", next(sentences))}
    assert words & set(WORDS) == set()


def test_filler_alone_fills_the_length() -> None:
    context = filler_text(Draw(WordTokens().encode, 300, np.random.default_rng(0), begin=BEGIN))
    assert 270 < len(context.ids) <= 300
    assert context.questions == ()


@pytest.mark.parametrize("task", LONG_TASKS)
def test_a_seed_gives_its_context_and_another_seed_another(task: str) -> None:
    assert drawn(task, 1)[0] == drawn(task, 1)[0]
    assert drawn(task, 1)[0] != drawn(task, 2)[0]


@pytest.mark.parametrize("task", LONG_TASKS)
def test_a_context_that_is_too_short_is_refused(task: str) -> None:
    with pytest.raises(SoftgapError, match=r"a context of 8 tokens is too short .*; choose longer contexts"):
        drawn(task, 0, 8)


def test_own_questions_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "2 + 2 =", "answer": "4"}\n\n{"prompt": "A", "answer": "B", "id": 3}\n')
    assert read_questions(str(file)) == [("2 + 2 =", "4"), ("A", "B")]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a"}', "line 1: 'answer' must hold some text, got None; add it"),
        ('["a"]', "line 1: 'prompt' must hold some text, got ['a']; add it"),
        (json.dumps({"prompt": " ", "answer": "b"}), "line 1: 'prompt' must hold some text, got ' '; add it"),
        ("", "must hold at least one question, got none; add one"),
    ],
)
def test_own_questions_that_cannot_be_used_are_refused(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(line)
    with pytest.raises(SoftgapError, match=re.escape(sentence)):
        read_questions(str(file))

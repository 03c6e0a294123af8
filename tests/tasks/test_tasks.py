"""Prompts from files and datasets, answers judged, and generated tasks whose answers are right."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from softgap.errors import SoftgapError
from softgap.tasks import TASKS, Prompt, generate_prompts, read_labels, read_prompts, resolve_scorer
from softgap.tasks.generators import RELATIONS, WORDS, draw_pairs

HEADER = "Type,Category,Question,Best Answer,Best Incorrect Answer,Correct Answers,Incorrect Answers,Source\n"


def judged(scoring: str, answer: str, *reference: str, **fields: object) -> str | None:
    return resolve_scorer(scoring).judge(answer, Prompt("0", "q", reference=reference, fields=fields))


@pytest.mark.parametrize(
    ("scoring", "answer", "reference", "label"),
    [
        ("exact", "  Paris. ", "paris", "right"),
        ("exact", "It is Paris", "paris", "wrong"),
        ("contains", "It is paris, of course", "Paris", "right"),
        ("contains", "comparison", "paris", "wrong"),
        ("contains", "New  York!", "new york", "right"),
        ("numeric", "10 + 5 is 1,015.50", "1015.5", "right"),
        ("numeric", "15, and not 16", "15", "wrong"),
        ("numeric", "-3", "3", "wrong"),
        ("numeric", "none", "3", "wrong"),
    ],
)
def test_answers_are_judged(scoring: str, answer: str, reference: str, label: str) -> None:
    assert judged(scoring, answer, reference) == label


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("False. It is not true.", "wrong"),
        ("I think it is true", "right"),
        ("A) because", "right"),
        ("(b)", "wrong"),
        ("Perhaps", None),
    ],
)
def test_the_choice_named_first_counts(answer: str, label: str | None) -> None:
    assert judged("choice", answer, "true", choices=["true", "false"]) == label


def test_a_scoring_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_scoring.py").write_text("def f(a, p):\n    return p['tone'] if a else None\nx = 3\n")
    assert judged("own_scoring:f", "yes", tone="warm") == "warm"
    assert judged("own_scoring:f", "", tone="warm") is None
    with pytest.raises(SoftgapError, match="the scoring 'own_scoring:x' must be a function, got 3"):
        resolve_scorer("own_scoring:x")
    assert str(tmp_path) not in sys.path


def test_truthfulqa_layout_gives_both_answers_of_a_question(tmp_path: Path) -> None:
    rows = 'A,Moon,"Is it cheese, really?",It is rock,It is cheese,It is rock; Rock,Cheese; Brie,here\n'
    (tmp_path / "t.csv").write_text(HEADER + rows + rows.replace("Moon", "Sun"))
    prompts = read_prompts(str(tmp_path / "t.csv"))
    assert [(p.sample_id, p.completion, p.label, p.group) for p in prompts[:3]] == [
        ("0-correct", "It is rock", "correct", "0"),
        ("0-incorrect", "It is cheese", "incorrect", "0"),
        ("1-correct", "It is rock", "correct", "1"),
    ]
    assert prompts[0].prompt == "Is it cheese, really?"
    assert (prompts[0].reference, prompts[3].fields["category"]) == (("It is rock", "Rock"), "Sun")


def test_a_dataset_by_name_with_its_own_field_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "set").mkdir(parents=True)
    rows = [{"question": f"q{i}", "answer": str(i), "hard": i} for i in range(3)]
    (tmp_path / "mine" / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = read_prompts("mine/set@train", renamed={"prompt": "question", "reference": "answer"})
    assert [(p.prompt, p.reference, p.fields["hard"]) for p in prompts] == [(f"q{i}", (str(i),), i) for i in range(3)]
    with pytest.raises(SoftgapError, match="mine/set, row 0 has no field 'nope' for 'prompt', it has question"):
        read_prompts("mine/set", renamed={"prompt": "nope"})


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SoftgapError, match=r"needs the library datasets; install it with: pip install 'softgap\[data"):
        read_prompts("some/set")


def test_prompts_survive_their_json() -> None:
    prompt = Prompt("a", "q", "c", ("1", "2"), "l", "g", {"x": [1, {"y": None}]})
    from softgap.tasks.prompts import prompt_from

    assert prompt_from(json.loads(json.dumps(prompt.to_json())), "", "") == prompt


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("id,label\n,x\n", "line 2: 'id' must be text or a whole number, got ''; add it"),
        ("id,label\na,x\na,y\n", "line 3: every id must be different, got 'a' again; leave one out"),
        ("id,lable\na,x\n", "line 2: 'label' must be text, got None; write it in quotes"),
        ("id,label\n", "must hold at least one label, got none; add rows with id and label"),
    ],
)
def test_labels_that_cannot_be_read_are_said(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(SoftgapError, match=re.escape(sentence)):
        read_labels(str(tmp_path / "l.csv"))


def test_a_seed_keeps_its_prompts() -> None:
    """Studies are made again from their seed: what a seed draws is part of the format."""
    recall, copying = (generate_prompts(name, 1, seed=5)[0] for name in ("recall", "copying"))
    assert recall.prompt == (
        "Here is a list of words with their codes.\nocean: 4424\njungle: 8618\nlantern: 8179\n"
        "What is the code of ocean? Answer with the code only."
    )
    assert recall.reference == ("4424",)
    assert copying.reference == ("prairie stone apple stone",)


def test_the_earlier_name_of_a_task_gives_the_same_prompts_under_their_earlier_ids() -> None:
    earlier, present = (generate_prompts(name, 8, seed=5) for name in ("lookup", "recall"))
    assert TASKS["lookup"] is TASKS["recall"]
    assert "lookup" not in TASKS
    assert [prompt.sample_id for prompt in earlier] == [f"lookup-{i:05d}" for i in range(8)]
    assert [(a.prompt, a.reference) for a in earlier] == [(b.prompt, b.reference) for b in present]
    with pytest.raises(KeyError):
        TASKS["lockup"]


def test_pairs_are_different_words_with_values_of_their_own() -> None:
    for values in ("codes", "words"):
        drawn = draw_pairs(40, values, rng=np.random.default_rng(2))
        assert all(len(set(side)) == 40 for side in zip(*drawn, strict=True))
        assert {key for key, _ in drawn} < set(WORDS)
    with pytest.raises(SoftgapError, match=f"pairs must be between 1 and the {len(WORDS)} words, got 0"):
        draw_pairs(0, "codes", rng=np.random.default_rng(2))


def test_answers_of_generated_tasks_are_right() -> None:
    for prompt in generate_prompts("recall", 40, seed=3):
        pairs = dict(re.findall(r"^(\w+): (\d+)$", prompt.prompt, flags=re.MULTILINE))
        asked = re.search(r"code of (\w+)\?", prompt.prompt)
        assert asked is not None
        assert (pairs[asked[1]],) == prompt.reference
        assert len(pairs) == prompt.fields["difficulty"]
    for prompt in generate_prompts("arithmetic", 40, seed=3):
        asked = re.search(r"What is (\d+ [+-] \d+)\?", prompt.prompt)
        assert asked is not None
        assert prompt.reference == (str(eval(asked[1])),)
        assert int(prompt.reference[0]) >= 0
    for prompt in generate_prompts("copying", 8, seed=3):
        assert prompt.prompt.endswith("\n" + prompt.reference[0])
    facts = {relation.sentence.format(subject=s, object=o) for relation in RELATIONS for s, o in relation.pairs}
    statements = generate_prompts("statements", 300, seed=3)
    assert all((p.fields["statement"] in facts) == (p.reference == ("true",)) for p in statements)
    assert Counter(p.reference for p in statements) == {("true",): 150, ("false",): 150}


@pytest.mark.parametrize("name", TASKS)
def test_a_right_answer_is_judged_right(name: str) -> None:
    scorer = resolve_scorer(TASKS[name].scoring)
    prompts = generate_prompts(name, 8)
    scorer.check(prompts, "here")
    assert {scorer.judge(prompt.reference[0], prompt) for prompt in prompts} == {"right"}
    assert {scorer.judge("nothing", prompt) for prompt in prompts} <= {"wrong", None}

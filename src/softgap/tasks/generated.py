"""Tasks with known answers, made from a seed: hard enough that a small model gets some of them wrong.

Each is a function of one generator and a difficulty. The prompts of a task of n are the same for the same seed, the
difficulties take turns, and the asked item, the numbers and the words are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from softgap.errors import ValueInputError, unknown_name
from softgap.tasks.facts import RELATIONS
from softgap.tasks.prompts import Prompt
from softgap.tasks.words import WORDS, draw_pairs

__all__ = ["TASKS", "Task", "generate_prompts"]

MOST_PROMPTS = 1_000_000


@dataclass(frozen=True)
class Task:
    """How prompts of a kind are made and judged.

    Attributes
    ----------
    make
        Fields of one prompt: from a generator, a difficulty and the number of the prompt.
    difficulties
        Taken in turn unless others are asked for.
    measure
        What a difficulty counts.
    scoring, max_new_tokens
        How an answer is judged, and how long it may be.
    """

    make: Callable[[np.random.Generator, int, int], dict[str, Any]]
    difficulties: tuple[int, ...]
    measure: str
    scoring: str
    max_new_tokens: int
    hardest: int


def generate_prompts(name: str, n: int, *, seed: int = 0, difficulties: Sequence[int] | None = None) -> list[Prompt]:
    """``n`` prompts of a task.

    Parameters
    ----------
    difficulties
        Whole numbers from 1, taken in turn; those of the task by default.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    if not 1 <= n <= MOST_PROMPTS:
        raise ValueInputError(f"n must be from 1 to {MOST_PROMPTS} prompts, got {n}; 400 are usual")
    task = TASKS[name]
    levels = tuple(task.difficulties if difficulties is None else difficulties)
    for level in levels:
        if not 1 <= level <= task.hardest:
            raise ValueInputError(
                f"the difficulty of '{name}' is {task.measure}, from 1 to {task.hardest}, got {level}; choose another"
            )
    if not levels:
        raise ValueInputError(f"'{name}' needs at least one difficulty, got none; leave it out for {task.difficulties}")
    prompts = []
    for i in range(n):
        # A generator each, so that the first prompts of 400 are those of 40.
        rng = np.random.default_rng([seed, i])
        level = levels[i % len(levels)]
        made = task.make(rng, level, i)
        fields = {"task": name, "difficulty": level, **made.pop("fields", {})}
        reference = (made.pop("reference"),)
        prompts.append(Prompt(sample_id=f"{name}-{i:05d}", reference=reference, fields=fields, line=i + 1, **made))
    return prompts


def _lookup(rng: np.random.Generator, pairs: int, number: int) -> dict[str, Any]:
    drawn = draw_pairs(pairs, "codes", rng=rng)
    asked = int(rng.integers(pairs))
    key, code = drawn[asked]
    listed = "\n".join(f"{word}: {its}" for word, its in drawn)
    return {
        "prompt": f"Here is a list of words with their codes.\n{listed}\nWhat is the code of {key}? "
        "Answer with the code only.",
        "reference": code,
        "fields": {"place": asked},
    }


def _arithmetic(rng: np.random.Generator, digits: int, number: int) -> dict[str, Any]:
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits
    a, b = (int(value) for value in rng.integers(low, high, size=2))
    sign = "+-"[int(rng.integers(2))]
    if sign == "-" and b > a:
        a, b = b, a
    return {
        "prompt": f"What is {a} {sign} {b}? Answer with the number only.",
        "reference": str(a + b if sign == "+" else a - b),
        "fields": {"operation": sign},
    }


def _copying(rng: np.random.Generator, words: int, number: int) -> dict[str, Any]:
    text = " ".join(str(word) for word in rng.choice(WORDS, size=words))
    return {"prompt": f"Repeat these words exactly, in the same order:\n{text}", "reference": text}


def _statements(rng: np.random.Generator, level: int, number: int) -> dict[str, Any]:
    """True and false in turn: a false statement takes the object of another subject of its relation."""
    facts = [(relation, i) for relation in RELATIONS for i in range(len(relation.pairs))]
    relation, place = facts[int(rng.integers(len(facts)))]
    subject, value = relation.pairs[place]
    true = number % 2 == 0
    shown = value if true else str(rng.choice(sorted({other for _, other in relation.pairs} - {value})))
    statement = relation.sentence.format(subject=subject, object=shown)
    return {
        "prompt": f"Is this statement true or false? {statement} Answer with one word, true or false.",
        "reference": "true" if true else "false",
        "group": f"{relation.name}-{subject}",
        "fields": {"relation": relation.name, "choices": ["true", "false"], "statement": statement},
    }


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "lookup": Task(_lookup, (3, 4, 6, 8), "the number of pairs", "contains", 16, len(WORDS)),
        "arithmetic": Task(_arithmetic, (1, 2, 3), "the number of digits", "numeric", 16, 9),
        "copying": Task(_copying, (4, 8, 16, 32), "the number of words", "contains", 96, 512),
        "statements": Task(_statements, (1,), "always 1", "choice", 8, 1),
    }
)
"""The built-in tasks by name."""

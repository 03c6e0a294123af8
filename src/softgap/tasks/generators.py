"""Tasks with known answers, generated from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from softgap.errors import ValueInputError, unknown_name
from softgap.tasks.prompts import Prompt

__all__ = ["RELATIONS", "TASKS", "WORDS", "Task", "draw_pairs", "generate_prompts"]


@dataclass(frozen=True)
class Relation:
    """A sentence with a subject and an object, and which object belongs to which subject."""

    name: str
    sentence: str
    pairs: tuple[tuple[str, str], ...]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    entries = (entry.partition("=") for entry in text.split(";"))
    return tuple((subject.strip(), value.strip()) for subject, _, value in entries)


RELATIONS = (
    Relation(
        "capital",
        "The capital of {subject} is {object}.",
        _pairs(
            "France=Paris; Italy=Rome; Spain=Madrid; Germany=Berlin; Japan=Tokyo; Egypt=Cairo; Norway=Oslo; "
            "Greece=Athens; Portugal=Lisbon; Poland=Warsaw; Austria=Vienna; Hungary=Budapest; Sweden=Stockholm; "
            "Peru=Lima; Cuba=Havana; Kenya=Nairobi; Ireland=Dublin; Finland=Helsinki; Denmark=Copenhagen; "
            "Thailand=Bangkok; Argentina=Buenos Aires; Canada=Ottawa; Australia=Canberra; Chile=Santiago"
        ),
    ),
    Relation(
        "symbol",
        "The chemical symbol of {subject} is {object}.",
        _pairs(
            "hydrogen=H; helium=He; carbon=C; nitrogen=N; oxygen=O; sodium=Na; magnesium=Mg; aluminium=Al; sulfur=S; "
            "chlorine=Cl; potassium=K; calcium=Ca; iron=Fe; copper=Cu; zinc=Zn; silver=Ag; tin=Sn; gold=Au; "
            "mercury=Hg; lead=Pb"
        ),
    ),
    Relation(
        "legs",
        "The number of legs of a healthy {subject} is {object}.",
        _pairs("dog=four; spider=eight; ant=six; chicken=two; snake=zero; horse=four; bee=six; ostrich=two"),
    ),
    Relation(
        "opposite",
        "The opposite of {subject} is {object}.",
        _pairs(
            "hot=cold; tall=short; dark=light; wet=dry; early=late; empty=full; noisy=quiet; "
            "rich=poor; strong=weak; young=old; slow=fast; deep=shallow; sharp=blunt; rough=smooth; open=closed"
        ),
    ),
    Relation(
        "young",
        "A young {subject} is called a {object}.",
        _pairs(
            "dog=puppy; cat=kitten; cow=calf; sheep=lamb; horse=foal; goose=gosling; pig=piglet; frog=tadpole; "
            "duck=duckling; swan=cygnet; kangaroo=joey; hare=leveret"
        ),
    ),
    Relation(
        "after",
        "The day after {subject} is {object}.",
        _pairs(
            "Monday=Tuesday; Tuesday=Wednesday; Wednesday=Thursday; Thursday=Friday; Friday=Saturday; "
            "Saturday=Sunday; Sunday=Monday"
        ),
    ),
    Relation(
        "continent",
        "{subject} lies in {object}.",
        _pairs(
            "Nigeria=Africa; Brazil=South America; Mexico=North America; India=Asia; Belgium=Europe; Ghana=Africa; "
            "Vietnam=Asia; Bolivia=South America; Romania=Europe; Mongolia=Asia; Morocco=Africa; Colombia=South America"
        ),
    ),
)


"""Every object belongs to the subject before it, and to no other of the same relation unless it stands there again."""


_LIST = """
amber anchor apple arrow basin basket beacon blanket bottle branch bridge bucket butter button cabin candle
carpet castle cedar chain cherry circle cloud copper coral cotton crystal desert dragon eagle ember engine
falcon feather fiddle forest garden ginger glacier hammer harbor hazel honey island ivory jacket jungle
kettle ladder lantern lemon magnet marble meadow mirror needle nickel ocean olive orchid paper pebble pepper
pillow planet pocket prairie quartz rabbit ribbon river rocket saddle salmon satin shadow silver spider
spring stone sugar summer table temple thunder ticket timber tunnel turtle valley velvet violet walnut
willow window winter wool yellow zephyr
"""


WORDS = tuple(_LIST.split())


def draw_pairs(n: int, values: Literal["codes", "words"], *, rng: np.random.Generator) -> list[tuple[str, str]]:
    """``n`` different words, each with a value of its own.

    Parameters
    ----------
    values
        ``codes``: numbers of four digits; ``words``: words of the same list.
    """
    if not 1 <= n <= len(WORDS):
        raise ValueInputError(f"pairs must be between 1 and the {len(WORDS)} words, got {n}")
    keys = rng.permutation(WORDS)[:n]
    values_drawn = rng.permutation(WORDS)[:n] if values == "words" else rng.choice(9000, size=n, replace=False) + 1000
    return [(str(key), str(value)) for key, value in zip(keys, values_drawn, strict=True)]


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
    if name not in TASKS and name not in _EARLIER_NAMES:
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
        entry = task.make(rng, level, i)
        fields = {"task": name, "difficulty": level, **entry.pop("fields", {})}
        reference = (entry.pop("reference"),)
        prompts.append(Prompt(sample_id=f"{name}-{i:05d}", reference=reference, fields=fields, line=i + 1, **entry))
    return prompts


def _associative_recall(rng: np.random.Generator, pairs: int, number: int) -> dict[str, Any]:
    pairs_drawn = draw_pairs(pairs, "codes", rng=rng)
    index = int(rng.integers(pairs))
    key, code = pairs_drawn[index]
    listed = "\n".join(f"{word}: {its}" for word, its in pairs_drawn)
    return {
        "prompt": f"Here is a list of words with their codes.\n{listed}\nWhat is the code of {key}? "
        "Answer with the code only.",
        "reference": code,
        "fields": {"place": index},
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


# Accepted and not listed. Prompts carry the name they were generated by, so that a study begun under it resumes.
_EARLIER_NAMES = {"lookup": "recall"}


class _TaskTable(dict[str, Task]):
    """Tasks by name; an earlier name gives the same task."""

    def __missing__(self, name: str) -> Task:
        return self[_EARLIER_NAMES[name]]


TASKS: Mapping[str, Task] = MappingProxyType(
    _TaskTable(
        {
            "recall": Task(_associative_recall, (3, 4, 6, 8), "the number of pairs", "contains", 16, len(WORDS)),
            "arithmetic": Task(_arithmetic, (1, 2, 3), "the number of digits", "numeric", 16, 9),
            "copying": Task(_copying, (4, 8, 16, 32), "the number of words", "contains", 96, 512),
            "statements": Task(_statements, (1,), "always 1", "choice", 8, 1),
        }
    )
)


"""The built-in tasks by name."""

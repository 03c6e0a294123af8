"""Long contexts with known answers, generated from a seed: recall by distance, needles, tracking, counting, copying.

A context is a row of tokens whose questions stand at its end. ``Question.distance`` counts token positions from the
last token of an answer's source to the first token of the answer. The source of an answer at distance d > w lies
outside a window of w keys: no query that predicts a token of the answer sees it there.

Needles, variable tracking, common and frequent words follow the definitions of RULER (Hsieh et al. 2024,
arXiv:2404.06654). All sentences are the project's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from softgap.errors import ValueInputError
from softgap.inputs import file_text, shortened
from softgap.tasks.generators import WORDS, draw_pairs

__all__ = ["LONG_TASKS", "Context", "Draw", "LongTask", "Question", "filler_text", "read_questions"]

Encode = Callable[[str], list[int]]
Span = tuple[int, int]

# Distances begin here: below it, an ordinary window sees the source.
NEAREST = 128
NEEDLES = 4
HOPS = 3
CHAINS = 2
COMMON = 3
COPIED = 64


@dataclass(frozen=True)
class Question:
    """One question of a context and its answer, by token positions.

    Attributes
    ----------
    asked, start, stop
        The question is ``ids[asked:start]``, its answer ``ids[start:stop]``.
    distance
        Token positions from the last token of the nearest source to the answer's first token; None without a source.
    items
        Words that an answer must contain; empty where the tokens themselves are compared.
    chance
        Shares that a guess gets which knows the candidates but not the context: of first tokens and of whole answers.
    """

    asked: int
    start: int
    stop: int
    distance: int | None
    items: tuple[str, ...] = ()
    chance: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Context:
    """Tokens, the questions at their end, and what distinguishes the context from others of its task."""

    ids: tuple[int, ...]
    questions: tuple[Question, ...]
    setting: str = ""


@dataclass(eq=False)
class Draw:
    """What a generator draws a context from.

    Attributes
    ----------
    encode
        Token ids of a text, without special tokens.
    length
        The most tokens that the context may have.
    number
        Number of the context; settings such as the distance are taken in turn.
    begin
        Tokens that every text of the model begins with.
    vocabulary
        Token ids for random tokens.
    pairs
        Pairs in a list of associative recall.
    """

    encode: Encode
    length: int
    rng: np.random.Generator
    number: int = 0
    begin: tuple[int, ...] = ()
    vocabulary: Sequence[int] = ()
    pairs: int = 12
    ids: list[int] = field(default_factory=list, init=False)
    questions: list[Question] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.ids.extend(self.begin)

    def write(self, text: str) -> Span:
        """Append a text; where its tokens stand."""
        return self.append(self.encode(text))

    def append(self, ids: Sequence[int]) -> Span:
        """Append tokens; where they stand."""
        start = len(self.ids)
        self.ids.extend(ids)
        return start, len(self.ids)

    def fill(self, tokens: int) -> None:
        """Append whole sentences of filler, at most so many tokens."""
        for sentence in filler_sentences(self.rng):
            piece = self.encode(f" {sentence}")
            if len(piece) > tokens:
                return
            self.ids.extend(piece)
            tokens -= len(piece)

    def ask(
        self,
        question: str | Sequence[int],
        answer: str | Sequence[int],
        sources: Sequence[Span] = (),
        *,
        items: Sequence[str] = (),
        chance: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Append a question and its answer."""
        asked, start = self.append(self.encode(question) if isinstance(question, str) else question)
        tokens = list(self.encode(answer) if isinstance(answer, str) else answer)
        # Where a space is a token of its own, it belongs to the question: it tells nothing about the answer.
        space = self.encode(" ") if items else []
        if space and len(tokens) > len(space) and tokens[: len(space)] == space:
            _, start = self.append(space)
            tokens = tokens[len(space) :]
        _, stop = self.append(tokens)
        nearest = max((last - 1 for _, last in sources), default=None)
        distance = None if nearest is None else start - nearest
        self.questions.append(Question(asked, start, stop, distance, tuple(items), chance))

    def free(self, *texts: str, tokens: int = 0) -> int:
        """Tokens that are left for filler once these texts, and so many tokens more, are written."""
        left = self.length - len(self.ids) - sum(len(self.encode(text)) for text in texts) - tokens
        if left < 0:
            raise ValueInputError(
                f"a context of {self.length} tokens is too short for this task, which needs {self.length - left}; "
                "choose longer contexts"
            )
        return left

    def context(self, setting: str = "") -> Context:
        """What was written."""
        return Context(tuple(self.ids), tuple(self.questions), setting)

    def scatter(self, lines: Sequence[tuple[str, str, str]], free: int) -> list[Span]:
        """Write lines between sentences of filler; where the middle part of each stands.

        The distances of the lines from the end are uniform in their logarithm.
        """
        low, high = math.log(min(NEAREST, free / 2) + 1), math.log(free + 1)
        depths = np.sort(free - np.exp(self.rng.uniform(low, high, len(lines))))
        spans, begin = [], len(self.ids)
        written = 0
        for depth, (before, middle, after) in zip(depths, lines, strict=True):
            self.fill(int(depth) - (len(self.ids) - begin - written))
            place = len(self.ids)
            self.write(before)
            spans.append(self.write(middle))
            self.write(after)
            written += len(self.ids) - place
        self.fill(free - (len(self.ids) - begin - written))
        return spans


# Filler: sentences of the project's own words, none of which is a word that tasks ask for.
_PEOPLE = "baker clerk driver farmer guard judge mayor nurse painter pilot porter sailor singer tailor teacher weaver"
_THINGS = (
    "bench bill book boot bowl bread brush cake cart chair clock coat door drum fence flag gate glove hat lamp map"
)
_PLACES = "barn church corner court hall hill hotel house kitchen library market mill office park port school shop yard"
_ACTS = "borrowed carried cleaned counted dropped found fixed hid kept lifted lost moved packed sold took washed"
_KINDS = "big bright broken clean cheap dull fine heavy large light narrow new old plain small strange thin wide"
_TIMES = "again|at noon|before dawn|every week|for a while|in the evening|last year|on Monday|that day|without a word"
_PATTERNS = (
    "The {person} {act} the {kind} {thing} near the {place} {time}.",
    "{Time}, a {person} {act} a {thing} behind the {kind} {place}.",
    "Nobody at the {place} knew why the {person} {act} the {thing}.",
    "After the rain the {kind} {thing} was still in the {place}, and the {person} {act} it {time}.",
    "A {kind} {place} stood by the road, where the {person} {act} one {thing} and another {person2} {act2} two.",
    "It was said that the {person} and the {person2} {act} every {thing} of the {place} {time}.",
)


def filler_sentences(rng: np.random.Generator) -> Iterator[str]:
    """Sentences without end, which hold none of the words that tasks ask for."""
    lists = {"person": _PEOPLE, "thing": _THINGS, "place": _PLACES, "act": _ACTS, "kind": _KINDS}
    words = {name: text.split() for name, text in lists.items()} | {"time": _TIMES.split("|")}
    words |= {"person2": words["person"], "act2": words["act"]}
    while True:
        drawn = {name: entries[int(rng.integers(len(entries)))] for name, entries in words.items()}
        drawn["Time"] = drawn["time"][0].upper() + drawn["time"][1:]
        yield _PATTERNS[int(rng.integers(len(_PATTERNS)))].format(**drawn)


def filler_text(draw: Draw) -> Context:
    """Filler alone, as many tokens as the length allows."""
    draw.fill(draw.free())
    if len(draw.ids) < 2:
        raise ValueInputError(f"no sentence fits into {draw.length} tokens; allow more, or give a text of your own")
    return draw.context()


def _recall(draw: Draw) -> Context:
    """A list of ``key: value`` lines, filler, and every key again in another order."""
    pairs = draw_pairs(draw.pairs, "words", rng=draw.rng)
    heading, again = "\nWords and their partners.\n", "\nThe same words and their partners.\n"
    body = sum(len(draw.encode(part)) for key, value in pairs for part in (f"{key}:", f" {value}", "\n"))
    free = draw.free(heading, again, tokens=2 * body)
    gap = _gap(draw, free, 2 * body)
    draw.fill(free - gap)
    draw.write(heading)
    sources = {}
    for key, value in pairs:
        draw.write(f"{key}:")
        sources[key] = draw.write(f" {value}")
        draw.write("\n")
    draw.fill(gap)
    lead = draw.encode(again)
    for i in draw.rng.permutation(len(pairs)):
        key, value = pairs[i]
        question = [*lead, *draw.encode(f"{key}:")]
        draw.ask(question, f" {value}", [sources[key]], items=[value], chance=(1 / len(pairs), 1 / len(pairs)))
        lead = draw.encode("\n")
    return draw.context(f"{len(pairs)} pairs")


def _gap(draw: Draw, free: int, body: int) -> int:
    """Tokens between sources and questions: octaves from 128 on in turn, so that distances fill the octave."""
    octaves = [NEAREST * 2**k for k in range(20) if NEAREST * 2**k <= free] or [free]
    least = octaves[draw.number % len(octaves)]
    most = max(least, min(free, 2 * least - body))
    return int(draw.rng.integers(least, most + 1))


def _needle(draw: Draw) -> Context:
    return _needles(draw, keys=1, asked=1)


def _multi_key(draw: Draw) -> Context:
    return _needles(draw, keys=NEEDLES, asked=1)


def _multi_query(draw: Draw) -> Context:
    return _needles(draw, keys=NEEDLES, asked=NEEDLES)


@dataclass(frozen=True)
class _Form:
    """Lines to scatter over filler, a question about them, the words of its answer, and which lines are its sources.

    The middle part of a line is what the answer repeats.
    """

    lines: tuple[tuple[str, str, str], ...]
    question: str
    items: tuple[str, ...]
    sources: tuple[int, ...]

    @property
    def answer(self) -> str:
        return " " + ", ".join(self.items)

    @property
    def parts(self) -> list[str]:
        return [part for line in self.lines for part in line]


def _scattered(draw: Draw, example: _Form, form: _Form, chance: tuple[float, float], setting: str) -> Context:
    """A short example of the task, then its lines between sentences of filler, and the question."""
    draw.write(f"Here is an example.{''.join(example.parts)}{example.question}{example.answer}.\n\nHere is a text.")
    spans = draw.scatter(form.lines, draw.free(form.question, form.answer, *form.parts))
    draw.ask(form.question, form.answer, [spans[i] for i in form.sources], items=form.items, chance=chance)
    return draw.context(setting)


def _needles(draw: Draw, keys: int, asked: int) -> Context:
    """Sentences with a word for each key; some keys are asked for in one question."""
    words = _words(draw, 2 * keys + 2 * asked)

    def form(keys: Sequence[str], values: Sequence[str], chosen: Sequence[int]) -> _Form:
        lines = tuple(
            (f" The secret word of the {key} is", f" {value}", ".") for key, value in zip(keys, values, strict=True)
        )
        names = [f"the {keys[i]}" for i in chosen]
        question = f"\nThe secret word of {names[0]} is"
        if asked > 1:
            question = f"\nThe secret words of {', '.join(names[:-1])} and {names[-1]} are, in this order,"
        return _Form(lines, question, tuple(values[i] for i in chosen), tuple(chosen))

    rest = words[2 * keys :]
    example = form(rest[:asked], rest[asked:], range(asked))
    chosen = [int(i) for i in draw.rng.permutation(keys)[:asked]]
    candidates = keys if keys > 1 else len(WORDS)
    chance = (1 / candidates, 1 / math.perm(candidates, asked))
    setting = f"{asked} of {keys} keys" if keys > 1 else ""
    return _scattered(draw, example, form(words[:keys], words[keys : 2 * keys], chosen), chance, setting)


def _multi_value(draw: Draw) -> Context:
    """Several words for one key; all are asked for, in the order of the text."""

    def form(key: str, *values: str) -> _Form:
        lines = tuple((f" One secret word of the {key} is", f" {value}", ".") for value in values)
        question = f"\nThe secret words of the {key} are, in the order of the text,"
        return _Form(lines, question, values, tuple(range(len(values))))

    words = _words(draw, 2 * (NEEDLES + 1))
    chance = (1 / len(WORDS), 1 / math.perm(len(WORDS), NEEDLES))
    return _scattered(draw, form(*words[NEEDLES + 1 :]), form(*words[: NEEDLES + 1]), chance, f"{NEEDLES} values")


def _variables(draw: Draw) -> Context:
    """Chains of names that take each other's value; all names of one chain are asked for."""

    def form(chains: Sequence[Sequence[str]], numbers: Sequence[int], chosen: int) -> _Form:
        steps = [0] * len(chains)
        lines: list[tuple[str, str, str]] = []
        sources: list[int] = []
        for c in (int(c) for _ in chains[0] for c in draw.rng.permutation(len(chains))):
            value = f"the value of {chains[c][steps[c] - 1]}" if steps[c] else str(numbers[c])
            sources += [len(lines)] if c == chosen else []
            lines.append((" Let", f" {chains[c][steps[c]]}", f" be {value}."))
            steps[c] += 1
        question = f"\nThe names whose value is {numbers[chosen]} are, in the order of the text,"
        return _Form(tuple(lines), question, tuple(chains[chosen]), tuple(sources))

    size = HOPS + 1
    words = _words(draw, (CHAINS + 1) * size)
    numbers = [int(x) for x in draw.rng.choice(9000, size=CHAINS + 1, replace=False) + 1000]
    example = form([words[CHAINS * size :]], numbers[CHAINS:], 0)
    chains = [words[c * size : (c + 1) * size] for c in range(CHAINS)]
    asked = form(chains, numbers, int(draw.rng.integers(CHAINS)))
    chance = (1 / (CHAINS * size), 1 / math.comb(CHAINS * size, size))
    return _scattered(draw, example, asked, chance, f"{CHAINS} chains of {HOPS} steps")


def _words(draw: Draw, n: int) -> list[str]:
    """Different words."""
    return [str(word) for word in draw.rng.permutation(WORDS)[:n]]


def _common_words(draw: Draw) -> Context:
    """A list of words, some of which come ten times as often as the others."""
    words = _words(draw, len(WORDS) - 2 * COMMON)
    common = words[:COMMON]

    def counts(n: int) -> list[int]:
        often = 10 * max(1, n // (10 * COMMON + len(words) - COMMON))
        rest = max(0, n - often * COMMON)
        others = len(words) - COMMON
        return [often] * COMMON + [rest // others + (i < rest % others) for i in range(others)]

    question = "The most common words of the list are, in the order of the list,"
    listed = _listed(draw, words, counts, question)
    return _ask_words(draw, listed, sorted(common, key=listed.index), question)


def _frequent_words(draw: Draw) -> Context:
    """Made-up words whose frequencies fall with the square of their rank; the most frequent are asked for."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    names: dict[str, None] = {}
    while len(names) < 24:
        names["".join(draw.rng.choice(syllables, size=2))] = None
    words = list(names)

    def counts(n: int) -> list[int]:
        weights = 1 / np.arange(1, len(words) + 1) ** 2
        found = np.maximum(1, np.floor(n * weights / weights.sum())).astype(int)
        # The words that are asked for, and the next one, differ in their counts.
        for rank in range(COMMON, 0, -1):
            found[rank - 1] = max(found[rank - 1], found[rank] + 1)
        return [int(count) for count in found]

    question = "The most frequent words of the list are, from the first on,"
    return _ask_words(draw, _listed(draw, words, counts, question), words[:COMMON], question)


def _listed(draw: Draw, words: Sequence[str], counts: Callable[[int], list[int]], question: str) -> list[str]:
    """As many words as fit, each as often as ``counts`` says, in random order."""
    cost = [len(draw.encode(f" {word}")) for word in words]
    longest = 10 * COMMON * max(len(draw.encode(f" {word},")) for word in (*words, *WORDS)) // 2 + 16
    free = draw.free(" ".join([question] * 2), tokens=longest)
    n = max(1, int(free / np.mean(cost)))
    times = counts(n)
    while sum(c * t for c, t in zip(cost, times, strict=True)) > free:
        smaller = counts(int(n * 0.97))
        if smaller == times and n < 2:
            raise ValueInputError(
                f"a context of {draw.length} tokens is too short for a list of words; choose longer contexts"
            )
        n, times = int(n * 0.97), smaller
    every = [word for word, count in zip(words, times, strict=True) for _ in range(count)]
    return [str(word) for word in draw.rng.permutation(every)]


def _ask_words(draw: Draw, listed: Sequence[str], answers: Sequence[str], question: str) -> Context:
    unlisted = [word for word in WORDS if word not in listed][: 2 * COMMON]
    often, once = unlisted[:COMMON], unlisted[COMMON:]
    example = " ".join([*often, *once[:1], *often, *once[1:], *often])
    draw.write(f"A list of words: {example}\n{question} {', '.join(often)}.\n\nA list of words:")
    for word in listed:
        draw.write(f" {word}")
    candidates = len(set(listed))
    chance = (1 / candidates, 1 / math.comb(candidates, len(answers)))
    draw.ask(f"\n{question}", " " + ", ".join(answers), items=answers, chance=chance)
    return draw.context(f"{len(answers)} words")


def _copying(draw: Draw) -> Context:
    """Random words, filler, and the words again: every second run of four is asked for."""
    heading, again = "\nRemember these words:", "\nThe same words again:"
    words = [str(word) for word in draw.rng.permutation(WORDS)[:COPIED]]
    cost = [len(draw.encode(f" {word}")) for word in words]
    while len(words) > 8 and 2 * sum(cost) > draw.free(heading, again):
        words, cost = words[:-8], cost[:-8]
    free = draw.free(heading, again, tokens=2 * sum(cost))
    gap = _gap(draw, free, 2 * sum(cost))
    draw.fill(free - gap)
    draw.write(heading)
    places = [draw.write(f" {word}") for word in words]
    draw.fill(gap)
    lead = draw.encode(again)
    chance = (1 / len(WORDS), 1 / len(WORDS) ** 4)
    for i in range(0, len(words), 8):
        question = [*lead, *(token for word in words[i : i + 4] for token in draw.encode(f" {word}"))]
        asked = words[i + 4 : i + 8]
        answer = [token for word in asked for token in draw.encode(f" {word}")]
        draw.ask(question, answer, [(places[i + 4][0], places[i + 7][1])], items=asked, chance=chance)
        lead = []
    return draw.context(f"{len(words)} words")


def _induction(draw: Draw) -> Context:
    """Random tokens, other random tokens, and the first ones again: every fourth is asked for."""
    tokens = np.asarray(draw.vocabulary)
    size = min(64, draw.free() // 4 // 4 * 4)
    if size < 4 or len(tokens) < size:
        raise ValueInputError(
            f"a context of {draw.length} tokens is too short to repeat random tokens; choose longer contexts"
        )
    row = [int(token) for token in draw.rng.permutation(tokens)[:size]]
    free = draw.free() - 2 * size
    gap = _gap(draw, free, 2 * size)
    others = np.setdiff1d(tokens, row)
    noise = [int(token) for token in draw.rng.choice(others if len(others) else tokens, size=free)]
    draw.append(noise[: free - gap])
    begin, _ = draw.append(row)
    draw.append(noise[free - gap :])
    for i in range(0, size, 4):
        place = begin + i + 3
        draw.ask(row[i : i + 3], row[i + 3 : i + 4], [(place, place + 1)], chance=(1 / len(tokens), 1 / len(tokens)))
    return draw.context(f"{size} tokens")


def _instructions(draw: Draw) -> Context:
    """An instruction, filler, and a request to follow it; the outcome can be checked word by word."""

    def form(a: str, b: str, c: str) -> tuple[str, str, str, str, list[str]]:
        forms = (
            ("repeat", "write the word", f" {a}", " three times", [a, a, a]),
            ("reverse", "write the words", f" {a}, {b}, {c}", " in reverse order", [c, b, a]),
            ("capitals", "write the word", f" {a}", " in capital letters", [a.upper()]),
            ("second", "write only the second one of the words", f" {a}, {b}, {c}", "", [b]),
        )
        return forms[draw.number % len(forms)]

    words = _words(draw, 6)
    _, before, middle, after, items = form(*words[3:])
    cue = "\nThe text ends here. As the instruction asks:"
    shown = f"{before}{middle}{after}.\nA text.{cue} {' '.join(items)}"
    draw.write(f"Here is an example. When the text ends, {shown}.\n\n")
    name, before, middle, after, items = form(*words[:3])
    opening, answer = f"When the text ends, {before}", " " + " ".join(items)
    free = draw.free(opening, middle, f"{after}.\n", cue, answer)
    draw.write(opening)
    source = draw.write(middle)
    draw.write(f"{after}.\n")
    draw.fill(free)
    chance = (1 / len(WORDS), 1 / math.perm(len(WORDS), len(set(items))))
    draw.ask(cue, answer, [source], items=items, chance=chance)
    return draw.context(name)


@dataclass(frozen=True)
class LongTask:
    """How contexts of a task are made, and what it asks, in words."""

    make: Callable[[Draw], Context]
    words: str


LONG_TASKS: Mapping[str, LongTask] = MappingProxyType(
    {
        "recall": LongTask(_recall, "associative recall: the partners of the words of a list, after other text"),
        "needle": LongTask(_needle, "one sentence in other text (RULER: single needle)"),
        "multi-key": LongTask(_multi_key, "one of several sentences (RULER: multi-key needle)"),
        "multi-value": LongTask(_multi_value, "all words of one key (RULER: multi-value needle)"),
        "multi-query": LongTask(_multi_query, "the words of several keys (RULER: multi-query needle)"),
        "variables": LongTask(_variables, "names that take each other's value (RULER: variable tracking)"),
        "common-words": LongTask(_common_words, "the most common words of a list (RULER)"),
        "frequent-words": LongTask(_frequent_words, "the most frequent made-up words of a list (RULER)"),
        "copying": LongTask(_copying, "random words again, after other text"),
        "induction": LongTask(_induction, "random tokens again, after other random tokens"),
        "instructions": LongTask(_instructions, "an instruction with a checkable outcome, before other text"),
    }
)


"""The generated long contexts by name."""


def read_questions(path: str) -> list[tuple[str, str]]:
    """Prompts and answers of a JSON lines file: ``{"prompt": ..., "answer": ...}`` on every line."""
    questions = []
    for number, line in enumerate(file_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"'{path}', line {number}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueInputError(f'{where}: not JSON ({error}); write {{"prompt": "a", "answer": "b"}}') from error
        for name in ("prompt", "answer"):
            if not isinstance(entry, dict) or not isinstance(entry.get(name), str) or not entry[name].strip():
                given = entry.get(name) if isinstance(entry, dict) else entry
                raise ValueInputError(f"{where}: '{name}' must hold some text, got {shortened(given)}; add it")
        questions.append((entry["prompt"], entry["answer"]))
    if not questions:
        raise ValueInputError(f"'{path}' must hold at least one question, got none; add one")
    return questions

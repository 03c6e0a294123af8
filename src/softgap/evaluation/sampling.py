"""Evaluate a model on as many contexts as its intervals need, with and without a change.

Contexts are drawn in blocks until the 95 % intervals over resampled contexts are narrow enough: a half-width of .02 for
the change of associative recall (first token of each answer) up to 2,048 tokens, of .05 elsewhere. Without a change the
half-width of the model's own number counts. ``contexts`` caps them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softgap.checkpoints import Checkpoints
from softgap.errors import ValueInputError, unknown_name
from softgap.evaluation.answers import Entry, generate_answers, loss_by_position, new_cache, score_answers
from softgap.evaluation.results import FORMAT, LOSSES, METRICS, Evaluation, Row
from softgap.inputs import as_items, check_count, refuse_string
from softgap.intervals import Interval, interval_of
from softgap.models.fingerprint import model_fingerprint
from softgap.models.loading import Model, Tokenizer
from softgap.models.support import check_measurable, context_length
from softgap.models.tokens import TokenStream, first_tokens, token_ids
from softgap.progress import Progress, bar_or_callback
from softgap.tasks.long_context import LONG_TASKS, NEAREST, Context, Draw, Question, filler_text

__all__ = ["DEFAULT_LENGTHS", "DEFAULT_TASKS", "GROUPS", "TASKS", "cells_of", "evaluate", "most_contexts"]

TASKS = ("loss", *LONG_TASKS)
"""The tasks that can be evaluated, by name."""
GROUPS = {"needles": ("needle", "multi-key", "multi-value", "multi-query"), "all": TASKS}
"""Names that stand for several tasks."""
DEFAULT_TASKS = ("loss", "recall", "needles")
DEFAULT_LENGTHS = (512, 1024, 2048)
# The questions of the user; what they are is not in the name.
OWN = "own"
SHORTEST = 64

HEADLINE_LENGTH = 2048
HEADLINE_HALF_WIDTH = 0.02
HALF_WIDTH = 0.05
LOSS_MARGIN = 0.03
BLOCK = 8
FEWEST = 16
MOST = 64
HEADLINE_MOST = 200
# Questions that are answered by generation, of each context.
GENERATED = 4

Under = Callable[[], AbstractContextManager[Any]]
"""Makes a context manager under which the model is changed."""


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str] = DEFAULT_TASKS,
    *,
    under: Under | None = None,
    label: str | None = None,
    against: Under | None = None,
    against_label: str | None = None,
    window: int = 0,
    lengths: Sequence[int] | None = None,
    pairs: Sequence[int] = (12,),
    texts: Sequence[str] = (),
    questions: Sequence[tuple[str, str]] = (),
    generation: bool = True,
    contexts: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: Progress | bool = True,
) -> Evaluation:
    """Evaluate a model on tasks with known answers, and what a change of it costs.

    Parameters
    ----------
    model, tokenizer
        From ``softgap.load_model``.
    tasks
        Names from ``softgap.evaluation.TASKS``; ``needles`` and ``all`` stand for several, ``own`` for ``questions``.
    under
        A function that returns a context manager under which the model is changed, such as ``lambda:
        softgap.linearize.apply(model, plan)``. Where the manager's value has a method ``cache``, generation uses that
        KV cache. None evaluates the model alone.
    label
        A name for the change. ``folder`` needs one, to tell finished work on one change from another's.
    against
        A second change, in the place of the original model: ``under`` is then compared with it.
    against_label
        A name for the second change.
    window
        Recent keys that the changed heads see exactly. Only answers at larger distances count as long-range.
    lengths
        Numbers of tokens of the contexts; 512, 1,024 and 2,048 by default, as far as the model's own context allows.
    pairs
        Numbers of pairs in the lists of associative recall.
    texts
        Texts for loss by position; without any, generated sentences are read.
    questions
        Prompts with their answers, evaluated as the task ``own``; see ``softgap.tasks.long_context.read_questions``.
    generation
        Whether to answer by generation too.
    contexts
        The most contexts per task and length; by default 200 for recall up to 2,048 tokens and 64 elsewhere.
    seed
        Every context follows from it.
    folder
        Where finished blocks of contexts are kept, so that an interrupted evaluation resumes; None keeps nothing.
    progress
        Called with a stage and the fraction done; True draws a bar on standard error if that is a terminal.

    Returns
    -------
    Evaluation
        One row per task, length, distance and metric, with intervals over contexts.

    Raises
    ------
    ValueInputError
        If a length or number is not allowed, or no task fits into the lengths.
    UnknownNameError
        If a task is not known.

    Examples
    --------
    ``tiny-llama`` is a small random model, which recalls nothing:

    >>> import softgap
    >>> model, tokenizer = softgap.load_model("./tiny-llama")
    >>> found = softgap.evaluate(model, tokenizer, "recall", lengths=[256], pairs=[4], contexts=2)
    >>> row = found.select(metric="first", distance=None)[0]
    >>> row.task, row.setting, row.length, row.floor, row.contexts, row.questions
    ('recall', '4 pairs', 256, 0.25, 2, 8)
    >>> row.verdict
    'not measurable with this model'
    """
    check_measurable(model)
    names = _task_names(tasks)
    sizes = _lengths(model, lengths)
    counts = tuple(check_count("pairs", n, least=1) for n in as_items(pairs))
    check_count("window", window, least=0)
    if contexts is not None:
        check_count("contexts", contexts)
    if folder is not None and ((under is not None and not label) or (against is not None and not against_label)):
        raise ValueInputError("a change needs a label where a folder is given, got none; name it with label=")
    refuse_string("questions", questions, "pairs of a prompt and its answer")
    if OWN in as_items(tasks) and not questions:
        raise ValueInputError(
            f"the task '{OWN}' takes your own questions, got none; give them as questions=, or as --questions FILE"
        )
    own = tuple((prompt, answer) for prompt, answer in questions)
    sampler = _Sampler(
        model, tokenizer, under, label or ("changed" if under else ""), against,
        against_label or ("another change" if against else ""), window, tuple(as_items(texts)), own,
        generation, contexts, seed,
    )  # fmt: skip
    settings = {
        "evaluation": FORMAT, "model": model_fingerprint(model), "seed": seed, "generation": generation,
        "texts": _digest(sampler.texts), "questions": _digest(text for pair in own for text in pair),
    }  # fmt: skip
    sampler.checkpoints = Checkpoints(folder, settings)
    cells = [*cells_of(model, names, sizes, counts)]
    cells += [(OWN, 0, 0)] if own else []
    rows: list[Row] = []
    notes: list[str] = []
    with bar_or_callback(progress) as report:
        for number, cell in enumerate(cells):

            def tell(share: float, name: str = cell[0], length: int = cell[2], number: int = number) -> None:
                report(f"{name} at {length:,} tokens" if length else name, (number + share) / len(cells))

            try:
                rows += sampler.rows(*cell, tell)
            except _DoesNotFit as error:
                notes.append(f"{cell[0]} at {cell[2]:,} tokens was left out: {error}")
    if not rows:
        raise ValueInputError(notes[0] if notes else "no task was given; name at least one")
    return Evaluation(
        str(model.name_or_path or model.config.model_type),
        str(settings["model"]),
        sampler.label,
        seed,
        window,
        tuple(rows),
        tuple(notes),
        sampler.against_label,
    )


class _DoesNotFit(Exception):
    """A task that needs longer contexts."""


@dataclass(eq=False)
class _Sampler:
    """Draws contexts, scores them with and without the change, and stops when the intervals are narrow."""

    model: Model
    tokenizer: Tokenizer
    under: Under | None
    label: str
    against: Under | None
    against_label: str
    window: int
    texts: tuple[str, ...]
    own: tuple[tuple[str, str], ...]
    generation: bool
    cap: int | None
    seed: int
    checkpoints: Checkpoints = field(default_factory=lambda: Checkpoints(None, {}))

    def rows(self, task: str, pairs: int, length: int, tell: Callable[[float], None]) -> list[Row]:
        """All rows of one task and length."""
        headline = _is_headline(task, length)
        most = min(self.cap or most_contexts(task, length), self._available(task, length))
        blocks: list[list[Context]] = []
        scored: dict[str, list[list[Entry]]] = {"original": [], "changed": []}
        while True:
            done = sum(map(len, blocks))
            tell(done / most)
            block = [self.draw(task, pairs, length, n) for n in range(done, min(most, done + BLOCK))]
            for who in scored if self.under else ("original",):
                scored[who] += self._score(who, task, pairs, length, block)
            blocks.append(block)
            rows = self._summarise(task, length, blocks, scored, headline)
            total = done + len(block)
            if total >= most or (total >= FEWEST and _narrow(rows, headline)):
                return rows

    def draw(self, task: str, pairs: int, length: int, number: int) -> Context:
        """The context of this number; it does not depend on how many there are."""
        if task == OWN:
            return self._own_context(*self.own[number])
        rng = np.random.default_rng([self.seed, zlib.crc32(task.encode()), pairs, length, number])
        vocabulary = self._vocabulary() if task == "induction" else ()
        draw = Draw(self._encode, length, rng, number, first_tokens(self.tokenizer), vocabulary, pairs)
        try:
            if task != "loss":
                return LONG_TASKS[task].make(draw)
            return self._text_context(length, number) if self.texts else filler_text(draw)
        except ValueInputError as error:
            raise _DoesNotFit(str(error)) from error

    def _score(self, who: str, task: str, pairs: int, length: int, block: Sequence[Context]) -> list[list[Entry]]:
        label = self.label if who == "changed" else self.against_label
        change = self.under if who == "changed" else self.against
        name = f"changed: {label}" if change else "original"
        digest = _digest(",".join(map(str, context.ids)) for context in block)

        def make() -> dict[str, Any]:
            changed = change() if change else nullcontext()
            with torch.inference_mode(), changed as applied:
                return {"contexts": [self._entries(task, context, applied) for context in block]}

        found = self.checkpoints.find_or_make([name, task, pairs, length, digest], make)
        return [[(str(m), place, value, floor) for m, place, value, floor in each] for each in found["contexts"]]

    def _entries(self, task: str, context: Context, applied: Any) -> list[Entry]:
        if task == "loss":
            return loss_by_position(self.model, context.ids)
        entries = score_answers(self.model, context)
        if self.generation:
            entries += generate_answers(self.model, self.tokenizer, context, new_cache(applied), GENERATED)
        return entries

    def _summarise(
        self,
        task: str,
        length: int,
        blocks: Sequence[Sequence[Context]],
        scored: dict[str, list[list[Entry]]],
        headline: bool,
    ) -> list[Row]:
        contexts = [context for block in blocks for context in block]
        settings = {context.setting for context in contexts}
        about: dict[str, Any] = {
            "task": task,
            "setting": settings.pop() if len(settings) == 1 else "",
            "length": length or max(len(context.ids) for context in contexts),
        }
        rows = []
        for metric in METRICS:
            kept = [_of_metric(entries, metric) for entries in scored["original"]]
            others = [_of_metric(entries, metric) for entries in scored["changed"]]
            places = [place for entries in kept for place, _, _ in entries]
            groups: list[tuple[tuple[int, int] | None, Callable[[int | None], bool]]] = []
            if metric == "loss":
                groups.append((None, lambda place: place is None))
            else:
                groups.append((None, lambda place: place is None or place > self.window))
            octaves = sorted({_octave(place) for place in places if place is not None})
            groups += [(octave, lambda place, octave=octave: _inside(place, octave)) for octave in octaves]  # type: ignore[misc]
            for octave, belongs in groups:
                row = self._row(kept, others, belongs, share=metric not in LOSSES)
                if row is None:
                    continue
                sourced = metric != "loss" and any(place is not None for place in places)
                long_range = None if not sourced else octave is None or octave[0] > self.window
                rows.append(Row(**about, distance=octave, metric=metric, margin=_margin(metric, headline), **row,
                                long_range=long_range))  # fmt: skip
        return rows

    def _row(
        self, kept: Any, others: Any, belongs: Callable[[int | None], bool], *, share: bool
    ) -> dict[str, Any] | None:
        """Means over the contexts that have such answers, with intervals over contexts."""

        def matching(contexts: Any) -> list[list[tuple[float, float]]]:
            return [[(value, floor) for place, value, floor in each if belongs(place)] for each in contexts]

        original = [each for each in matching(kept) if each]
        changed = [each for each in matching(others) if each]
        if not original:
            return None
        first, second = (np.array([np.mean([v for v, _ in each]) for each in x]) for x in (original, changed))
        floors = [floor for each in original for _, floor in each]
        n = len(floors)

        def interval(values: np.ndarray, low: float) -> Interval:
            found = interval_of(values, rng=np.random.default_rng(self.seed))
            return rule_of_three(found, n, low) if share else found

        found: dict[str, Any] = {"contexts": len(original), "questions": n, "floor": float(np.mean(floors))}
        found["original"] = interval(first, 0.0)
        if len(second):
            found |= {"changed": interval(second, 0.0), "change": interval(second - first, -1.0)}
        return found

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _vocabulary(self) -> list[int]:
        """Some thousand ordinary tokens, spread evenly over all; a line break would end an answer."""
        size = min(len(self.tokenizer), int(self.model.config.get_text_config().vocab_size))
        spread = np.unique(np.linspace(0, size - 1, min(size, 4096)).astype(int))
        special = set(self.tokenizer.all_special_ids)
        return [int(t) for t in spread if int(t) not in special and "\n" not in self.tokenizer.decode([int(t)])]

    def _available(self, task: str, length: int) -> int:
        if task == OWN:
            return len(self.own)
        if task == "loss" and self.texts:
            ids = self._text_ids()
            return max(1, len(ids) // ids.body(length))
        return 10**9

    def _text_ids(self) -> TokenStream:
        return token_ids(self.tokenizer, self.texts)

    def _text_context(self, length: int, number: int) -> Context:
        ids = self._text_ids()
        body = ids.body(length)
        if len(ids) < body:
            raise ValueInputError(f"the text must have at least {length} tokens, got {len(ids)}; give more text")
        return Context(ids.sequence(number * body, length), ())

    def _own_context(self, prompt: str, answer: str) -> Context:
        apart = prompt[-1:].isspace() or answer[:1].isspace()
        ids = [*first_tokens(self.tokenizer), *self._encode(prompt)]
        new = self._encode(answer if apart else f" {answer}")
        limit = context_length(self.model)
        if limit and len(ids) + len(new) > limit:
            raise ValueInputError(
                f"a prompt with its answer must fit into the model's context of {limit} tokens, got "
                f"{len(ids) + len(new)}; shorten it"
            )
        question = Question(len(ids) - 1, len(ids), len(ids) + len(new), None, (answer.strip(),), (0.0, 0.0))
        return Context((*ids, *new), (question,))


def cells_of(
    model: Model, tasks: Sequence[str], lengths: Sequence[int] | None, pairs: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Every task with every number of pairs, 0 where it has none, and every length."""
    sizes = _lengths(model, lengths)
    return [
        (name, n, length)
        for name in _task_names(tasks)
        for n in (pairs if name == "recall" else (0,))
        for length in sizes
    ]


def most_contexts(task: str, length: int) -> int:
    """The most contexts of a task at a length, unless the caller says otherwise."""
    return HEADLINE_MOST if _is_headline(task, length) else MOST


def _is_headline(task: str, length: int) -> bool:
    return task == "recall" and length <= HEADLINE_LENGTH


def _task_names(tasks: Sequence[str]) -> tuple[str, ...]:
    """Every generated task that is named."""
    names: dict[str, None] = {}
    for name in as_items(tasks):
        if name not in TASKS and name not in GROUPS and name != OWN:
            raise unknown_name("task", name, (*TASKS, *GROUPS, OWN))
        names |= dict.fromkeys(GROUPS.get(name, () if name == OWN else (name,)))
    return tuple(names)


def _lengths(model: Model, lengths: Sequence[int] | None) -> tuple[int, ...]:
    limit = context_length(model)
    if lengths is None:
        fitting = tuple(length for length in DEFAULT_LENGTHS if not limit or length <= limit)
        return fitting or (int(limit or 0),)
    remedy = f"the model's own context is {limit:,} tokens" if limit else ""
    return tuple(
        check_count("lengths", length, least=SHORTEST, most=limit, remedy=remedy) for length in as_items(lengths)
    )


def rule_of_three(interval: Interval, n: int, low: float = 0.0) -> Interval:
    """An interval of a share in which n answers all agree, from its ends at ``low`` and 1; others stay as they are.

    Resampling contexts that all agree gives an interval without width. What never happened in n answers has a chance
    of up to 3 / n, at a level of 95 %.
    """
    if interval.low < interval.high:
        return interval
    return Interval(interval.value, max(low, interval.value - 3 / n), min(1.0, interval.value + 3 / n))


def _narrow(rows: Iterable[Row], headline: bool) -> bool:
    """Whether the rows that decide have narrow intervals: all distances together, accuracies and loss."""
    for row in rows:
        if row.distance is not None or row.metric == "answer_loss":
            continue
        interval = row.original if row.change is None else row.change
        target = HEADLINE_HALF_WIDTH if headline and row.metric == "first" and row.change is not None else HALF_WIDTH
        if interval.half_width > target:
            return False
    return True


def _margin(metric: str, headline: bool) -> float:
    if metric in LOSSES:
        return LOSS_MARGIN
    return HEADLINE_HALF_WIDTH if headline and metric == "first" else HALF_WIDTH


def _of_metric(entries: Sequence[Entry], metric: str) -> list[tuple[int | None, float, float]]:
    return [(place, value, floor) for name, place, value, floor in entries if name == metric]


def _octave(place: int) -> tuple[int, int]:
    """The octave that a distance or position lies in; all below 128 are one."""
    low, high = 0, NEAREST
    while place >= high:
        low, high = high, 2 * high
    return low, high


def _inside(place: int | None, octave: tuple[int, int]) -> bool:
    return place is not None and octave[0] <= place < octave[1]


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(f"{len(text)}:{text}".encode())
    return digest.hexdigest()[:32]

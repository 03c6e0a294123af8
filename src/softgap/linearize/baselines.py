"""Baselines of a plan: what the same heads cost with windows of equal memory or a constant, and what other heads cost.

Each baseline swaps whole sets of heads at once, on text that the search never saw, and has no output correction. The
plan stands beside them as it is and without its output correction.

    window alone       exact softmax on the most recent keys
    sinks + window     the same memory, 4 of the keys at the beginning of the text
    constant           the mean output of every head
    random groups      the plan's substitute on as many KV groups drawn at random, others for every third text
    only KIND          where the plan chose among kinds: KV groups chosen for that kind alone, with no more bytes in all

A plan is compared with the better of the two windows, text by text. Where it has several kinds, each group gets the
window of its own memory, and groups that keep nothing stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from softgap.attention import Mechanism, resolve
from softgap.attention.memory import SINKS, equal_window, kept_numbers
from softgap.checkpoints import Checkpoints
from softgap.cluster import Workers
from softgap.intervals import Interval, interval_of
from softgap.intervene.substitute import Head, Substitute, Swaps, substitute
from softgap.linearize.impact import mean_outputs
from softgap.linearize.sequences import (
    Reading,
    Sequences,
    context_of,
    cut_sequences,
    digest_of_sequences,
    join_readings,
    read_under,
)
from softgap.models.loading import Model
from softgap.models.tokens import stream_of
from softgap.probe.layout import attention_layers, head_dim
from softgap.progress import Progress, silent

__all__ = [
    "EQUAL",
    "LENGTHS",
    "ONLY",
    "Baseline",
    "Baselines",
    "evaluate_baselines",
    "group_bytes",
    "sequences_by_length",
    "window_of_equal_memory",
]

LENGTHS = (512, 2048, 8192)
"""Tokens per sequence that baselines are evaluated at, as far as text and context allow."""
FEWEST_TEXTS = 3
DRAWS = 3
# Windows of more memory than this, in that of the plan, are not of equal memory.
EQUAL = 1.05

PLAN, UNCORRECTED = "plan", "plan without output correction"
WINDOW, SINKS_AND_WINDOW, CONSTANT, RANDOM, ONLY = "window alone", "sinks + window", "constant", "random", "only"
_WINDOW_WORDS = {WINDOW: "A sliding window", SINKS_AND_WINDOW: "A sliding window with sinks"}


@dataclass(frozen=True)
class Baseline:
    """One row: what heads become, what that keeps, and what it costs.

    Attributes
    ----------
    name
        ``plan`` or the name of the baseline.
    substitute
        What the heads become.
    bytes_per_group
        Bytes that each freed KV group keeps, at any length; ``inf`` where it keeps every key and value.
    loss
        Rise in loss in nats per token, by the length of the sequences, with an interval over texts.
    recall
        Change in recall with an interval over recall lists; None where it was not asked for.
    """

    name: str
    substitute: str
    bytes_per_group: float
    loss: Mapping[int, Interval]
    recall: Interval | None = None


@dataclass(frozen=True)
class Baselines:
    """A plan and its baselines on the same text.

    Attributes
    ----------
    rows
        The plan first.
    texts
        Number of sequences by their length.
    lists
        Recall lists that were asked.
    best_window
        By length, the name of the window of equal memory that costs less; empty where no window is as small as the
        substitute, or where that keeps every key.
    difference
        By length, the loss of the plan minus that of this window, with an interval over texts, paired by text. Above 0
        the window is better.
    left_out
        Lengths that were not evaluated, with the reason.
    """

    rows: tuple[Baseline, ...]
    texts: Mapping[int, int]
    lists: int = 0
    best_window: Mapping[int, str] = field(default_factory=dict)
    difference: Mapping[int, Interval] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)

    def row(self, name: str) -> Baseline:
        """The row of this name."""
        return next(row for row in self.rows if row.name == name)

    def verdict(self) -> str:
        """Where a window of equal memory costs less than the plan, in one sentence; "" where none does."""
        worse = {length: interval for length, interval in self.difference.items() if interval.value > 0}
        if not worse:
            return ""
        noun = _WINDOW_WORDS[self.best_window[next(iter(worse))]]
        certain = any(interval.sign > 0 for interval in worse.values())
        costs = "costs less at the same memory" if certain else "costs no more than the plan at the same memory"
        parts = []
        for length, interval in worse.items():
            window, own = (self.row(name).loss[length].value for name in (self.best_window[length], PLAN))
            rise = f"{window:+.3f} nats per token instead of {own:+.3f} at {length:,} tokens"
            parts.append(f"{rise} (plan minus window {interval})")
        return f"{noun} {costs}: {'; '.join(parts)}."

    def notes(self) -> list[str]:
        """What a reader of the table has to know, one sentence each."""
        notes = []
        if self.difference:
            each = ", ".join(f"{interval} at {length:,} tokens" for length, interval in self.difference.items())
            notes.append(f"Loss of the plan minus that of the better window, paired by text: {each}.")
        else:
            notes.append("No window has the same memory as this substitute, so the plan is compared with none.")
        texts = ", ".join(f"{n} of {length:,} tokens" for length, n in self.texts.items())
        lists = f", recall on {self.lists} lists" if self.lists else ""
        notes.append(f"Loss is measured on sequences that the search never saw ({texts}){lists}.")
        if self.lists and self.difference:
            notes.append(
                "A window holds every answer that lies nearer than its keys. Its recall says little about longer "
                "distances than the lists ask across."
            )
        notes += [f"Not evaluated at {length:,} tokens: {reason}." for length, reason in self.left_out.items()]
        return notes

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Columns and rows in words; a rise in loss stands with the half-width of its interval."""
        columns = ("the heads become", "bytes per KV group", *(f"loss at {length:,}" for length in self.texts))
        rows = []
        for row in self.rows:
            size = "all keys" if math.isinf(row.bytes_per_group) else f"{row.bytes_per_group:,.0f}"
            cells = [_with_half_width(row.loss[length]) for length in self.texts]
            recall = [] if not self.lists else ["" if row.recall is None else _with_half_width(row.recall)]
            same = row.name == PLAN or row.name == row.substitute
            rows.append((row.name if same else f"{row.name} ({row.substitute})", size, *cells, *recall))
        return (*columns, *(("recall",) if self.lists else ())), rows

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        rows = [
            {
                "name": row.name,
                "substitute": row.substitute,
                # JSON has no infinity: null is every key and value.
                "bytes_per_group": None if math.isinf(row.bytes_per_group) else row.bytes_per_group,
                "loss": {str(length): interval.to_json() for length, interval in row.loss.items()},
                "recall": None if row.recall is None else row.recall.to_json(),
            }
            for row in self.rows
        ]
        return {
            "rows": rows,
            "texts": {str(length): n for length, n in self.texts.items()},
            "lists": self.lists,
            "best_window": {str(length): name for length, name in self.best_window.items()},
            "difference": {str(length): interval.to_json() for length, interval in self.difference.items()},
            "left_out": {str(length): reason for length, reason in self.left_out.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Baselines:
        """From plain data; raises ``ValueError`` or ``LookupError`` where it is something else."""
        rows = tuple(
            Baseline(
                str(row["name"]),
                str(row["substitute"]),
                math.inf if row["bytes_per_group"] is None else float(row["bytes_per_group"]),
                _intervals(row["loss"]),
                None if row["recall"] is None else _interval(row["recall"]),
            )
            for row in data["rows"]
        )
        texts, best = ({int(length): x for length, x in data[name].items()} for name in ("texts", "best_window"))
        left_out = {int(length): str(reason) for length, reason in data["left_out"].items()}
        found = cls(rows, texts, int(data["lists"]), best, _intervals(data["difference"]), left_out)
        if any(set(row.loss) != set(texts) for row in rows) or not set(found.difference) == set(best) <= set(texts):
            raise ValueError("baselines must have a loss at every length")
        if not {PLAN, *best.values()} <= {row.name for row in rows} or not set(best.values()) <= set(_WINDOW_WORDS):
            raise ValueError("baselines must have a row for the plan and its best window")
        return found


def _with_half_width(interval: Interval) -> str:
    return f"{interval.value:+.3f} ±{interval.half_width:.3f}"


def _interval(data: Mapping[str, float]) -> Interval:
    return Interval(**{name: float(value) for name, value in data.items()})


def _intervals(data: Mapping[str, Mapping[str, float]]) -> dict[int, Interval]:
    return {int(length): _interval(interval) for length, interval in data.items()}


def group_bytes(model: Model, mechanism: Mechanism) -> float:
    """Bytes that a mechanism keeps per KV group of a model, at any length; states are in float32."""
    numbers = kept_numbers(mechanism, head_dim(model), kv_heads=attention_layers(model)[0].kv_heads)
    return numbers * torch.float32.itemsize


def window_of_equal_memory(model: Model, mechanism: Mechanism, *, sinks: bool = True) -> Mechanism | None:
    """The window that keeps as much as a mechanism does; None where that keeps nothing, or every key."""
    if group_bytes(model, mechanism) in (0, math.inf):
        return None
    kv_heads = attention_layers(model)[0].kv_heads
    return resolve(equal_window(mechanism, head_dim(model), kv_heads=kv_heads, sinks=SINKS if sinks else 0))


def sequences_by_length(
    model: Model, ids: Sequence[int], lengths: Sequence[int], tokens: int
) -> tuple[dict[int, Sequences], dict[int, str]]:
    """Sequences of every length from one text, and why there are none of some lengths.

    Parameters
    ----------
    ids
        The tokens of the text.
    tokens
        How many tokens to read at each length, or those of three sequences where these are more.
    """
    texts: dict[int, Sequences] = {}
    left_out: dict[int, str] = {}
    context = context_of(model)
    for length in sorted(set(lengths)):
        if context and length > context:
            left_out[length] = f"the model's context has {context:,} tokens"
        elif len(ids) < stream_of(ids).body(length):
            left_out[length] = f"the text that the search never saw has {len(ids):,} tokens"
        else:
            texts[length] = cut_sequences(model, ids, length, max(FEWEST_TEXTS, tokens // length))
    return texts, left_out


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A row before it is evaluated; ``key`` names everything that it computes, for the checkpoints."""

    name: str
    substitute: str
    bytes_per_group: float
    draws: Sequence[Callable[[], Swaps]]
    key: Any


def evaluate_baselines(
    model: Model,
    swaps: Swaps,
    texts: Mapping[int, Sequences],
    recall_lists: Sequences | None,
    *,
    fit: Sequences,
    units: Sequence[Sequence[Head]],
    pure: Mapping[str, Swaps] | None = None,
    seed: int = 0,
    left_out: Mapping[int, str] | None = None,
    checkpoints: Checkpoints | None = None,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> Baselines:
    """Evaluate a plan and its baselines.

    Parameters
    ----------
    swaps
        The heads of the plan with their substitutes.
    texts
        Sequences that nothing was fitted on, by their length.
    recall_lists
        Recall lists that nothing was fitted on; None asks none.
    fit
        Sequences that mean outputs come from.
    units
        All heads or KV groups of the model; the random ones are drawn from them.
    pure
        Other swaps by name, for rows of their own: those of one kind alone.
    seed
        Random seed of the draws and of the bootstrap.
    left_out
        Lengths without sequences, with the reason, for the result.
    checkpoints
        Where finished readings lie.
    workers
        Of a cluster, to read batches of texts there.
    progress
        Called with the stage in words and the share that is done.
    """
    run = _Run(model, texts, recall_lists, checkpoints or Checkpoints(None, {}), progress, workers)
    candidates = _candidates(model, swaps, fit, units, seed)
    candidates += [_candidate(model, name, other) for name, other in (pure or {}).items()]
    run.total = (1 + len(candidates)) * run.parts
    original = run.read("the model itself", "original", [lambda: ()])
    readings = {candidate.name: run.read(candidate.name, candidate.key, candidate.draws) for candidate in candidates}

    def interval(values: Float[np.ndarray, " text"]) -> Interval:
        return interval_of(values, rng=np.random.default_rng(seed))

    rows = []
    for candidate in candidates:
        loss, recall = readings[candidate.name]
        rise = {length: interval(loss[length] - original[0][length]) for length in texts}
        change = None if recall_lists is None else interval(recall - original[1])
        rows.append(Baseline(candidate.name, candidate.substitute, candidate.bytes_per_group, rise, change))
    comparable = [
        row.name for row in rows if row.name in _WINDOW_WORDS and row.bytes_per_group <= EQUAL * rows[0].bytes_per_group
    ]
    best, difference = {}, {}
    for length in texts if comparable else ():
        best[length] = min(comparable, key=lambda name: float(readings[name][0][length].mean()))
        difference[length] = interval(readings[PLAN][0][length] - readings[best[length]][0][length])
    counts = {length: len(sequences) for length, sequences in texts.items()}
    lists = 0 if recall_lists is None else len(recall_lists)
    return Baselines(tuple(rows), counts, lists, best, difference, dict(left_out or {}))


_Losses = tuple[dict[int, np.ndarray], np.ndarray]
"""Loss of every text, by length, and recall of every list."""


@dataclass(eq=False)
class _Run:
    """Readings that are made one after the other, each once."""

    model: Model
    texts: Mapping[int, Sequences]
    recall_lists: Sequences | None
    checkpoints: Checkpoints
    progress: Progress
    workers: Workers | None
    total: int = 1
    done: int = 0

    @property
    def parts(self) -> int:
        """Readings of every row."""
        return len(self.texts) + (self.recall_lists is not None)

    def read(self, name: str, key: Any, draws: Sequence[Callable[[], Swaps]]) -> _Losses:
        """The model with these heads swapped, at all lengths and on the recall lists."""
        loss = {}
        for length, sequences in self.texts.items():
            self._tell(f"{name}, {length:,} tokens")
            loss[length] = self._read(sequences, None, key, draws).loss
        if self.recall_lists is None:
            return loss, np.zeros(0)
        self._tell(f"{name}, recall")
        return loss, self._read(None, self.recall_lists, key, draws).recall

    def _tell(self, stage: str) -> None:
        self.progress(f"baselines: {stage}", self.done / self.total)
        self.done += 1

    def _read(
        self, sequences: Sequences | None, lists: Sequences | None, key: Any, draws: Sequence[Callable[[], Swaps]]
    ) -> Reading:
        """One reading; several draws take turns with the texts, so that they cost no more than one."""
        n = min(len(draws), len(sequences or lists or ()))
        readings = []
        for number, draw in enumerate(draws[:n]):
            own = slice(number, None, n)
            text, asked = (None if whole is None else whole.part(own) for whole in (sequences, lists))

            def make(text: Any = text, asked: Any = asked, draw: Callable[[], Swaps] = draw) -> dict[str, Any]:
                return read_under(self.model, text, asked, draw(), self.workers).to_json()

            digest = digest_of_sequences(*(part for part in (text, asked) if part is not None))
            readings.append(Reading.from_json(self.checkpoints.find_or_make(["baseline", digest, number, key], make)))
        return _take_turns(readings)


def _take_turns(readings: Sequence[Reading]) -> Reading:
    """Readings of every n-th text, in the order of the texts."""
    whole = join_readings(readings)
    for name, values in vars(whole).items():
        for number, reading in enumerate(readings):
            values[number :: len(readings)] = getattr(reading, name)
    return whole


def _candidates(
    model: Model, swaps: Swaps, fit: Sequences, units: Sequence[Sequence[Head]], seed: int
) -> list[_Candidate]:
    """The plan and its baselines, without having computed anything."""
    bare = [(heads, part.with_readout(None)) for heads, part in swaps]
    candidates = [_candidate(model, PLAN, swaps)]
    if any(part.readout is not None for _, part in swaps):
        candidates.append(_candidate(model, UNCORRECTED, bare))
    for name in (WINDOW, SINKS_AND_WINDOW):
        equal = [(heads, _equal_part(model, part, sinks=name != WINDOW)) for heads, part in bare]
        # What keeps every key has no window of equal memory; nor has a plan that keeps nothing.
        windows = [(heads, part) for heads, part in equal if part is not None]
        if len(windows) == len(equal) and any(part.window for _, part in windows):
            candidates.append(_candidate(model, name, windows))
    everything = [head for heads, _ in swaps for head in heads]
    means: list[Substitute] = []

    def constant() -> Swaps:
        if not means:
            means.append(substitute(mean_outputs(model, fit), model))
        return [(everything, means[0])]

    key = [CONSTANT, sorted(everything), digest_of_sequences(fit)]
    candidates.append(_Candidate(CONSTANT, CONSTANT, 0.0, [constant], key))
    drawn = _draw_units(bare, units, np.random.default_rng(seed))
    name = f"{RANDOM} {'heads' if max(map(len, units)) == 1 else 'groups'}"
    candidates.append(
        _Candidate(
            name,
            _name(bare),
            candidates[0].bytes_per_group,
            [lambda draw=draw: draw for draw in drawn],  # type: ignore[misc]
            [_key(draw) for draw in drawn],
        )
    )
    return candidates


def _candidate(model: Model, name: str, swaps: Swaps) -> _Candidate:
    return _Candidate(name, _name(swaps), _mean_bytes(model, swaps), [lambda: swaps], _key(swaps))


def _mean_bytes(model: Model, swaps: Swaps) -> float:
    """Bytes that a freed KV group keeps, in the mean over the swapped heads."""
    sizes = [group_bytes(model, part.mechanism) for _, part in swaps]
    weights = [len(heads) for heads, _ in swaps]
    return sizes[0] if len(set(sizes)) == 1 else float(np.average(sizes, weights=weights))


def _equal_part(model: Model, part: Substitute, *, sinks: bool) -> Substitute | None:
    """The window that keeps as much as a part; the part itself where it keeps nothing, None where it keeps all."""
    if group_bytes(model, part.mechanism) == 0:
        return part
    window = window_of_equal_memory(model, part.mechanism, sinks=sinks)
    return None if window is None else Substitute(window)


def _name(swaps: Swaps) -> str:
    return ", ".join(dict.fromkeys(part.mechanism.label for _, part in swaps))


def _key(swaps: Swaps) -> list[Any]:
    return [[list(heads), part.name, part.digest] for heads, part in swaps]


def _draw_units(swaps: Swaps, units: Sequence[Sequence[Head]], rng: np.random.Generator) -> list[Swaps]:
    """Each substitute on as many units as it has in the plan, drawn at random; one draw where all units are swapped."""
    counts = []
    for heads, _ in swaps:
        own = set(heads)
        counts.append(sum(set(unit) <= own for unit in units))
    draws: list[Swaps] = []
    for _ in range(1 if sum(counts) == len(units) and len(swaps) == 1 else DRAWS):
        order = iter(rng.permutation(len(units)))
        draws.append(
            [
                (sorted(head for _, place in zip(range(n), order, strict=False) for head in units[place]), part)
                for n, (_, part) in zip(counts, swaps, strict=True)
                if n
            ]
        )
    return draws

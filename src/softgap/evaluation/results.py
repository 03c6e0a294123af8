"""The result of an evaluation: one row per task, length, distance and metric."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from softgap.checkpoints import write_whole
from softgap.errors import StoreError
from softgap.intervals import Interval

__all__ = ["FORMAT", "LEAST_ABOVE_CHANCE", "LOSSES", "METRICS", "Evaluation", "Row"]

FORMAT = 1
METRICS: Mapping[str, str] = {
    "loss": "loss, nats per token",
    "first": "first token, by likelihood",
    "whole": "whole answer, by likelihood",
    "answer_loss": "loss of the answer, nats per token",
    "generated_first": "first token, generated",
    "generated_whole": "whole answer, generated",
}
"""The metrics in words."""
LOSSES = ("loss", "answer_loss")
"""The metrics of which less is better."""
LEAST_ABOVE_CHANCE = 0.1
"""A task is measurable where the original model's interval lies at least so far above chance."""


@dataclass(frozen=True)
class Row:
    """One number of an evaluation, for the original model and for the changed one.

    Attributes
    ----------
    setting
        What else distinguishes the contexts, such as the number of pairs; "" where all settings are taken together.
    distance
        Distances of the answers, or for ``loss`` positions of the tokens: from the first number up to the second,
        which is excluded. None takes all answers that count as long-range, or all tokens.
    contexts, questions
        How many contexts the intervals rest on, and how many answers were scored in them.
    floor
        What chance gives: a guess that knows the candidates but not the context; for ``loss``, all tokens alike. NaN
        where that is not defined.
    original, changed
        The original model, which is the ceiling, and the changed one; None without a change.
    change
        Changed minus original, paired by context.
    margin
        A change whose interval lies within plus and minus the margin is equivalent to none.
    long_range
        Whether every answer's source lies outside of every exact window; None where there is no source.
    """

    task: str
    setting: str
    length: int
    distance: tuple[int, int] | None
    metric: str
    contexts: int
    questions: int
    floor: float
    original: Interval
    changed: Interval | None = None
    change: Interval | None = None
    margin: float = 0.05
    long_range: bool | None = None

    @property
    def measurable(self) -> bool:
        """Whether the original model itself is better than chance, by the end of its interval."""
        return self._above_chance(self.original.high if self.metric in LOSSES else self.original.low)

    def _above_chance(self, value: float) -> bool:
        if math.isnan(self.floor):
            return True
        if self.metric in LOSSES:
            return value < self.floor
        return value >= min(1.0, self.floor + LEAST_ABOVE_CHANCE)

    @property
    def verdict(self) -> str:
        """In words: ``equivalent``, ``worse``, ``better`` or ``undecided``; "" without a change.

        Where the original model itself is not measurable: ``not measurable with this model``, or ``too few contexts``
        if its value is above chance and only its interval is too wide.
        """
        if not self.measurable:
            return "too few contexts" if self._above_chance(self.original.value) else "not measurable with this model"
        if self.change is None:
            return ""
        if -self.margin <= self.change.low and self.change.high <= self.margin:
            return "equivalent"
        good = self.change.sign * (-1 if self.metric in LOSSES else 1)
        return {1: "better", -1: "worse", 0: "undecided"}[good]

    def to_json(self) -> dict[str, Any]:
        """As plain data, with its verdict."""
        data = asdict(self)
        for name in ("original", "changed", "change"):
            interval = getattr(self, name)
            data[name] = None if interval is None else interval.to_json()
        data["floor"] = None if math.isnan(self.floor) else self.floor
        return {**data, "measurable": self.measurable, "verdict": self.verdict}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """From plain data."""
        values = {name: value for name, value in data.items() if name not in ("measurable", "verdict")}
        for name in ("original", "changed", "change"):
            values[name] = None if values[name] is None else Interval(**values[name])
        values["distance"] = None if values["distance"] is None else tuple(values["distance"])
        values["floor"] = math.nan if values["floor"] is None else values["floor"]
        row = cls(**values)
        row._check()
        return row

    def _check(self) -> None:
        """Raise unless every field holds what its type says."""
        texts = (self.task, self.setting, self.metric)
        span = () if self.distance is None else self.distance
        counts = (self.length, self.contexts, self.questions, *span)
        intervals = [x for x in (self.original, self.changed, self.change) if x is not None]
        numbers = [self.floor, self.margin, *(n for x in intervals for n in (x.value, x.low, x.high, x.level))]
        if not all(isinstance(text, str) for text in texts) or self.metric not in METRICS:
            raise ValueError(f"task and setting must be texts, and metric one of {', '.join(METRICS)}")
        if not all(type(count) is int and count >= 0 for count in counts) or len(span) not in (0, 2):
            raise ValueError("length, contexts, questions and distance must be whole numbers from 0")
        if not all(type(number) in (int, float) for number in numbers) or self.long_range not in (None, True, False):
            raise ValueError("floor, margin and intervals must hold numbers")


@dataclass(frozen=True)
class Evaluation:
    """What a model can do, and what a change of it costs.

    Attributes
    ----------
    model, fingerprint
        The name of the model, and the hash of its weights.
    label
        What the changed model is called; "" without a change.
    seed
        Every context follows from it.
    window
        Recent keys that changed heads see exactly: answers count as long-range beyond it.
    rows
        One per task, length, distance and metric.
    notes
        What was left out, and why.
    against
        What stands in the place of the original model; "" for the model itself.
    """

    model: str
    fingerprint: str
    label: str
    seed: int
    window: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    against: str = ""

    def select(self, **values: Any) -> tuple[Row, ...]:
        """The rows whose fields have these values."""
        return tuple(row for row in self.rows if all(getattr(row, name) == value for name, value in values.items()))

    def sentence(self) -> str:
        """How many of the numbers can be measured, and what the change does to them."""
        rows = [row for row in self.rows if row.distance is None and row.metric != "answer_loss"]
        measurable = [row for row in rows if row.measurable]
        words = f"{len(measurable)} of {len(rows)} scores can be measured with {self.model}."
        if not self.label:
            return words
        counts = {name: sum(row.verdict == name for row in measurable) for name in ("equivalent", "worse", "better")}
        undecided = len(measurable) - sum(counts.values())
        base = self.against or "the original"
        return (
            f"{words} Compared with {base}, {self.label} is equivalent within the margin in {counts['equivalent']} of "
            f"them, worse in {counts['worse']}, better in {counts['better']} and undecided in {undecided}."
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        rows = [row.to_json() for row in self.rows]
        return {"format": FORMAT, **asdict(self), "rows": rows, "notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Evaluation:
        """From plain data."""
        values = {name: value for name, value in data.items() if name != "format"}
        rows = tuple(Row.from_json(row) for row in values["rows"])
        found = cls(**{**values, "rows": rows, "notes": tuple(values["notes"])})
        texts = (found.model, found.fingerprint, found.label, found.against, *found.notes)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("model, fingerprint, labels and notes must be texts")
        if not all(type(number) is int for number in (found.seed, found.window)):
            raise ValueError("seed and window must be whole numbers")
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON."""
        write_whole(Path(path), json.dumps(self.to_json(), indent=2) + "\n")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read what ``save`` wrote."""
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise StoreError(f"cannot read '{path}': {error.strerror or error}; check the path") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise StoreError(
                f"'{path}' holds no evaluation ({reason}); give a file that softgap evaluate wrote"
            ) from error

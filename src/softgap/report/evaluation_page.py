"""An evaluation as a document: scores by task and length, recall by distance, and loss by position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from softgap.errors import UnsupportedError
from softgap.report.documents import Cell, Document, Picture, Table
from softgap.report.figures import figure_bytes, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from softgap.evaluation import Evaluation, Row
    from softgap.intervals import Interval

__all__ = ["draw_evaluation", "evaluation_document", "read_evaluation"]

_COLOURS = ("#1f5fa8", "#c2571a")


def read_evaluation(path: Path) -> Document:
    """The document of a file that ``softgap evaluate --out`` wrote."""
    from softgap.evaluation import Evaluation

    return evaluation_document(Evaluation.load(path))


def evaluation_document(found: Evaluation) -> Document:
    """The document of an evaluation; without matplotlib it has no picture."""
    every = [row for row in found.rows if row.distance is None]
    spans = [row for row in found.rows if row.distance is not None and row.metric in ("first", "loss")]
    above = f" above the window of {found.window:,} keys" if found.window else ""
    tables = [_table(found, every, f"Scores by task and length, answers at all distances{above}", "metric")]
    if spans:
        caption = "By distance of the answer (first token), and loss by position"
        tables.append(_table(found, spans, caption, "distance or position"))
    intervals = "Intervals (95 %) are over contexts" + ("; the change is paired by context." if found.label else ".")
    notes = [
        ("Floor", "What a guess gets that knows the candidates but not the context."),
        ("Intervals", intervals),
        ("Model", f"{found.model}, fingerprint {found.fingerprint}"),
        *([("Changed", found.label)] if found.label else []),
        *([("Compared with", found.against)] if found.against else []),
        ("Seed", str(found.seed)),
        *(("Left out", note) for note in found.notes),
    ]
    try:
        figure = draw_evaluation(found)
    except UnsupportedError:
        figure = None
    caption = "Score of the first token by distance of the answer, and loss by position, with 95 % intervals"
    pictures = () if figure is None else (Picture("evaluation.svg", figure_bytes(figure, ".svg"), caption),)
    return Document(f"Evaluation of {found.model}", found.sentence(), tuple(tables), pictures, tuple(notes))


def _table(found: Evaluation, rows: Iterable[Row], caption: str, what: str) -> Table:
    from softgap.evaluation import METRICS

    columns = ["task", "tokens", what, "floor", found.against or "original"]
    columns += ["changed", "change", "margin"] if found.label else []
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        span = "" if row.distance is None else f"{row.distance[0]:,} to {row.distance[1] - 1:,}"
        cell: list[Cell] = [f"{row.task}, {row.setting}" if row.setting else row.task, row.length]
        cell += [(span + (" (in window)" if row.long_range is False else "")) or METRICS[row.metric]]
        cell += [None if math.isnan(row.floor) else round(row.floor, 3), _shown(row.original)]
        cell += [_shown(row.changed), _shown(row.change, "+"), row.margin] if found.label else []
        cells.append((*cell, row.contexts, row.verdict or "measurable"))
    return Table((*columns, "contexts", "verdict"), tuple(cells), caption)


def _shown(interval: Interval | None, sign: str = "") -> str:
    if interval is None:
        return "–"
    return f"{interval.value:{sign}.3f} ({interval.low:{sign}.3f} to {interval.high:{sign}.3f})"


def draw_evaluation(found: Evaluation) -> Figure | None:
    """Recall by distance and loss by position, at the greatest length of each; None where there is neither.

    Without associative recall, the first other task with distances takes its place.
    """
    scores = [row for row in found.rows if row.distance is not None and row.metric == "first"]
    scores.sort(key=lambda row: row.task != "recall")
    losses = [row for row in found.rows if row.distance is not None and row.metric == "loss"]
    panels = [_longest(rows) for rows in (scores, losses) if rows]
    if not panels:
        return None
    figure = new_figure(5.5 * len(panels), 4.2)
    for axes, rows in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, rows, found)
    return figure


def _longest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the first task and setting at its greatest length."""
    same = [row for row in rows if (row.task, row.setting) == (rows[0].task, rows[0].setting)]
    length = max(row.length for row in same)
    return [row for row in same if row.length == length]


def _draw(axes: Axes, rows: Sequence[Row], found: Evaluation) -> None:
    lines = [(found.against or "original", [row.original for row in rows], "o-")]
    lines += [(found.label, [row.changed for row in rows if row.changed is not None], "s--")] if found.label else []
    for number, (label, intervals, style) in enumerate(lines):
        middle = [each.value for each in intervals]
        error = np.clip([[e.value - e.low for e in intervals], [e.high - e.value for e in intervals]], 0, None)
        # A little apart, so that equal values do not hide each other.
        places = np.arange(len(intervals)) + 0.08 * (number - (len(lines) - 1) / 2)
        axes.errorbar(
            places, middle, error, fmt=style, color=_COLOURS[number], markersize=4, capsize=2, label=label
        )  # fmt: skip
    loss = rows[0].metric == "loss"
    if not loss:
        axes.plot(range(len(rows)), [row.floor for row in rows], ":", color="#666666", label="floor")
        axes.set_ylim(-0.03, 1.03)
    axes.set_xticks(range(len(rows)), [f"{row.distance[0]:,}" for row in rows if row.distance is not None])
    axes.set_xlabel("position, from" if loss else "distance of the answer in tokens, from")
    axes.set_ylabel("loss, nats per token" if loss else "share of first tokens that are right")
    setting = f", {rows[0].setting}" if rows[0].setting else ""
    axes.set_title(f"{rows[0].task}{setting}, {rows[0].length:,} tokens")
    axes.legend(fontsize=8, frameon=False)

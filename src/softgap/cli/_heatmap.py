"""One number per head of a model as a map in the terminal: layers across, heads down."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float
from rich.color import Color
from rich.style import Style
from rich.text import Text

from softgap.cli._colour import beyond, ramp, shade
from softgap.cli._means import mean

__all__ = ["heat_map"]

_MARGIN = 4
_WHOLE_LINES = 16
_LINES = 24
_TICKS = 5
# Where the scale ends; what lies beyond is shown as such.
_END = 1.0


def heat_map(
    values: Float[np.ndarray, "layer head"], layers: tuple[int, ...], *, width: int, colour: bool
) -> tuple[Text, str]:
    """The map and what one cell of it stands for, to be read on a scale from 0 to 1.

    In colour a cell is a block, half a line high where there are many heads; without colour it is a digit, the
    number's tenths. Above 1 it has a colour of its own, from 1 on it is ``+``, and the legend says how many heads these
    are and how large the largest number is. A model too large for the width or for 24 lines is pooled: then a cell is
    the mean over neighbouring layers or heads.
    """
    halves = colour and values.shape[1] > _WHOLE_LINES
    room = max(1, width - _MARGIN)
    per_column = math.ceil(values.shape[0] / room)
    per_row = math.ceil(values.shape[1] / (2 * _LINES if halves else _LINES))
    cells = _pooled(values, per_column, per_row)
    cell = 2 if 2 * len(cells) <= room else 1
    lines = Text()
    for row in range(0, cells.shape[1], 2 if halves else 1):
        lines.append(f"{row * per_row:>{_MARGIN - 1}} ", "dim")
        for column in cells:
            below = column[row + 1] if halves and row + 1 < len(column) else math.nan
            lines.append_text(_blocks(column[row], below, cell, halves) if colour else _digit(column[row], cell))
        lines.append("\n")
    lines.append(_axis(layers[::per_column], cell), "dim")
    lines.append("\n").append_text(_legend(values, colour))
    return lines, _meaning(per_column, per_row)


def _pooled(values: Float[np.ndarray, "layer head"], per_column: int, per_row: int) -> Float[np.ndarray, "column row"]:
    columns, rows = (math.ceil(size / per) for size, per in zip(values.shape, (per_column, per_row), strict=True))
    padded = np.full((columns * per_column, rows * per_row), np.nan)
    padded[: values.shape[0], : values.shape[1]] = values
    return mean(padded.reshape(columns, per_column, rows, per_row), axis=(1, 3))


def _blocks(above: float, below: float, cell: int, halves: bool) -> Text:
    if not halves:
        sign = f"{'+' if above > _END else '':<{cell}}"
        return Text(sign, Style() if math.isnan(above) else Style(color="black", bgcolor=_colour(above)))
    if math.isnan(above):
        return Text(" " * cell) if math.isnan(below) else Text("▄" * cell, Style(color=_colour(below)))
    return Text("▀" * cell, Style(color=_colour(above), bgcolor=None if math.isnan(below) else _colour(below)))


def _colour(value: float) -> Color:
    return beyond() if value > _END else shade(value)


def _digit(value: float, cell: int) -> Text:
    digit = " " if math.isnan(value) else "+" if value >= _END else str(int(10 * max(value, 0.0)))
    return Text(f"{digit:<{cell}}")


def _axis(layers: tuple[int, ...], cell: int) -> str:
    """Numbers of some of the layers, each beginning under its column."""
    line = ""
    for column in range(0, len(layers), _TICKS):
        line = f"{line:<{_MARGIN + column * cell}}{layers[column]:<{cell}}"
    return line


def _legend(values: Float[np.ndarray, "layer head"], colour: bool) -> Text:
    """The scale, and how far the numbers go beyond it."""
    # A digit cannot show 1 itself, a colour can.
    over = values[values > _END] if colour else values[values >= _END]
    count = f"{len(over)} head{'' if len(over) == 1 else 's'}"
    reach = f"{count}, up to {over.max():.2f}" if len(over) else "no head"
    legend = Text(" " * _MARGIN)
    if colour:
        return legend.append_text(ramp("0", "1   ")).append("  ", Style(bgcolor=beyond())).append(f" above 1: {reach}")
    return legend.append(f"tenths: 5 is 0.5 to 0.6, + is 1 and more: {reach}", "dim")


def _meaning(per_column: int, per_row: int) -> str:
    parts = [f"{count} {name}" for count, name in ((per_column, "layers"), (per_row, "heads")) if count > 1]
    return f"each cell is the mean of {' and '.join(parts)}" if parts else ""

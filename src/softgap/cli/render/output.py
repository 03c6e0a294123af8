"""Output of commands: tables, heat maps of one number per head, one JSON document, warnings, and the browser."""

from __future__ import annotations

import json
import math
import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from softgap.errors import UnsupportedError

__all__ = [
    "Force",
    "console",
    "find_browser",
    "finite",
    "has_colour",
    "heat_map",
    "mean",
    "open_address",
    "open_file",
    "overriding",
    "ramp",
    "shade",
    "shade_style",
    "strip_control_characters",
    "warn",
    "write_json",
]


# Wide enough for a table of formulas when the output goes to a file or a pipe, where no terminal says how wide it is.
_PIPE_WIDTH = 160


def console() -> Console:
    """The console on standard output."""
    # Formulas hold brackets and colons, which rich would otherwise read as markup and emoji.
    candidate = Console(markup=False, emoji=False, highlight=False)
    if not candidate.is_terminal:
        candidate.width = _PIPE_WIDTH
    return candidate


def write_json(document: dict[str, Any]) -> None:
    """Write one JSON document, and nothing else, to standard output; NaN and infinities become null."""
    # Escapes of JSON where the stream cannot hold every character: its own would make no JSON.
    plain = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(finite(document), indent=2, ensure_ascii=plain, allow_nan=False) + "\n")


def warn(sentence: str) -> None:
    """Write a warning to standard error."""
    sys.stderr.write(f"softgap: {sentence}\n")
    sys.stderr.flush()


Force = Annotated[
    bool, typer.Option("--force", help="Read a study whose manifest or prompts were edited; says what this overrides.")
]


@contextmanager
def overriding(force: bool) -> Iterator[None]:
    """With ``force`` read studies that were edited, and warn of everything that would have been refused."""
    if not force:
        yield
        return
    from softgap.trajectories.reader import accept_edited

    with accept_edited() as overridden:
        try:
            yield
        finally:
            for sentence in overridden:
                warn(f"{sentence}; --force overrides this")


def finite(value: Any) -> Any:
    """The same document with null for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


_REMEDY = "leave --open out and open it yourself"


def find_browser() -> webbrowser.BaseBrowser:
    """The browser of the user."""
    # On Linux without a display, webbrowser would offer a text browser, which cannot show a report.
    displays = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    unseen = sys.platform.startswith("linux") and not any(os.environ.get(name) for name in displays)
    try:
        if unseen:
            raise webbrowser.Error("no display")
        return webbrowser.get()
    except webbrowser.Error as error:
        raise UnsupportedError(f"--open needs a browser, and none was found here ({error}); {_REMEDY}") from error


def open_file(browser: webbrowser.BaseBrowser, path: Path) -> None:
    """Open a file in the browser."""
    if not browser.open(path.absolute().as_uri()):
        raise UnsupportedError(f"the browser did not open '{path}', which is written; {_REMEDY}")


def open_address(browser: webbrowser.BaseBrowser, address: str) -> bool:
    """Open an address in the browser; return whether it worked."""
    return bool(browser.open(address))


# Viridis at nine even points, from its bright end: dark is more.
_STOPS = (
    (253, 231, 37),
    (170, 220, 50),
    (92, 200, 99),
    (39, 173, 129),
    (33, 144, 141),
    (44, 113, 142),
    (59, 81, 139),
    (71, 44, 122),
    (68, 1, 84),
)


# Of what lies beyond the scale: no colour of it.
_BEYOND = (255, 70, 30)


_CONTROL_CHARACTERS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


def has_colour(console: Console) -> bool:
    """Whether this console shows colours."""
    return console.color_system is not None and not console.no_color


def shade(fraction: float) -> Color:
    """The colour at 0 to 1 of the scale; beyond its ends, the colour at the end."""
    place = min(max(fraction, 0.0), 1.0) * (len(_STOPS) - 1)
    left = min(int(place), len(_STOPS) - 2)
    share = place - left
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_STOPS[left], _STOPS[left + 1], strict=True))
    return Color.from_rgb(red, green, blue)


def overflow_colour() -> Color:
    """The colour of what lies beyond the upper end of the scale."""
    return Color.from_rgb(*_BEYOND)


def ramp(low: str, high: str, cells: int = 16) -> Text:
    """A legend: the scale between what its two ends stand for."""
    legend = Text(f"{low} ")
    for cell in range(cells):
        legend.append(" ", Style(bgcolor=shade(cell / (cells - 1))))
    return legend.append(f" {high}")


def strip_control_characters(text: str) -> str:
    """The text without the control characters that could steer a terminal."""
    return text.translate(_CONTROL_CHARACTERS)


def shade_style(fraction: float) -> Style:
    """A style for text on a colour of the scale, which can be read at both ends."""
    colour = shade(fraction)
    red, green, blue = colour.triplet or (0, 0, 0)
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 120
    return Style(color="black" if bright else "white", bgcolor=colour)


def mean(values: Float[np.ndarray, ...], axis: int | tuple[int, ...] | None = None) -> Float[np.ndarray, ...]:
    """Mean in float64 over the numbers that are there; NaN, without a warning, where there are none."""
    wide = np.asarray(values, dtype=np.float64)
    counted = np.count_nonzero(~np.isnan(wide), axis=axis)
    total = np.nansum(wide, axis=axis)
    return np.where(counted > 0, total / np.maximum(counted, 1), np.nan)


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

    In colour a cell is a block, half a line high where there are many heads, and dark is more; without colour it is a
    digit, the number's tenths. Above 1 it has a colour of its own, from 1 on it is ``+``, and the legend says how many
    heads these are and how large the largest number is. A model too large for the width or for 24 lines is pooled: then
    a cell is the mean over neighbouring layers or heads.
    """
    halves = colour and values.shape[1] > _WHOLE_LINES
    room = max(1, width - _MARGIN)
    per_column = math.ceil(values.shape[0] / room)
    per_row = math.ceil(values.shape[1] / (2 * _LINES if halves else _LINES))
    cells = _pool(values, per_column, per_row)
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


def _pool(values: Float[np.ndarray, "layer head"], per_column: int, per_row: int) -> Float[np.ndarray, "column row"]:
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
    return overflow_colour() if value > _END else shade(value)


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
        return (
            legend.append_text(ramp("0", "1   "))
            .append("  ", Style(bgcolor=overflow_colour()))
            .append(f" above 1: {reach}")
        )
    return legend.append(f"tenths: 5 is 0.5 to 0.6, + is 1 and more: {reach}", "dim")


def _meaning(per_column: int, per_row: int) -> str:
    parts = [f"{count} {name}" for count, name in ((per_column, "layers"), (per_row, "heads")) if count > 1]
    return f"each cell is the mean of {' and '.join(parts)}" if parts else ""

"""Divergence as colour, and the piece of a text that each token stands for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

__all__ = ["colourful", "harmless", "on_shade", "pieces", "ramp", "shade"]

# Viridis at nine even points: dark is linear, bright is far from it.
_STOPS = (
    (68, 1, 84),
    (71, 44, 122),
    (59, 81, 139),
    (44, 113, 142),
    (33, 144, 141),
    (39, 173, 129),
    (92, 200, 99),
    (170, 220, 50),
    (253, 231, 37),
)
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")
# A token that is part of a character has no text of its own.
_UNKNOWN = "�"
_LONGEST_CHARACTER = 8


def colourful(console: Console) -> bool:
    """Whether this console shows colours."""
    return console.color_system is not None and not console.no_color


def shade(fraction: float) -> Color:
    """The colour at 0 to 1 of the scale; beyond its ends, the colour at the end."""
    place = min(max(fraction, 0.0), 1.0) * (len(_STOPS) - 1)
    left = min(int(place), len(_STOPS) - 2)
    share = place - left
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_STOPS[left], _STOPS[left + 1], strict=True))
    return Color.from_rgb(red, green, blue)


def ramp(low: str, high: str, cells: int = 16) -> Text:
    """A legend: the scale between what its two ends stand for."""
    legend = Text(f"{low} ")
    for cell in range(cells):
        legend.append(" ", Style(bgcolor=shade(cell / (cells - 1))))
    return legend.append(f" {high}")


def harmless(text: str) -> str:
    """The text without the control characters that could steer a terminal."""
    return text.translate(_CONTROLS)


def on_shade(fraction: float) -> Style:
    """A style for text on a colour of the scale, which can be read at both ends."""
    colour = shade(fraction)
    red, green, blue = colour.triplet or (0, 0, 0)
    bright = 0.299 * red + 0.587 * green + 0.114 * blue > 120
    return Style(color="black" if bright else "white", bgcolor=colour)


def pieces(text: str, tokens: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The text cut into pieces, each with the indices of the tokens it came from.

    Decoding one token alone may lose a leading space or give half a character, so the tokens are looked up in the text,
    from its end: there the last token ends, while a text that was read begins with a token nothing predicted. Tokens
    that are not in the text (end of a turn) belong to no piece; what no token explains has an empty list.
    """
    found: list[tuple[str, list[int]]] = []
    end, waiting = len(text), 0
    indices: list[int] = []
    for index in reversed(range(len(tokens))):
        start = _start(text, tokens[index], end, waiting)
        if start is None:
            # Behind the text's end only what a decoder leaves out.
            if found or _UNKNOWN in tokens[index]:
                indices.insert(0, index)
                waiting += _LONGEST_CHARACTER if _UNKNOWN in tokens[index] else 0
            continue
        stop = start + len(tokens[index])
        rest = text[stop:end]
        if rest.strip() or (rest and indices):
            found.append((rest, indices))
            rest = ""
        found.append((text[start:stop] + rest, [index]))
        end, waiting, indices = start, 0, []
    if end:
        found.append((text[:end], indices))
    return found[::-1]


def _start(text: str, token: str, end: int, slack: int) -> int | None:
    """Where a token begins that ends at ``end``, or before spaces or up to ``slack`` characters; None if nowhere."""
    if not token or _UNKNOWN in token:
        return None
    close = len(text[:end].rstrip())
    for stop in (end, close):
        if text.endswith(token, 0, stop):
            return stop - len(token)
    if not slack:
        return None
    at = text.rfind(token, max(0, end - len(token) - slack), end)
    return None if at < 0 else at

"""Divergence as colour."""

from __future__ import annotations

from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

__all__ = ["beyond", "colourful", "harmless", "on_shade", "ramp", "shade"]

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
# Of what lies beyond the scale: no colour of it, and darker than its bright end.
_BEYOND = (255, 70, 30)
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "�")


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


def beyond() -> Color:
    """The colour of what lies beyond the upper end of the scale."""
    return Color.from_rgb(*_BEYOND)


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

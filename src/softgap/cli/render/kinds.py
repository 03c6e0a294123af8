"""The kinds of heads in the terminal: which substitute suffices for each, as a map and a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli.render.output import has_colour
from softgap.kinds import COLOURS, KINDS, LETTERS, MAP_TITLE

if TYPE_CHECKING:
    from softgap.calibration.sufficiency import Sufficiency

__all__ = ["kind_map", "kind_table", "show_kind_map", "show_kinds"]

_MARGIN = " " * 4
_TICKS = 5


def kind_map(
    labels: Sequence[Sequence[str | None]], layers: Sequence[int] | None = None, *, colour: bool, width: int = 100
) -> Text:
    """One letter per head, heads down and layers across, with a legend; a wide model goes on below.

    Parameters
    ----------
    labels
        The kind of each head, ``[layer][head]``; None where it is unknown.
    layers
        Numbers of the layers; by default they count from 0.
    """
    numbers = range(len(labels)) if layers is None else layers
    room = max(_TICKS, (width - len(_MARGIN)) // _TICKS * _TICKS)
    text = Text()
    for start in range(0, len(labels), room):
        columns = labels[start : start + room]
        for head in range(max(map(len, columns), default=0)):
            text.append(f"{head:>3} ")
            for layer in columns:
                kind = layer[head] if head < len(layer) else None
                text.append(" " if kind is None else LETTERS.get(kind, "?"), _style(kind) if colour else "")
            text.append("\n")
        ticks = "".join(f"{number:<{_TICKS}}" for number in numbers[start : start + room : _TICKS])
        text.append(f"{_MARGIN}{ticks.rstrip()}\n")
    return text.append(_MARGIN + ", ".join(f"{LETTERS[kind]} {kind}" for kind in KINDS))


def _style(kind: str | None) -> str:
    colour = COLOURS.get(kind or "")
    return "" if colour is None else f"{'#ffffff' if kind == 'softmax' else '#000000'} on {colour}"


def kind_table(sufficiency: Sufficiency) -> Table:
    """What each kind keeps, closes and suffices for."""
    table = Table(title="What suffices for each head", title_justify="left")
    for heading in ("kind", "keys' worth per KV head", "gap closed, all heads", "heads that need it"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in KINDS:
        count = sufficiency.counts.get(kind)
        if count is None:
            continue
        worth = sufficiency.keys_worth.get(kind)
        kept = f"{worth:.0f}" if worth is not None else "all values" if kind == "profile" else "all keys"
        closed = sufficiency.gap_closed.get(kind)
        share = "1" if closed is None else f"{closed.value:.3f} ({closed.low:.3f} to {closed.high:.3f})"
        low, high = round(count.low), round(count.high)
        table.add_row(kind, kept, share, f"{count.value:.0f}" + (f" ({low} to {high})" if low != high else ""))
    return table


def show_kind_map(
    console: Console, labels: Sequence[Sequence[str | None]], layers: Sequence[int] | None = None
) -> None:
    """The map under its title."""
    console.print(Text(MAP_TITLE, "bold"))
    console.print(kind_map(labels, layers, colour=has_colour(console), width=min(console.width, 100)))


def show_kinds(console: Console, sufficiency: Sufficiency) -> None:
    """The sentence, the map, the table, and how far the labels can be trusted."""
    console.print(sufficiency.sentence, width=min(console.width, 100))
    console.print()
    show_kind_map(console, sufficiency.labels)
    console.print(kind_table(sufficiency))
    rule = f"A kind suffices if it leaves at most {sufficiency.limit:.0%} of the output's energy and of the gap."
    console.print(f"{rule} Intervals are over {sufficiency.texts} held-out texts.", width=min(console.width, 100))
    if sufficiency.stability:
        shares = ", ".join(f"{share:.0%} ({name})" for name, share in sufficiency.stability.items())
        console.print(f"Heads that keep their kind: {shares}.", width=min(console.width, 100))
    else:
        console.print("The stability of the kinds was not measured.")

"""The kinds of heads in the terminal: which substitute suffices for each, as a map and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from softgap.cli.render.output import has_colour
from softgap.kinds import COLOURS, KINDS, LETTERS

if TYPE_CHECKING:
    from softgap.calibration.sufficiency import Sufficiency

__all__ = ["kind_map", "kind_table", "show_kinds"]


def kind_map(sufficiency: Sufficiency, *, colour: bool) -> Text:
    """One letter per head, heads down and layers across, with a legend."""
    layers = sufficiency.labels
    text = Text()
    rows = max(map(len, layers))
    for head in range(rows):
        text.append(f"{head:>3} ")
        for layer in layers:
            kind = layer[head] if head < len(layer) else None
            letter = " " if kind is None else LETTERS.get(kind, "?")
            style = f"#000000 on {COLOURS[kind]}" if colour and kind in COLOURS and kind != "softmax" else ""
            if colour and kind == "softmax":
                style = f"#ffffff on {COLOURS[kind]}"
            text.append(letter, style)
        text.append("\n")
    text.append("    " + "".join(f"{layer:<5}" for layer in range(0, len(layers), 5)).rstrip() + "\n")
    shown = [kind for kind in KINDS if kind in sufficiency.counts]
    text.append("    " + ", ".join(f"{LETTERS[kind]} {kind}" for kind in shown))
    return text


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


def show_kinds(console: Console, sufficiency: Sufficiency) -> None:
    """The sentence, the map, the table, and how far the labels can be trusted."""
    console.print(sufficiency.sentence, width=min(console.width, 100))
    console.print()
    console.print(Text("The cheapest substitute that suffices, by head (rows) and layer (columns)", "bold"))
    console.print(kind_map(sufficiency, colour=has_colour(console)))
    console.print(kind_table(sufficiency))
    rule = f"A kind suffices if it leaves at most {sufficiency.limit:.0%} of the output's energy and of the gap."
    console.print(f"{rule} Intervals are over {sufficiency.texts} held-out texts.", width=min(console.width, 100))
    if sufficiency.stability:
        shares = ", ".join(f"{share:.0%} ({name})" for name, share in sufficiency.stability.items())
        console.print(f"Heads that keep their kind: {shares}.", width=min(console.width, 100))
    else:
        console.print("The stability of the kinds was not measured.")

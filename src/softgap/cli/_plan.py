"""A plan of heads without softmax as a person reads it in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from softgap.linearize import Plan
    from softgap.probe.layout import AttentionLayer

__all__ = ["show_plan"]

_WORDS = {
    "loss": "loss, nats per token",
    "accuracy": "accuracy of the top token",
    "recall": "recall (first token of each answer)",
    "whole_answers": "recall (whole answers)",
}


def show_plan(console: Console, plan: Plan, layers: Sequence[AttentionLayer], path: Path) -> None:
    """How many heads go, what that costs on unseen text, what it saves, and which they are."""
    heads, groups = sum(x.heads for x in layers), sum(x.kv_heads for x in layers)
    console.print(
        f"{len(plan.heads)} of {heads} heads go without softmax ({plan.substitute.name}); {len(plan.groups)} of "
        f"{groups} KV groups are freed, {len(plan.layers)} layers whole."
    )
    console.print(_costs(plan))
    if plan.recall:
        console.print(plan.recall_words())
    saved = plan.memory["saved_per_token"] / max(1.0, plan.memory["per_token_original"])
    console.print(
        f"The KV cache takes {plan.memory['per_token']:,.0f} bytes per token instead of "
        f"{plan.memory['per_token_original']:,.0f} ({saved:.0%} less), and "
        f"{plan.memory['states'] / 1e6:.1f} MB of states; the plan itself is {plan.memory['parameters'] / 1e6:.1f} MB."
    )
    console.print(
        Text("Heads (down) by layer (across): . softmax, o swapped, # swapped and its KV group freed", "bold")
    )
    for line in _grid(plan, layers):
        console.print(line)
    console.print(f"Saved to {path}", soft_wrap=True)


def _costs(plan: Plan) -> Table:
    table = Table(show_header=True)
    for name in ("on unseen text", "original", "change", "95 % interval"):
        table.add_column(name, justify="left" if name == "on unseen text" else "right")
    for name, interval in plan.expected.items():
        spread = f"{interval.low:+.3f} to {interval.high:+.3f}"
        table.add_row(_WORDS[name], f"{plan.original[name]:.3f}", f"{interval.value:+.3f}", spread)
    return table


def _grid(plan: Plan, layers: Sequence[AttentionLayer]) -> list[str]:
    cells = np.full((max(x.heads for x in layers), len(layers)), " ")
    for column, layer in enumerate(layers):
        for head in range(layer.heads):
            freed = (layer.number, head // (layer.heads // layer.kv_heads)) in plan.groups
            cells[head, column] = "#" if freed else "o" if (layer.number, head) in plan.heads else "."
    return ["".join(row) for row in cells]

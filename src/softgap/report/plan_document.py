"""A plan of heads without softmax as findings for people: what goes, what it costs on unseen text, what it saves."""

from __future__ import annotations

from collections.abc import Sequence

from softgap.errors import UnsupportedError
from softgap.linearize.plan import Plan
from softgap.report.document import Document, Picture, Table
from softgap.report.linearize_figure import draw_plan
from softgap.report.pictures import figure_bytes

__all__ = ["plan_document"]

_WORDS = {"recall": "recall (first token of each answer)", "whole_answers": "recall (whole answers)"}


def plan_document(plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], layers: Sequence[int]) -> Document:
    """The document of a plan for a model with so many heads and KV heads in each layer; without matplotlib no picture.

    ``layers`` are the numbers of the layers.
    """
    memory, rows = plan.memory, []
    for name, interval in plan.expected.items():
        rows.append((_WORDS.get(name, name), plan.original[name], interval.value, interval.low, interval.high))
    columns = ("on unseen text", "original", "change", "from", "to")
    caption = "What it costs, with 95 % intervals over texts and lists of lookups"
    return Document(
        title=f"A plan for {plan.model}",
        verdict=(
            f"{len(plan.heads)} of {sum(heads)} heads go without softmax ({plan.substitute.name}); {len(plan.groups)} "
            f"of {sum(kv_heads)} KV groups are freed, {len(plan.layers)} layers whole."
        ),
        tables=(Table(columns, tuple(rows), caption),) if rows else (),
        pictures=_picture(plan, heads, kv_heads, layers),
        notes=(
            *((("Recall", plan.recall_words()),) if plan.recall else ()),
            (
                "Memory",
                f"The KV cache takes {memory['per_token']:,.0f} bytes per token instead of "
                f"{memory['per_token_original']:,.0f}, and {memory['states'] / 1e6:.1f} MB of states; the plan itself "
                f"is {memory['parameters'] / 1e6:.1f} MB.",
            ),
            *((name, str(value)) for name, value in plan.provenance.items()),
        ),
    )


def _picture(plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], layers: Sequence[int]) -> tuple[Picture, ...]:
    try:
        content = figure_bytes(draw_plan(plan, heads, kv_heads, layers), ".svg")
    except UnsupportedError:
        return ()
    return (Picture("plan.svg", content, "Heads that keep softmax, and heads that go."),)

"""`softgap study task`: prompts with known answers, made from a seed, answered and judged."""

from __future__ import annotations

from typing import Annotated

import typer

from softgap.cli._grouped import grouped
from softgap.cli._study import carry_out
from softgap.cli._study_options import Limit, Measuring, StudyOut

__all__ = ["task_command"]


@grouped
def task_command(
    task: Annotated[str, typer.Argument(help="lookup, arithmetic, copying or statements.")],
    *,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of prompts.")] = 400,
    out: StudyOut = None,
    difficulty: Annotated[
        list[int] | None,
        typer.Option(help="Taken in turn; may be repeated: pairs, digits or words.", show_default=False),
    ] = None,
    limit: Limit = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: what the task needs.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Of the prompts, and of sampling.")] = 0,
    measuring: Measuring,
) -> None:
    """Make prompts with known answers from a seed, let the model answer, and label the answers right or wrong."""
    from softgap.tasks import TASKS, generate_prompts

    found = generate_prompts(task, n, seed=seed, difficulties=difficulty)[:limit]
    settings = measuring.settings(
        max_new_tokens=max_new_tokens or TASKS[task].max_new_tokens,
        seed=None if measuring.temperature is None else seed,
        scoring=TASKS[task].scoring,
    )
    carry_out(found, f"runs/{task}" if out is None else out, settings, measuring)

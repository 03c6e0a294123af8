"""`softgap study run`: prompts from a file or a dataset, measured in batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softgap.cli._grouped import grouped
from softgap.cli._study import carry_out
from softgap.cli._study_options import Limit, Measuring, StudyOut
from softgap.errors import ValueInputError

if TYPE_CHECKING:
    from softgap.tasks import Prompt

__all__ = ["run_command"]


@grouped
def run_command(
    prompts: Annotated[str, typer.Argument(help="A .jsonl or .csv file, or a dataset as org/name:config@split.")],
    *,
    out: StudyOut = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", help="Our field = theirs, as prompt=question; may be repeated.", show_default=False),
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(help="Judge answers: exact, contains, numeric, choice or module:function.", show_default=False),
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="Let the model answer prompts that come with a completion, too.")
    ] = False,
    limit: Limit = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    seed: Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Sample with this seed, not greedily.")] = None,
    measuring: Measuring,
) -> None:
    """Measure every head on many prompts: answered by the model, or read where a completion is given."""
    from softgap.tasks import read_prompts, resolve_scorer
    from softgap.trajectories.names import slug

    found = read_prompts(prompts, renamed=_renamed(field or ()))[:limit]
    if answer:
        found = _answered(found)
    if score is not None:
        resolve_scorer(score).check(found, f"'{prompts}'")
    settings = measuring.settings(max_new_tokens=max_new_tokens, seed=seed, scoring=score)
    place = f"runs/{slug(Path(prompts).stem)}" if out is None else out
    carry_out(found, place, settings, measuring)


def _renamed(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for entry in given:
        own, sign, other = entry.partition("=")
        if not (own and sign and other):
            raise ValueInputError(f"--field must say our field = theirs, got '{entry}'; write prompt=question")
        found[own] = other
    return found


def _answered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Every different question once."""
    seen: dict[tuple[str, str | None], Prompt] = {}
    for prompt in prompts:
        seen.setdefault((prompt.prompt, prompt.group), prompt.asked())
    return list(seen.values())

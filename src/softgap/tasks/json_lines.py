"""JSON lines: one object per line, checked line by line before the first one is used."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from softgap.errors import ValueInputError
from softgap.tasks.prompts import Prompt, check_ids, prompt_from
from softgap.tasks.text_files import short

__all__ = ["json_objects", "json_prompts"]


def json_objects(name: str, text: str, needs: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and object of every line that is not blank."""
    what = " and ".join(needs)
    # JSON allows other line separators inside a text, so not splitlines.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    found = [(number, _object(f"{name}, line {number}", line, what)) for number, line in lines]
    if not found:
        raise ValueInputError(f"{name} must hold at least one JSON line with {what}, got none; add one")
    return found


def json_prompts(
    name: str, text: str, *, needs: Sequence[str] = ("prompt",), renamed: Mapping[str, str] | None = None
) -> list[Prompt]:
    """The prompts of a JSON lines text; an id left out is the number of the prompt, from 0."""
    taken = renamed or {}
    prompts = [
        prompt_from(
            {**entry, **{own: entry.get(given) for own, given in taken.items()}},
            f"{name}, line {number}",
            str(index),
            line=number,
            needs=needs,
        )
        for index, (number, entry) in enumerate(json_objects(name, text, needs))
    ]
    check_ids(prompts, name)
    return prompts


def _object(where: str, line: str, what: str) -> dict[str, Any]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueInputError(
            f'{where}: not JSON ({error}); write one object per line, such as {{"prompt": "a", "completion": "b"}}'
        ) from error
    if not isinstance(entry, dict):
        raise ValueInputError(f"{where}: must be an object with {what}, got {short(entry)}; write one object per line")
    return entry

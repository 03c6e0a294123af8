"""What a study of many prompts keeps beside its measurements.

prompts.jsonl               one line per sample: everything that was given about it, and the number of its batch
failures/part-*.jsonl       one line per sample that failed in the batch of that number, with its reason
labels.jsonl                one line per call of `softgap study label`: when, from what, how many
"""

from __future__ import annotations

from collections.abc import Sequence

from softgap.errors import StoreError
from softgap.study.batches import Batch
from softgap.study.measuring import Failure
from softgap.tasks import Prompt
from softgap.tasks.prompts import prompt_from
from softgap.tasks.text_files import short
from softgap.trajectories.folder import Folder
from softgap.trajectories.lines import json_lines, read_lines

__all__ = ["read_failures", "stored_prompts", "write_failures", "write_prompts"]

PROMPTS = "prompts.jsonl"
LABELS = "labels.jsonl"
_FAILURES = "failures"
# The batch of a prompt that failed before any batch was made.
UNPLANNED = -1


def write_prompts(folder: Folder, prompts: Sequence[Prompt], batches: Sequence[Batch]) -> None:
    """Write down what is asked and which samples go together, before the first is measured."""
    number = {i: batch.number for batch in batches for i in batch.indices}
    lines = [{**prompt.to_json(), "batch": number.get(i, UNPLANNED)} for i, prompt in enumerate(prompts)]
    folder.replace(PROMPTS, json_lines(lines))


def stored_prompts(folder: Folder) -> dict[str, tuple[Prompt, int]] | None:
    """Prompts by sample id, each with the number of its batch; None for a study without them."""
    if folder.kind(PROMPTS) == "absent":
        return None
    found = {}
    for number, entry in enumerate(read_lines(folder, PROMPTS), start=1):
        batch = entry.pop("batch", UNPLANNED)
        if not isinstance(batch, int):
            raise StoreError(
                f"{PROMPTS} in '{folder.given}', line {number}: 'batch' must be a whole number, got {short(batch)}; "
                "restore this file from a copy"
            )
        prompt = prompt_from(entry, f"{PROMPTS} in '{folder.given}', line {number}", str(number), line=number)
        found[prompt.sample_id] = (prompt, batch)
    return found


def write_failures(folder: Folder, batch: int, failures: Sequence[Failure]) -> None:
    """Write the failures of a batch, if there are any; before the batch itself, so that none is ever lost."""
    if failures:
        folder.create(_FAILURES)
        folder.replace(_failures(batch), json_lines([failure.to_json() for failure in failures]))


def read_failures(folder: Folder) -> list[Failure]:
    """All failures of a study, by batch."""
    names = [name for name in folder.names(_FAILURES) if name.startswith("part-")]
    try:
        return [Failure(**entry) for name in names for entry in read_lines(folder, f"{_FAILURES}/{name}")]
    except TypeError as error:
        raise StoreError(
            f"{_FAILURES} in '{folder.given}' is damaged ({error}); restore the folder from a copy"
        ) from error


def _failures(batch: int) -> str:
    return f"{_FAILURES}/part-{'none' if batch == UNPLANNED else f'{batch:05d}'}.jsonl"

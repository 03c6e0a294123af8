"""The prompts of a stored study, by sample id."""

from __future__ import annotations

from softgap.errors import StoreError
from softgap.tasks.prompts import Prompt, prompt_from
from softgap.tasks.text_files import shortened
from softgap.trajectories.folder import Folder, read_lines

__all__ = ["PROMPTS", "UNPLANNED", "stored_prompts"]


PROMPTS = "prompts.jsonl"


# The batch of a prompt that failed before any batch was made.
UNPLANNED = -1


def stored_prompts(folder: Folder) -> dict[str, tuple[Prompt, int]] | None:
    """Prompts by sample id, each with the number of its batch; None for a study without them."""
    if folder.kind(PROMPTS) == "absent":
        return None
    prompts = {}
    for number, entry in enumerate(read_lines(folder, PROMPTS), start=1):
        batch = entry.pop("batch", UNPLANNED)
        if not isinstance(batch, int):
            raise StoreError(
                f"{PROMPTS} in '{folder.address}', line {number}: 'batch' must be a whole number, got "
                f"{shortened(batch)}; restore this file from a copy"
            )
        prompt = prompt_from(entry, f"{PROMPTS} in '{folder.address}', line {number}", str(number), line=number)
        prompts[prompt.sample_id] = (prompt, batch)
    return prompts

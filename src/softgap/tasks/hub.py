"""Prompts from a dataset by name, through the library `datasets` (an extra)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from softgap.errors import UnsupportedError, ValueInputError
from softgap.tasks.prompts import Prompt, check_ids, prompt_from

__all__ = ["DATASET", "dataset_prompts"]

DATASET = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")
"""``name``, ``org/name``, with ``:config`` and ``@split`` where there are several."""


def dataset_prompts(source: str, *, renamed: Mapping[str, str] | None = None) -> list[Prompt]:
    """The rows of a dataset as prompts; an id left out is the number of the row, from 0."""
    found = DATASET.fullmatch(source)
    if found is None:
        raise ValueInputError(
            f"a dataset is named org/name, org/name:config or org/name:config@split, got '{source}'; correct it"
        )
    rows = _rows(source, found["name"], found["config"], found["split"] or "train")
    prompts = []
    for index, row in enumerate(rows):
        entry = {key: value for key, value in dict(row).items() if value is not None}
        for own, given in (renamed or {}).items():
            if given not in entry:
                raise ValueInputError(
                    f"{source}, row {index} has no field '{given}' for '{own}', it has {', '.join(entry)}; choose one"
                )
            entry[own] = entry[given]
        prompts.append(prompt_from(entry, f"{source}, row {index}", str(index), line=index))
    if not prompts:
        raise ValueInputError(f"{source} must hold at least one row, got none; choose another split")
    check_ids(prompts, source)
    return prompts


def _rows(source: str, name: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedError(
            f"'{source}' is no file, and a dataset by name needs the library datasets; install it with: "
            "pip install 'softgap[datasets]'"
        ) from error
    # One transient bar per file and split would fill the terminal.
    datasets.disable_progress_bars()
    # It also prints what it raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueInputError(
            f"cannot load the dataset '{source}' ({reason}); check its name, config and split, or give a .jsonl or "
            ".csv file"
        ) from error

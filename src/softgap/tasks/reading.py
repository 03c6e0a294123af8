"""Prompts by where they are: a JSON lines file, a CSV file, or a dataset by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from softgap.errors import ValueInputError
from softgap.tasks.hub import DATASET, dataset_prompts
from softgap.tasks.json_lines import json_objects, json_prompts
from softgap.tasks.prompts import Prompt
from softgap.tasks.tables import csv_prompts, csv_rows
from softgap.tasks.text_files import file_text, short

__all__ = ["read_labels", "read_prompts"]

_JSON_LINES = (".jsonl", ".ndjson", ".json")
_CSV = (".csv",)


def read_prompts(source: str, *, renamed: Mapping[str, str] | None = None) -> list[Prompt]:
    """All prompts of a source, every one checked.

    Parameters
    ----------
    source
        A ``.jsonl`` or ``.csv`` file (TruthfulQA's layout is known by its columns), or the name of a dataset.
    renamed
        Our field by the name it has there, such as ``{"prompt": "question"}``.
    """
    path = Path(source)
    ending = path.suffix.lower()
    if path.is_file() or ending in (*_JSON_LINES, *_CSV):
        if ending not in (*_JSON_LINES, *_CSV):
            raise ValueInputError(
                f"prompts are read from .jsonl and .csv files or a dataset by name, got '{source}'; rename the file"
            )
        text = file_text(source)
        return (csv_prompts if ending in _CSV else json_prompts)(f"'{source}'", text, renamed=renamed)
    if source and (path / "manifest.json").is_file():
        raise ValueInputError(f"prompts are read from a file, but '{source}' is a study; give its prompts.jsonl")
    if DATASET.fullmatch(source) is None:
        raise ValueInputError(f"there is no file '{source}'; give a .jsonl or .csv file, or a dataset as org/name")
    return dataset_prompts(source, renamed=renamed)


def read_labels(source: str) -> dict[str, str | None]:
    """Labels by sample id, from a ``.jsonl`` or ``.csv`` file with ``id`` and ``label``; an empty label removes one."""
    ending = Path(source).suffix.lower()
    if ending not in (*_JSON_LINES, *_CSV):
        raise ValueInputError(f"labels are read from .jsonl and .csv files, got '{source}'; give one with id and label")
    text, name = file_text(source), f"'{source}'"
    rows = csv_rows(name, text) if ending in _CSV else json_objects(name, text, ("id", "label"))
    labels: dict[str, str | None] = {}
    for line, row in rows:
        where = f"{name}, line {line}"
        sample_id, label = row.get("id"), row.get("label", "")
        if isinstance(sample_id, bool) or not isinstance(sample_id, str | int) or sample_id == "":
            raise ValueInputError(f"{where}: 'id' must be text or a whole number, got {short(sample_id)}; add it")
        if "label" not in row or not isinstance(label, str | None):
            raise ValueInputError(f"{where}: 'label' must be text, got {short(row.get('label'))}; write it in quotes")
        if str(sample_id) in labels:
            raise ValueInputError(f"{where}: every id must be different, got '{sample_id}' again; leave one out")
        labels[str(sample_id)] = label or None
    if not labels:
        raise ValueInputError(f"{name} must hold at least one label, got none; add rows with id and label")
    return labels

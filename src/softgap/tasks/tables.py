"""CSV files: one prompt per row, or the two answers of each question in TruthfulQA's layout."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence

from softgap.errors import ValueInputError
from softgap.tasks.prompts import Prompt, check_ids, prompt_from

__all__ = ["TRUTHFULQA", "csv_prompts", "csv_rows"]

TRUTHFULQA = ("Question", "Best Answer", "Best Incorrect Answer", "Correct Answers", "Incorrect Answers")
"""Columns by which the layout is known."""


def csv_rows(name: str, text: str) -> Iterator[tuple[int, dict[str, str]]]:
    """The line on which each row ends, and its cells by the names in the first row."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if not any(cell.strip() for cell in header) or len(set(header)) < len(header):
            raise ValueInputError(f"{name}, line 1: must name the columns, each once, got {header}; add a header")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueInputError(
                    f"{name}, line {reader.line_num}: must have {len(header)} cells as the header has, got {len(row)}; "
                    "put quotes around cells with commas"
                )
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueInputError(
            f"{name}, line {reader.line_num}: not CSV ({error}); check the quotes on that line"
        ) from error


def csv_prompts(name: str, text: str, *, renamed: Mapping[str, str] | None = None) -> list[Prompt]:
    """The prompts of a CSV text; empty cells are left out, an id left out is the number of the prompt, from 0."""
    taken = renamed or {}
    rows = list(csv_rows(name, text))
    if not rows:
        raise ValueInputError(f"{name} must hold at least one row below its header, got none; add one")
    columns = rows[0][1]
    for own, given in taken.items():
        if given not in columns:
            raise ValueInputError(
                f"{name} has no column '{given}' for '{own}', it has {', '.join(columns)}; choose one of them"
            )
    if not taken and all(column in columns for column in TRUTHFULQA):
        return _truthfulqa(name, rows)
    if "prompt" not in columns and "prompt" not in taken:
        raise ValueInputError(
            f"{name} must have a column 'prompt', it has {', '.join(columns)}; name it with --field prompt=COLUMN"
        )
    prompts = []
    for index, (line, row) in enumerate(rows):
        entry = {**row, **{own: row[given] for own, given in taken.items()}}
        kept = {key: value for key, value in entry.items() if value != ""}
        prompts.append(prompt_from(kept, f"{name}, line {line}", str(index), line=line))
    check_ids(prompts, name)
    return prompts


def _truthfulqa(name: str, rows: Sequence[tuple[int, dict[str, str]]]) -> list[Prompt]:
    """Each question twice, with its best answer and its best incorrect one, to be read; the question is the group."""
    prompts = []
    for index, (line, row) in enumerate(rows):
        question = row["Question"].strip()
        shared = {
            "group": str(index),
            "reference": [answer.strip() for answer in row["Correct Answers"].split(";") if answer.strip()],
            "incorrect": [answer.strip() for answer in row["Incorrect Answers"].split(";") if answer.strip()],
            **{column.lower(): row[column] for column in ("Type", "Category") if column in row},
        }
        for label, column in (("correct", "Best Answer"), ("incorrect", "Best Incorrect Answer")):
            entry = {**shared, "id": f"{index}-{label}", "prompt": question, "label": label}
            answer = {"completion": row[column].strip()}
            needs = ("prompt", "completion")
            prompts.append(prompt_from({**entry, **answer}, f"{name}, line {line}", "", line=line, needs=needs))
    return prompts

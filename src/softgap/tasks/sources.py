"""Prompts by source: a JSON lines file, a CSV file, a dataset by name or a stored study."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.inputs import encodable, file_text, shortened
from softgap.tasks.prompts import RESERVED, Prompt, check_ids, prompt_from

if TYPE_CHECKING:
    from softgap.trajectories.folder import Folder

__all__ = [
    "BATCH",
    "PROMPTS",
    "TRUTHFULQA",
    "UNPLANNED",
    "json_prompts",
    "layout_of",
    "read_labels",
    "read_prompts",
    "stored_prompts",
]


DATASET = re.compile(r"(?P<name>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[\w.-]+))?(?:@(?P<split>[\w.\[\]:%+-]+))?")


"""``name``, ``org/name``, with ``:config`` and ``@split`` where there are several."""


def dataset_prompts(source: str, *, renamed: Mapping[str, str] | None = None) -> list[Prompt]:
    """The rows of a dataset as prompts; an id left out is the number of the row, from 0."""
    match = DATASET.fullmatch(source)
    if match is None:
        raise ValueInputError(
            f"a dataset is named org/name, org/name:config or org/name:config@split, got '{source}'; correct it"
        )
    rows = _rows(source, match["name"], match["config"], match["split"] or "train")
    prompts = []
    for index, row in enumerate(rows):
        entry = {key: value for key, value in dict(row).items() if value is not None}
        for field, column in (renamed or {}).items():
            if column not in entry:
                raise ValueInputError(
                    f"{source}, row {index} has no field '{column}' for '{field}', it has {', '.join(entry)}; choose "
                    "one"
                )
            entry[field] = entry[column]
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


def json_objects(name: str, text: str, needs: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    """Line number, from 1, and object of every line that is not blank."""
    requirement = " and ".join(needs)
    # JSON allows other line separators inside a text, so not splitlines.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    objects = [(number, _object(f"{name}, line {number}", line, requirement)) for number, line in lines]
    if not objects:
        raise ValueInputError(f"{name} must hold at least one JSON line with {requirement}, got none; add one")
    return objects


def json_prompts(
    name: str, text: str, *, needs: Sequence[str] = ("prompt",), renamed: Mapping[str, str] | None = None
) -> list[Prompt]:
    """The prompts of a JSON lines text; an id left out is the number of the prompt, from 0."""
    columns = renamed or {}
    prompts = [
        prompt_from(
            {**entry, **{field: entry.get(column) for field, column in columns.items()}},
            f"{name}, line {number}",
            str(index),
            line=number,
            needs=needs,
        )
        for index, (number, entry) in enumerate(json_objects(name, text, needs))
    ]
    check_ids(prompts, name)
    return prompts


def _object(where: str, line: str, requirement: str) -> dict[str, Any]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueInputError(
            f'{where}: not JSON ({error}); write one object per line, such as {{"prompt": "a", "completion": "b"}}'
        ) from error
    if not isinstance(entry, dict):
        raise ValueInputError(
            f"{where}: must be an object with {requirement}, got {shortened(entry)}; write one object per line"
        )
    return entry


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
    mapping = renamed or {}
    rows = list(csv_rows(name, text))
    if not rows:
        raise ValueInputError(f"{name} must hold at least one row below its header, got none; add one")
    columns = rows[0][1]
    for field, source_column in mapping.items():
        if source_column not in columns:
            raise ValueInputError(
                f"{name} has no column '{source_column}' for '{field}', it has {', '.join(columns)}; choose one of them"
            )
    if not mapping and all(column in columns for column in TRUTHFULQA):
        return _truthfulqa(name, rows)
    if "prompt" not in columns and "prompt" not in mapping:
        raise ValueInputError(
            f"{name} must have a column 'prompt', it has {', '.join(columns)}; name it with --field prompt=COLUMN"
        )
    prompts = []
    for index, (line, row) in enumerate(rows):
        entry = {**row, **{field: row[source_column] for field, source_column in mapping.items()}}
        filled = {key: value for key, value in entry.items() if value != ""}
        prompts.append(prompt_from(filled, f"{name}, line {line}", str(index), line=line))
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


def layout_of(source: str, *, renamed: Mapping[str, str] | None = None) -> str:
    """How ``read_prompts`` reads a source, in words.

    Parameters
    ----------
    source, renamed
        As for ``read_prompts``.
    """
    ending = Path(source).suffix.lower()
    if ending in _JSON_LINES:
        return "JSON lines"
    if ending not in _CSV:
        return "a dataset"
    columns = next(csv_rows(f"'{source}'", file_text(source)))[1]
    if not renamed and all(column in columns for column in TRUTHFULQA):
        return "TruthfulQA's layout, each question with its best answer and with its best incorrect answer"
    return f"a table with the columns {', '.join(columns)}"


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
            raise ValueInputError(f"{where}: 'id' must be text or a whole number, got {shortened(sample_id)}; add it")
        if "label" not in row or not isinstance(label, str | None):
            raise ValueInputError(
                f"{where}: 'label' must be text, got {shortened(row.get('label'))}; write it in quotes"
            )
        encodable(str(sample_id), f"{where}: 'id'")
        encodable(label or "", f"{where}: 'label'")
        if str(sample_id) in labels:
            raise ValueInputError(f"{where}: every id must be different, got '{sample_id}' again; leave one out")
        labels[str(sample_id)] = label or None
    if not labels:
        raise ValueInputError(f"{name} must hold at least one label, got none; add rows with id and label")
    return labels


PROMPTS = "prompts.jsonl"


# The field of a stored prompt that holds the number of its batch.
BATCH = f"{RESERVED}batch"
# The batch of a prompt that failed before any batch was made.
UNPLANNED = -1


def stored_prompts(folder: Folder) -> dict[str, tuple[Prompt, int]] | None:
    """Prompts by sample id, each with the number of its batch; None for a study without them."""
    from softgap.trajectories.folder import read_lines

    if folder.kind(PROMPTS) == "absent":
        return None
    prompts = {}
    for number, entry in enumerate(read_lines(folder, PROMPTS), start=1):
        # Version 0.1 wrote the batch among the fields of the user, in the place of one that had this name.
        batch = entry.get(BATCH) if BATCH in entry else entry.pop("batch", UNPLANNED)
        if not isinstance(batch, int) or isinstance(batch, bool):
            raise StoreError(
                f"{PROMPTS} in '{folder.address}', line {number}: '{BATCH}' must be a whole number, got "
                f"{shortened(batch)}; restore this file from a copy"
            )
        prompt = prompt_from(entry, f"{PROMPTS} in '{folder.address}', line {number}", str(number), line=number)
        prompts[prompt.sample_id] = (prompt, batch)
    return prompts

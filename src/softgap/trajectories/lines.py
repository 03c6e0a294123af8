"""JSON lines beside the data of a study: prompts, failures, labels, and the log of comparisons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from softgap.errors import StoreError
from softgap.trajectories.folder import Folder

__all__ = ["add_line", "json_lines", "read_lines"]


def read_lines(folder: Folder, name: str) -> list[dict[str, Any]]:
    """The objects of a JSON lines file of a study; none if there is no such file."""
    if folder.kind(name) == "absent":
        return []
    try:
        found = [json.loads(line) for line in folder.read(name).decode().split("\n") if line.strip()]
        if not all(isinstance(entry, dict) for entry in found):
            raise ValueError("a line is no object")
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{name} in '{folder.given}' is damaged ({error}); restore this file from a copy") from error
    return found


def add_line(folder: Folder, name: str, entry: Mapping[str, Any]) -> None:
    """Add one object to a JSON lines file of a study; object stores know no other way than to write it anew."""
    folder.replace(name, json_lines([*read_lines(folder, name), entry]))


def json_lines(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Objects as the bytes of a JSON lines file."""
    return "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries).encode()

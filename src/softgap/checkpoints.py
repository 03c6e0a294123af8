"""Resumable work: finished steps lie on disk, so that an interruption loses at most one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from softgap.errors import StoreError

__all__ = ["Checkpoints", "checkpoint_folder", "remove_checkpoints", "settings_key", "write_whole"]


def checkpoint_folder(target: Path) -> Path:
    """Where the finished steps of an unfinished file lie: beside it."""
    return target.with_name(f"{target.name}.parts")


def remove_checkpoints(folder: Path) -> None:
    """Delete the finished steps: the work is whole."""
    shutil.rmtree(folder, ignore_errors=True)


def settings_key(settings: Mapping[str, Any]) -> str:
    """A hash of settings, by which steps that were made under others are told apart."""
    return _hash(_words(settings))[:32]


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that it is there whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise StoreError(
            f"cannot write to '{path.parent}': {error.strerror or error}; choose another folder"
        ) from error


class Checkpoints:
    """Finished steps of unfinished work, found again only under the settings that they were made with.

    Parameters
    ----------
    folder
        Where they lie; None writes nothing, and every step is made anew.
    settings
        Everything that all steps depend on.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._settings = _words(settings)

    def find_or_make(self, step: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a step from its file; else it is made now and written. JSON must be able to hold both."""
        if self._folder is None:
            return make()
        key = _hash(self._settings + json.dumps(step, default=str))[:24]
        path = self._folder / f"{key}.json"
        try:
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return result
        except (OSError, ValueError, RecursionError):  # not there, or cut off by a crash: made again
            result = make()
        write_whole(path, json.dumps(result))
        return result


def _words(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()

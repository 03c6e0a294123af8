"""Resumable work: finished steps on disk, so that an interruption loses at most one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from softgap.errors import StoreError

__all__ = ["Kept"]


class Kept:
    """Finished parts on disk, each under a hash of everything it depends on."""

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        self._settings = json.dumps(settings, sort_keys=True, default=str)

    def made(self, what: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was kept under this name, or else made now and kept."""
        if self._folder is None:
            return make()
        key = hashlib.sha256((self._settings + json.dumps(what, default=str)).encode()).hexdigest()[:24]
        path = self._folder / f"{key}.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError, RecursionError):  # not there, or cut off by a crash: made again
            found = make()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise StoreError(f"cannot write '{path}': {error.strerror or error}; choose another folder") from error
        return found

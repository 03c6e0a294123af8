"""Layers that are fitted wait beside the calibration until all are there, so that an interruption loses one at most."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softgap.calibration.fit import Maps
from softgap.errors import StoreError
from softgap.models.tensor_files import load_calibration, save_calibration

__all__ = ["Parts"]


class Parts:
    """Fitted layers of an unfinished calibration.

    Parameters
    ----------
    target
        Where the finished calibration goes; the parts lie in a folder beside it.
    settings
        Everything the layers depend on: parts made under other settings are not used.
    """

    def __init__(self, target: Path, settings: Mapping[str, Any]) -> None:
        self._folder = target.with_name(f"{target.name}.parts")
        self._key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def load(self, layer: int) -> Maps | None:
        """A layer that was fitted before under the same settings."""
        try:
            stored = load_calibration(self._path(layer))
        except StoreError:  # not there, or cut off by a crash: fitted again
            return None
        return Maps(**stored.tensors) if stored.metadata.get("key") == self._key else None

    def save(self, layer: int, maps: Maps) -> None:
        """Keep a fitted layer."""
        save_calibration(self._path(layer), maps.tensors(), {"key": self._key})

    def steps(self, choose: int | None = None) -> int | None:
        """The number of steps that a speed probe chose, noted once so that a resumed fit uses the same."""
        path = self._folder / f"steps-{self._key}"
        if choose is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            path.write_text(str(choose), encoding="utf-8")
            return choose
        try:
            return int(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def remove(self) -> None:
        """Forget all parts: the calibration is whole."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, layer: int) -> Path:
        return self._folder / f"layer-{layer:04d}.safetensors"

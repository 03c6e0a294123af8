"""A calibration: the parameters fitted to one model, how they came about, and how good they are on held-out text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from softgap.attention import Mechanism
from softgap.calibration.held_out import Closed, HeldOut
from softgap.calibration.ladders import Ladders
from softgap.errors import StoreError
from softgap.probe.calibrations import (
    StoredCalibration,
    calibration_path,
    held_out_summary,
    load_calibration,
    save_calibration,
)

__all__ = ["Calibration"]


@dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """What :func:`softgap.calibrate` found for a model.

    Attributes
    ----------
    tensors
        Parameters by ``mechanism.parameter``, each ``[layer, head, ...]``: of ``fitted``, and of the controls
        ``mean_ablation`` and ``profile``, taken from the same text.
    metadata
        Model, fingerprint, recipe, hash of the text, versions, threads. No times: equal settings give equal bytes.
    held_out
        How far the gap is closed on text that the fit never saw.
    elsewhere
        The same by condition: the text of the fit, other kinds of text, with a BOS token, as a chat message, at random
        offsets.
    ladders
        From the mean of values to softmax, by output and by weights, and the rank floor.
    curve
        The share of the gap closed by number of features, by short fits in a few layers.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    held_out: HeldOut
    elsewhere: Mapping[str, Closed]
    ladders: Ladders
    curve: Mapping[str, Closed]

    def __repr__(self) -> str:
        found = held_out_summary(self.held_out.to_json())
        words = {
            "gap_closed": "gap closed",
            "against_profile": "of the gap that profile leaves",
            "explained": "energy explained",
            "explained_uniform": "by uniform",
            "rank_correlation": "rank correlation of the two over heads",
        }
        numbers = ", ".join(f"{words[name]} {value:.2f}" for name, value in found.items())
        return f"Calibration({self.metadata.get('model')}: {numbers}; held-out text)"

    def mechanism(self, name: str = "fitted") -> Mechanism:
        """The mechanism of this name with its parameters, to be given wherever a mechanism is."""
        return StoredCalibration(self.tensors, self.metadata, self.digest).equip(name)

    @property
    def digest(self) -> str:
        """Hash of the parameters."""
        return str(self.metadata["digest"])

    @property
    def fingerprint(self) -> str:
        """The model that it belongs to."""
        return str(self.metadata["fingerprint"])

    def save(self, path: str | Path | None = None) -> Path:
        """Write it to a file; without one, to the cache, where every part of softgap finds it by the model."""
        target = calibration_path(self.fingerprint) if path is None else Path(path).expanduser()
        save_calibration(target, self.tensors, {**self.metadata, **self.report()})
        return target

    def report(self) -> dict[str, Any]:
        """How good it is, as plain data; ``summary`` holds the few numbers that belong together."""
        return {
            "summary": held_out_summary(self.held_out.to_json()),
            "held_out": self.held_out.to_json(),
            "elsewhere": {name: asdict(closed) for name, closed in self.elsewhere.items()},
            "ladders": self.ladders.to_json(),
            "curve": {name: asdict(closed) for name, closed in self.curve.items()},
        }

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read one from a file."""
        stored = load_calibration(Path(path).expanduser())
        metadata = dict(stored.metadata)
        try:
            metadata["fingerprint"] = str(metadata["fingerprint"])
            held_out = HeldOut.from_json(metadata.pop("held_out"))
            ladders = Ladders.from_json(metadata.pop("ladders"))
            metadata.pop("summary", None)
            elsewhere, curve = (
                {key: Closed(**value) for key, value in metadata.pop(name).items()} for name in ("elsewhere", "curve")
            )
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StoreError(
                f"'{path}' was written by another version of softgap: its report lacks or garbles {error}; calibrate "
                "again"
            ) from None
        return cls(stored.tensors, metadata, held_out, elsewhere, ladders, curve)

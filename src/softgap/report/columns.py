"""Quantities of heads that were measured elsewhere: what a calibration closes of the gap, what a swap costs.

A file of them is a CSV with the columns ``layer`` and ``head`` and one further column for each quantity, whose heading
is its name. Heads that are missing, and empty cells, are unknown.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.errors import StoreError, ValueInputError
from softgap.report.kinds import rows_of_run
from softgap.report.samples import round_values
from softgap.trajectories import Manifest, Trajectories

if TYPE_CHECKING:
    from softgap.calibration.sufficiency import Sufficiency

__all__ = ["Column", "calibration_columns", "calibration_kinds", "read_columns", "study_calibration"]

_LARGEST = 16 * 2**20


@dataclass(frozen=True)
class Column:
    """One number per head.

    Attributes
    ----------
    values
        By layer and head; a head that is missing is unknown.
    unit
        What the number says, in a few words.
    source
        Where it comes from.
    """

    label: str
    values: Mapping[tuple[int, int], float]
    unit: str = ""
    source: str = ""

    def to_json(self, run: Trajectories) -> dict[str, Any]:
        """As a page carries it: heads in the order of its arrays."""
        heads = [(layer, head) for i, layer in enumerate(run.layers) for head in range(run.heads_per_layer[i])]
        numbers = [self.values.get(place, math.nan) for place in heads]
        if all(math.isnan(number) for number in numbers):
            raise ValueInputError(
                f"'{self.label}' from {self.source} has no value for any of the {len(heads)} heads of this study; "
                "give a file for the same model"
            )
        return {
            "label": self.label,
            "unit": self.unit,
            "source": self.source,
            "values": round_values(np.array(numbers)),
        }


def read_columns(path: str | os.PathLike[str]) -> list[Column]:
    """The quantities in a CSV file."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > _LARGEST:
            raise StoreError(
                f"a CSV file of heads may have at most {_LARGEST // 2**20} MB, but '{path}' has more; give another file"
            )
        with file.open(encoding="utf-8-sig", newline="") as opened:
            rows = list(csv.DictReader(opened))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot read '{path}' as a CSV file of heads ({reason}); give another file") from error
    names = [name for name in (rows[0] if rows else ()) if name not in ("layer", "head", None)]
    if not rows or not {"layer", "head"} <= rows[0].keys() or not names:
        raise ValueInputError(
            f"'{path}' must have the columns layer, head and at least one quantity, got "
            f"{', '.join(map(str, rows[0])) if rows else 'no rows'}; add them"
        )
    columns: dict[str, dict[tuple[int, int], float]] = {name: {} for name in names}
    for line, row in enumerate(rows, start=2):
        try:
            place = int(row["layer"]), int(row["head"])
            for name in names:
                if row[name] not in ("", None):
                    columns[name][place] = float(row[name])
        except (TypeError, ValueError) as error:
            raise ValueInputError(
                f"'{path}', line {line}: {error}; layer and head are whole numbers, the rest numbers"
            ) from error
    return [Column(name, values, source=f"'{file.name}'") for name, values in columns.items()]


def calibration_columns(path: str | os.PathLike[str], run: Trajectories) -> list[Column]:
    """What a calibration closes of each head's gap and explains of its energy, on text that it was not fitted to.

    A calibration of an earlier version does not know the energy by head: then there is one column.
    """
    from softgap.calibration import Calibration

    calibration = Calibration.load(Path(path))
    weights = run.manifest.weights
    if weights and calibration.fingerprint != weights:
        raise ValueInputError(
            f"the calibration '{path}' was fitted to the model {calibration.fingerprint}, but this study used "
            f"{weights}; give the calibration of that model"
        )
    held_out, source = calibration.held_out, f"calibration {calibration.digest[:12]}"
    closed = Column(
        "gap closed by the calibration",
        _values_by_head(held_out.by_head, run),
        unit="1 − divergence from fitted / divergence from uniform, held-out text",
        source=source,
    )
    explained = Column(
        "energy explained by the calibration",
        _values_by_head(held_out.explained_by_head, run),
        unit="1 − |fitted − softmax|² / |softmax|², held-out text",
        source=source,
    )
    return [closed, explained] if explained.values else [closed]


def calibration_kinds(path: str | os.PathLike[str]) -> Sufficiency | None:
    """The kind of each head by a calibration; None where it is of an earlier version, which did not ask."""
    from softgap.calibration import Calibration

    return Calibration.load(Path(path)).sufficiency


def _values_by_head(by_head: Sequence[Sequence[float | None]], run: Trajectories) -> dict[tuple[int, int], float]:
    return {
        (layer, head): value
        for layer, row in zip(run.layers, rows_of_run(by_head, run), strict=True)
        for head, value in enumerate(row)
        if value is not None
    }


def study_calibration(manifest: Manifest) -> Path | None:
    """The calibration whose mechanism a study was measured with, if it is still at hand and can be read."""
    digest = manifest.mechanisms.get("fitted", {}).get("calibration")
    if digest is None or not manifest.weights:
        return None
    # Only now: they bring torch with them.
    from softgap.calibration import Calibration
    from softgap.models.tensor_files import find_calibration

    path = find_calibration(manifest.weights)
    if path is None:
        return None
    try:
        return path if Calibration.load(path).digest == digest else None
    except StoreError:  # of another version, or damaged: nobody asked for it, and the report does without
        return None

"""Add or replace labels of a study without measuring anything again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from softgap.errors import ValueInputError
from softgap.study.files import LABELS
from softgap.trajectories import open_study
from softgap.trajectories.batches import relabel
from softgap.trajectories.folder import Folder
from softgap.trajectories.lines import add_line

__all__ = ["Labelled", "label_study"]


@dataclass(frozen=True)
class Labelled:
    """How many labels were given, how many changed something, and how many samples have none now."""

    given: int
    changed: int
    without: int


def label_study(path: str, labels: Mapping[str, str | None], *, source: str = "") -> Labelled:
    """Give samples of a study other labels; None takes a label away. The study's log keeps what was done."""
    study = open_study(path)
    unknown = [sample_id for sample_id in labels if sample_id not in set(study.ids)]
    if unknown:
        raise ValueInputError(
            f"labels must be for samples of '{path}', got '{unknown[0]}' ({len(unknown)} such ids); its samples are "
            f"{', '.join(study.ids[:3])}, ..., leave the others out"
        )
    folder = Folder.at(path)
    changed = relabel(folder, dict(labels))
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "source": source, "given": len(labels)}
    add_line(folder, LABELS, {**entry, "changed": changed})
    without = int(study.samples()["label"].isna().sum())
    return Labelled(len(labels), changed, without)

"""The files of a study beside its measurements: prompts, failures and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from softgap.deprecation import DeprecatedAttribute
from softgap.errors import StoreError, ValueInputError
from softgap.study.batches import Batch, Failure
from softgap.tasks import Prompt
from softgap.tasks.stored import PROMPTS, UNPLANNED
from softgap.trajectories import open_study
from softgap.trajectories.folder import Folder, add_line, json_lines, read_lines
from softgap.trajectories.writer import relabel

__all__ = ["LabelCounts", "label_study", "read_failures", "write_failures", "write_prompts"]


LABELS = "labels.jsonl"


_FAILURES = "failures"


def write_prompts(folder: Folder, prompts: Sequence[Prompt], batches: Sequence[Batch]) -> None:
    """Write down what is asked and which samples go together, before the first is measured."""
    number = {i: batch.number for batch in batches for i in batch.indices}
    lines = [{**prompt.to_json(), "batch": number.get(i, UNPLANNED)} for i, prompt in enumerate(prompts)]
    folder.replace(PROMPTS, json_lines(lines))


def write_failures(folder: Folder, batch: int, failures: Sequence[Failure]) -> None:
    """Write the failures of a batch, if there are any; before the batch itself, so that none is ever lost."""
    if failures:
        folder.create(_FAILURES)
        folder.replace(_failures(batch), json_lines([failure.to_json() for failure in failures]))


def read_failures(folder: Folder) -> list[Failure]:
    """All failures of a study, by batch."""
    names = [name for name in folder.names(_FAILURES) if name.startswith("part-")]
    try:
        return [Failure(**entry) for name in names for entry in read_lines(folder, f"{_FAILURES}/{name}")]
    except TypeError as error:
        raise StoreError(
            f"{_FAILURES} in '{folder.address}' is damaged ({error}); restore the folder from a copy"
        ) from error


def _failures(batch: int) -> str:
    return f"{_FAILURES}/part-{'none' if batch == UNPLANNED else f'{batch:05d}'}.jsonl"


@dataclass(frozen=True)
class LabelCounts:
    """How many labels were read, how many of them are new, and how many samples have no label now."""

    labels: int
    new: int
    unlabelled: int
    given = DeprecatedAttribute("labels")
    changed = DeprecatedAttribute("new")
    without = DeprecatedAttribute("unlabelled")

    def to_json(self) -> dict[str, int]:
        """The counts, under the names that ``softgap study label --json`` prints."""
        return {"given": self.labels, "changed": self.new, "without": self.unlabelled}


def label_study(path: str, labels: Mapping[str, str | None], *, source: str = "") -> LabelCounts:
    """Give samples of a study other labels; None takes a label away. The study's log keeps what was done."""
    study = open_study(path)
    unknown = [sample_id for sample_id in labels if sample_id not in set(study.ids)]
    if unknown:
        raise ValueInputError(
            f"labels must be for samples of '{path}', got '{unknown[0]}' ({len(unknown)} such ids); its samples are "
            f"{', '.join(study.ids[:3])}, ...; remove the other ids"
        )
    folder = Folder.at(path)
    changed = relabel(folder, dict(labels))
    entry = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "source": source, "given": len(labels)}
    add_line(folder, LABELS, {**entry, "changed": changed})
    unlabelled = int(study.samples()["label"].isna().sum())
    return LabelCounts(len(labels), changed, unlabelled)

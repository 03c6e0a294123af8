"""The log of everything that was tried on a study: plans before labels are read, looks at them, the locked split.

comparisons/log.jsonl in the study, one object per line:
    plan      a plan's hash, written before the labels are read
    locked    the samples kept back for confirmation: share and hash
    looked    a comparison was made: of how many samples, the hash of their labels, and what came of it
    opened    the confirmation samples were looked at, once
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from softgap.analysis.plan import ComparisonPlan
from softgap.errors import StoreError, ValueInputError
from softgap.stats import Split
from softgap.trajectories.folder import Folder
from softgap.trajectories.lines import add_line, read_lines

__all__ = ["Tried"]

_LOG = "comparisons/log.jsonl"


class Tried:
    """The log of one study."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.entries = tuple(read_lines(folder, _LOG))
        if not all(map(_is_whole, self.entries)):
            raise StoreError(
                f"{_LOG} in '{folder.given}' is damaged (a line lacks what its event has); restore it from a copy"
            )

    def add(self, event: str, **facts: Any) -> None:
        """Write one line."""
        entry = {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
        self._folder.create("comparisons")
        add_line(self._folder, _LOG, entry)
        self.entries = (*self.entries, entry)

    def record_plan(self, plan: ComparisonPlan, source: str) -> None:
        """Write down a plan, unless it is there already."""
        if not any(entry["hash"] == plan.hash for entry in self._of("plan")):
            self.add("plan", hash=plan.hash, source=source, plan=plan.to_json())

    def status(self, plan: ComparisonPlan, labels: str, *, from_file: bool) -> str:
        """Whether this look at the labels with that hash is "planned", or "exploratory" with the reason."""
        if not from_file:
            return "exploratory: no plan was written down before the labels were read"
        for entry in self.entries:
            if entry["event"] == "plan" and entry["hash"] == plan.hash:
                return self._planned(plan, labels)
            if entry["event"] == "looked":
                return f"exploratory: the labels were looked at on {entry['time']}, before this plan was written down"
        return "exploratory: the plan was not written down"

    def _planned(self, plan: ComparisonPlan, labels: str) -> str:
        """Which look of a plan that was written down in time this is; the same samples again are the same look."""
        # A line of 0.1 holds no hash of labels: it may have seen anything, so it counts as a look of its own.
        earlier = [entry.get("labels", entry["time"]) for entry in self.looks if entry["hash"] == plan.hash]
        seen = list(dict.fromkeys([*earlier, labels]))
        look, plans = seen.index(labels) + 1, len({entry["hash"] for entry in self._of("plan")})
        if look > plan.looks:
            return (
                f"exploratory: look {look} with other samples or labels, and the plan allows {plan.looks}; allow more "
                "with looks before the first"
            )
        among = f", one of {plans} plans" if plans > 1 else ""
        return f"planned{among}" if plan.looks == 1 else f"planned, look {look} of {plan.looks}{among}"

    @property
    def looks(self) -> list[dict[str, Any]]:
        """Comparisons that were made."""
        return self._of("looked")

    def lock(self, split: Split) -> None:
        """Lock the confirmation samples; a study has one lock."""
        known = self._of("locked")
        if known and known[0]["hash"] != split.hash:
            raise ValueInputError(
                f"the confirmation samples of a study are locked once, those of this study since {known[0]['time']} "
                f"with a share of {known[0]['fraction']:g}, got a share of {split.fraction:g}; use that share"
            )
        if not known:
            if self.looks:
                raise ValueInputError(
                    f"confirmation samples are locked before labels are read, and this study was looked at on "
                    f"{self.looks[0]['time']}; measure new samples for a confirmation"
                )
            self.add("locked", hash=split.hash, fraction=split.fraction, samples=int(split.confirmation.sum()))

    @property
    def locked_share(self) -> float | None:
        """The share of samples that is locked; None where none are."""
        known = self._of("locked")
        return None if not known else float(known[0]["fraction"])

    @property
    def locked_hash(self) -> str | None:
        """The hash of the locked split; None where none is."""
        known = self._of("locked")
        return None if not known else str(known[0]["hash"])

    def refuse_second_opening(self) -> None:
        """Refuse to look at confirmation samples that were looked at before."""
        known = self._of("opened")
        if known:
            raise ValueInputError(
                f"confirmation samples are opened once, and those of this study were on {known[0]['time']}; "
                "measure new samples"
            )

    def open(self, split: Split) -> None:
        """Note that the confirmation samples are looked at; a second time is refused."""
        self.refuse_second_opening()
        self.add("opened", hash=split.hash)

    def _of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["event"] == event]


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """Whether a line holds what is read again of its event."""
    event, share = entry.get("event"), entry.get("fraction")
    texts = ("event", "time", *(("hash",) if event in ("plan", "locked", "looked") else ()))
    if not all(isinstance(entry.get(name), str) for name in texts):
        return False
    return event != "locked" or (isinstance(share, float) and 0 < share < 1)

"""The preregistration of a comparison, and the log of all comparisons of a study."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from softgap.analysis.series import Cut
from softgap.errors import StoreError, ValueInputError, unknown_name
from softgap.inputs import as_items, check_count, check_share, file_text
from softgap.signal.patterns import least_windows
from softgap.signal.validation import check_order
from softgap.stats import EXCHANGES, Split
from softgap.trajectories import QUANTITIES
from softgap.trajectories.folder import Folder, add_line, read_lines
from softgap.trajectories.locks import locked
from softgap.trajectories.validation import PARTS

__all__ = ["ComparisonLog", "Preregistration", "read_preregistration"]


FEATURES = ("mean", "slope", "entropy", "complexity", "sparsity")


"""What is measured of a head in a sample: of its divergence over the steps, and S(a) where it was recorded."""


# Fields that count something, from and to: beyond, a comparison would need more memory or time than there is.
_COUNTS = (
    ("permutations", 19, 1_000_000),
    ("refits", 19, 100_000),
    ("draws", 1, 10_000),
    ("looks", 1, 1000),
    ("min_steps", 1, None),
    ("seed", 0, None),
)


@dataclass(frozen=True)
class Preregistration:
    """What is compared, and by which rule it is judged.

    Attributes
    ----------
    by, between, first
        The field that names the groups; the two of its values to compare, where it has more; and the one whose effect
        is positive.
    mechanisms, quantity, features, transforms, orders, segments, part
        The family: every combination of these, in every head. Mechanisms are all of the study's by default.
    collapse
        Whether heads that share a KV head are averaged.
    clusters, exchange
        The field that says which samples belong together (passed over where no sample has it), and how labels move.
    match, strata
        Confounders, all held fixed at once: numbers that samples are matched on, and fields whose values pairs share.
    margin, alpha, power
        The smallest effect that would matter, in standard deviations; error rate; and the power a study must have.
    looks
        How often the plan may be applied as samples come in; every look is tested at alpha / looks.
    confirm
        The share of samples that is locked for confirmation; None for no split.
    min_steps, eligibility
        Shorter samples are left out; the least number of windows of an entropy.
    permutations, refits, draws, seed
        Permutations of the labels; permutations with the whole selection refitted; draws of flipped labels per rate.
    """

    by: str = "label"
    between: tuple[str, ...] = ()
    first: str | None = None
    mechanisms: tuple[str, ...] = ()
    quantity: str = "divergence"
    features: tuple[str, ...] = FEATURES
    transforms: tuple[str, ...] = ("diff",)
    orders: tuple[int, ...] = (3,)
    segments: tuple[str, ...] = ("full",)
    part: str = "completion"
    collapse: bool = False
    clusters: str = "group"
    exchange: str = "auto"
    match: tuple[str, ...] = ("length",)
    strata: tuple[str, ...] = ()
    margin: float = 0.5
    alpha: float = 0.05
    power: float = 0.8
    looks: int = 1
    confirm: float | None = None
    min_steps: int = 1
    eligibility: str | int = "2*order!"
    permutations: int = 4999
    refits: int = 199
    draws: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if isinstance(field.default, tuple):
                object.__setattr__(self, field.name, as_items(getattr(self, field.name)))
        for name, names, known in (
            ("feature", self.features, FEATURES),
            ("quantity", (self.quantity,), QUANTITIES),
            ("part", (self.part,), PARTS),
            ("exchange", (self.exchange,), EXCHANGES),
        ):
            for value in names:
                if value not in known:
                    raise unknown_name(name, value, known)
        for order in self.orders:
            least_windows(self.eligibility, check_order(order))
        for transform in self.transforms:
            for segment in self.segments:
                Cut(transform, segment)
        if not (self.features and self.orders and self.transforms and self.segments):
            raise ValueInputError("a comparison needs at least one feature, order, transform and segment, got none")
        if len(self.between) not in (0, 2):
            raise ValueInputError(f"between must name two groups, got {list(self.between)}; name two or none")
        for name in ("alpha", "power"):
            check_share(name, getattr(self, name), 0.05 if name == "alpha" else 0.8)
        if self.confirm is not None:
            check_share("confirm", self.confirm, 0.3)
        if not 0 < self.margin < math.inf:
            raise ValueInputError(
                f"margin must be a positive number of standard deviations, got {self.margin!r}; 0.5 is usual"
            )
        for name, least, most in _COUNTS:
            check_count(name, getattr(self, name), least=least, most=most, remedy="choose another")

    @property
    def alpha_per_look(self) -> float:
        """The error rate of one look: alpha spent in equal shares."""
        return self.alpha / self.looks

    @property
    def control_name(self) -> str:
        """What the joint control holds fixed, in words; empty where nothing is named."""
        matched = f"matched on {', '.join(self.match)}" if self.match else ""
        return " ".join(part for part in (matched, f"within {', '.join(self.strata)}" if self.strata else "") if part)

    @property
    def hash(self) -> str:
        """SHA-256 of everything that is decided here; a field added after 0.1 counts where it is not the default."""
        decided = self.to_json()
        if self.looks == 1:
            del decided["looks"]
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def read_preregistration(path: str) -> Preregistration:
    """Read a preregistration from a TOML file whose keys are fields of ``Preregistration``."""
    try:
        document = tomllib.loads(file_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueInputError(
            f"the preregistration '{path}' is not TOML ({error}); write lines such as margin = 0.5"
        ) from error
    known = {f.name: f.default for f in fields(Preregistration)}
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name not in known:
            raise unknown_name(f"key of the preregistration '{path}'", name, known)
        values[name] = _convert_value(path, name, value, known[name])
    return Preregistration(**values)


def _convert_value(path: str, name: str, value: Any, default: Any) -> Any:
    """The value as the field's own type."""
    if isinstance(default, tuple):
        entries = tuple(value) if isinstance(value, list) else (value,)
        kind = int if name == "orders" else str
        if all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in entries):
            return entries
        expected = "whole numbers" if kind is int else "names"
        raise ValueInputError(
            f"{name} in the preregistration '{path}' must be a list of {expected}, got {value!r}; correct it"
        )
    if isinstance(default, float) or name == "confirm":
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    elif name == "eligibility":
        fits = isinstance(value, str | int) and not isinstance(value, bool)
    else:
        fits = type(value) is (str if default is None else type(default))
    if not fits:
        raise ValueInputError(
            f"{name} in the preregistration '{path}' must be like {default!r}, got {value!r}; correct it"
        )
    return value


_LOG = "comparisons/log.jsonl"
# Seconds to wait for another comparison that writes to the log.
_PATIENCE = 20.0


class ComparisonLog:
    """The log of one study."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.entries: tuple[dict[str, Any], ...] = ()
        self._read()

    def _read(self) -> None:
        self.entries = tuple(read_lines(self._folder, _LOG))
        if not all(map(_is_whole, self.entries)):
            raise StoreError(
                f"{_LOG} in '{self._folder.address}' is damaged (a line lacks what its event has); restore it from a "
                "copy"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only one who reads and writes the log: what is decided by its lines still holds when one is added."""
        comparisons = self._folder.below("comparisons")
        with locked(comparisons, patience=_PATIENCE) as lock:
            comparisons.discard_partial("", "log.jsonl")
            self._read()
            folder, self._folder = self._folder, self._folder.fenced(lock.folder.fence)
            try:
                yield
            finally:
                self._folder = folder

    def add(self, event: str, **facts: Any) -> None:
        """Write one line."""
        with self._locked():
            self._add(event, **facts)

    def _add(self, event: str, **facts: Any) -> None:
        entry = {"event": event, "time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
        add_line(self._folder, _LOG, entry)
        self.entries = (*self.entries, entry)

    def record_preregistration(self, preregistration: Preregistration, source: str) -> None:
        """Write down a plan, unless it is there already."""
        with self._locked():
            if not any(entry["hash"] == preregistration.hash for entry in self._of("plan")):
                self._add("plan", hash=preregistration.hash, source=source, plan=preregistration.to_json())

    def status(self, preregistration: Preregistration, labels: str, *, from_file: bool) -> str:
        """Whether this look at the labels with that hash is "planned", or "exploratory" with the reason."""
        if not from_file:
            return "exploratory: no plan was written down before the labels were read"
        for entry in self.entries:
            if entry["event"] == "plan" and entry["hash"] == preregistration.hash:
                return self._look_status(preregistration, labels)
            if entry["event"] == "looked":
                return f"exploratory: the labels were looked at on {entry['time']}, before this plan was written down"
        return "exploratory: the plan was not written down"

    def _look_status(self, preregistration: Preregistration, labels: str) -> str:
        """Which look of a plan that was written down in time this is; the same samples again are the same look."""
        # A line of 0.1 holds no hash of labels: it may have seen anything, so it counts as a look of its own.
        earlier = [entry.get("labels", entry["time"]) for entry in self.looks if entry["hash"] == preregistration.hash]
        seen = list(dict.fromkeys([*earlier, labels]))
        look, plans = seen.index(labels) + 1, len({entry["hash"] for entry in self._of("plan")})
        if look > preregistration.looks:
            return (
                f"exploratory: look {look} with other samples or labels, and the plan allows {preregistration.looks}; "
                "allow more with looks before the first"
            )
        among = f", one of {plans} plans" if plans > 1 else ""
        return (
            f"planned{among}"
            if preregistration.looks == 1
            else f"planned, look {look} of {preregistration.looks}{among}"
        )

    @property
    def looks(self) -> list[dict[str, Any]]:
        """Comparisons that were made."""
        return self._of("looked")

    def lock(self, split: Split) -> None:
        """Lock the confirmation samples; a study has one lock."""
        with self._locked():
            self._lock_split(split)

    def _lock_split(self, split: Split) -> None:
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
            self._add("locked", hash=split.hash, fraction=split.fraction, samples=int(split.confirmation.sum()))

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
        with self._locked():
            self.refuse_second_opening()
            self._add("opened", hash=split.hash)

    def _of(self, event: str) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["event"] == event]


def _is_whole(entry: Mapping[str, Any]) -> bool:
    """Whether a line holds what is read again of its event."""
    event, share = entry.get("event"), entry.get("fraction")
    texts = ("event", "time", *(("hash",) if event in ("plan", "locked", "looked") else ()))
    if not all(isinstance(entry.get(name), str) for name in texts):
        return False
    return event != "locked" or (isinstance(share, float) and 0 < share < 1)

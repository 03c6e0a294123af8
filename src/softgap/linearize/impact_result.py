"""What swapping each head alone does to a model, with intervals over texts."""

from __future__ import annotations

import csv
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from softgap.errors import StoreError, ValueInputError, unknown_name
from softgap.linearize.heads import Head
from softgap.linearize.resampling import Interval, interval_of, resampled

__all__ = ["QUANTITIES", "Impact"]

QUANTITIES = ("loss", "kl", "accuracy")
FORMAT = 1


@dataclass(frozen=True, eq=False)
class Impact:
    """What each head is worth.

    Attributes
    ----------
    mechanisms
        What heads were swapped for, the controls last.
    heads
        (layer, head) pairs.
    original
        Of the unswapped model, per text: ``loss`` in nats per token, ``accuracy`` of the top token; per list of
        lookups: ``recall``, the share of answers in the context whose first token is right, and ``whole_answers``, the
        share that is right in every token.
    change
        By swapping one head, ``[mechanism, head, text]``: the rise in ``loss``, the ``kl`` divergence of the swapped
        model's next-token distribution from the original one, and the changes in ``accuracy``, ``recall`` and
        ``whole_answers``.
    settings
        Model, hash of the passages and whatever else it depends on.
    """

    mechanisms: tuple[str, ...]
    heads: tuple[Head, ...]
    original: Mapping[str, Float[np.ndarray, " text"]]
    change: Mapping[str, Float[np.ndarray, "mechanism head text"]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def mean(self, quantity: str = "loss", mechanism: str | None = None) -> Float[np.ndarray, " head"]:
        """Mean change over texts, per head."""
        found: np.ndarray = self._of(quantity, mechanism).mean(axis=-1)
        return found

    def interval(self, head: Head, quantity: str = "loss", mechanism: str | None = None) -> Interval:
        """Mean change of one head, with its middle 95 % over resampled texts."""
        values = self._of(quantity, mechanism)[self.heads.index(head)]
        return interval_of(values, rng=np.random.default_rng(self.settings.get("seed", 0)))

    def linearizable(self, control: str | None = None) -> Bool[np.ndarray, " head"]:
        """Heads where the mechanism costs less than the control (the last one), in 97.5 % of resampled texts."""
        if len(self.mechanisms) == 1:
            raise ValueInputError("this impact has no control to compare with; measure it with controls")
        other = self.mechanisms[-1] if control is None else control
        gained = self._of("loss", other) - self._of("loss", None)
        drawn = resampled(gained, rng=np.random.default_rng(self.settings.get("seed", 0)))
        found: np.ndarray = np.quantile(drawn, 0.025, axis=-1) > 0
        return found

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it to an ``.npz`` file."""
        target = Path(path)
        about = {"format": FORMAT, "mechanisms": self.mechanisms, "heads": self.heads, "settings": dict(self.settings)}
        arrays = {f"{kind}.{name}": x for kind in ("original", "change") for name, x in getattr(self, kind).items()}
        partial = target.with_name(f".{target.name}.partial")
        try:
            with partial.open("wb") as file:
                np.savez_compressed(file, about=np.array(json.dumps(about)), allow_pickle=False, **arrays)
            partial.replace(target)
        except OSError as error:
            raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
        return target

    def write_heads(self, path: str | os.PathLike[str]) -> Path:
        """Write the mean changes of every head as the CSV that ``softgap report --heads`` shows in its map."""
        target = Path(path)
        columns = [(name, quantity) for name in self.mechanisms for quantity in self.change]
        rows = np.stack([self.mean(quantity, name) for name, quantity in columns], axis=1).tolist()
        try:
            with target.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(["layer", "head", *(f"{quantity}, swapped for {name}" for name, quantity in columns)])
                writer.writerows([*head, *row] for head, row in zip(self.heads, rows, strict=True))
        except OSError as error:
            raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Impact:
        """Read one from a file."""
        try:
            # Opened here: numpy leaves a broken archive open.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                about = json.loads(str(stored["about"]))
                arrays = {name: stored[name] for name in stored.files if "." in name}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise StoreError(f"cannot read an impact from '{path}': {error}; measure it again") from error
        parts: dict[str, dict[str, np.ndarray]] = {"original": {}, "change": {}}
        for name, array in arrays.items():
            kind, _, quantity = name.partition(".")
            parts[kind][quantity] = array
        heads = tuple((int(layer), int(head)) for layer, head in about["heads"])
        return cls(tuple(about["mechanisms"]), heads, parts["original"], parts["change"], about["settings"])

    def _of(self, quantity: str, mechanism: str | None) -> Float[np.ndarray, "head text"]:
        if quantity not in self.change:
            raise unknown_name("quantity", quantity, tuple(self.change))
        if mechanism is not None and mechanism not in self.mechanisms:
            raise unknown_name("mechanism of this impact", mechanism, self.mechanisms)
        place = 0 if mechanism is None else self.mechanisms.index(mechanism)
        found: np.ndarray = self.change[quantity][place]
        return found

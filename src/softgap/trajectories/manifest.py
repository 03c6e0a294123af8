"""The manifest of a run or a study: the model, settings and versions behind its measurements."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from softgap.errors import ValueInputError
from softgap.inputs import as_items

__all__ = ["Manifest", "inputs_digest", "seal_of"]

_TIMES = ("started", "finished")
_NOT_THE_QUESTION = (*_TIMES, "weights", "versions", "backend", "threads", "command", "extra")
_NOT_THE_DATA = (*_TIMES, "command", "extra")
_OBJECTS = ("versions", "options", "extra")
_TEXTS = ("model", "weights", "dtype", "backend", "inputs", "command")


@dataclass(frozen=True)
class Manifest:
    """What was measured, on what, with what.

    Attributes
    ----------
    model, weights : str
        The model's id and the fingerprint of its weights.
    mechanisms : Mapping[str, Mapping[str, Any]]
        Name of each mechanism, in order, with its options.
    versions : Mapping[str, str]
        Versions of the programs: softgap, torch, transformers, ...
    dtype, backend : str
        Of the model: ``"float32"``, ``"sdpa"``, ...
    threads, seed : int or None
        None where it was not fixed.
    dropped_sinks : int
        How many first tokens were left out of the visible set.
    inputs : str
        A fingerprint of the prompts, so that two studies of the same model can be told apart.
    options : Mapping[str, Any]
        What else the data depend on: length, temperature, ...
    command : str
        The command line, for the reader.
    started, finished : str or None
        ISO 8601 times. The store fills in what is None.
    extra : Mapping[str, Any]
        Anything else, for the reader; never compared.

    Notes
    -----
    The three open mappings hold what JSON holds: tuples become lists, NaN is refused.
    """

    model: str = ""
    weights: str = ""
    mechanisms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    backend: str = ""
    threads: int | None = None
    seed: int | None = None
    dropped_sinks: int = 0
    inputs: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    started: str | None = None
    finished: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("mechanisms", *_OBJECTS):
            object.__setattr__(self, name, _as_json(name, getattr(self, name)))
        for name, options in self.mechanisms.items():
            if not isinstance(options, dict):
                raise ValueInputError(
                    f"the options of mechanism '{name}' must be a mapping, got {options!r}; use {{}} for none"
                )
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise ValueInputError(f"manifest field '{name}' must be text, got {getattr(self, name)!r}")
        for name in ("threads", "seed", "dropped_sinks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, int) or (value is None and name != "dropped_sinks")):
                raise ValueInputError(f"manifest field '{name}' must be a whole number, got {value!r}")
        for name in _TIMES:
            if not isinstance(getattr(self, name), str | None):
                raise ValueInputError(f"manifest field '{name}' must be an ISO 8601 time, got {getattr(self, name)!r}")

    def differences(self, other: Manifest, *, question_only: bool = False) -> list[str]:
        """Names of the fields in which two studies differ, those that only inform the reader left aside.

        With ``question_only`` also versions, weights, backend and threads are left aside: what remains is what was
        asked, not the machine that answered.
        """
        return self._unequal(other, _NOT_THE_QUESTION if question_only else _NOT_THE_DATA)

    def equals(self, other: Manifest) -> bool:
        """Whether everything but the two times is equal."""
        return not self._unequal(other, _TIMES)

    def _unequal(self, other: Manifest, ignored: tuple[str, ...]) -> list[str]:
        ours, theirs = self.to_json(), other.to_json()
        return [name for name in ours if name not in ignored and ours[name] != theirs[name]]

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object; mechanisms become a list because their order matters."""
        document = {f.name: getattr(self, f.name) for f in fields(self)}
        document["mechanisms"] = [{"name": name, "options": options} for name, options in self.mechanisms.items()]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Manifest:
        """The inverse of ``to_json``; names it does not know are left aside."""
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        entries = known.get("mechanisms", [])
        try:
            known["mechanisms"] = {entry["name"]: entry["options"] for entry in entries}
        except (TypeError, KeyError) as error:
            raise ValueInputError(
                f"manifest field 'mechanisms' must be a list of name and options, got {entries!r}"
            ) from error
        return cls(**known)


def inputs_digest(texts: Sequence[str]) -> str:
    """The fingerprint of the texts of a study, for ``Manifest.inputs``."""
    return hashlib.sha256("\x00".join(as_items(texts)).encode()).hexdigest()[:16]


def seal_of(document: Mapping[str, Any]) -> str:
    """The hash of a manifest's document, its field ``hash`` aside: it tells whether somebody edited the file."""
    rest = {name: value for name, value in document.items() if name != "hash"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _as_json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    try:
        result = json.loads(json.dumps(value, allow_nan=False, default=dict))
    except (TypeError, ValueError) as error:
        raise ValueInputError(
            f"manifest field '{name}' must hold what JSON can hold, got {value!r} ({error}); use text or finite numbers"
        ) from error
    if not isinstance(result, dict):
        raise ValueInputError(f"manifest field '{name}' must be a mapping, got {value!r}")
    return result

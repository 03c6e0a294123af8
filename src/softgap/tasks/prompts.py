"""A prompt of a study, with its completion, reference, label and other fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from softgap.deprecation import DeprecatedAttribute
from softgap.errors import ValueInputError
from softgap.inputs import as_items, check_text, encodable, refuse_string, shortened

__all__ = ["RESERVED", "Prompt", "check_ids", "prompt_from"]

_PROMPT_FIELDS = ("id", "prompt", "completion", "reference", "label", "group")
# What softgap writes beside the fields of a prompt begins with this, so that no field of a user has its name.
RESERVED = "softgap."


@dataclass(frozen=True)
class Prompt:
    """What a model is asked.

    Attributes
    ----------
    sample_id
        Its name in the study, different for every prompt.
    completion
        A text that is read instead of generated: replay.
    reference
        Accepted answers; empty if none is known.
    label
        Its group in a comparison, where it is known beforehand.
    group
        What belongs together, such as a question's id; never divided between folds or exchanged across.
    fields
        Anything else that was given: difficulty, choices, ...; not under the names above, nor one that begins with
        ``softgap.``
    line
        Where it stood in its file, for messages; 0 if nowhere.
    """

    sample_id: str
    prompt: str
    completion: str | None = None
    reference: tuple[str, ...] = ()
    label: str | None = None
    group: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", as_items(self.reference))
        for name in self.fields:
            if name in _PROMPT_FIELDS or str(name).startswith(RESERVED):
                raise ValueInputError(
                    f"the fields of a prompt must not be called {', '.join(_PROMPT_FIELDS)} or begin with "
                    f"'{RESERVED}', got {shortened(name)}; rename it"
                )

    def to_json(self) -> dict[str, Any]:
        """As one object, which ``prompt_from`` reads back."""
        fields = {
            "id": self.sample_id,
            "prompt": self.prompt,
            "completion": self.completion,
            "reference": list(self.reference) or None,
            "label": self.label,
            "group": self.group,
        }
        return {**{name: value for name, value in fields.items() if value is not None}, **self.fields}

    asked = DeprecatedAttribute("without_completion")

    def without_completion(self) -> Prompt:
        """The same to be answered by the model: without the completion, and without the label that belonged to it."""
        return replace(self, completion=None, label=None)


def prompt_from(
    entry: Mapping[str, Any], where: str, default_id: str, *, line: int = 0, needs: Sequence[str] = ("prompt",)
) -> Prompt:
    """A prompt from named fields; ``where`` begins the sentence about a field that cannot be used.

    What a study wrote beside the fields of its prompts is left aside, so that its file can be read as prompts again.
    """
    entry = {name: value for name, value in entry.items() if not name.startswith(RESERVED)}
    _check_encodable(entry, where)
    for name in needs:
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise ValueInputError(f"{where}: '{name}' must hold some text, got {shortened(entry.get(name))}; add it")
    sample_id = entry.get("id", default_id)
    if isinstance(sample_id, bool) or not isinstance(sample_id, str | int) or sample_id == "":
        raise ValueInputError(f"{where}: 'id' must be text or a whole number, got {shortened(sample_id)}; change it")
    label = entry.get("label")
    if not isinstance(label, str | None):
        raise ValueInputError(f"{where}: 'label' must be text, got {shortened(label)}; write it in quotes")
    return Prompt(
        sample_id=str(sample_id),
        prompt=check_text(entry["prompt"], f"{where}: 'prompt'"),
        completion=_completion(entry.get("completion"), where),
        reference=_references(entry.get("reference"), where),
        label=label or None,
        group=_group(entry.get("group"), where),
        fields={name: value for name, value in entry.items() if name not in _PROMPT_FIELDS},
        line=line,
    )


def check_ids(prompts: Sequence[Prompt], name: str) -> None:
    """Refuse an id that occurs twice."""
    refuse_string("prompts", prompts, "softgap.tasks.Prompt objects")
    lines: dict[str, int] = {}
    for prompt in prompts:
        if prompt.sample_id in lines:
            raise ValueInputError(
                f"{name}, line {prompt.line}: every id must be different, got '{prompt.sample_id}' again after line "
                f"{lines[prompt.sample_id]}; rename one"
            )
        lines[prompt.sample_id] = prompt.line


def _check_encodable(entry: Mapping[str, Any], where: str) -> None:
    """Refuse a field whose name or value, at any depth, holds half a character, as JSON can write it."""
    for field_name, field_value in entry.items():
        encodable(field_name, f"{where}: the name of a field")
        values = [field_value]
        while values:
            value = values.pop()
            if isinstance(value, str):
                encodable(value, f"{where}: '{field_name}'")
            elif isinstance(value, Mapping):
                values += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                values += value


def _completion(value: Any, where: str) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValueInputError(f"{where}: 'completion' must be text, got {shortened(value)}; write it in quotes")
    return value


def _references(answers: Any, where: str) -> tuple[str, ...]:
    values = answers if isinstance(answers, list | tuple) else [] if answers is None or answers == "" else [answers]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or str(value).strip() == "":
            raise ValueInputError(
                f"{where}: 'reference' must be an answer or a list of answers, got {shortened(answers)}; write "
                "them as text"
            )
    return tuple(str(value) for value in values)


def _group(value: Any, where: str) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueInputError(f"{where}: 'group' must be text or a whole number, got {shortened(value)}; change it")
    return str(value)

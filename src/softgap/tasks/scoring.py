"""Score answers: exact, contains, numeric, choice, or a function that the user supplies."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from softgap.errors import ValueInputError, unknown_name
from softgap.tasks.prompts import Prompt

__all__ = ["RIGHT", "SCORERS", "WRONG", "Scorer", "resolve_scorer"]

RIGHT = "right"
"""The label of a right answer."""
WRONG = "wrong"
"""The label of a wrong answer."""

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_LETTER = re.compile(r"^\W*\(?([A-Za-z])(?:[).:]|\s|$)")


@dataclass(frozen=True)
class Scorer:
    """A way to judge an answer; ``judge`` gives a label, or None for "cannot say"."""

    name: str
    judge: Callable[[str, Prompt], str | None]
    needs_reference: bool = True

    def check(self, prompts: Sequence[Prompt], source: str) -> None:
        """Refuse prompts that this way cannot judge."""
        for prompt in prompts:
            where = f"{source}, line {prompt.line}: sample '{prompt.sample_id}'"
            if self.needs_reference and not prompt.reference:
                raise ValueInputError(
                    f"{where} has no reference, which scoring '{self.name}' compares with; add one or leave scoring out"
                )
            if prompt.label is not None:
                raise ValueInputError(
                    f"{where} has the label '{prompt.label}', and scoring '{self.name}' would give it another; leave "
                    "out the label or the scoring"
                )
            if self.name == "choice":
                _choices(prompt)
            if self.name == "numeric" and not any(_numbers(answer) for answer in prompt.reference):
                raise ValueInputError(
                    f"{where} has no number in its reference {list(prompt.reference)}; use scoring 'contains'"
                )


def resolve_scorer(name: str) -> Scorer:
    """A scorer by name, or a function by import path ``module:function``.

    The function is called with the answer and the prompt's fields (as ``Prompt.to_json``); it returns True or
    False (right or wrong), a label of its own, or None.
    """
    if ":" not in name:
        if name not in SCORERS:
            raise unknown_name("scoring", name, (*SCORERS, "module:function"))
        return SCORERS[name]
    return Scorer(name, _labelling_function(_import_function(name)), needs_reference=False)


def _exact(answer: str, prompt: Prompt) -> str:
    return _label(any(_plain(answer) == _plain(reference) for reference in prompt.reference))


def _contains(answer: str, prompt: Prompt) -> str:
    """A reference as whole words somewhere in the answer."""
    words = f" {_words(answer)} "
    return _label(any(f" {_words(reference)} " in words for reference in prompt.reference))


def _numeric(answer: str, prompt: Prompt) -> str:
    """The last number of the answer equals that of a reference."""
    answer_numbers = _numbers(answer)
    answers = [numbers[-1] for numbers in map(_numbers, prompt.reference) if numbers]
    return _label(
        bool(answer_numbers) and any(math.isclose(answer_numbers[-1], number, rel_tol=1e-9) for number in answers)
    )


def _choice(answer: str, prompt: Prompt) -> str | None:
    """The choice that the answer names first, by its letter at the start or by its words; None if it names none."""
    choices = _choices(prompt)
    answers = {_words(reference) for reference in prompt.reference}
    right = {i for i, choice in enumerate(choices) if _words(choice) in answers or chr(65 + i).lower() in answers}
    words = f" {_words(answer)} "
    places = {i: words.find(f" {_words(choice)} ") for i, choice in enumerate(choices)}
    named = sorted((place, -len(choices[i]), i) for i, place in places.items() if place >= 0)
    if named:
        return _label(named[0][2] in right)
    letter = _LETTER.match(answer)
    index = ord(letter[1].upper()) - 65 if letter else -1
    return _label(index in right) if 0 <= index < len(choices) else None


SCORERS: Mapping[str, Scorer] = MappingProxyType(
    {
        "exact": Scorer("exact", _exact),
        "contains": Scorer("contains", _contains),
        "numeric": Scorer("numeric", _numeric),
        "choice": Scorer("choice", _choice),
    }
)
"""Built-in ways by name."""


def _label(right: bool) -> str:
    return RIGHT if right else WRONG


def _plain(text: str) -> str:
    """Without case, outer punctuation and the kind of spaces."""
    return " ".join(text.casefold().split()).strip(" .!?\"'`*")


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _numbers(text: str) -> list[float]:
    return [float(match.replace(",", "")) for match in _NUMBER.findall(text)]


def _choices(prompt: Prompt) -> list[str]:
    choices = prompt.fields.get("choices")
    if not isinstance(choices, list | tuple) or len(choices) < 2:
        raise ValueInputError(
            f"scoring 'choice' needs a list 'choices' of at least two, got {choices!r} in sample '{prompt.sample_id}'; "
            "add it"
        )
    return [str(choice) for choice in choices]


def _import_function(path: str) -> Callable[..., Any]:
    module, _, function = path.partition(":")
    if not (module and function):
        raise ValueInputError(f"a scoring of one's own is written module:function, got '{path}'; name both")
    folder = str(Path.cwd())
    added = folder not in sys.path
    try:
        if added:
            # The console script does not look in the folder it is called from, where a user's module lies. Last: a file
            # there with the name of a library must not stand in its place.
            sys.path.append(folder)
        function_object = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise ValueInputError(
            f"cannot import the scoring '{path}' ({type(error).__name__}: {error}); give module:function with the "
            "module in this folder or installed"
        ) from error
    finally:
        if added:
            sys.path.remove(folder)
    if not callable(function_object):
        raise ValueInputError(f"the scoring '{path}' must be a function, got {function_object!r}; name a function")
    return function_object  # type: ignore[no-any-return]


def _labelling_function(function: Callable[..., Any]) -> Callable[[str, Prompt], str | None]:
    def label(answer: str, prompt: Prompt) -> str | None:
        verdict = function(answer, prompt.to_json())
        if verdict is None or isinstance(verdict, str):
            return verdict
        if isinstance(verdict, bool):
            return _label(verdict)
        raise ValueInputError(f"a scoring must return True, False, a label or None, got {verdict!r}")

    return label

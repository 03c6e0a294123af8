"""What a visitor wishes for: checked completely before anything is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from softgap.errors import ValueInputError, unknown_name
from softgap.probe.temperature import COLDEST
from softgap.report.live.limits import Limits

__all__ = ["CONTROL", "Wish", "wishes"]

CONTROL = "uniform"
"""Measured beside every mechanism: without it a divergence says little."""

_FIELDS = ("prompts", "mechanisms", "max_new_tokens", "temperature", "seed")
_GREATEST_SEED = 2**32 - 1
_HOTTEST = 10.0


@dataclass(frozen=True)
class Wish:
    """One generation.

    Attributes
    ----------
    mechanisms
        The control is among them.
    temperature
        None for greedy search.
    """

    prompt: str
    mechanisms: tuple[str, ...]
    max_new_tokens: int
    temperature: float | None
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As a page shows it."""
        return {
            "prompt": self.prompt,
            "mechanisms": list(self.mechanisms),
            "maxNewTokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }


def wishes(body: bytes, known: Sequence[str], limits: Limits) -> list[Wish]:
    """The generations that a request asks for, one per prompt; ``known`` are the mechanisms at hand."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueInputError(f"a request must be JSON, got something else ({error})") from error
    if not isinstance(given, dict):
        raise ValueInputError(f"a request must be a JSON object, got {type(given).__name__}")
    for name in given:
        if name not in _FIELDS:
            raise unknown_name("field of a request", name, _FIELDS)
    length = _whole("max_new_tokens", given.get("max_new_tokens", 128), 1, limits.new_tokens)
    temperature = _temperature(given.get("temperature"))
    seed = given.get("seed")
    number = _whole("seed", 0 if seed is None else seed, 0, _GREATEST_SEED)
    mechanisms = _mechanisms(given.get("mechanisms"), known, limits)
    return [Wish(prompt, mechanisms, length, temperature, number) for prompt in _prompts(given.get("prompts"), limits)]


def _prompts(given: Any, limits: Limits) -> list[str]:
    if not isinstance(given, list) or not 1 <= len(given) <= limits.prompts:
        many = len(given) if isinstance(given, list) else 0
        raise ValueInputError(f"prompts must be a list of 1 to {limits.prompts} texts, got {many}")
    for prompt in given:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueInputError("a prompt must hold some text, got none; write something to continue")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueInputError(f"a prompt must be valid Unicode, got half a character at {error.start}") from error
    return given


def _mechanisms(given: Any, known: Sequence[str], limits: Limits) -> tuple[str, ...]:
    named = ["elu1"] if given is None else given
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueInputError("mechanisms must be a list of names")
    wanted = [name for name in dict.fromkeys(named) if name != CONTROL]
    for name in wanted:
        if name not in known:
            raise unknown_name("mechanism", name, known)
    if len(wanted) > limits.mechanisms:
        raise ValueInputError(
            f"a run is compared with at most {limits.mechanisms} mechanisms besides {CONTROL}, got {len(wanted)}; "
            "choose fewer"
        )
    return (*wanted, CONTROL)


def _temperature(given: Any) -> float | None:
    if given is None:
        return None
    number = isinstance(given, int | float) and not isinstance(given, bool)
    if not number or not COLDEST <= given <= _HOTTEST:
        raise ValueInputError(
            f"temperature must be from {COLDEST:g} to {_HOTTEST:g}, got {given!r}; leave it empty for the likeliest "
            "tokens"
        )
    return float(given)


def _whole(name: str, given: Any, least: int, most: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
        raise ValueInputError(f"{name} must be a whole number from {least} to {most:,}, got {given!r}")
    return given

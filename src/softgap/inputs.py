"""Checks of what a user gives: several items, counts, shares, random generators, and text from files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from softgap.errors import ValueInputError

__all__ = [
    "as_items",
    "check_count",
    "check_rng",
    "check_share",
    "check_text",
    "decode_utf8",
    "encodable",
    "file_text",
    "is_whole",
    "refuse_string",
    "shortened",
]


Item = TypeVar("Item")


def as_items(given: Iterable[Item]) -> tuple[Item, ...]:
    """The items of an argument that takes several; a string, or anything that is not iterable, is one item.

    A string is never a sequence of its characters.

    >>> as_items("elu1")
    ('elu1',)
    >>> as_items(["elu1", "uniform"])
    ('elu1', 'uniform')
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        return (cast(Item, given),)
    return tuple(given)


def refuse_string(name: str, given: Any, wanted: str) -> None:
    """Refuse a string where one item would mean nothing; ``wanted`` says what the argument takes.

    >>> refuse_string("ids", "abc", "one name per sample")
    Traceback (most recent call last):
        ...
    softgap.errors.ValueInputError: ids must be a list with one name per sample, got the string 'abc'; put it in a list
    """
    if isinstance(given, str | bytes):
        shown = repr(given) if len(given) <= 40 else f"{given[:40]!r} ..."
        raise ValueInputError(f"{name} must be a list with {wanted}, got the string {shown}; put it in a list")


def is_whole(given: Any) -> bool:
    """Whether ``given`` is an integer, of Python or numpy; True and False are none."""
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def check_count(name: str, given: Any, *, least: int = 1, most: int | None = None, remedy: str = "") -> int:
    """``given`` as a whole number from ``least`` to ``most``.

    >>> check_count("order", 9, least=2, most=8, remedy="use a shorter pattern")
    Traceback (most recent call last):
        ...
    softgap.errors.ValueInputError: order must be a whole number from 2 to 8, got 9; use a shorter pattern
    """
    if not is_whole(given) or given < least or (most is not None and given > most):
        allowed = f"from {least}" if most is None else f"from {least} to {most}"
        raise ValueInputError(f"{name} must be a whole number {allowed}, got {given!r}{remedy and '; ' + remedy}")
    return int(given)


def check_share(name: str, given: Any, usual: float) -> float:
    """``given`` as a number between 0 and 1, both excluded.

    >>> check_share("level", 95, usual=0.95)
    Traceback (most recent call last):
        ...
    softgap.errors.ValueInputError: level must be between 0 and 1, both excluded, got 95; 0.95 is usual
    """
    number = isinstance(given, int | float | np.integer | np.floating) and not isinstance(given, bool)
    if not number or not 0 < given < 1:
        raise ValueInputError(f"{name} must be between 0 and 1, both excluded, got {given!r}; {usual:g} is usual")
    return float(given)


def check_rng(given: Any) -> np.random.Generator:
    """``given`` if it is a generator: a seed or the old RandomState would work by accident, or not at all."""
    if not isinstance(given, np.random.Generator):
        raise ValueInputError(f"rng must be a numpy Generator, got {given!r}; use np.random.default_rng(seed)")
    return given


def file_text(file: str | os.PathLike[str], instead: str = "") -> str:
    """All of a UTF-8 file; ``instead`` says in a message what else could have been given."""
    try:
        content = Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ValueInputError(f"cannot read '{file}': {reason}; give a text file{instead}") from error
    return decode_utf8(content, f"'{file}'")


def decode_utf8(content: bytes, name: str) -> str:
    """Bytes as UTF-8 text, with or without a byte order mark."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueInputError(
            f"{name} must be UTF-8 text, got the byte 0x{content[error.start]:02x} at {error.start}; convert it first"
        ) from error


def check_text(text: str, name: str) -> str:
    """The text, if it holds more than spaces and can be written down."""
    if not text.strip():
        raise ValueInputError(f"{name} must hold some text, got {shortened(text)}; write something to read")
    return encodable(text, name)


def encodable(text: str, name: str) -> str:
    """The text, if UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueInputError(f"{name} must be valid UTF-8, got {shortened(text[error.start])}; correct it") from error
    return text


def shortened(value: object) -> str:
    """A value as it is shown in a message."""
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:39]}…"

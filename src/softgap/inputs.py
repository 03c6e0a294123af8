"""Arguments that take several items: a string among them is one item, never a sequence of its characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

from softgap.errors import ValueInputError

__all__ = ["as_items", "refuse_string"]

Item = TypeVar("Item")


def as_items(given: Iterable[Item]) -> tuple[Item, ...]:
    """The items of an argument that takes several; a string, or anything that is not iterable, is one item.

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

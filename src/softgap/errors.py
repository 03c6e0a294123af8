"""Every exception softgap raises on purpose.

SoftgapError
├── ShapeError         tensors or arrays that do not fit together
├── ValueInputError    a value outside what is allowed (NaN, a range, a type)
├── UnknownNameError   a name that is in no registry; the nearest one is suggested
├── UnsupportedError   a sound request that this part cannot serve, with what can
├── ModelError         a model that cannot be found, loaded or tapped
└── StoreError         a study that cannot be read or written

A message is one sentence: what was wrong, what is allowed, what was given, what to do. The command line prints it
as it is and exits with code 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ModelError",
    "NonFiniteWarning",
    "ShapeError",
    "SoftgapError",
    "StoreError",
    "UnknownNameError",
    "UnsupportedError",
    "ValueInputError",
    "unknown_name",
]

_MOST_NAMED = 40


class SoftgapError(Exception):
    """Root of everything softgap raises on purpose."""


class ShapeError(SoftgapError, ValueError):
    """Tensors or arrays that do not fit together."""


class ValueInputError(SoftgapError, ValueError):
    """A value outside what is allowed."""


class UnknownNameError(SoftgapError, LookupError):
    """A name that is in no registry."""


class UnsupportedError(SoftgapError, NotImplementedError):
    """A sound request that this part cannot serve."""


class ModelError(SoftgapError, RuntimeError):
    """A model that cannot be found, loaded or tapped."""


class NonFiniteWarning(UserWarning):
    """Numbers of a measurement are NaN or infinite, and its means leave them out."""


class StoreError(SoftgapError, OSError):
    """A study that cannot be read or written."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not registered, with the nearest known name or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    remedy = f"did you mean '{near[0]}'?" if near else f"choose one of: {', '.join(names[:_MOST_NAMED])}{more}"
    return UnknownNameError(f"unknown {kind} '{given}'; {remedy}")

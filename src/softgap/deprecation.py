"""Old names of public functions, classes and attributes, which warn and lead to the new ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["DeprecatedAttribute", "deprecated_names"]


def deprecated_names(module: str, names: Mapping[str, str]) -> Callable[[str], object]:
    """Return a module's ``__getattr__`` (PEP 562) that gives the new name for an old one, with a warning.

    Parameters
    ----------
    module
        The ``__name__`` of the module that keeps the old names.
    names
        Each old name with its new one.
    """

    def getattr_(name: str) -> object:
        if name not in names:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        new = names[name]
        warnings.warn(f"{module}.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new)

    return getattr_


class DeprecatedAttribute:
    """The old name of an attribute: reading it warns and gives the new one.

    >>> class Result:
    ...     value = 1
    ...     mean = DeprecatedAttribute("value")
    """

    def __init__(self, new: str) -> None:
        self._new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._old = owner.__name__, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(f"{self._owner}.{self._old} is now {self._owner}.{self._new}", DeprecationWarning, stacklevel=2)
        return getattr(instance, self._new)

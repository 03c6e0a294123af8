"""Old names of public functions, classes, keywords and attributes, which warn and lead to the new ones."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

__all__ = ["DeprecatedAttribute", "deprecated_keywords", "deprecated_names"]

P = ParamSpec("P")
R = TypeVar("R")


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


def deprecated_keywords(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that accepts each old keyword of a function as its new one, with a warning.

    Parameters
    ----------
    **names
        Each old keyword with its new one.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{function.__name__}() got '{new}' and its old name '{old}'; leave one out")
                    message = f"keyword '{old}' of {function.__name__}() is now '{new}'"
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


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

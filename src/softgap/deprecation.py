"""Old names of public functions and classes, which warn and lead to the new ones."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping

__all__ = ["deprecated_names"]


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

"""How the kernels of this room are compiled: cached on disk where that is possible, else in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """``function`` as machine code that leaves other Python threads alone.

    One thread, always: numba's own thread pool may not be entered from two Python threads at once, and a caller who
    wants more cores can run calls in threads, since the interpreter lock is released.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return cast(Function, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to cache in: a read-only install with no user cache either
        return cast(Function, numba.njit(**options)(function))

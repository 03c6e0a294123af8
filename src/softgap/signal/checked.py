"""What every transform, surrogate and system asks of its input, with a sentence for everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.errors import ShapeError, ValueInputError

__all__ = ["checked_count", "checked_rng", "checked_series"]


def checked_series(x: Any, *, least: int = 1, use: str = "this") -> Float64[np.ndarray, "*batch time"]:
    """``x`` as float64 with time last, or the error that says why it is no series for ``use``."""
    array = np.asarray(x)
    if array.dtype.kind not in "fiu":
        raise ValueInputError(f"a series must hold real numbers, got an array of {array.dtype}")
    if array.ndim == 0:
        raise ShapeError(f"a series must have a time axis, got the single number {array}")
    if array.shape[-1] < least:
        raise ShapeError(f"{use} needs at least {least} steps, got {array.shape[-1]}; use longer series")
    array = array.astype(np.float64, copy=False)
    bad = ~np.isfinite(array)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueInputError(
            f"a series must be finite, got {array[first]} at index {first} ({bad.sum()} such values); "
            "leave out heads and steps that were not measured"
        )
    return array


def checked_count(name: str, given: Any, *, least: int = 1, most: int | None = None, remedy: str = "") -> int:
    """``given`` as a whole number from ``least`` to ``most``."""
    whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
    if not whole or given < least or (most is not None and given > most):
        allowed = f"from {least}" if most is None else f"from {least} to {most}"
        raise ValueInputError(f"{name} must be a whole number {allowed}, got {given!r}{remedy and '; ' + remedy}")
    return int(given)


def checked_rng(given: Any) -> np.random.Generator:
    """``given`` if it is a generator: a seed or the old RandomState would work by accident, or not at all."""
    if not isinstance(given, np.random.Generator):
        raise ValueInputError(f"rng must be a numpy Generator, got {given!r}; use np.random.default_rng(seed)")
    return given

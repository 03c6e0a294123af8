"""Checks of the arguments of this package."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.errors import ShapeError, ValueInputError
from softgap.inputs import check_count, is_whole

__all__ = [
    "check_delay",
    "check_order",
    "check_series",
    "not_finite",
    "real_array",
    "series_name",
]


def real_array(x: Any) -> np.ndarray:
    """``x`` as an array of real numbers with a time axis, in its own precision."""
    try:
        array = np.asarray(x)
    except ValueError as error:
        raise ShapeError(
            f"series must have one length in memory, got {type(x).__name__} of several; pad them and give lengths"
        ) from error
    if array.dtype.kind not in "fiu":
        raise ValueInputError(f"a series must hold real numbers, got an array of {array.dtype}")
    if array.ndim == 0:
        raise ShapeError(f"a series must have a time axis, got the single number {array}")
    return array


def check_series(x: Any, *, least: int = 1, use: str = "this") -> Float64[np.ndarray, "*batch time"]:
    """``x`` as float64 with time last, or the error that says why it is no series for ``use``."""
    array = real_array(x)
    if array.shape[-1] < least:
        raise ShapeError(f"{use} needs at least {least} steps, got {array.shape[-1]}; use longer series")
    array = array.astype(np.float64, copy=False)
    bad = ~np.isfinite(array)
    if bad.any():
        *at, step = (int(i) for i in np.argwhere(bad)[0])
        raise not_finite(array[(*at, step)], step, tuple(at))
    return array


def not_finite(value: float, step: int, at: tuple[int, ...]) -> ValueInputError:
    """The error for NaN or infinity in the series with index ``at``."""
    return ValueInputError(
        f"a series must be finite, got {value} at step {step} of {series_name(at)}; "
        "leave out heads and steps that were not measured"
    )


def series_name(at: tuple[int, ...]) -> str:
    """How a sentence calls the series with index ``at`` over the leading axes."""
    return f"series {at}" if at else "the series"


def check_order(order: Any) -> int:
    """``order`` as a whole number from 2 to 8."""
    whole = is_whole(order)
    if not whole or not 2 <= order <= 8:
        remedy = "longer" if whole and order < 2 else "shorter"
        raise ValueInputError(f"order must be between 2 and 8, got {order!r}; use a {remedy} pattern")
    return int(order)


def check_delay(delay: Any) -> int:
    """``delay`` as a whole number from 1."""
    return check_count("delay", delay, remedy="1 takes neighbouring steps")

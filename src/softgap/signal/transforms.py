"""Transforms and segments of a series, by name.

A transform is a pure function of the array, so that a null can put noise through exactly what the data went through.
The one that needs a whole study, ``residual``, lives in :mod:`softgap.signal.residuals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.errors import UnsupportedError, unknown_name
from softgap.signal.checked import checked_count, checked_series

__all__ = ["SEGMENTS", "TRANSFORMS", "apply_transform", "segment", "segment_slice", "steps_lost"]

TRANSFORMS: Mapping[str, int] = MappingProxyType({"raw": 0, "diff": 1, "diff2": 2, "diff3": 3, "residual": 0})
"""Transforms by name, with the steps that each one loses at the end of the time axis."""

SEGMENTS = ("full", "early", "mid", "late")
"""The whole series and its three thirds."""


def steps_lost(name: str) -> int:
    """By how many steps the transform ``name`` shortens a series: a series of T steps has T - ``steps_lost`` after."""
    if name not in TRANSFORMS:
        raise unknown_name("transform", name, TRANSFORMS)
    return TRANSFORMS[name]


def apply_transform(x: Any, name: str) -> Float64[np.ndarray, "*batch shorter"]:
    """A series, or its first, second or third differences, along the last axis.

    ``diff``: y_t = x_{t+1} - x_t; ``diff2`` and ``diff3`` apply it two and three times; ``raw`` leaves x as it is.
    Each difference removes one step and one degree of a polynomial trend in time, and makes noise less white: the
    differences of white noise are correlated at -1/2. A null has to be put through the same transform.

    Parameters
    ----------
    x
        Real numbers, time last, any leading axes. Never modified; ``raw`` returns a copy too.
    name
        "raw", "diff", "diff2" or "diff3"; see :func:`steps_lost` for the lengths.
    """
    lost = steps_lost(name)
    if name == "residual":
        raise UnsupportedError(
            "transform 'residual' is fitted over the samples of a study and not over one array; use residuals(samples)"
        )
    series = checked_series(x, least=lost + 1, use=f"transform '{name}'")
    return np.diff(series, n=lost, axis=-1) if lost else series.copy()


def segment_slice(n: int, name: str) -> slice:
    """The steps of ``n`` that a segment takes.

    The thirds begin at floor(k n / 3), k = 0, 1, 2: they do not overlap, leave nothing out, and differ in length by at
    most one step.
    """
    if name not in SEGMENTS:
        raise unknown_name("segment", name, SEGMENTS)
    checked_count("the number of steps", n, least=0)
    if name == "full":
        return slice(0, n)
    if n < 3:
        raise UnsupportedError(f"segment '{name}' needs at least 3 steps, got {n}; use segment 'full'")
    third = SEGMENTS.index(name) - 1
    return slice(third * n // 3, (third + 1) * n // 3)


def segment(x: Any, name: str) -> Float64[np.ndarray, "*batch part"]:
    """The whole of a series, or its early, middle or late third.

    Cut the series that was transformed, not the one that will be: thirds of a residual or of differences then share
    one trend and lose no steps at the cuts.
    """
    series = checked_series(x)
    return series[..., segment_slice(series.shape[-1], name)]

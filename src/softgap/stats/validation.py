"""Checks of the arguments of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int64

from softgap.errors import ShapeError, ValueInputError

__all__ = [
    "check_codes",
    "check_groups",
    "check_labels",
    "check_strata",
    "check_values",
]


def check_values(values: Any, name: str = "values") -> tuple[Float64[np.ndarray, "sample unit"], tuple[int, ...]]:
    """A table as float64 with its units in one axis, and the shape those units had."""
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise ValueInputError(f"{name} must hold real numbers, got an array of {array.dtype}")
    if array.ndim == 0:
        raise ShapeError(f"{name} must have one row per sample, got the single number {array}")
    if array.size == 0:
        raise ShapeError(f"{name} must hold at least one sample and one unit, got the shape {list(array.shape)}")
    bad = ~np.isfinite(array)
    if bad.any():
        sample, *unit = (int(i) for i in np.argwhere(bad)[0])
        where = f"sample {sample}" + (f", unit {tuple(unit)}" if unit else "")
        raise ValueInputError(
            f"{name} must be finite, got {array[(sample, *unit)]} at {where} ({bad.sum()} such values); "
            "leave out units or samples that were not measured"
        )
    return array.reshape(len(array), -1).astype(np.float64, copy=False), array.shape[1:]


def check_groups(a: Any, b: Any) -> tuple[Float64[np.ndarray, "sample unit"], np.ndarray, tuple[int, ...]]:
    """Two groups as one table, True for the rows of ``a``, and the shape of the units."""
    (first, shape), (second, other) = check_values(a, "group a"), check_values(b, "group b")
    if shape != other:
        raise ShapeError(
            f"the groups must hold the same units, got {list(shape)} in a and {list(other)} in b; "
            "samples come first, units behind them"
        )
    labels = np.arange(len(first) + len(second)) < len(first)
    for name, rows in (("a", first), ("b", second)):
        if len(rows) < 2:
            raise ValueInputError(
                f"each group needs at least 2 samples, got {len(rows)} in group '{name}'; add samples"
            )
    return np.concatenate([first, second]), labels, shape


def check_labels(
    labels: Any, samples: int, first: Any = None, least: int = 2
) -> tuple[Bool[np.ndarray, " sample"], tuple[str, str]]:
    """True for the samples of the first group, and the names of both; by default the first is the larger label."""
    values = _column("labels", labels, samples)
    distinct = _distinct("labels", values)
    names = ", ".join(f"'{value}'" for value in distinct.tolist())
    if len(distinct) < 2:
        raise ValueInputError(f"labels must name two groups, got only {names}; add samples of another group")
    if len(distinct) > 2:
        raise ValueInputError(f"labels must name two groups, got {len(distinct)} ({names}); choose two of them")
    if first is not None and first not in distinct.tolist():
        raise ValueInputError(f"the first group must be one of {names}, got {first!r}")
    leading, other = (distinct[1], distinct[0]) if first is None or first == distinct[1] else (distinct[0], distinct[1])
    in_first = np.asarray(values == leading)
    for name, count in ((leading, int(in_first.sum())), (other, int((~in_first).sum()))):
        if count < least:
            raise ValueInputError(
                f"each group needs at least {least} samples, got {count} in group '{name}'; add samples"
            )
    return in_first, (str(leading), str(other))


def check_codes(name: str, value: Any, samples: int) -> Int64[np.ndarray, " sample"]:
    """A number from 0 for each different entry of a column."""
    values = _column(name, value, samples)
    _distinct(name, values)
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def check_strata(value: Any, samples: int) -> Int64[np.ndarray, " sample"]:
    """The stratum of each sample: of one column, or of several by name, crossed; all 0 without any."""
    if value is None:
        return np.zeros(samples, np.int64)
    if not isinstance(value, Mapping):
        return check_codes("strata", value, samples)
    crossed = np.zeros(samples, np.int64)
    for name, column in value.items():
        codes = check_codes(f"stratum '{name}'", column, samples)
        crossed = np.unique(crossed * (codes.max() + 1) + codes, return_inverse=True)[1].astype(np.int64)
    return crossed


def _column(name: str, entries: Any, samples: int) -> np.ndarray:
    values = np.asarray(entries)
    if values.ndim != 1 or len(values) != samples:
        got = f"{len(values)} for {samples} samples" if values.ndim == 1 else f"the shape {list(values.shape)}"
        raise ShapeError(f"{name} must have one entry per sample, got {got}; give each sample its own entry")
    missing = [i for i, value in enumerate(values.tolist()) if value is None or value != value]
    if missing:
        raise ValueInputError(
            f"{name} must be known for every sample, got {values[missing[0]]} at sample {missing[0]} "
            f"({len(missing)} such entries); leave those samples out"
        )
    return values


def _distinct(name: str, values: np.ndarray) -> np.ndarray:
    try:
        return np.unique(values)
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in values.tolist()}))
        raise ValueInputError(f"{name} must be of one type, got {kinds}; write all of them as text") from None

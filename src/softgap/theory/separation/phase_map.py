"""Where the separation works: success over a grid of any two of its sizes, and the boundary two arguments predict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from softgap.attention import resolve
from softgap.errors import ValueInputError, unknown_name
from softgap.inputs import as_items
from softgap.progress import Progress
from softgap.theory.separation.classes import Construction, class_outputs, construct, draw_many, form_of
from softgap.theory.separation.network import Trial, argument, signal_margin, trial

__all__ = ["AXES", "Axis", "PhaseMap", "parse_axes", "phase_maps", "turning_point"]

AXES: Mapping[str, tuple[float, ...]] = {
    "n": (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "d": (18, 34, 66, 130, 258, 514, 1026, 2050),
    "t": (1, 2, 4, 8, 16, 32, 64),
    "m": (2, 4, 8, 16, 32, 64, 128, 256),
    "a0": (0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8),
    "a1": (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2),
    "b": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    "c": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
}
_WHOLE = ("n", "d", "t", "m")
_GRIDS = ("success", "low", "high", "fires_d0", "fires_d1", "bound", "argued", "median")


@dataclass(frozen=True)
class Axis:
    """One size of the construction and the values it takes."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class PhaseMap:
    """One mechanism over a grid; NaN where the sizes are no construction.

    Attributes
    ----------
    success, low, high
        P(F = 0 on D0 and F > 0 on D1) with its 95 % Wilson interval.
    fires_d0, fires_d1
        P(F > 0) on each class.
    bound
        The bound on P(failure) from Hoeffding's inequality and the marked row, at most 1: it promises success where it
        is below 1/2. NaN for mechanisms without classes of rows.
    argued
        1 where b (w + sqrt(2 log m / (d - 2))) < 0.1 and the marked row of D1 has a positive margin, else 0: what
        the b / sqrt(d - 2) argument expects. For softmax only, else NaN.
    median
        The same with the median of the largest sum instead of its usual bound, see ``argument``.
    """

    mechanism: str
    x: Axis
    y: Axis
    success: Float[np.ndarray, "y x"]
    low: Float[np.ndarray, "y x"]
    high: Float[np.ndarray, "y x"]
    fires_d0: Float[np.ndarray, "y x"]
    fires_d1: Float[np.ndarray, "y x"]
    bound: Float[np.ndarray, "y x"]
    argued: Float[np.ndarray, "y x"]
    median: Float[np.ndarray, "y x"]

    def agreement(self, which: Literal["argued", "median"] = "argued") -> float:
        """The share of cells in which an argument and the measured majority agree; NaN without an argument."""
        expected = getattr(self, which)
        known = ~np.isnan(expected) & ~np.isnan(self.success)
        return float(((expected > 0.5) == (self.success > 0.5))[known].mean()) if known.any() else math.nan

    @property
    def broken_promises(self) -> int:
        """Cells whose measured failure rate is above the bound beyond its interval: 0 if the bound is one."""
        return int((1 - self.high > self.bound + 1e-12).sum())

    def boundary(self, which: Literal["success", "argued", "median"] = "success") -> tuple[float, ...]:
        """For each y, where success (or an argument) crosses 1/2 along x, the last crossing; NaN where it does not.

        Between grid values it is interpolated, on a logarithmic scale where all x are positive.
        """
        values = getattr(self, which)
        x = np.asarray(self.x.values, float)
        scale = np.log(x) if (x > 0).all() else x
        crossings = []
        for row in values:
            known = ~np.isnan(row)
            place = _last_crossing(scale[known], row[known])
            crossings.append(math.exp(place) if (x > 0).all() else place)
        return tuple(crossings)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mechanism": self.mechanism,
            "x": {"name": self.x.name, "values": list(self.x.values)},
            "y": {"name": self.y.name, "values": list(self.y.values)},
            **{name: getattr(self, name).tolist() for name in _GRIDS},
            "boundary": list(self.boundary()),
            "argued_boundary": list(self.boundary("argued")),
            "median_boundary": list(self.boundary("median")),
            "agreement": {which: self.agreement(which) for which in ("argued", "median")},
            "broken_promises": self.broken_promises,
        }


def _last_crossing(x: Float[np.ndarray, " x"], values: Float[np.ndarray, " x"]) -> float:
    above = values > 0.5
    crossings = np.flatnonzero(above[1:] != above[:-1])
    if not len(crossings):
        return math.nan
    i = int(crossings[-1])
    return float(x[i] + (0.5 - values[i]) / (values[i + 1] - values[i]) * (x[i + 1] - x[i]))


def parse_axes(text: str) -> tuple[Axis, Axis]:
    """Two axes from words such as ``d,b`` or ``d=34/130/514,b=0.2/0.5``."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueInputError(f"a map has two axes, written like d,b or d=34/130,b=0.2/0.5, got '{text}'; name two")
    axes = []
    for part in parts:
        name, _, values = part.strip().partition("=")
        if name not in AXES:
            raise unknown_name("axis of a map", name, AXES)
        try:
            ticks = tuple(float(value) for value in values.split("/")) if values else AXES[name]
        except ValueError:
            raise ValueInputError(
                f"the values of axis {name} are numbers with / between them, got '{values}'; for example {name}="
                + "/".join(f"{value:g}" for value in AXES[name][:3])
            ) from None
        if name in _WHOLE and any(value % 1 for value in ticks):
            raise ValueInputError(f"axis {name} takes whole numbers, got '{values}'")
        axes.append(Axis(name, tuple(sorted(ticks))))
    if axes[0].name == axes[1].name:
        raise ValueInputError(f"the two axes of a map must differ, got {axes[0].name} twice; choose another")
    return axes[0], axes[1]


def phase_maps(
    names: Sequence[str],
    x: Axis,
    y: Axis,
    fixed: Mapping[str, Any],
    draws: int,
    *,
    rng: np.random.Generator,
    allow_breaks: bool = False,
    progress: Progress | None = None,
) -> tuple[PhaseMap, ...]:
    """Success over a grid, one map per mechanism with the same draws.

    Parameters
    ----------
    fixed
        Sizes that stay as they are, as for ``construct``; an axis takes the place of its own. n, d and t follow
        each other as there, and so do b and c.
    """
    cells: dict[tuple[int, int], tuple[Construction, tuple[Trial, ...]]] = {}
    reason = ""
    for j, upper in enumerate(y.values):
        for i, value in enumerate(x.values):
            if progress is not None:
                progress("mapping", (j * len(x.values) + i) / (len(x.values) * len(y.values)))
            try:
                size = construct(**_cell_sizes(fixed, {x.name: value, y.name: upper}), allow_breaks=allow_breaks)
            except ValueInputError as error:
                reason = str(error)
                continue
            drawn = draw_many(size, draws, rng=rng)
            cells[j, i] = size, tuple(trial(name, size, drawn) for name in as_items(names))
    if not cells:
        raise ValueInputError(f"no cell of the map {x.name}, {y.name} is a construction: {reason}")
    return tuple(_collect_map(which, name, x, y, cells) for which, name in enumerate(as_items(names)))


def _cell_sizes(fixed: Mapping[str, Any], values: Mapping[str, float]) -> dict[str, Any]:
    """The sizes of one cell: c follows b and b follows c, and of n, d and t the one that is left follows the others."""
    free = {"n", "d", "t"} - set(values)
    if len(free) < 3 and free <= set(fixed):
        # All but the axes were given too, so one must give way: d to n, and n to d or t.
        fixed = {name: value for name, value in fixed.items() if name != next(x for x in ("n", "d", "t") if x in free)}
    placed = {**fixed, **{name: int(value) if name in _WHOLE else value for name, value in values.items()}}
    if "b" in values and "c" not in values:
        placed.pop("c", None)
    if "c" in values and "b" not in values:
        placed["b"] = 1 - values["c"]
    return placed


def _collect_map(
    which: int, name: str, x: Axis, y: Axis, cells: Mapping[tuple[int, int], tuple[Construction, tuple[Trial, ...]]]
) -> PhaseMap:
    grids = {key: np.full((len(y.values), len(x.values)), np.nan) for key in _GRIDS}
    for at, (size, trials) in cells.items():
        trial = trials[which]
        grids["success"][at], grids["low"][at], grids["high"][at] = (
            trial.success.value,
            trial.success.low,
            trial.success.high,
        )
        grids["fires_d0"][at], grids["fires_d1"][at] = trial.fires_d0.value, trial.fires_d1.value
        grids["bound"][at] = min(1.0, trial.bound_d0 + trial.bound_d1)
        if trial.mechanism == "softmax":
            grids["argued"][at] = float(argument(size) < 1 and trial.margin > 0)
            grids["median"][at] = float(argument(size, median=True) < 1 and trial.margin > 0)
    return PhaseMap(name, x, y, **grids)


def turning_point(mechanism: str, *, a1: float, b: float, largest: int = 2**24) -> int | None:
    """The smallest n (with t = 1) from 64 on at which the marked row of D1 no longer reaches the threshold.

    None where it still does at ``largest``. Found by doubling and halving, so a margin that recovers in between is
    not seen; that of softmax falls steadily once a1^2 + b^2 < 1.
    """
    entry = resolve(mechanism)

    def lost(n: int) -> bool:
        size = construct(n=n, t=1, a1=a1, b=b, m=1)
        if form_of(entry, size) != "classes":
            raise ValueInputError(f"mechanism '{mechanism}' has no classes of rows, so no turning point is known")
        return signal_margin(class_outputs(entry, size, 1), size) <= 0

    low, high = 64, 64
    while not lost(high):
        if high >= largest:
            return None
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lost(middle) else (middle, high)
    return high

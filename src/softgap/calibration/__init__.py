"""Fit a linear attention to each head of a model; the result is the mechanism ``fitted``."""

from typing import TYPE_CHECKING

from softgap.calibration.fit import Recipe, fit_maps
from softgap.calibration.held_out import HeldOut, evaluate_held_out, gap_closed
from softgap.calibration.rank_floor import Ladders, Rung, ladders
from softgap.calibration.whole_model import Calibration, calibrate
from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.intervals import Interval as Closed  # its name before 0.2

__all__ = [
    "Calibration",
    "Closed",
    "HeldOut",
    "Ladders",
    "Recipe",
    "Rung",
    "calibrate",
    "evaluate_held_out",
    "fit_maps",
    "gap_closed",
    "ladders",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"judge": "evaluate_held_out"})

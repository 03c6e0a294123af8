"""Fit a linear attention to each head of a model; the result is the mechanism ``fitted``."""

from softgap.calibration.fit import Recipe, fit_maps
from softgap.calibration.held_out import HeldOut, gap_closed, judge
from softgap.calibration.rank_floor import Ladders, Rung, ladders
from softgap.calibration.whole_model import Calibration, calibrate
from softgap.intervals import Interval as Closed  # its name before 0.2

__all__ = [
    "Calibration",
    "Closed",
    "HeldOut",
    "Ladders",
    "Recipe",
    "Rung",
    "calibrate",
    "fit_maps",
    "gap_closed",
    "judge",
    "ladders",
]

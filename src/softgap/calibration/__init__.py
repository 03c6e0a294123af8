"""Fit the cheap substitutes of each head of a model, and say which of them suffices."""

from typing import TYPE_CHECKING

from softgap.calibration.fit import Recipe, RowPlan, fit_maps
from softgap.calibration.held_out import HeldOut, evaluate_held_out, gap_closed
from softgap.calibration.memory_ladder import MemoryLadder
from softgap.calibration.rank_floor import Ladders, Rung, ladders
from softgap.calibration.sufficiency import Sufficiency, label_heads
from softgap.calibration.whole_model import Calibration, calibrate
from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.intervals import Interval as Closed  # its name before 0.2

__all__ = [
    "Calibration",
    "Closed",
    "HeldOut",
    "Ladders",
    "MemoryLadder",
    "Recipe",
    "RowPlan",
    "Rung",
    "Sufficiency",
    "calibrate",
    "evaluate_held_out",
    "fit_maps",
    "gap_closed",
    "label_heads",
    "ladders",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"judge": "evaluate_held_out"})

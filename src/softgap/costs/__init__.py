"""What a command would cost before it starts: seconds, memory and disk, from short timings of the model here."""

from softgap.costs.calibration import calibration_cost
from softgap.costs.evaluation import evaluation_cost
from softgap.costs.measurement import measurement_cost
from softgap.costs.probe import Cost, Curve, Probe
from softgap.costs.search import search_cost

__all__ = ["Cost", "Curve", "Probe", "calibration_cost", "evaluation_cost", "measurement_cost", "search_cost"]

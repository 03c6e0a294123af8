"""Which heads can live without softmax: swap them, measure what it costs, and find a plan."""

from softgap.linearize.applying import Applied, apply
from softgap.linearize.heads import heads_of_group, heads_of_layer
from softgap.linearize.impact import impact
from softgap.linearize.impact_result import Impact
from softgap.linearize.plan import Plan, load_plan
from softgap.linearize.substitute import Readout, Substitute
from softgap.linearize.swapping import swap

__all__ = [
    "Applied",
    "Impact",
    "Plan",
    "Readout",
    "Substitute",
    "apply",
    "heads_of_group",
    "heads_of_layer",
    "impact",
    "load_plan",
    "swap",
]

"""Which heads can live without softmax: swap them, measure what it costs, and find a plan."""

from softgap.linearize.heads import heads_of_group, heads_of_layer
from softgap.linearize.impact import impact
from softgap.linearize.impact_result import Impact
from softgap.linearize.substitute import Readout, Substitute
from softgap.linearize.swapping import swap

__all__ = ["Impact", "Readout", "Substitute", "heads_of_group", "heads_of_layer", "impact", "swap"]

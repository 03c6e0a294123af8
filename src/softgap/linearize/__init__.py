"""Which heads can live without softmax: swap any of them for another mechanism while the model runs."""

from softgap.linearize.heads import heads_of_group, heads_of_layer
from softgap.linearize.swapping import swap

__all__ = ["heads_of_group", "heads_of_layer", "swap"]

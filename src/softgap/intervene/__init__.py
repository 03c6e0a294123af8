"""Change a model while a block of code runs: swap heads, run from a layer on, caches with a recurrent state."""

from __future__ import annotations

from softgap.intervene.substitute import Mixture, Readout, Substitute, substitute
from softgap.intervene.swap import heads_of_group, heads_of_layer, swap

__all__ = ["Mixture", "Readout", "Substitute", "heads_of_group", "heads_of_layer", "substitute", "swap"]

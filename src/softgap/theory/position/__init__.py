"""Position: why the divergence of a head changes along a text."""

from softgap.theory.position.drift import TERMS, predicted, synthetic_layer
from softgap.theory.position.lab import Correction, MechanismTrend, Position, position_in_model, position_lab
from softgap.theory.position.trends import Slopes, log_slopes

__all__ = [
    "TERMS",
    "Correction",
    "MechanismTrend",
    "Position",
    "Slopes",
    "log_slopes",
    "position_in_model",
    "position_lab",
    "predicted",
    "synthetic_layer",
]

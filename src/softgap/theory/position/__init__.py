"""Position: why the divergence of a head changes along a text."""

from softgap.theory.position.drift import TERMS, Slopes, log_slopes, predicted, synthetic_layer
from softgap.theory.position.lab import Correction, MechanismTrend, Position, position_in_model, position_lab

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

"""The claims of the sources, run: one lab per claim, on synthetic data and inside a real model."""

from softgap.intervals import ClusterInterval
from softgap.intervals import ClusterInterval as Estimate  # its name before 0.2
from softgap.theory import focus, injectivity, locality, position, separation
from softgap.theory.focus import FocusFindings, ModelFocus, focus_in_model, focus_lab
from softgap.theory.injectivity import Injectivity, ModelInjectivity, injectivity_in_model, injectivity_lab
from softgap.theory.lab import Claim, Verdict
from softgap.theory.locality import Locality, ModelLocality, locality_in_model, locality_lab
from softgap.theory.position import Position, position_in_model, position_lab
from softgap.theory.separation import Separation, separation_lab

__all__ = [
    "Claim",
    "ClusterInterval",
    "Estimate",
    "FocusFindings",
    "Injectivity",
    "Locality",
    "ModelFocus",
    "ModelInjectivity",
    "ModelLocality",
    "Position",
    "Separation",
    "Verdict",
    "focus",
    "focus_in_model",
    "focus_lab",
    "injectivity",
    "injectivity_in_model",
    "injectivity_lab",
    "locality",
    "locality_in_model",
    "locality_lab",
    "position",
    "position_in_model",
    "position_lab",
    "separation",
    "separation_lab",
]

"""What `softgap.doctor` runs: gates on a model, and checks of the installation."""

from __future__ import annotations

from softgap.gates.diagnosis import Diagnosis, doctor
from softgap.gates.model import Gate

__all__ = ["Diagnosis", "Gate", "doctor"]

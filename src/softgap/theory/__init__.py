"""The claims of the sources, run: one lab per claim, on synthetic data and inside a real model."""

from softgap.theory import focus
from softgap.theory.claims import Claim, Verdict

__all__ = ["Claim", "Verdict", "focus"]

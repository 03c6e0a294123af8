"""From trajectories to findings: what the dynamics of every head look like, and how far that is from chance."""

from softgap.analysis.dynamics import analyze
from softgap.analysis.findings import Findings, HeadFinding, SystemPoint

__all__ = ["Findings", "HeadFinding", "SystemPoint", "analyze"]

"""From trajectories to findings: what the dynamics of every head look like, and how far that is from chance."""

from softgap.analysis.dynamics import analyze
from softgap.analysis.findings import Findings, HeadFinding, SystemPoint
from softgap.analysis.headline import GapSums, Headline, gap_sums, headline

__all__ = ["Findings", "GapSums", "HeadFinding", "Headline", "SystemPoint", "analyze", "gap_sums", "headline"]

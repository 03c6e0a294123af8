"""From trajectories to findings: the dynamics of every head against chance, and groups of samples compared."""

from softgap.analysis.comparison import compare_study
from softgap.analysis.comparison_findings import ComparisonFindings
from softgap.analysis.dynamics import analyze
from softgap.analysis.dynamics_findings import Findings, HeadFinding, SystemPoint
from softgap.analysis.headline import GapSums, Headline, gap_sums, headline
from softgap.analysis.preregistration import ComparisonPlan, read_plan

__all__ = [
    "ComparisonFindings",
    "ComparisonPlan",
    "Findings",
    "GapSums",
    "HeadFinding",
    "Headline",
    "SystemPoint",
    "analyze",
    "compare_study",
    "gap_sums",
    "headline",
    "read_plan",
]

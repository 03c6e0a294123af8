"""Turn trajectories into findings: the dynamics of each head, and comparisons of groups of samples."""

from typing import TYPE_CHECKING

from softgap.analysis.comparison import compare_study
from softgap.analysis.comparison_findings import ComparisonFindings
from softgap.analysis.dynamics import analyze
from softgap.analysis.dynamics_findings import Findings, HeadFinding, SystemPoint
from softgap.analysis.headline import GapSums, Headline, gap_sums, headline
from softgap.analysis.preregistration import Preregistration, read_preregistration
from softgap.deprecation import deprecated_names as _deprecated_names

__all__ = [
    "ComparisonFindings",
    "Findings",
    "GapSums",
    "HeadFinding",
    "Headline",
    "Preregistration",
    "SystemPoint",
    "analyze",
    "compare_study",
    "gap_sums",
    "headline",
    "read_preregistration",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(
        __name__, {"ComparisonPlan": "Preregistration", "read_plan": "read_preregistration"}
    )

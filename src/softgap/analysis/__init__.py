"""From trajectories to findings: the dynamics of every head against chance, and groups of samples compared.

The comparison of groups needs pandas and ``softgap.stats``: its names are fetched on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# At once, since the function shares its name with the module.
from softgap.analysis.headline import GapSums, Headline, gap_sums, headline
from softgap.deprecation import deprecated_names as _deprecated_names

if TYPE_CHECKING:
    from softgap.analysis.comparison import compare_study
    from softgap.analysis.comparison_findings import ComparisonFindings
    from softgap.analysis.dynamics import Findings, HeadFinding, analyze
    from softgap.analysis.pattern_counts import SystemPoint
    from softgap.analysis.preregistration import Preregistration, read_preregistration

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

_MODULE_OF = {
    "ComparisonFindings": "comparison_findings",
    "Findings": "dynamics",
    "HeadFinding": "dynamics",
    "Preregistration": "preregistration",
    "SystemPoint": "pattern_counts",
    "analyze": "dynamics",
    "compare_study": "comparison",
    "read_preregistration": "preregistration",
}

# Hidden from the type checker, which would otherwise accept any attribute.
if not TYPE_CHECKING:
    _deprecated = _deprecated_names(
        __name__, {"ComparisonPlan": "Preregistration", "read_plan": "read_preregistration"}
    )

    def __getattr__(name: str) -> object:
        """Import the module that holds a public name, once (PEP 562)."""
        from importlib import import_module

        if name not in _MODULE_OF:
            return _deprecated(name)
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)

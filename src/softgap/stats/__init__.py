"""Honest comparisons: effect sizes, permutation nulls, matching, correction, equivalence and classification.

Works on numpy arrays whose first axis is the sample and imports with numpy and scipy alone.
"""

from typing import TYPE_CHECKING

from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.stats.auroc import Auroc, AurocDifference, auroc, auroc_difference
from softgap.stats.comparison import Comparison, ComparisonOptions, compare, compare_table
from softgap.stats.design import EXCHANGES, Split, confirmation_split
from softgap.stats.effects import Contrast, EffectSize, contrast_table, hedges_g
from softgap.stats.equivalence import Equivalence, Power, equivalence
from softgap.stats.incremental import Incremental, incremental_auroc
from softgap.stats.matching import MATCHINGS, JointControl, MatchedSamples, joint_control, match
from softgap.stats.permutation import Null, Omnibus, Recurrence, recurrence
from softgap.stats.reliability import Kappa, LabelNoise, cohens_kappa, label_noise
from softgap.stats.verdict import OUTCOMES, Verdict, VerdictStep, verdict

__all__ = [
    "EXCHANGES",
    "MATCHINGS",
    "OUTCOMES",
    "Auroc",
    "AurocDifference",
    "Comparison",
    "ComparisonOptions",
    "Contrast",
    "EffectSize",
    "Equivalence",
    "Incremental",
    "JointControl",
    "Kappa",
    "LabelNoise",
    "MatchedSamples",
    "Null",
    "Omnibus",
    "Power",
    "Recurrence",
    "Split",
    "Verdict",
    "VerdictStep",
    "auroc",
    "auroc_difference",
    "cohens_kappa",
    "compare",
    "compare_table",
    "confirmation_split",
    "contrast_table",
    "equivalence",
    "hedges_g",
    "incremental_auroc",
    "joint_control",
    "label_noise",
    "match",
    "recurrence",
    "verdict",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"Matched": "MatchedSamples", "Step": "VerdictStep"})

"""Which heads can live without softmax: swap them, measure what it costs, and find a plan."""

from softgap.linearize.applying import Applied, apply
from softgap.linearize.budget import Budget
from softgap.linearize.frontier import frontier
from softgap.linearize.frontier_result import Frontier, Point
from softgap.linearize.heads import heads_of_group, heads_of_layer
from softgap.linearize.impact import impact
from softgap.linearize.impact_result import Impact
from softgap.linearize.passages import Passages, lookups, passages_of
from softgap.linearize.plan import Plan, load_plan
from softgap.linearize.ranking import Ranking, rank_agreement
from softgap.linearize.repair import repaired
from softgap.linearize.scores import SCORES, Scores, head_scores
from softgap.linearize.search import find_plan
from softgap.linearize.substitute import Readout, Substitute, substitute
from softgap.linearize.swapping import swap
from softgap.linearize.tuning import tuned

__all__ = [
    "SCORES",
    "Applied",
    "Budget",
    "Frontier",
    "Impact",
    "Passages",
    "Plan",
    "Point",
    "Ranking",
    "Readout",
    "Scores",
    "Substitute",
    "apply",
    "find_plan",
    "frontier",
    "head_scores",
    "heads_of_group",
    "heads_of_layer",
    "impact",
    "load_plan",
    "lookups",
    "passages_of",
    "rank_agreement",
    "repaired",
    "substitute",
    "swap",
    "tuned",
]

"""Which heads can live without softmax: swap them, measure what it costs, and find a plan."""

from softgap.intervene.swap import Readout, Substitute, heads_of_group, heads_of_layer, substitute, swap
from softgap.linearize.distil import tuned
from softgap.linearize.frontier import Budget, Frontier, Point, frontier
from softgap.linearize.impact import Impact, impact
from softgap.linearize.output_correction import repaired
from softgap.linearize.plan import Applied, Plan, apply, load_plan
from softgap.linearize.ranking import Ranking, rank_agreement
from softgap.linearize.scores import SCORES, Scores, head_scores
from softgap.linearize.search import find_plan
from softgap.linearize.sequences import Passages, lookups, passages_of

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

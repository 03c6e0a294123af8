"""Which heads can live without softmax: swap them, measure what it costs, and find a plan."""

from typing import TYPE_CHECKING

from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.intervene.substitute import Mixture, Readout, Substitute, substitute
from softgap.intervene.swap import heads_of_group, heads_of_layer, swap
from softgap.linearize.application import Applied, apply
from softgap.linearize.attached import attach, attached_plan, detach, load_model
from softgap.linearize.distil import distil_substitute
from softgap.linearize.exchange import Export, export_plan, import_pattern
from softgap.linearize.frontier import Budget, Frontier, Point, frontier
from softgap.linearize.generation import Generation, GenerationStep, generate
from softgap.linearize.impact import Impact, impact
from softgap.linearize.output_correction import fit_output_correction
from softgap.linearize.plan import Plan, load_plan
from softgap.linearize.recall_scores import RECALL_SCORES, UnitScores, impact_of_units, learn_gates, recall_scores
from softgap.linearize.scores import SCORES, Ranking, Scores, head_scores, rank_agreement
from softgap.linearize.search import find_plan
from softgap.linearize.sequences import Sequences, recall_sequences, split_sequences

__all__ = [
    "RECALL_SCORES",
    "SCORES",
    "Applied",
    "Budget",
    "Export",
    "Frontier",
    "Generation",
    "GenerationStep",
    "Impact",
    "Mixture",
    "Plan",
    "Point",
    "Ranking",
    "Readout",
    "Scores",
    "Sequences",
    "Substitute",
    "UnitScores",
    "apply",
    "attach",
    "attached_plan",
    "detach",
    "distil_substitute",
    "export_plan",
    "find_plan",
    "fit_output_correction",
    "frontier",
    "generate",
    "head_scores",
    "heads_of_group",
    "heads_of_layer",
    "impact",
    "impact_of_units",
    "import_pattern",
    "learn_gates",
    "load_model",
    "load_plan",
    "rank_agreement",
    "recall_scores",
    "recall_sequences",
    "split_sequences",
    "substitute",
    "swap",
]

if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(
        __name__,
        {
            "Passages": "Sequences",
            "lookups": "recall_sequences",
            "passages_of": "split_sequences",
            "repaired": "fit_output_correction",
            "tuned": "distil_substitute",
        },
    )

"""What a model can do, changed or not: loss, associative recall, needles, by likelihood and by generation."""

from softgap.evaluation.lm_harness import HarnessResult, HarnessRow, lm_eval
from softgap.evaluation.results import METRICS, Evaluation, Row
from softgap.evaluation.sampling import TASKS, evaluate

__all__ = ["METRICS", "TASKS", "Evaluation", "HarnessResult", "HarnessRow", "Row", "evaluate", "lm_eval"]

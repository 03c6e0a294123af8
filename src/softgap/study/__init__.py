"""Many prompts measured in fixed batches, on this machine or a cluster; resumable, and labelled later at will."""

from softgap.study.estimate import Estimate, estimate_study
from softgap.study.labelling import Labelled, label_study
from softgap.study.measuring import Failure
from softgap.study.runner import ENGINES, Planned, StudyResult, plan_study, run_study
from softgap.study.settings import StudySettings

__all__ = [
    "ENGINES",
    "Estimate",
    "Failure",
    "Labelled",
    "Planned",
    "StudyResult",
    "StudySettings",
    "estimate_study",
    "label_study",
    "plan_study",
    "run_study",
]

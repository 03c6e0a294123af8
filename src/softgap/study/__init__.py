"""Many prompts measured in fixed batches, on this machine or a cluster; resumable, and labelled later at will."""

from softgap.study.files import Labelled, label_study
from softgap.study.measurement import Failure, StudySettings
from softgap.study.runner import ENGINES, Estimate, Planned, StudyResult, estimate_study, plan_study, run_study

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

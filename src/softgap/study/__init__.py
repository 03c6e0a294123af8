"""Many prompts measured in fixed batches, on this machine or a cluster; resumable, and labelled later at will."""

from softgap.study.batches import Failure, Observer, StudySettings
from softgap.study.estimate import Estimate, estimate_study
from softgap.study.files import Labelled, label_study
from softgap.study.measurement import (
    ENGINES,
    Planned,
    StudyResult,
    check_run,
    measure,
    plan_study,
    run_study,
)

__all__ = [
    "ENGINES",
    "Estimate",
    "Failure",
    "Labelled",
    "Observer",
    "Planned",
    "StudyResult",
    "StudySettings",
    "check_run",
    "estimate_study",
    "label_study",
    "measure",
    "plan_study",
    "run_study",
]

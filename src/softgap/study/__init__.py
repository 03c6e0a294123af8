"""Many prompts measured in fixed batches, on this machine or a cluster; resumable, and labelled later at will."""

from typing import TYPE_CHECKING

from softgap.deprecation import deprecated_names as _deprecated_names
from softgap.study.batches import Failure, Observer, StudySettings
from softgap.study.measurement import (
    ENGINES,
    Planned,
    StudyResult,
    check_run,
    measure,
    plan_study,
    run_study,
)
from softgap.trajectories.writer import LabelCounts, label_study

__all__ = [
    "ENGINES",
    "Failure",
    "LabelCounts",
    "Observer",
    "Planned",
    "StudyResult",
    "StudySettings",
    "check_run",
    "label_study",
    "measure",
    "plan_study",
    "run_study",
]

# Hidden from the type checker, which would otherwise accept any attribute.
if not TYPE_CHECKING:
    __getattr__ = _deprecated_names(__name__, {"Labelled": "LabelCounts"})

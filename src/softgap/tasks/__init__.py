"""Labelled prompts: read them from files and datasets, generate them with known answers, score the answers."""

from softgap.tasks.generators import TASKS, Task, generate_prompts
from softgap.tasks.prompts import Prompt
from softgap.tasks.scoring import RIGHT, SCORERS, WRONG, Scorer, resolve_scorer
from softgap.tasks.sources import read_labels, read_prompts

__all__ = [
    "RIGHT",
    "SCORERS",
    "TASKS",
    "WRONG",
    "Prompt",
    "Scorer",
    "Task",
    "generate_prompts",
    "read_labels",
    "read_prompts",
    "resolve_scorer",
]

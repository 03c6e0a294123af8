"""`softgap study`: many prompts, measured, judged and labelled."""

from __future__ import annotations

import typer

from softgap.cli.study_label import label_command
from softgap.cli.study_run import run_command
from softgap.cli.study_task import task_command

__all__ = ["study"]

study = typer.Typer(name="study", help="Measure many prompts, resume, judge answers, and label them later.")
study.command("run", epilog="Example: softgap study run prompts.jsonl --out runs/mine --score contains")(run_command)
study.command("task", epilog="Example: softgap study task lookup --n 400 --out runs/lookup")(task_command)
study.command("label", epilog="Example: softgap study label runs/mine labels.csv")(label_command)

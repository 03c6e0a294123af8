"""Recall of plans by distance, by likelihood and by generation, beside the original model's.

Run: python experiments/recall_of_plans.py PLAN [PLAN ...] --parts FOLDER [--length 2048] [--contexts 40]

Plans are files of ``softgap linearize``, or of ``experiments/mixed_plans.py --plans``. Every plan runs in its own cache
and answers the same contexts as the original model: lists of 12 pairs at distances up to the length. Finished blocks of
contexts lie in ``--parts``, so that an interrupted run goes on, and several plans share the original's.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import torch

from harness import FINDINGS, machine, write_section
from softgap.evaluation import evaluate
from softgap.evaluation.results import Evaluation, Row
from softgap.intervals import Interval
from softgap.linearize import apply, load_plan
from softgap.linearize.plan import cache_bytes_at
from softgap.models import load_model

CONTEXT = 8192
METRICS = {"first": "first token", "whole": "whole answer", "generated_first": "generated, first token",
           "generated_whole": "generated, whole answer"}  # fmt: skip


def say(*words: object) -> None:
    """A line of progress."""
    print(time.strftime("%H:%M:%S"), *words, flush=True)


def measured(model: Any, tokenizer: Any, path: str, options: argparse.Namespace) -> Evaluation:
    """Recall under the plan of a file."""
    plan = load_plan(path)
    last = [-1.0]

    def tell(stage: str, share: float) -> None:
        if share > last[0]:
            last[0] = share
            say(f"{Path(path).stem}: {stage}, {share:.0%}")

    return evaluate(
        model,
        tokenizer,
        "recall",
        under=lambda: apply(model, plan),
        label=Path(path).stem,
        lengths=[options.length],
        contexts=options.contexts,
        folder=options.parts,
        progress=tell,
    )


def rows_of(path: str, found: Evaluation) -> list[str]:
    """A row of the table for every metric."""
    memory = load_plan(path).memory
    kept = cache_bytes_at(memory, CONTEXT) / cache_bytes_at(memory, CONTEXT, original=True)
    lines = []
    for metric, words in METRICS.items():
        own = found.select(metric=metric)
        (whole,) = (row for row in own if row.distance is None)
        cells = [_change(whole), *(_change(row) for row in _by_distance(own))]
        share = f"{whole.original.value:.2f}"
        lines.append(f"| {Path(path).stem} | {kept:.1%} | {words} | {share} | {' | '.join(cells)} |")
    return lines


def _by_distance(rows: Iterable[Row]) -> list[Row]:
    return sorted((row for row in rows if row.distance is not None), key=lambda row: row.distance or (0, 0))


def _change(row: Row) -> str:
    change = row.change
    assert isinstance(change, Interval)
    return f"{change.value:+.3f} ({change.low:+.3f} to {change.high:+.3f})"


def main() -> None:
    """Measure, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", nargs="+")
    parser.add_argument("--parts", required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--silent", action="store_true", help="measure only; write no section")
    parser.add_argument("--title", default="", help="added to the section's title, so that other plans keep theirs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model("smollm2-135m")
    lines: list[str] = []
    found = None
    for path in options.plans:
        found = measured(model, tokenizer, path, options)
        lines += rows_of(path, found)
        say("\n" + "\n".join(lines[-len(METRICS) :]))
    if options.silent or found is None:
        return
    distances = _by_distance(found.select(metric="first"))
    octaves = [f"{low} to {high}" for low, high in (row.distance for row in distances if row.distance)]
    header = f"| plan | cache | metric | original | all distances | {' | '.join(octaves)} |"
    write_section(
        f"recall_of_plans-longer-{options.length}" + (f"-{options.title}".replace(" ", "-") if options.title else ""),
        f"Recall of plans with longer windows, contexts of {options.length:,} tokens"
        + (f", {options.title}" if options.title else ""),
        f"`python experiments/recall_of_plans.py PLAN ... --parts FOLDER --length {options.length} --contexts "
        f"{options.contexts}{f' --title {options.title!r}' if options.title else ''}` on the embedded model; "
        f"{machine()}. The plans are those of `experiments/mixed_plans.py --plans`, without output correction, each in "
        "its own cache. Change from the original model in the share of "
        "right answers, paired by context, with 95 % over contexts; by the distance in tokens between an answer's "
        f"source and its question. At most {options.contexts} contexts of 12 pairs, fewer where the half-width of .02 "
        "(first token) and .05 (the others) was reached before; every question by likelihood, 4 of each context by "
        f"generation. Cache: share of the original's bytes at {CONTEXT:,} tokens.\n\n"
        f"{header}\n|{'---|' * (header.count('|') - 1)}\n" + "\n".join(lines),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()

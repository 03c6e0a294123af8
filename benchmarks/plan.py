"""What a plan saves: memory of the KV cache and time per token of a generation, at several lengths of context.

Run: python benchmarks/plan.py PLAN.json [--contexts 1024 8192] [--new 32] [--pairs 5]

Both sides are the plan's model (the embedded one), a copy each, that has read a context and now writes new tokens one
by one: as it is, and under the plan with the plan's cache. They take turns. Memory is that of the cache (keys, values
and states), and the peak of a process of its own, weights included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness import field_words, machine, peak_memory, peak_of_process, ratio, require_quiet_machine, write_section
from softgap.intervene.state_cache import cache_bytes
from softgap.linearize import Plan, apply, load_plan
from softgap.models import load_model

CHUNK = 512


class Side:
    """A model that has read a context; the context is read in chunks, so that it fits anywhere."""

    def __init__(self, model: Any, cache: Any, context: int) -> None:
        self._model, self._cache = model, cache
        self._generator = torch.Generator().manual_seed(context)
        for start in range(0, context, CHUNK):
            part = self._tokens(min(CHUNK, context - start))
            self._cache = model(part, past_key_values=self._cache, use_cache=True, logits_to_keep=1).past_key_values
        self.bytes = cache_bytes(self._cache)

    def _tokens(self, n: int) -> torch.Tensor:
        return torch.randint(10, 40000, (1, n), generator=self._generator)

    def write(self, new: int) -> float:
        """Median seconds per new token."""
        times = []
        for _ in range(new):
            token = self._tokens(1)
            begun = time.perf_counter()
            self._model(token, past_key_values=self._cache, use_cache=True)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)


def described(plan: Plan) -> str:
    """What the plan swaps, and what it says that this costs."""
    costs = " and ".join(f"{name} by {plan.expected[name]}" for name in ("loss", "recall") if name in plan.expected)
    return (
        f"The plan frees {len(plan.groups)} KV groups ({len(plan.heads)} heads, "
        f"{field_words(plan.substitute.name)}) and, on text that its search never saw, changes {costs}."
    )


def report_peak(plan: Plan, context: int, name: str) -> None:
    """One side alone, and this process's peak memory."""
    model, _ = load_model(progress=False)
    with torch.inference_mode(), ExitStack() as stack:
        cache = stack.enter_context(apply(model, plan)).cache() if name == "plan" else None
        Side(model, cache, context).write(4)
    print(peak_of_process())


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--loaded", action="store_true", help="measure on a busy machine; nothing is written")
    parser.add_argument("--peak", nargs=2, metavar=("CONTEXT", "SIDE"), help="only report one process's peak")
    options = parser.parse_args()
    plan = load_plan(options.plan)
    if options.peak:
        report_peak(plan, int(options.peak[0]), options.peak[1])
        return
    if not options.loaded:
        require_quiet_machine()
    model, planned_model = (load_model(progress=False)[0] for _ in range(2))
    plan.check(model)
    lines = [
        "| context | cache, MB | cache under the plan, MB | ms per token | ms per token under the plan | time, plan / "
        "original | peak, MB | peak under the plan, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for context in options.contexts:
        with torch.inference_mode(), apply(planned_model, plan) as applied:
            sides = (Side(model, None, context), Side(planned_model, applied.cache(), context))
            pairs = [[side.write(options.new) for side in sides] for _ in range(options.pairs)]
        plain, planned = ([pair[i] for pair in pairs] for i in (0, 1))
        peaks = [
            peak_memory(__file__, options.plan, "--peak", str(context), name) or 0 for name in ("original", "plan")
        ]
        lines.append(
            f"| {context} | {sides[0].bytes / 1e6:.1f} | {sides[1].bytes / 1e6:.1f} | "
            f"{statistics.median(plain) * 1e3:.1f} | {statistics.median(planned) * 1e3:.1f} | {ratio(planned, plain)} "
            f"| {peaks[0] / 1e6:.0f} | {peaks[1] / 1e6:.0f} |"
        )
        print(lines[-1], flush=True)
    if options.loaded:
        return
    write_section(
        "plan",
        "What a plan saves",
        f"`python benchmarks/plan.py PLAN --pairs {options.pairs} --new {options.new}` on the embedded model; "
        f"{machine()}. {described(plan)} Medians of {options.new} new tokens and {options.pairs} pairs, the sides "
        "taking turns; the ratio is that of the pairs, with its range.\n\n" + "\n".join(lines),
    )


if __name__ == "__main__":
    main()

"""What a plan saves: memory of the KV cache and time per token of a generation, at several lengths of context.

Run: python benchmarks/plan.py PLAN.json [--contexts 1024 8192] [--new 32] [--pairs 5]

Both sides are the plan's model (the embedded one), reading a context and then writing new tokens one by one: as it is,
and under the plan with the plan's cache. Memory is that of the cache (keys, values and states), and the peak of a
process of its own, weights included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness import machine, peak_memory, peak_of_process, ratio, require_quiet_machine, write_section
from softgap.linearize import apply, load_plan
from softgap.probe import load_model
from softgap.probe.state_cache import cache_bytes

CHUNK = 512


def side(model: Any, plan: Any, context: int, new: int) -> dict[str, float]:
    """Seconds per new token and bytes of the cache; the context is read in chunks, so that prefill fits anywhere."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(10, 40000, (1, context + new), generator=generator)
    with torch.inference_mode(), ExitStack() as stack:
        make: Callable[[], Any] = lambda: None  # noqa: E731
        if plan is not None:
            make = stack.enter_context(apply(model, plan)).cache
        cache = make()
        for start in range(0, context, CHUNK):
            part = ids[:, start : min(context, start + CHUNK)]
            cache = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        times = []
        for place in range(context, context + new):
            begun = time.perf_counter()
            model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            times.append(time.perf_counter() - begun)
        return {"seconds": statistics.median(times), "bytes": float(cache_bytes(cache))}


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
        model, _ = load_model(progress=False)
        side(model, plan if options.peak[1] == "plan" else None, int(options.peak[0]), 4)
        print(peak_of_process())
        return
    if not options.loaded:
        require_quiet_machine()
    model, _ = load_model(progress=False)
    plan.check(model)
    lines = [
        "| context | cache, MB | cache under the plan, MB | ms per token | ms per token under the plan | time, plan / "
        "original | peak, MB | peak under the plan, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for context in options.contexts:
        rows = [
            (side(model, None, context, options.new), side(model, plan, context, options.new))
            for _ in range(options.pairs)
        ]
        plain, planned = ([row[i]["seconds"] for row in rows] for i in (0, 1))
        peaks = [
            peak_memory(__file__, options.plan, "--peak", str(context), name) or 0 for name in ("original", "plan")
        ]
        lines.append(
            f"| {context} | {rows[0][0]['bytes'] / 1e6:.1f} | {rows[0][1]['bytes'] / 1e6:.1f} | "
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
        f"{machine()}. The plan frees {len(plan.groups)} KV groups ({len(plan.heads)} heads, {plan.substitute.name}). "
        f"Medians of {options.new} new tokens and {options.pairs} pairs, one side after the other; the ratio is that "
        "of the pairs, with its range.\n\n" + "\n".join(lines),
    )


if __name__ == "__main__":
    main()

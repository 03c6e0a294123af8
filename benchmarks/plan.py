"""What plans save: time per new token, time to read a prompt, memory, batches, and how far the memory bus allows.

Run: python benchmarks/plan.py --calibration FILE [--plan PLAN.json] [--only decode prefill batch peak] [--pairs 5]

Both sides are the embedded model or that of ``--model``: as it is, and under a plan with the plan's cache; they take
turns. Without ``--plan`` the plans are made here: the KV groups of every layer become the calibration's hybrid (a
fitted state with sinks and a window), but for one group in nine, spread evenly over the layers; beside it windows of
equal bytes, and the hybrid with half of its window as far keys. Speed does not depend on which groups are kept, so no
search is needed; what such a plan costs in loss is not measured here. All parts take some 20 minutes on two cores;
``--only`` chooses some.

From --synthetic positions on (32,768 by default) the cache of either side is synthetic: keys and values are noise that
nobody has read, behind a short context that was read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import torch

from harness import field_words, machine, peak_of_process, ratio, require_quiet_machine, write_section
from softgap.attention import resolve
from softgap.attention.memory import equal_window, trade_for_far_keys
from softgap.intervene.state_cache import StateLayer, cache_bytes
from softgap.linearize import Applied, Plan, Readout, Substitute, apply, load_plan
from softgap.linearize.plan import plan_of
from softgap.models import load_model
from softgap.models.catalogue import EMBEDDED
from softgap.probe.layout import attention_layers, head_dim
from softgap.probe.recording import prepare_mechanism

CHUNK = 512
KEPT = 1 / 9  # of the KV groups
WINDOW = 94
SYNTHETIC = [32768]
PARTS = ("decode", "prefill", "batch", "peak")
# Seconds on the wall; on a busy machine those of the processor on one thread, which other work does not add to.
CLOCK = [time.perf_counter]


def make_plans(model: Any, calibration: str) -> dict[str, Plan]:
    """A plan of hybrids, of windows with the same bytes, and of hybrids with far keys; outputs are corrected."""
    layers, dim = attention_layers(model), head_dim(model)
    groups = [(layer.number, g) for layer in layers for g in range(layer.kv_heads)]
    n_kept = round(KEPT * len(groups))
    kept = {groups[i * len(groups) // n_kept] for i in range(n_kept)}
    size = layers[0].heads // layers[0].kv_heads
    heads = [(layer, g * size + i) for layer, g in groups if (layer, g) not in kept for i in range(size)]
    hybrid = prepare_mechanism(f"hybrid@{calibration}", model).configure(w=WINDOW)
    window = resolve(equal_window(hybrid, dim, kv_heads=layers[0].kv_heads))
    # An identity costs what any other output correction costs.
    readout = Readout.identity(len(layers), layers[0].heads, dim)
    mechanisms = {"hybrids": hybrid, "windows": window, "far keys": trade_for_far_keys(hybrid, dim)}
    return {name: plan_of(model, heads, Substitute(x, readout=readout)) for name, x in mechanisms.items()}


def plans_of(options: argparse.Namespace, model: Any) -> dict[str, Plan]:
    """The plan of a file, or those that are made here."""
    if options.plan:
        return {Path(options.plan).stem: load_plan(options.plan)}
    return make_plans(model, options.calibration)


def tokens(n: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(10, 40000, (batch, n), generator=torch.Generator().manual_seed(seed))


class Side:
    """A model, as it is or under a plan, that has read a context and writes new tokens one by one."""

    def __init__(self, model: Any, plan: Plan | None, context: int, batch: int = 1) -> None:
        self.model, self._plan, self._batch, self._written = model, plan, batch, 0
        self.cache: Any = None
        with self._applied() as applied:
            self.cache = None if applied is None else applied.cache()
            for start in range(0, context if context < SYNTHETIC[0] else 2 * CHUNK, CHUNK):
                self._forward(tokens(min(CHUNK, context - start), batch, start))
        if context >= SYNTHETIC[0]:
            self._extend(context)

    @contextmanager
    def _applied(self) -> Iterator[Applied | None]:
        """Under the plan, with the cache that an earlier block has left."""
        if self._plan is None:
            yield None
            return
        with apply(self.model, self._plan) as applied:
            if self.cache is not None:
                applied._caches.add(self.cache)
                for layer in self.cache.layers:
                    layer.closed = False
            yield applied

    def _forward(self, ids: torch.Tensor) -> None:
        found = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = found.past_key_values

    def _extend(self, context: int) -> None:
        """Let the cache look as if it held so many positions: noise where keys are kept."""
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                x = getattr(layer, name)
                if x is not None:
                    setattr(layer, name, torch.randn(*x.shape[:2], context, x.shape[3]))
            if isinstance(layer, StateLayer):
                layer.length = context

    def write(self, new: int) -> float:
        """Median seconds per new token."""
        times = []
        with self._applied():
            for _ in range(new):
                token = tokens(1, self._batch, self._written)
                self._written += 1
                begun = CLOCK[0]()
                self._forward(token)
                times.append(CLOCK[0]() - begun)
        return statistics.median(times[1:] or times)

    def read_prompt(self, length: int) -> float:
        """Seconds of one forward over a prompt."""
        self.cache = None
        with self._applied() as applied:
            self.cache = None if applied is None else applied.cache()
            ids = tokens(length, self._batch)
            begun = CLOCK[0]()
            self._forward(ids)
            return CLOCK[0]() - begun


def in_turn(sides: list[Callable[[], float]], pairs: int, warm: bool = False) -> list[list[float]]:
    """Seconds of every side, round by round, after one that warms up where they are not warm."""
    for side in () if warm else sides:
        side()
    rounds = [[side() for side in sides] for _ in range(pairs)]
    return [[row[i] for row in rounds] for i in range(len(sides))]


def bandwidth() -> float:
    """Bytes a second that a sum over 1 GB reads."""
    x = torch.ones(2**28)
    times = []
    for _ in range(5):
        begun = CLOCK[0]()
        x.sum()
        times.append(CLOCK[0]() - begun)
    return float(x.nbytes / min(times))


def products_alone(model: Any) -> float:
    """Seconds of one row's products with the weights of all linear layers, and nothing else."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    rows = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}
    times = []
    for _ in range(7):
        begun = CLOCK[0]()
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)
        times.append(CLOCK[0]() - begun)
    return statistics.median(times)


def read_per_token(model: Any, plan: Plan | None, cache: Any) -> float:
    """Bytes that one step reads at least: weights, the whole cache, and the plan's maps."""
    weights = sum(x.nbytes for x in model.parameters())
    return float(weights + cache_bytes(cache) + (0 if plan is None else plan.memory["parameters"]))


def decode_rows(model: Any, plans: dict[str, Plan], options: argparse.Namespace) -> list[str]:
    """Time per new token at every context, every plan beside the model as it is."""
    speed, products = bandwidth(), products_alone(model)
    weights = sum(x.nbytes for x in model.parameters())
    lines = [
        "| context | plan | cache, MB | ms per token | time, plan / original | read per token, MB | read, plan / "
        "original | floor, ms | floor, plan / original |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for context in options.contexts:
        names: list[str | None] = [None, *plans]
        sides = [Side(model, None if name is None else plans[name], context) for name in names]
        seconds = in_turn([partial(side.write, options.new) for side in sides], options.pairs)
        first = read_per_token(model, None, sides[0].cache)
        first_floor = products + (first - weights) / speed
        for name, side, own in zip(names, sides, seconds, strict=True):
            read = read_per_token(model, None if name is None else plans[name], side.cache)
            floor = products + (read - weights) / speed
            compared = "" if name is None else str(ratio(own, seconds[0]))
            lines.append(
                f"| {context} | {name or 'none'} | {cache_bytes(side.cache) / 1e6:.1f} | "
                f"{statistics.median(own) * 1e3:.1f} | {compared} | {read / 1e6:.0f} | {read / first:.3f} | "
                f"{floor * 1e3:.1f} | {floor / first_floor:.3f} |"
            )
            print(lines[-1], flush=True)
        del sides
    linear = sum(module.weight.nbytes for module in model.modules() if isinstance(module, torch.nn.Linear))
    return [
        *lines,
        "",
        f"A sum over 1 GB reads {speed / 1e9:.1f} GB/s. One row's products with the weights of all linear layers take "
        f"{products * 1e3:.1f} ms ({linear / products / 1e9:.1f} GB/s). The floor is these products, and everything "
        "else that a step reads, at the speed of the sum.",
    ]


def prefill_rows(model: Any, plans: dict[str, Plan], options: argparse.Namespace) -> list[str]:
    """Seconds of one forward over a prompt."""
    lines = ["| prompt | plan | s | time, plan / original |", "|---|---|---|---|"]
    for number, length in enumerate(options.prompts):
        names: list[str | None] = [None, *plans]
        sides = [Side(model, None if name is None else plans[name], 0) for name in names]
        # Longer prompts are the work of minutes, and the first length has warmed up everything.
        seconds = in_turn([partial(side.read_prompt, length) for side in sides], options.pairs, warm=number > 0)
        for name, own in zip(names, seconds, strict=True):
            compared = "" if name is None else str(ratio(own, seconds[0]))
            lines.append(f"| {length} | {name or 'none'} | {statistics.median(own):.2f} | {compared} |")
            print(lines[-1], flush=True)
    return lines


def batch_rows(model: Any, plans: dict[str, Plan], options: argparse.Namespace) -> list[str]:
    """Time per step and bytes per sequence of several sequences at once."""
    name = next(iter(plans))
    lines = [
        "| sequences | cache a sequence, MB: original, plan | ms per step: original, plan | time, plan / original |",
        "|---|---|---|---|",
    ]
    for batch in options.batches:
        sides = [Side(model, plan, options.batch_context, batch) for plan in (None, plans[name])]
        seconds = in_turn([partial(side.write, options.new // 2) for side in sides], options.pairs)
        sizes = [cache_bytes(side.cache) / batch / 1e6 for side in sides]
        medians = [statistics.median(own) * 1e3 for own in seconds]
        lines.append(
            f"| {batch} | {sizes[0]:.1f}, {sizes[1]:.1f} | {medians[0]:.1f}, {medians[1]:.1f} | "
            f"{ratio(seconds[1], seconds[0])} |"
        )
        print(lines[-1], flush=True)
        del sides
    return lines


def peak_rows(model: Any, plans: dict[str, Plan], options: argparse.Namespace) -> list[str]:
    """The peak memory of a process of its own that reads a prompt in one forward and writes 4 tokens.

    Beside it what is private to the process at the end: the rest are pages of files, such as weights and libraries.
    """
    lines = [
        "| context | peak, MB: original, plan | plan / original | private at the end, MB: original, plan | "
        "plan / original |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = str(next(iter(plans.values())).save(Path(folder) / "plan.json"))
        for context in options.prompts:
            one, other = (_memory_of(path, context, options, side) for side in ("original", "plan"))
            cells = (f"{a / 1e6:.0f}, {b / 1e6:.0f} | {b / a:.3f}" for a, b in zip(one, other, strict=True))
            lines.append(f"| {context} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return lines


def _memory_of(plan: str, context: int, options: argparse.Namespace, side: str) -> tuple[int, int]:
    """Peak and private bytes of one side in a process of its own."""
    command = [sys.executable, __file__, "--plan", plan, "--threads", str(options.threads), "--model", options.model]
    command += ["--of", str(context), side]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, private = done.stdout.split()[-2:]
    return int(peak), int(private)


def report_peak(options: argparse.Namespace) -> None:
    """One side alone, and this process's peak memory and what of it is private in the end."""
    context, name = int(options.of[0]), options.of[1]
    model, _ = load_model(options.model, progress=False)
    plan = next(iter(plans_of(options, model).values())) if name == "plan" else None
    with torch.inference_mode():
        side = Side(model, plan, 0)
        side.read_prompt(context)
        side.write(4)
    memory = psutil.Process().memory_info()
    print(peak_of_process(), memory.rss - memory.shared)


SECTIONS = {
    "decode": ("plan", "What a plan saves: new tokens", decode_rows),
    "prefill": ("plan-prefill", "What a plan saves: reading a prompt", prefill_rows),
    "batch": ("plan-batch", "What a plan saves: several sequences", batch_rows),
    "peak": ("plan-peak", "What a plan saves: peak memory", peak_rows),
}


def main() -> None:
    """Measure, print, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", help="make the plans from this calibration")
    parser.add_argument("--model", default=EMBEDDED, help="each has tables of its own")
    parser.add_argument("--plan", help="measure this plan's JSON file instead")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--batch-context", type=int, default=2048)
    parser.add_argument("--synthetic", type=int, default=SYNTHETIC[0], help="contexts from here on are not read")
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loaded", action="store_true", help="a busy machine: one thread, processor time")
    parser.add_argument("--of", nargs=2, metavar=("CONTEXT", "SIDE"), help="only report one process's peak")
    options = parser.parse_args()
    if (options.calibration is None) == (options.plan is None):
        parser.error("give either --calibration FILE or --plan PLAN.json")
    SYNTHETIC[0] = options.synthetic
    torch.set_num_threads(1 if options.loaded else options.threads)
    if options.loaded:
        CLOCK[0] = time.process_time
    if options.of:
        report_peak(options)
        return
    if not options.loaded:
        require_quiet_machine()
    model, _ = load_model(options.model, progress=False)
    plans = plans_of(options, model)
    about = "; ".join(
        f"*{name}*: {len(plan.groups)} KV groups freed, {field_words(plan.substitute.name)}"
        for name, plan in plans.items()
    )
    noise = f"Caches of {options.synthetic:,} positions and more are synthetic. "
    embedded = options.model == EMBEDDED
    words = "the embedded model" if embedded else options.model
    of_model, suffix = ("", "") if embedded else (f" --model {options.model}", f"-{options.model}")
    flags = f"{of_model} --synthetic {options.synthetic}" + " --loaded" * options.loaded
    busy = ", beside other work: times are those of the processor" if options.loaded else ""
    for part in options.only:
        name, title, rows = SECTIONS[part]
        with torch.inference_mode():
            lines = rows(model, plans, options)
        own = noise if part == "decode" else ""
        write_section(
            name + suffix,
            title + ("" if embedded else f": {options.model}"),
            f"`python benchmarks/plan.py --only {part} --pairs {options.pairs} --new {options.new}{flags}` on {words} "
            f"in float32; {machine()}{busy}. {about}. {own}Medians of {options.pairs} rounds "
            "in which the sides take turns; ratios are those of the rounds, with their range.\n\n" + "\n".join(lines),
        )


if __name__ == "__main__":
    main()

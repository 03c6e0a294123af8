"""What recording costs: wall time and peak memory against the same model without it.

Run: python benchmarks/overhead.py [--pairs 5] [--only live replay offloaded]
     python benchmarks/overhead.py --profile    (where the time of recording goes)

Each row takes --pairs pairs, or fewer, at least 5, once --seconds have passed, and is written when it is measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import cpu_offload

from harness import (
    interleaved,
    machine,
    peak_memory,
    peak_of_process,
    ratio,
    require_quiet_machine,
    write_section,
)
from softgap.attention import LinearState
from softgap.models import load_model
from softgap.probe import Recording, meter, read_ids, record
from softgap.probe.stream import Stream
from softgap.probe.token_scores import TokenScores, forward_then_logits

LIVE = (200, 1000)
REPLAY = (512, 2048, 8192)
OFFLOADED = (512, 2048)
# Tokens of a run that needs no other to warm up.
LONG = 1000
FEWEST_PAIRS = 5
PROMPT = "The keeper of the lighthouse wrote down every storm that crossed the bay, and in the margin he noted"

TITLES = {
    "live": "What recording a generation costs",
    "replay": "What recording a text costs",
    "offloaded": "What recording a text costs under CPU offload",
}
HEADING = (
    "| | tokens | pairs | plain, ms per token | recorded, ms per token | time, recorded / plain | plain, MB | "
    "recorded, MB | memory, recorded / plain |",
    "|---|---|---|---|---|---|---|---|---|",
)

Side = Callable[[], object]


def live_sides(model: Any, tokenizer: Any, new_tokens: int) -> tuple[Side, Side]:
    """Greedy generation that returns its logits: plain, and recorded up to finished trajectories."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]

    def plain() -> object:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    def recorded() -> object:
        with record(model, tokenizer=tokenizer) as recording:
            plain()
        return recording.trajectories()

    return plain, recorded


def replay_sides(model: Any, tokenizer: Any, length: int) -> tuple[Side, Side]:
    """One forward over seeded tokens with all logits, a block at a time: plain, and recorded."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(10, len(tokenizer), (1, length), generator=generator)
    inputs = {"input_ids": ids, "use_cache": False, "position_ids": torch.arange(length)[None]}

    def plain() -> object:
        firsts = []
        with torch.inference_mode():
            for _, logits in forward_then_logits(model, inputs, length)():
                firsts.append(float(logits[0, 0, 0]))
                del logits  # as the recorded side does: one block at a time
        return firsts

    return plain, lambda: read_ids(model, [ids[0].tolist()], tokenizer=tokenizer)


def sides_of(mode: str, size: int) -> tuple[Side, Side]:
    """The two sides of one measurement on the embedded model."""
    model, tokenizer = load_model(progress=False)
    if mode == "offloaded":
        cpu_offload(model)
    return (live_sides if mode == "live" else replay_sides)(model, tokenizer, size)


def report_peak(mode: str, size: int, side: str) -> None:
    """Print the peak resident memory of this process, weights included, after one call."""
    sides_of(mode, size)[("plain", "recorded").index(side)]()
    print(peak_of_process())


def measure(mode: str, size: int, pairs: int, seconds: float, clock: Callable[[], float]) -> str:
    """One line of the table."""
    sides, begun = sides_of(mode, size), time.perf_counter()
    # The longest runs warm up within their first second.
    plain, recorded = interleaved(sides, 1, warm_up=0 if size >= LONG else 1, clock=clock)
    while len(plain) < pairs and (len(plain) < FEWEST_PAIRS or time.perf_counter() - begun < seconds):
        for known, more in zip((plain, recorded), interleaved(sides, 1, warm_up=0, clock=clock), strict=True):
            known += more
    peaks = [peak_memory(__file__, "--peak", mode, str(size), side) or 0 for side in ("plain", "recorded")]
    milliseconds = [statistics.median(times) / size * 1e3 for times in (plain, recorded)]
    times = f"{milliseconds[0]:.2f} | {milliseconds[1]:.2f} | {ratio(recorded, plain)}"
    return (
        f"| {mode} | {size} | {len(plain)} | {times} | "
        f"{peaks[0] / 1e6:.0f} | {peaks[1] / 1e6:.0f} | {peaks[1] / max(1, peaks[0]):.3f} |"
    )


# What recording does, as rows of the profile: each a function of the instrument, none inside another.
PARTS = {
    "linear attention and comparing": (LinearState, "compare"),
    "stacking what waits": (meter, "stacked_runs"),
    "noting steps": (Stream, "observe_step"),
    "scoring logits": (TokenScores, "add"),
    "assembling trajectories": (Recording, "trajectories"),
}


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Seconds spent in each part while the block runs; one clock reading costs about 0.1 microseconds."""
    spent: dict[str, float] = defaultdict(float)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    patches = [patch.object(owner, name, clocked(part, getattr(owner, name))) for part, (owner, name) in PARTS.items()]
    for change in patches:
        change.start()
    try:
        yield spent
    finally:
        for change in patches:
            change.stop()


def profile(cases: tuple[tuple[str, int], ...], repeats: int = 3) -> str:
    """A table of the parts, in percent of the plain side's time."""
    lines = [
        "| | tokens | " + " | ".join(PARTS) + " | all of these |",
        "|---|---|" + "---|" * (len(PARTS) + 1),
    ]
    for mode, size in cases:
        plain, recorded = sides_of(mode, size)
        plain()
        recorded()
        rows = []
        for _ in range(repeats):
            start = time.perf_counter()
            plain()
            whole = time.perf_counter() - start
            with timed() as spent:
                recorded()
            rows.append({part: 100 * spent[part] / whole for part in PARTS})
        medians = [statistics.median(row[part] for row in rows) for part in PARTS]
        cells = [f"{share:.2f}" for share in (*medians, sum(medians))]
        lines.append(f"| {mode} | {size} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return (
        f"`python benchmarks/overhead.py --profile`, {machine()}: the time that each part of recording takes, in "
        f"percent of the same run without it (medians of {repeats}). What the ratios above have beyond these sums is "
        "the model itself running slower with its caches shared, and noise.\n\n" + "\n".join(lines)
    )


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=tuple(TITLES), default=list(TITLES))
    parser.add_argument("--seconds", type=float, default=60, help="a row that has taken so long begins no sixth pair")
    parser.add_argument("--profile", action="store_true", help="only measure where the time of recording goes")
    parser.add_argument("--loaded", action="store_true", help="a busy machine: one thread, processor time")
    parser.add_argument("--sizes", type=int, nargs="+", help="only these numbers of tokens; nothing is written")
    parser.add_argument("--peak", nargs=3, metavar=("MODE", "SIZE", "SIDE"), help="only report one process's peak")
    arguments = parser.parse_args()
    if arguments.peak:
        report_peak(arguments.peak[0], int(arguments.peak[1]), arguments.peak[2])
        return
    if not arguments.loaded:
        require_quiet_machine()
    unwritten = bool(arguments.sizes)
    clock = time.process_time if arguments.loaded else time.perf_counter
    if arguments.loaded:
        torch.set_num_threads(1)
    if arguments.profile:
        text = profile((("live", 100), ("replay", 512), ("replay", 2048)))
        if not (unwritten or arguments.loaded):
            write_section("overhead-profile", "Where the time of recording goes", text)
        return
    for mode, sizes in (("live", LIVE), ("replay", REPLAY), ("offloaded", OFFLOADED)):
        lines = list(HEADING)
        for size in (arguments.sizes or sizes) if mode in arguments.only else ():
            lines.append(measure(mode, size, arguments.pairs, arguments.seconds, clock))
            print(lines[-1], flush=True)
            # Row by row: an interrupted run keeps what it has measured.
            if not unwritten:
                write_section(f"overhead-{mode}", TITLES[mode], _text(mode, lines, arguments))


def _text(mode: str, lines: list[str], arguments: argparse.Namespace) -> str:
    pairs = arguments.pairs
    flag, busy = (
        (" --loaded", ", beside other work: times are those of the processor") if arguments.loaded else ("", "")
    )
    offloaded = " On both sides accelerate keeps the weights in memory and brings each to its layer (target: 1.10)."
    return (
        f"`python benchmarks/overhead.py --pairs {pairs} --only {mode}{flag}` on the embedded model (float32, sdpa); "
        f"{machine()}{busy}. Both "
        "sides run the same generation or forward and get the same logits (replay: the head in blocks); the recorded "
        "side adds elu1 and uniform with all three quantities, log-probability and entropy of every token, up to the "
        f"finished trajectories. Times are medians of interleaved pairs, ratios those of the pairwise ratios "
        "with their range. Memory is the peak resident memory of a process of its own, weights included."
        f"{offloaded if mode == 'offloaded' else ''}\n\n" + "\n".join(lines)
    )


if __name__ == "__main__":
    main()

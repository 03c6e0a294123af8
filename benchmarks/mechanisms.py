"""Chunked linear attention against its quadratic form and torch's own softmax attention: time and peak memory.

Run: python benchmarks/mechanisms.py [--pairs 7]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from harness import (
    Ratio,
    added_memory,
    interleaved,
    machine,
    peak_memory,
    ratio,
    require_quiet_machine,
    write_section,
)
from softgap.attention import attend

LENGTHS = (256, 1024, 4096, 8192)
HEADS, KV_HEADS, DIM = 9, 3, 64


def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seeded q, k, v of one sequence in float32."""
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(1, HEADS, length, DIM, generator=generator)
    k, v = (torch.randn(1, KV_HEADS, length, DIM, generator=generator) for _ in range(2))
    return q, k, v


def sides(length: int) -> dict[str, Callable[[], object]]:
    """The computations on the same tensors."""
    q, k, v = tensors(length)
    return {
        "chunked": lambda: attend("elu1", q, k, v, form="chunked"),
        "window": lambda: attend("window:w=60,sinks=4", q, k, v, form="chunked"),
        "hybrid": lambda: attend("elu1+window:w=60,sinks=4", q, k, v, form="chunked"),
        "quadratic": lambda: attend("elu1", q, k, v, form="quadratic"),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    }


def measure(length: int, pairs: int) -> tuple[dict[str, float], Ratio, Ratio, dict[str, int | None]]:
    """Median milliseconds of each side, chunked over the two others, peak memory of each."""
    calls = sides(length)
    times = dict(zip(calls, interleaved(list(calls.values()), pairs), strict=True))
    medians = {name: statistics.median(of_name) * 1e3 for name, of_name in times.items()}
    peaks = {name: peak_memory(__file__, "--peak", name, str(length)) for name in calls}
    chunked = times["chunked"]
    return medians, ratio(chunked, times["quadratic"]), ratio(chunked, times["sdpa"]), peaks


def report_peak(name: str, length: int) -> None:
    """Print what one call of a side adds to this process, after a small call has loaded the libraries."""
    with torch.inference_mode():
        sides(64)[name]()
        print(added_memory(sides(length)[name]))


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--peak", nargs=2, metavar=("SIDE", "T"), help="only report the memory of one call")
    arguments = parser.parse_args()
    if arguments.peak:
        report_peak(arguments.peak[0], int(arguments.peak[1]))
        return
    pairs = arguments.pairs
    require_quiet_machine()
    lines = [
        "| T | chunked, ms | window, ms | hybrid, ms | quadratic, ms | sdpa, ms | chunked / quadratic | "
        "chunked / sdpa | peak memory, MB: chunked, window, hybrid, quadratic, sdpa |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with torch.inference_mode():
        for length in LENGTHS:
            ms, to_quadratic, to_sdpa, memory = measure(length, pairs)
            peaks = ", ".join("n/a" if peak is None else f"{peak / 1e6:.0f}" for peak in memory.values())
            times = " | ".join(f"{ms[name]:.1f}" for name in ms)
            lines.append(f"| {length} | {times} | {to_quadratic} | {to_sdpa} | {peaks} |")
            print(lines[-1], flush=True)
        growth = interleaved([sides(8192)["chunked"], sides(4096)["chunked"]], pairs)
    slope = ratio(growth[0], growth[1])
    print(f"time at 8192 / time at 4096: {slope}")
    write_section(
        "mechanisms",
        "Linear attention in chunks against softmax attention",
        f"`make bench`: elu1 on B = 1, {HEADS} query heads, {KV_HEADS} KV heads, d = {DIM}, float32 "
        f"on all sides; {machine()}. Times are medians of {pairs} interleaved rounds, ratios those of the "
        "pairwise ratios, with their range. `chunked` and `quadratic` include the input checks; `window` is "
        "`window:w=60,sinks=4`, `hybrid` is `elu1+window:w=60,sinks=4`, both in chunks; `sdpa` is torch's "
        "`scaled_dot_product_attention` (causal, grouped KV heads). Peak memory is what one call adds to the "
        "process.\n\n" + "\n".join(lines) + f"\n\nTime of the chunked form at T = 8192 over T = 4096: {slope} "
        "(linear growth is 2).",
    )


if __name__ == "__main__":
    main()

"""IAAFT surrogates in one batched call against the loop over series and surrogates: time and peak memory.

Run: python benchmarks/surrogates.py [--pairs 5]
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from harness import (
    added_memory,
    interleaved,
    machine,
    peak_memory,
    ratio,
    require_quiet_machine,
    write_section,
)
from softgap.signal import simulate, surrogates
from softgap.signal.reference import iaaft_loop

SERIES, STEPS, SURROGATES = 270, 1000, 100
# The loop over all 27,000 surrogates would take a quarter of an hour per round; both sides share a smaller batch.
PAIR_SERIES, PAIR_SURROGATES = 27, 20
WORKERS = 2
MOST_ITERATIONS = 1000


def data(series: int) -> np.ndarray:
    """Bounded and correlated, as divergences are."""
    noise = simulate("ar1", STEPS, rng=np.random.default_rng(series), size=series, phi=0.8)
    return np.asarray(1 / (1 + np.exp(-1 - noise)))


def batched(x: np.ndarray, count: int, workers: int) -> float:
    """Surrogates in one call; iterations made per surrogate."""
    result = surrogates(
        x, "iaaft", count, rng=np.random.default_rng(0), max_iterations=MOST_ITERATIONS, workers=workers
    )
    assert result.convergence is not None
    return float(result.convergence.iterations.mean())


def lean_loop(x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The loop without trigonometry and with numpy's fastest sort: what a careful author would write by hand."""
    ordered, amplitude = np.sort(x), np.abs(np.fft.rfft(x))
    series, following = start.copy(), np.empty_like(start)
    for _ in range(MOST_ITERATIONS):
        spectrum = np.fft.rfft(series)
        spectrum *= amplitude / np.abs(spectrum)
        following[np.argsort(np.fft.irfft(spectrum, n=len(x)))] = ordered
        if np.array_equal(following, series):
            break
        series, following = following, series
    return series


def looped(x: np.ndarray, count: int, lean: bool) -> None:
    """The same number of surrogates, one at a time."""
    rng = np.random.default_rng(0)
    for row in x:
        for _ in range(count):
            start = rng.permuted(row)
            if lean:
                lean_loop(row, start)
            else:
                iaaft_loop(row, start, MOST_ITERATIONS)


def report_peak() -> None:
    """Print what the large call adds to this process, after a small call has loaded and compiled everything."""
    batched(data(2), 2, WORKERS)
    x = data(SERIES)
    print(added_memory(lambda: batched(x, SURROGATES, WORKERS)))


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peak", action="store_true", help="only report the memory of the large call")
    arguments = parser.parse_args()
    if arguments.peak:
        report_peak()
        return
    pairs = arguments.pairs
    require_quiet_machine()
    x = data(PAIR_SERIES)
    batched(x[:2], 2, 1)
    names = ("loop, as in the paper", "loop, lean", "batched, 1 worker", f"batched, {WORKERS} workers")
    seconds = interleaved(
        [
            lambda: looped(x, PAIR_SURROGATES, lean=False),
            lambda: looped(x, PAIR_SURROGATES, lean=True),
            lambda: batched(x, PAIR_SURROGATES, 1),
            lambda: batched(x, PAIR_SURROGATES, WORKERS),
        ],
        pairs,
    )
    lines = ["| | s | speed-up over the paper's loop | speed-up over the lean loop |", "|---|---|---|---|"]
    for name, times in zip(names, seconds, strict=True):
        gains = f"{ratio(seconds[0], times)} | {ratio(seconds[1], times)}"
        lines.append(f"| {name} | {statistics.median(times):.2f} | {gains} |")
        print(lines[-1], flush=True)
    start = time.perf_counter()
    iterations = batched(data(SERIES), SURROGATES, WORKERS)
    whole = time.perf_counter() - start
    peak = peak_memory(__file__, "--peak")
    memory = "n/a" if peak is None else f"{peak / 1e6:.0f} MB"
    large = (
        f"{SERIES} x {STEPS} x {SURROGATES} surrogates in one call with {WORKERS} workers: {whole:.1f} s, "
        f"{iterations:.0f} iterations per surrogate until nothing changes; the call adds {memory} to the process, of "
        f"which the result is {SERIES * STEPS * SURROGATES * 8 / 1e6:.0f} MB."
    )
    print(large)
    write_section(
        "surrogates",
        "IAAFT surrogates in one call against the loop",
        f"`python benchmarks/surrogates.py --pairs {pairs}`: {PAIR_SERIES} series of {STEPS} steps, {PAIR_SURROGATES} "
        f"surrogates each, float64, each until nothing changes; {machine()}. Times are medians of {pairs} interleaved "
        "rounds, speed-ups those of the pairwise ratios, with their range. The paper's loop is "
        "`softgap.signal.reference`, with which the batch agrees value by value; the lean one avoids its "
        "trigonometry and its stable sort. A worker is a thread; compilation is excluded.\n\n"
        + "\n".join(lines)
        + f"\n\n{large}",
    )


if __name__ == "__main__":
    main()

"""Permutation entropy of many series against antropy and ordpy: time, and the memory one call adds.

Run: python benchmarks/ordinal.py [--pairs 7]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

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
from softgap.signal import permutation_entropy

SHAPES = ((1024, 400), (270, 10_000))
ORDERS = (3, 4, 5, 7)
# ordpy takes minutes over the long series: a few rows stand for all, and its time is scaled by their share.
ORDPY_ROWS = 16


def data(shape: tuple[int, int]) -> np.ndarray:
    """Seeded noise, one series per row."""
    return np.random.default_rng(0).standard_normal(shape)


def sides(x: np.ndarray, order: int) -> dict[str, Callable[[], object]]:
    """The same entropies three ways; ordpy on the first rows only."""
    # Here, since antropy brings in numba and harness.py has to come before that.
    import antropy
    import ordpy

    if order < 5:

        def rival() -> object:
            return antropy.perm_entropy(x, order, normalize=True)
    else:

        def rival() -> object:
            return [antropy.perm_entropy(row, order, normalize=True) for row in x]

    return {
        "softgap": lambda: permutation_entropy(x, order, eligibility=1),
        "antropy": rival,
        "ordpy": lambda: [ordpy.permutation_entropy(row, order) for row in x[:ORDPY_ROWS]],
    }


def agree(x: np.ndarray, order: int) -> None:
    """Raise unless the three give the same numbers."""
    calls = sides(x[:ORDPY_ROWS], order)
    ours = permutation_entropy(x[:ORDPY_ROWS], order, eligibility=1).value
    for name in ("antropy", "ordpy"):
        np.testing.assert_allclose(ours, np.asarray(calls[name](), float), rtol=0, atol=1e-12)


def measure(shape: tuple[int, int], order: int, pairs: int) -> str:
    """One row of the table."""
    x = data(shape)
    agree(x, order)
    calls = sides(x, order)
    ours, antropys, some = interleaved(list(calls.values()), pairs)
    ordpys = [seconds * len(x) / ORDPY_ROWS for seconds in some]
    times = " | ".join(f"{statistics.median(seconds) * 1e3:.1f}" for seconds in (ours, antropys, ordpys))
    memory = [peak_memory(__file__, "--peak", name, str(order), *map(str, shape)) for name in ("softgap", "antropy")]
    megabytes = ", ".join("n/a" if peak is None else f"{peak / 1e6:.1f}" for peak in memory)
    how = "2-D" if order < 5 else "rows"
    return (
        f"| {shape[0]:,} × {shape[1]:,} | {order} | {times} | {how} | {ratio(antropys, ours)} | "
        f"{ratio(ordpys, ours)} | {megabytes} |"
    )


def report_peak(name: str, order: int, shape: tuple[int, int]) -> None:
    """Print what one call adds to this process, after a small call has compiled and loaded everything."""
    x = data(shape)
    sides(x[:2, :50], order)[name]()
    print(added_memory(sides(x, order)[name]))


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--peak", nargs=4, metavar=("SIDE", "ORDER", "ROWS", "STEPS"), help="memory of one call only")
    arguments = parser.parse_args()
    if arguments.peak:
        name, order, rows, steps = arguments.peak
        report_peak(name, int(order), (int(rows), int(steps)))
        return
    require_quiet_machine()
    lines = [
        "| series × steps | order | softgap, ms | antropy, ms | ordpy, ms | antropy by | antropy / softgap | "
        "ordpy / softgap | added memory, MB: softgap, antropy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shape in SHAPES:
        for order in ORDERS:
            lines.append(measure(shape, order, arguments.pairs))
            print(lines[-1], flush=True)
    write_section(
        "ordinal",
        "Permutation entropy of many series",
        f"`python benchmarks/ordinal.py --pairs {arguments.pairs}` on float64 white noise; {machine()}. All three run "
        "in one thread and agree to 1e-12. softgap's time includes the input checks, tie detection and eligibility; "
        "compilation is excluded by a warm-up round. antropy takes the whole array at orders 3 and 4 (2-D) and one "
        f"row at a time above; ordpy always takes one row, timed on {ORDPY_ROWS} rows and scaled to all. Times are "
        f"medians of {arguments.pairs} interleaved rounds, ratios those of the pairwise ratios, with their range. "
        "Memory is what one call adds to the peak of a process of its own.\n\n" + "\n".join(lines),
    )


if __name__ == "__main__":
    main()

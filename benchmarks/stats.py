"""Max-T over many units by permutation, against a loop over scipy.stats.permutation_test: time and memory.

Run: python benchmarks/stats.py [--pairs 5]; --small to see that it works, without writing anything
"""

from __future__ import annotations

import os

# One thread for both sides; read when numpy is first imported.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import statistics
from dataclasses import dataclass

import numpy as np
from scipy import stats as scipy_stats

from harness import added_memory, interleaved, machine, peak_memory, ratio, require_quiet_machine, write_section
from softgap.stats import Comparison, compare

RIVAL_UNITS = 4
LEAST_RATIO = 50


@dataclass(frozen=True)
class Size:
    """How much is compared."""

    permutations: int
    heads: int
    features: int
    samples: int

    @property
    def units(self) -> int:
        """Units of the family."""
        return self.heads * self.features


FULL, SMALL = Size(10_000, 1024, 12, 400), Size(1_000, 64, 4, 60)


def groups(size: Size) -> tuple[np.ndarray, np.ndarray]:
    """Seeded noise in unequal groups, which need the second matrix product; an effect in the first units."""
    x = np.random.default_rng(0).standard_normal((size.samples, size.heads, size.features))
    first = 2 * size.samples // 5
    x[:first, :2] += 0.2
    return x[:first], x[first:]


def ours(size: Size) -> Comparison:
    """All units at once."""
    return compare(*groups(size), permutations=size.permutations, rng=np.random.default_rng(1))


def welch(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    """|t|, as little work as numpy can make of it."""
    spread = a.var(axis=axis, ddof=1) / a.shape[axis] + b.var(axis=axis, ddof=1) / b.shape[axis]
    return np.asarray(np.abs(a.mean(axis=axis) - b.mean(axis=axis)) / np.sqrt(spread))


def rival(size: Size, units: int) -> list[float]:
    """The p-values of the first units, one after the other."""
    a, b = (x.reshape(len(x), -1) for x in groups(size))
    return [
        float(
            scipy_stats.permutation_test(
                (a[:, unit], b[:, unit]),
                welch,
                vectorized=True,
                n_resamples=size.permutations,
                alternative="greater",
                rng=np.random.default_rng(unit),
            ).pvalue
        )
        for unit in range(units)
    ]


def agree(size: Size) -> None:
    """Raise unless both give the same p-values, up to the chance in each."""
    p = ours(size).p.ravel()[:RIVAL_UNITS]
    np.testing.assert_allclose(p, rival(size, RIVAL_UNITS), rtol=0, atol=4 / np.sqrt(2 * size.permutations))


def measure(size: Size, pairs: int) -> str:
    """One row of the table."""
    agree(size)
    our_times, some = interleaved([lambda: ours(size), lambda: rival(size, RIVAL_UNITS)], pairs)
    loop = [seconds * size.units / RIVAL_UNITS for seconds in some]
    times = " | ".join(f"{statistics.median(seconds):,.1f}" for seconds in (our_times, loop))
    memory = []
    for permutations in (size.permutations // 5, size.permutations):
        shape = map(str, (permutations, size.heads, size.features, size.samples))
        peak = peak_memory(__file__, "--peak", *shape)
        memory.append("n/a" if peak is None else f"{peak / 1e6:.0f}")
    return (
        f"| {size.permutations:,} | {size.heads:,} × {size.features} | {size.samples} | {times} | "
        f"{ratio(loop, our_times)} | {', '.join(memory)} |"
    )


def main() -> None:
    """Measure, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="a small size; prints and writes nothing")
    parser.add_argument("--peak", nargs=4, type=int, metavar=("PERMUTATIONS", "HEADS", "FEATURES", "SAMPLES"))
    arguments = parser.parse_args()
    if arguments.peak:
        ours(Size(100, 4, 2, 20))  # so that everything is loaded
        print(added_memory(lambda: ours(Size(*arguments.peak))))
        return
    lines = [
        "| permutations | heads × features | samples | softgap, s | scipy loop, s | scipy / softgap | "
        "added memory, MB: a fifth of the permutations, all |",
        "|---|---|---|---|---|---|---|",
    ]
    if arguments.small:
        print("\n".join([*lines, measure(SMALL, arguments.pairs)]))
        return
    require_quiet_machine()
    lines.append(measure(FULL, arguments.pairs))
    print(lines[-1], flush=True)
    write_section(
        "stats",
        "Comparing two groups over many units",
        f"`python benchmarks/stats.py --pairs {arguments.pairs}` on float64 noise in groups of 160 and 240; "
        f"{machine()}, one BLAS thread. softgap: the whole of `stats.compare`, with checks, effects, max-T, omnibus "
        "tests, false discovery rate and power. scipy: a loop over units with `scipy.stats.permutation_test` and a "
        "vectorized Welch "
        f"t, which gives neither max-T nor the rest, timed on {RIVAL_UNITS} units and scaled to all. Their p-values "
        f"agree within the chance of both. At least {LEAST_RATIO} times faster was asked for. Memory is what one call "
        "adds to the peak of a process of its own, the copies of the table included: it does not grow with the "
        "permutations.\n\n" + "\n".join(lines),
    )


if __name__ == "__main__":
    main()

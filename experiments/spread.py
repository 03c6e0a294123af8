"""What white noise scores at the least number of windows of each eligibility rule; the default rule is read off it.

Run: python experiments/spread.py [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np

from harness import FINDINGS, write_section
from softgap.signal import LEAST_WINDOWS, Spread, bias_factor, noise_spread

# Windows simulated per row of the table.
EFFORT = 8_000_000


def simulated(order: int, windows: int, rng: np.random.Generator) -> Spread:
    """Spread over as many series as the effort allows."""
    return noise_spread(order, windows, series=max(200, min(20_000, EFFORT // windows)), rng=rng)


def described(order: int, rule: str, windows: int, rng: np.random.Generator) -> str:
    """One row of the table."""
    noise = simulated(order, windows, rng)
    share = f"{noise.patterns:.0f} of {math.factorial(order)}"
    return (
        f"| {order} | {rule} | {windows} | {noise.mean:.4f} | {noise.deviation:.4f} | {noise.low:.4f} | {share} | "
        f"{bias_factor(order, windows):.3f} |"
    )


def main() -> None:
    """Simulate, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    rng = np.random.default_rng(seed)
    lines = [
        "| order | rule | windows | mean | standard deviation | 2.5 % quantile | patterns seen | bias factor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for order, least in LEAST_WINDOWS.items():
        common = 2 * math.factorial(order)
        for rule, windows in {"2*order!": common, "half of spread": least // 2, "spread": least}.items():
            lines.append(described(order, rule, windows, rng))
            print(lines[-1], flush=True)
    write_section(
        "spread",
        "White noise at the eligibility rules",
        f"`python experiments/spread.py --seed {seed}`: normalised permutation entropy of simulated white noise at "
        "delay 1. The default rule, `spread`, asks that the 2.5 % quantile be at least 0.95. The bias factor is what "
        "the Miller-Madow correction is multiplied by.\n\n" + "\n".join(lines),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()

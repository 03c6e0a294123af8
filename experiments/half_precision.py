"""What a calibration made in float32 closes of the gap of the same model in bfloat16 and float16.

Run: python experiments/half_precision.py --calibration FILE --text BOOK [--sequences 8] [--length 1024]

The text must not be the text of the fit. Every dtype reads the same sequences; differences are paired by sequence.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np

from harness import DOCS, machine, write_section
from held_out import sequences
from softgap.calibration.held_out import measure_sequence
from softgap.models import load_model
from softgap.models.tensor_files import load_calibration
from softgap.models.tokens import token_ids
from softgap.trajectories.validation import BASELINE

FIRST = 64
RESAMPLES = 2000


def main() -> None:
    """Measure every dtype on the same sequences, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    arguments = parser.parse_args()
    stored = load_calibration(arguments.calibration)
    mechanisms = [dataclasses.replace(stored.equip(name), origin="") for name in ("fitted", "hybrid")]
    sums: dict[str, np.ndarray] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        model, tokenizer = load_model(dtype=dtype, progress=False)
        ids = token_ids(tokenizer, arguments.text.read_text())
        chosen = sequences(ids, {arguments.length: arguments.sequences})[arguments.length]
        rows = []
        for number, text in enumerate(chosen):
            run = measure_sequence(model, text, [*mechanisms, BASELINE])
            rows.append([float(np.nansum(x[..., FIRST:])) for x in run.quantities["divergence"]])
            print(dtype, number + 1, "of", len(chosen), flush=True)
        sums[dtype] = np.array(rows)
        del model
    section = table(sums, arguments)
    print(section)
    write_section(
        "half-precision", "The same weights in bfloat16 and float16", section, DOCS.with_name("calibration.md")
    )


def closed(sums: np.ndarray) -> np.ndarray:
    """The share of the gap that each mechanism but the last, the mean of values, closes."""
    shares: np.ndarray = 1 - sums.sum(axis=-2)[..., :-1] / sums.sum(axis=-2)[..., -1:]
    return shares


def table(sums: dict[str, np.ndarray], arguments: argparse.Namespace) -> str:
    """One row per dtype."""
    draws = np.random.default_rng(0).integers(arguments.sequences, size=(RESAMPLES, arguments.sequences))
    lines = [
        "| the model in | fitted | change from float32 | hybrid | change from float32 |",
        "|---|---|---|---|---|",
    ]
    for dtype, values in sums.items():
        shares = closed(values)
        change = closed(values[draws]) - closed(sums["float32"][draws])
        low, high = np.quantile(change, [0.025, 0.975], axis=0)
        cells = []
        for i in range(2):
            moved = shares[i] - closed(sums["float32"])[i]
            told = "" if dtype == "float32" else f"{moved:+.4f} ({low[i]:+.4f} to {high[i]:+.4f})"
            cells += [f"{shares[i]:.4f}", told]
        lines.append(f"| {dtype} | " + " | ".join(cells) + " |")
    return (
        f"`python experiments/half_precision.py --sequences {arguments.sequences} --length {arguments.length}` on the "
        "embedded model: the share of the gap to the mean of values that one calibration, made in float32, closes of "
        f"the same weights in each dtype, on {arguments.sequences} sequences of {arguments.length:,} tokens of "
        f"held-out text, from position {FIRST} on. Intervals (95 %) resample sequences, paired; {machine()}.\n\n"
        + "\n".join(lines)
    )


if __name__ == "__main__":
    main()

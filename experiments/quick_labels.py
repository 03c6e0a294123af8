"""How far the labels of a quick calibration agree with those of a full one of the same model.

Run: python experiments/quick_labels.py QUICK FULL   (two calibrations; writes its section of docs/findings.md)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np

from harness import FINDINGS, write_section
from softgap.calibration import Calibration
from softgap.kinds import KINDS


def labels_of(path: str) -> np.ndarray:
    """The number of each head's kind in ``KINDS``."""
    sufficiency = Calibration.load(path).sufficiency
    if sufficiency is None:
        sys.exit(f"'{path}' holds no labels, because an old version made it; calibrate again")
    return np.array([KINDS.index(kind) for row in sufficiency.labels for kind in row])


def main() -> None:
    """Compare, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("quick")
    parser.add_argument("full")
    asked = parser.parse_args()
    quick, full = labels_of(asked.quick), labels_of(asked.full)
    counts = np.zeros((len(KINDS), len(KINDS)), int)
    np.add.at(counts, (quick, full), 1)
    softmax = KINDS.index("softmax")
    same, needs = (quick == full).mean(), ((quick == softmax) == (full == softmax)).mean()
    lines = [f"| quick | {' | '.join(f'full: {kind}' for kind in KINDS)} | all |", "|---" * (len(KINDS) + 2) + "|"]
    lines += [
        f"| {kind} | {' | '.join(map(str, row))} | {row.sum()} |" for kind, row in zip(KINDS, counts, strict=True)
    ]
    lines.append(f"| all | {' | '.join(map(str, counts.sum(axis=0)))} | {counts.sum()} |")
    text = (
        f"`python experiments/quick_labels.py QUICK FULL` on a file of `softgap calibrate --quick` and one of `softgap "
        f"calibrate --text FILE` for the same model: the kinds of its {len(quick)} heads. Both give {same:.2f} of them "
        f"the same kind, and agree for {needs:.2f} of them on whether they need softmax. This is one pair of "
        "calibrations, fitted to different texts.\n\n" + "\n".join(lines)
    )
    print(text)
    write_section("quick-labels", "Labels of a quick calibration", text, FINDINGS)


if __name__ == "__main__":
    main()

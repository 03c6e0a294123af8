"""The figures of the labs for the pages of the theory: what `softgap lab NAME --out DIR` draws, made small.

Run: python docs/make/lab_figures.py [--only focus] [--text FILE]   (needs the embedded model; writes docs/images/)

The figures of positions and of locality in a model are over several texts, which FILE is cut into: without it they are
left as they are. That of locality trains small models, which takes minutes.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from softgap.cli import main as softgap

IMAGES = Path(__file__).resolve().parents[1] / "images"
MOST_BYTES = 200_000
FIGURES = {
    "lab-focus": ["focus"],
    "lab-focus-model": ["focus", "--model", "smollm2-135m"],
    "lab-injectivity": ["injectivity"],
    "lab-injectivity-model": ["injectivity", "--model", "smollm2-135m"],
    "lab-locality": ["locality", "--train"],
    "lab-locality-model": ["locality", "--model", "smollm2-135m"],
    "lab-position": ["position"],
    "lab-position-model": ["position", "--model", "smollm2-135m"],
    "lab-separation": ["separation"],
}
# Figures that one built-in page is not enough for.
OVER_TEXTS = ("lab-position-model", "lab-locality-model")


def smaller(svg: str) -> str:
    """The same picture with two decimals to a coordinate, which are a hundredth of a point."""
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number.group()):.2f}".rstrip("0").rstrip("."), svg)


def main() -> None:
    """Run the labs and keep their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="names of figures that contain this")
    parser.add_argument("--text", help="text file of at least 4,096 tokens for the figures over several texts")
    options = parser.parse_args()
    pattern = options.only or ""
    IMAGES.mkdir(exist_ok=True)
    too_large = []
    for name, arguments in FIGURES.items():
        if pattern not in name:
            continue
        if name in OVER_TEXTS:
            if options.text is None:
                print(f"docs/images/{name}.svg left as it is: it needs --text", flush=True)
                continue
            arguments = [*arguments, "--text", options.text]
        with tempfile.TemporaryDirectory() as folder:
            if softgap(["lab", *arguments, "--out", folder]):
                sys.exit(f"softgap lab {' '.join(arguments)} failed")
            picture = smaller((Path(folder) / "figure.svg").read_text(encoding="utf-8"))
        if len(picture) > MOST_BYTES:
            too_large.append(f"{name}.svg ({len(picture):,} bytes)")
            continue
        (IMAGES / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(f"docs/images/{name}.svg {len(picture):,} bytes", flush=True)
    if too_large:
        sys.exit(f"not kept, since larger than {MOST_BYTES:,} bytes: {', '.join(too_large)}")


if __name__ == "__main__":
    main()

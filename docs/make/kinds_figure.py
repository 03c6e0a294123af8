"""The map by kind for the README: the cheapest substitute that suffices for each head, by a calibration.

Run: python docs/make/kinds_figure.py CALIBRATION   (a file that softgap calibrate wrote; writes docs/images/kinds.svg)
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lab_figures import IMAGES, smaller
from softgap import Calibration
from softgap.report.figures import draw_kinds, save_figure


def main() -> None:
    """Draw the map and keep it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("calibration", type=Path, help="calibration of the embedded model")
    calibration = Calibration.load(parser.parse_args().calibration)
    if calibration.sufficiency is None:
        sys.exit("this calibration is of version 0.1 and does not know the kinds of heads; calibrate again")
    labels = calibration.sufficiency.labels
    title = f"{calibration.metadata['model']}: the cheapest substitute that suffices for each head"
    with tempfile.TemporaryDirectory() as folder:
        path = save_figure(draw_kinds(labels, title=title), Path(folder) / "kinds.svg")
        picture = smaller(path.read_text(encoding="utf-8"))
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "kinds.svg").write_text(picture, encoding="utf-8")
    print(f"docs/images/kinds.svg {len(picture):,} bytes")


if __name__ == "__main__":
    main()

"""What a run of a calibrated model opens with, for the README and the quick start: the picture of the map and the text.

Run: python docs/make/opening.py CALIBRATION   (a full one of the embedded model, as `softgap calibrate` writes it)

It writes docs/images/kinds.svg, the sections `opening` of README.md and docs/quickstart.md, and a table of findings.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness import FINDINGS, machine, write_section
from lab_figures import IMAGES, smaller
from softgap import Calibration
from softgap.kinds import KINDS
from softgap.report.figures import draw_kinds, save_figure

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/quickstart.md")
PROMPT, TOKENS = "Tell me a story about a fox.", 96
LAST = "heads need softmax."
BEGIN, END = "<!-- opening: written by docs/make/opening.py -->", "<!-- end of opening -->"


def opening_of_run(calibration: Calibration) -> str:
    """What the command prints before the text, with this calibration in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "calibrations"
        cache.mkdir()
        calibration.save(cache / f"{calibration.fingerprint}.safetensors")
        command = [sys.executable, "-m", "softgap", "run", PROMPT, "--max-new-tokens", str(TOKENS)]
        shown = subprocess.run(
            [*command, "--out", str(Path(folder) / "fox")],
            env={**os.environ, "SOFTGAP_CALIBRATIONS": str(cache)},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        ).stdout
    # The last paragraph of the opening ends in these words, wherever its lines break.
    end = re.search(r"\s+".join(LAST.split()), shown[shown.index("On held-out text") :])
    if end is None:
        sys.exit(f"the output has no paragraph that ends in '{LAST}'")
    stop = shown.index("On held-out text") + end.end()
    return "\n".join(line.rstrip() for line in shown[:stop].splitlines())


def write_opening(page: Path, text: str) -> None:
    """Replace the section of a page."""
    content = page.read_text(encoding="utf-8")
    section = f"{BEGIN}\n\n```text\n{text}\n```\n\n{END}"
    page.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: section, content, flags=re.DOTALL), encoding="utf-8")


def without_map(text: str) -> str:
    """The same without the map, which the README has as a picture."""
    return re.sub(r"\n\nThe cheapest substitute.*?S softmax", "", text, flags=re.DOTALL)


def main() -> None:
    """Draw the map, run the command, and write what it prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("calibration", type=Path, help="calibration of the embedded model")
    path = parser.parse_args().calibration
    calibration = Calibration.load(path)
    suffices = calibration.sufficiency
    if suffices is None or calibration.quick:
        sys.exit("this calibration is quick, or of version 0.1, and the pages show a full one; calibrate again")
    title = f"{calibration.metadata['model']}: the cheapest substitute that suffices for each head"
    with tempfile.TemporaryDirectory() as folder:
        drawn = save_figure(draw_kinds(suffices.labels, title=title), Path(folder) / "kinds.svg")
        picture = smaller(drawn.read_text(encoding="utf-8"))
    (IMAGES / "kinds.svg").write_text(picture, encoding="utf-8")
    shown = opening_of_run(calibration)
    for page in PAGES:
        write_opening(REPOSITORY / page, without_map(shown) if page == "README.md" else shown)
    rows = [
        f"| {kind} | {count.value:.0f} | {count.low:.0f} to {count.high:.0f} |"
        for kind in KINDS
        if (count := suffices.counts.get(kind)) is not None
    ]
    stable = ", ".join(f"{share:.0%} ({name})" for name, share in suffices.stability.items())
    write_section(
        "opening",
        "Which heads of the embedded model need softmax",
        f"`python docs/make/opening.py CALIBRATION` with the calibration that `softgap calibrate --text FILE` wrote on "
        f"the first half of WikiText-2's validation text; {machine()}. Heads by the cheapest substitute that suffices, "
        f"on {suffices.texts} held-out texts ({suffices.tokens:,} tokens), with 95 % over texts. Heads that keep their "
        f"kind: {stable}.\n\n| kind | heads | interval |\n|---|---|---|\n" + "\n".join(rows),
        page=FINDINGS,
    )


if __name__ == "__main__":
    main()

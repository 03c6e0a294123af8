"""Pictures of the explorer for the docs: a story of the embedded model, one of its heads, a difference and a study.

Run: python docs/make/screenshots.py   (needs the embedded model, its calibration and chromium; writes docs/images/)
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from softgap.models import load_model
from softgap.models.tensor_files import default_mechanisms
from softgap.probe import generate, read, run_anatomy
from softgap.report import write_difference, write_explorer
from softgap.trajectories import StudyWriter, inputs_digest

IMAGES = Path(__file__).resolve().parents[1] / "images"
MOST_BYTES = 300_000
PROMPT = "Tell me a story about a fox."
OTHER_PROMPT = "Explain in one paragraph how a lighthouse works."
TOKENS = 200
LOOKED_INTO = "18.6,18.8,5.6"
# Completions with labels: what somebody might compare.
STUDY = {
    "prose": (
        "The river ran slowly past the old mill, and nobody had crossed the bridge since autumn. A light burned in the "
        "upper window, where somebody was still counting the sacks that would go to town in the morning.",
        "She put the letter back into the drawer and listened to the rain on the roof. It was too late to answer, "
        "and too early to forget, so she lit the stove and waited for the kettle to sing.",
        "By evening the market was empty, and the last cart rolled away over the wet stones. A dog followed it as "
        "far as the gate, thought better of it, and came back to sleep under the fountain.",
        "They had walked since noon without meeting anyone, and the path grew narrow between the pines. When the moon "
        "came up they could see the lake, and on its far side the house they had been told about.",
    ),
    "list": (
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
        "eighteen nineteen twenty twenty-one twenty-two twenty-three twenty-four twenty-five",
        "red green blue red green blue red green blue red green blue red green blue red green blue red green blue red "
        "green blue red green blue red green blue red green blue red green blue red green blue",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z a b c d e f g h i j k l m n o p q r s t u v w x y z",
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday, Friday, "
        "Saturday, Sunday, Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    ),
}


WIDE: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}}
PHONE: dict[str, Any] = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser of this machine."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("pictures need a browser, and none was found; install chromium and try again")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def write_story(folder: Path) -> Path:
    """The report on one long answer."""
    model, tokenizer = load_model()
    mechanisms = default_mechanisms(model)
    if "fitted" not in mechanisms:
        sys.exit("the page opens with what a calibration says; make one first: softgap calibrate --text book.txt")
    run = generate(model, tokenizer, PROMPT, TOKENS, mechanisms=mechanisms, focus=True)
    with StudyWriter(folder / "story", run.manifest) as writer:
        batch = writer.append([run])
        writer.append_anatomy(run_anatomy(model, tokenizer, run, LOOKED_INTO), batch=batch)
    return write_explorer(folder / "story").path


def write_pair(folder: Path) -> Path:
    """The difference of two answers."""
    model, tokenizer = load_model()
    generate(model, tokenizer, OTHER_PROMPT, TOKENS, mechanisms=default_mechanisms(model)).save(folder / "lighthouse")
    return write_difference(folder / "story", folder / "lighthouse").path


def write_study(folder: Path) -> Path:
    """The report on a study of two labels."""
    model, tokenizer = load_model()
    texts = [(label, text) for label, several in STUDY.items() for text in several]
    runs = [read(model, tokenizer, text, mechanisms=("elu1", "uniform")) for _, text in texts]
    manifest = replace(runs[0].manifest, inputs=inputs_digest([text for _, text in texts]))
    with StudyWriter(folder / "study", manifest) as writer:
        for i, (run, (label, _)) in enumerate(zip(runs, texts, strict=True)):
            writer.append([replace(run, sample_id=f"{label}-{i}", label=label)])
    return write_explorer(folder / "study").path


def save(name: str, picture: bytes) -> None:
    """A picture in few colours, small enough for a repository."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64):
        content = io.BytesIO()
        image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(
            content, "PNG", optimize=True
        )
        if len(content.getvalue()) < MOST_BYTES:
            break
    else:
        sys.exit(f"docs/images/{name}.png is larger than {MOST_BYTES} bytes in 64 colours; make it show less")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / f"{name}.png").write_bytes(content.getvalue())
    print(f"docs/images/{name}.png {len(content.getvalue()):,} bytes")


def shot(
    browser: Browser,
    report: Path,
    name: str,
    *,
    until: str,
    choose: Callable[[Page], None] | None = None,
    **context: Any,
) -> None:
    """The page from its top to the end of one of its parts, with a few heads and a token chosen."""
    window = browser.new_context(**context)
    page = window.new_page()
    page.goto(report.absolute().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    (choose or prepare)(page)
    bottom = page.locator(until).evaluate("(node) => node.getBoundingClientRect().bottom + window.scrollY")
    width = page.viewport_size["width"] if page.viewport_size else 0
    picture = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": bottom + 12})
    save(name, picture)
    window.close()


def look_into_head(page: Page) -> None:
    """Hold a token and look at what the first of the stored heads attends to."""
    page.evaluate(f"update({{ anatomy: HEADS.find(({{ name }}) => name === '{LOOKED_INTO.split(',')[0]}').row }})")
    page.evaluate("pinStep(span()[0] + 60)")
    page.wait_for_timeout(500)


def prepare(page: Page) -> None:
    """Choose what a reader might have chosen."""
    page.evaluate("update({ cursor: span()[0] + 12 })")
    page.wait_for_timeout(500)


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        story, study = write_story(Path(folder)), write_study(Path(folder))
        pair = write_pair(Path(folder))
        shot(browser, story, "explorer-light", until="#lines-readout", color_scheme="light", **WIDE)
        shot(browser, story, "explorer-dark", until="#lines-readout", color_scheme="dark", **WIDE)
        shot(browser, story, "explorer-phone", until="#map-readout", color_scheme="light", **PHONE)
        shot(browser, story, "explorer-anatomy", until="#anatomy-card", choose=look_into_head, **WIDE)
        shot(browser, pair, "explorer-pair", until="#lines-readout", color_scheme="light", **WIDE)
        shot(browser, study, "explorer-study", until="#groups-table", color_scheme="light", **WIDE)


if __name__ == "__main__":
    main()

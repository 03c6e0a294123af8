"""Pictures of the live page for the docs: a story while it is written, and two prompts side by side.

Run: python docs/make/live_screenshots.py   (needs the embedded model and chromium; writes docs/images/)
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Frame, Page

from screenshots import PHONE, PROMPT, WIDE, launched, save

SECOND = "Explain in one paragraph how a lighthouse works."
SECONDS = 300


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of its own."""
    command = [str(Path(sys.executable).with_name("softgap")), "serve", "--studies", str(folder / "runs")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                sys.exit("the server has no output to read its address from")
            lines = [process.stdout.readline().strip() for _ in range(2)]
            if not lines[1]:
                sys.exit("the server did not start; try: softgap serve")
            yield lines[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)


def waited(condition: Callable[[], Any]) -> None:
    """Wait until something is true."""
    end = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > end:
            sys.exit("the model took too long; try again when the machine is quiet")
        time.sleep(0.05)


def pane(page: Page, index: int) -> Frame:
    """The explorer of a run inside the page, ready."""
    place = page.locator("iframe").nth(index)
    place.wait_for()
    frame = place.element_handle().content_frame()
    if frame is None:
        sys.exit("the page has no frame for the run")
    frame.wait_for_selector("html[data-ready]", state="attached")
    return frame


def shot(
    browser: Browser, address: str, name: str, *, second: str = "", tokens: int, until: str, **context: Any
) -> None:
    """The page from its top to a part of its first pane, when the last run has so many tokens."""
    window = browser.new_context(**context)
    page = window.new_page()
    page.goto(address)
    page.wait_for_selector("html[data-ready]", state="attached")
    page.locator("#prompt").fill(PROMPT)
    page.locator("#length").fill("96" if not second else str(tokens))
    if second:
        page.get_by_text("Compare with a second prompt").click()
        page.locator("#second").fill(second)
    page.locator("#generate").click()
    last = pane(page, 1 if second else 0)
    waited(lambda: last.evaluate("SAMPLE.steps") >= tokens)
    page.wait_for_timeout(600)
    top = page.locator("iframe").first.evaluate("(frame) => frame.getBoundingClientRect().top + scrollY")
    bottom = pane(page, 0).locator(until).evaluate("(node) => node.getBoundingClientRect().bottom")
    width = page.viewport_size["width"] if page.viewport_size else 0
    save(name, page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": width, "height": top + bottom + 12}))
    for button in page.locator("#runs").get_by_role("button", name="Stop").all():
        button.click()
    waited(lambda: page.locator("#queue-state").inner_text() == "no run is active")
    window.close()


def main() -> None:
    """Make all pictures."""
    with tempfile.TemporaryDirectory() as folder, launched() as browser, served(Path(folder)) as address:
        shot(browser, address, "live", tokens=40, until="#lines-readout", color_scheme="light", **WIDE)
        shot(
            browser,
            address,
            "live-two",
            second=SECOND,
            tokens=32,
            until="#map-readout",
            color_scheme="dark",
            viewport={"width": 1500, "height": 900},
        )
        shot(browser, address, "live-phone", tokens=16, until="#text-legend", color_scheme="light", **PHONE)


if __name__ == "__main__":
    main()

"""Settings for every test: nothing is downloaded, no calibration is at hand, no deadline; and one browser for all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

# Read by transformers when it is first imported, so it must be set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
# A calibration that the user has made would join the defaults of every command.
os.environ["SOFTGAP_CALIBRATIONS"] = tempfile.mkdtemp(prefix="softgap-no-calibrations-")

import pytest
from hypothesis import settings

from support.ray_cluster import cluster, head

if TYPE_CHECKING:
    from playwright.sync_api import Browser

__all__ = ["cluster", "head"]

settings.register_profile("softgap", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("softgap")


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    """A mechanism that a test registers is gone after it: labs look at every one there is."""
    from softgap.attention import registry

    kept = dict(registry._registry)
    yield
    registry._registry.clear()
    registry._registry.update(kept)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A real headless browser; without one the tests of pages are skipped, and fail under continuous integration."""
    from playwright.sync_api import sync_playwright

    from support.explorer_examples import NO_BROWSER, browser_path

    path = browser_path()
    if path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(NO_BROWSER)
    with sync_playwright() as playwright:
        # Containers run tests as root, where the sandbox cannot start; the pages are our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()

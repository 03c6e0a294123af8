"""The layer profile: medians and quartiles of each layer, dots that choose heads, and kinds as bars."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from softgap.report.figures import dark_is_more
from support.explorer_examples import chosen, opened, report_of, settle, story

RUN = story()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("profile"), RUN)


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as shown:
        yield shown


def test_median_and_quartiles_are_those_of_the_heads(page: Page) -> None:
    layers = page.evaluate("layerProfile(quantityNow().numbers).map(({ low, median, high }) => [low, median, high])")
    expected = np.quantile(RUN.head_means(), [0.25, 0.5, 0.75], axis=1).T
    np.testing.assert_allclose(layers, expected, atol=2e-5)
    assert page.locator("#profile .dot").count() == 24
    highest = int(expected[:, 1].argmax())
    assert f"highest in layer {highest}" in str(page.locator("#profile svg").get_attribute("aria-label"))


def test_it_follows_quantity_mechanism_and_range(page: Page) -> None:
    before = page.locator("#profile .trace").get_attribute("d")
    page.evaluate("chooseRange(30, 50)")
    settle(page)
    ranged = page.locator("#profile .trace").get_attribute("d")
    assert ranged != before
    assert "tokens 30 to 50" in page.locator("#profile-caption").inner_text()
    page.locator("#mechanism").select_option("uniform")
    page.locator("#quantity").select_option("norm_ratio")
    settle(page)
    assert page.locator("#profile .trace").get_attribute("d") != ranged
    assert "Norm ratio (|linear| / |softmax|), uniform" in page.locator("#profile-caption").inner_text()


def test_a_dot_is_its_head(page: Page) -> None:
    # Dots lie upon each other.
    dot = page.locator('#profile .dot[data-row="15"]')
    dot.dispatch_event("pointerover")
    words = page.locator("#profile-readout").inner_text()
    dot.dispatch_event("click")
    settle(page)
    assert chosen(page) == ["2.3"]
    assert "Head 2.3" in words


@pytest.mark.parametrize("key", ["divergence", "distance", "gap", "slope", "sparsity", "norm_ratio"])
def test_every_map_says_its_quantity_and_mechanism(page: Page, key: str) -> None:
    page.evaluate(f"update({{ quantity: '{key}' }})")
    settle(page)
    for caption in ("#map-caption", "#profile-caption"):
        words = page.locator(caption).inner_text()
        assert ("softmax" if key == "sparsity" else "elu1") in words


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_more_stands_out_more_from_the_page(browser: Browser, report: Path, scheme: str) -> None:
    with opened(browser, report, color_scheme=scheme) as page:
        lightness = page.evaluate("d3.range(0, 1.01, 0.1).map((share) => d3.lab(sequential(share)).l)")
        steps = np.diff(lightness)
        # On a light page dark is more; on a dark one light is.
        assert (steps < 0).all() if scheme == "light" else (steps > 0).all()


def test_figures_have_the_colours_of_the_page(page: Page) -> None:
    shown = page.evaluate("d3.range(9).map((i) => d3.rgb(sequential(i / 8))).map(({ r, g, b }) => [r, g, b])")
    figure = [dark_is_more()(i / 8)[:3] for i in range(9)]
    np.testing.assert_allclose(np.clip(shown, 0, 255), 255 * np.array(figure), atol=3)

"""Heads are looked into on demand: a live run, a saved study, and what the server refuses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from playwright.sync_api import Browser, Frame, Page, expect

from softgap import load_model
from softgap.probe import run_anatomy
from softgap.report.anatomy import pack_anatomy, unpack_anatomy
from softgap.trajectories import load
from support.explorer_examples import save_study, settle, story
from support.live_examples import Live, context, ended, generate, pane, served, visit, waited

FOX = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "runs").mkdir()
    save_study(folder / "runs" / "saved-story", [story()])
    save_study(folder / "runs" / "saved-other", [story(seed=3)])
    with served(folder) as started:
        yield started


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    problems: list[str] = []
    with context(browser, problems) as made:
        yield visit(made, live, problems)
        live.until_idle()


def look_into(frame: Frame) -> None:
    """Ask for the keys of the head that is chosen, and wait for the answer."""
    frame.locator("#anatomy-ask").click()
    waited(lambda: frame.evaluate("ANATOMY.asked") is None)
    settle(frame.page)


def test_heads_of_a_run_and_of_its_saved_study_are_listed_on_demand(page: Page, live: Live) -> None:
    generate(page, FOX, 6)
    frame = pane(page)
    assert ended(frame) == "finished"
    name = str(frame.evaluate("PAYLOAD.live.run"))
    frame.locator('#map .cell[data-row="92"]').click()
    look_into(frame)
    settle(page)
    assert frame.evaluate("ANATOMY.refused") == ""
    shown = frame.evaluate("Array.from(ANATOMY.heads.values())[0]")
    model, tokenizer = load_model()
    (entry,) = run_anatomy(model, tokenizer, load(live.studies / name), "10.2")
    assert (shown["layer"], shown["head"], shown["mechanisms"]) == (10, 2, list(entry.mechanisms))
    frame.locator(".t").nth(20).click()
    settle(page)
    assert frame.locator(".keys li").count() > 4
    keys, weights = frame.evaluate("[anatomyNow().data.keys, anatomyNow().data.weights].map((x) => Array.from(x))")
    expected = unpack_anatomy(pack_anatomy(entry), 16)
    assert np.mean(np.array(keys) == expected[0].ravel()) > 0.999
    np.testing.assert_allclose(weights, expected[1].ravel(), atol=1e-4)


def test_a_study_of_another_model_is_refused_in_a_sentence(page: Page) -> None:
    page.get_by_role("button", name="Show the study saved-story", exact=True).click()
    frame = pane(page)
    expect(frame.locator("#map .cell")).to_have_count(24)
    waited(lambda: frame.evaluate("ANATOMY.host"))
    frame.locator('#map .cell[data-row="3"]').click()
    look_into(frame)
    assert "the study was measured with tiny" in frame.locator("#anatomy-caption").inner_text()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"study": "saved-story", "sample": "fox", "head": "x"}, "heads must be named LAYER.HEAD"),
        (
            {"study": "saved-story", "sample": "fox", "head": "1.1,1.2"},
            "head must name one head, such as 18.8, got '1.1,1.2'",
        ),
        ({"study": "saved-story", "sample": "fox"}, "head must be a text, got None"),
        ({"study": "../x", "sample": "fox", "head": "1.1"}, "unknown study '../x'"),
        ({"study": "saved-story", "sample": "fox", "head": "1.1", "model": "x"}, "unknown field of a request 'model'"),
    ],
)
def test_bad_requests_get_a_sentence(live: Live, body: dict[str, str], sentence: str) -> None:
    status, answer = live.post("/anatomy", body)
    assert status == 400
    assert sentence in answer["error"]


def test_two_saved_studies_are_compared_on_a_page_of_their_own(page: Page, live: Live) -> None:
    page.get_by_role("button", name="Show the study saved-story", exact=True).click()
    expect(page.locator("#difference")).to_be_hidden()
    page.get_by_role("button", name="Show the study saved-other beside the other", exact=True).click()
    expect(page.locator("#difference")).to_be_visible()
    address = str(page.locator("#difference").get_attribute("href"))
    status, headers, body = live.request("GET", address)
    assert status == 200
    assert headers["content-security-policy"].startswith("sandbox allow-scripts")
    assert b"saved-other minus saved-story" in body
    status, _, body = live.request("GET", "/studies/saved-story/minus/none")
    assert (status, b"Unknown study 'none'" in body or b"unknown study 'none'" in body) == (404, True)

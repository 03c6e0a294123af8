"""What a head attends to, in the page: the numbers, both directions, the keyboard, hostile text, phone and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.report.anatomy import pack_anatomy, unpack_anatomy
from softgap.report.payload import payload
from softgap.trajectories import Anatomy, StudyWriter, open_study
from support.explorer_examples import (
    HOSTILE,
    anatomy_of,
    opened,
    report_of,
    report_with_anatomy,
    settle,
    story,
    violations,
)

RUN = story()
HEADS = ((1, 2), (3, 5))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_with_anatomy(tmp_path_factory.mktemp("anatomy"), RUN, *HEADS)


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as shown:
        yield shown


def listed(page: Page, mechanism: int) -> list[tuple[str, str]]:
    """Key and weight in one column."""
    rows = page.locator(".keys").nth(mechanism).locator("li")
    return [(row.locator(".key").inner_text(), row.locator(".number").inner_text()) for row in rows.all()]


def token(page: Page, step: int) -> Any:
    return page.locator(f'#tokens [data-step="{step}"]')


def test_packing_keeps_keys_and_never_gives_weight_away() -> None:
    entry = anatomy_of(RUN, (1, 2))[0]
    keys, weights, rest = unpack_anatomy(pack_anatomy(entry), 16)
    np.testing.assert_array_equal(keys, entry.keys)
    np.testing.assert_allclose(weights, entry.weights, atol=1.3 / 32767)
    assert (np.abs(weights) <= np.abs(entry.weights.astype(np.float64)) + 1e-12).all()
    np.testing.assert_array_equal(rest, entry.rest)


def test_a_large_negative_weight_keeps_its_sign() -> None:
    keys = np.array([[[0, -1]], [[0, -1]]], np.int32)
    weights = np.array([[[1.0, 0.0]], [[-118.5, 0.0]]], np.float32)
    entry = Anatomy(0, 0, ("softmax", "identity"), keys, weights, np.zeros((2, 1), np.float32))
    np.testing.assert_allclose(unpack_anatomy(pack_anatomy(entry), 2)[1], weights, rtol=1e-4)


def test_the_page_decodes_what_was_packed(page: Page) -> None:
    page.evaluate("update({ anatomy: 23 })")
    settle(page)
    shown = page.evaluate("({ k: Array.from(anatomyNow().data.keys), w: Array.from(anatomyNow().data.weights) })")
    keys, weights, _ = unpack_anatomy(pack_anatomy(anatomy_of(RUN, *HEADS)[1]), 16)
    assert shown["k"] == keys.ravel().tolist()
    np.testing.assert_allclose(shown["w"], weights.ravel(), atol=1e-7)


def test_pointing_at_a_token_lists_its_sources_with_the_rest(page: Page) -> None:
    entry = anatomy_of(RUN, *HEADS)[0]
    expect(page.locator("#anatomy-head")).to_have_value("8")
    token(page, 40).hover()
    settle(page)
    assert page.locator(".keys").count() == 2
    for m in range(2):
        keys, weights = entry.keys[m, 40], entry.weights[m, 40]
        rows = listed(page, m)
        assert len(rows) == 16
        for (name, number), key, weight in zip(rows, keys, weights, strict=True):
            expected = "first token “Once”" if key == 0 else page.evaluate(f"tokenName({key - 1})")
            assert name == expected
            if abs(weight) >= 0.0051:
                assert float(number.replace("−", "-")) == pytest.approx(weight, abs=0.0051)
        words = page.locator(".keys").nth(m).locator(".others").first.inner_text()
        shown = words.removeprefix("other keys: ").replace("−", "-")
        if not shown.startswith(("<", ">")):
            assert float(shown) == pytest.approx(entry.rest[m, 40], abs=0.0051)


def test_the_other_direction_lists_who_attends_to_a_token(page: Page) -> None:
    entry = anatomy_of(RUN, *HEADS)[0]
    token(page, 20).click()
    page.locator("#direction input[value=targets]").check()
    settle(page)
    queries = [q for q in range(101) if 21 in entry.keys[0, q].tolist()]
    weights = sorted((float(entry.weights[0, q][entry.keys[0, q] == 21][0]) for q in queries), reverse=True)
    rows = listed(page, 0)
    assert len(rows) == min(16, len(weights))
    assert float(rows[0][1]) == pytest.approx(weights[0], abs=0.0051)
    assert "among the 16 strongest keys" in page.locator("#anatomy-caption").inner_text()


def test_a_click_holds_a_token_and_shades_the_text_by_its_sources(page: Page) -> None:
    entry = anatomy_of(RUN, *HEADS)[0]
    token(page, 40).click()
    settle(page)
    assert page.locator("#tokens .pinned").get_attribute("data-step") == "40"
    expect(page.locator("#shade")).to_have_value("attention")
    strongest = next(int(key) for key in entry.keys[0, 40] if key > 0)
    assert token(page, strongest - 1).evaluate("(node) => node.style.backgroundColor") != ""
    unseen = next(step for step in range(60, 100) if step + 1 not in entry.keys[0, 40])
    assert token(page, unseen).evaluate("(node) => node.style.backgroundColor") == ""
    assert "softmax of head 1.2 attends to" in page.locator("#token-readout").inner_text()
    # The pointer elsewhere changes nothing of what is held.
    token(page, 50).hover()
    settle(page)
    assert "(token 40)" in page.locator("#anatomy-caption").inner_text()
    page.get_by_role("button", name="Shade the text by the weights of elu1").click()
    settle(page)
    assert "weight of elu1" in str(page.locator("#text-legend").text_content())
    token(page, 40).click()
    settle(page)
    assert page.locator("#tokens .pinned").count() == 0
    expect(page.locator("#shade")).to_have_value("divergence")


def test_a_click_is_visible_without_anatomy(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(tmp_path, story())) as page:
        token(page, 40).click()
        settle(page)
        assert page.locator("#tokens .pinned").count() == 1
        assert "softgap run --anatomy" in page.locator("#anatomy-caption").inner_text()
        assert page.locator("#lines .cursor").get_attribute("visibility") is None


def test_the_keyboard_is_enough(page: Page) -> None:
    page.locator("#tokens .t").first.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    settle(page)
    assert page.locator("#tokens .pinned").count() == 1
    page.locator(".keys button.key").first.focus()
    page.keyboard.press("Enter")
    settle(page)
    assert page.locator("#tokens .pinned").count() == 1
    page.locator("#tokens .t").first.focus()
    page.keyboard.press("Escape")
    settle(page)
    assert page.locator("#tokens .pinned").count() == 0


def test_choosing_a_head_with_anatomy_looks_into_it(page: Page) -> None:
    page.locator('#map .cell[data-row="23"]').click()
    settle(page)
    expect(page.locator("#anatomy-head")).to_have_value("23")
    page.locator('#map .cell[data-row="4"]').click()
    settle(page)
    expect(page.locator("#anatomy-head")).to_have_value("23")


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}],
    ids=["light", "dark", "phone"],
)
def test_no_serious_violation(browser: Browser, report: Path, options: dict[str, Any]) -> None:
    with opened(browser, report, bypass_csp=True, **options) as page:
        page.evaluate("pinStep(40)")
        settle(page)
        assert page.locator(".keys li").count() == (12 if "viewport" in options else 32)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(page) == []


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    run = story(words=HOSTILE, sample_id=HOSTILE[0])
    with StudyWriter(tmp_path / "study", run.manifest) as writer:
        heads = [
            Anatomy(e.layer, e.head, ("softmax", HOSTILE[0]), e.keys, e.weights, e.rest, e.sample_id, HOSTILE[2])
            for e in anatomy_of(run, (1, 2))
        ]
        writer.append_anatomy(heads, batch=writer.append([run]))
    from softgap.report import write_explorer

    with opened(browser, write_explorer(tmp_path / "study").path) as page:
        page.evaluate("pinStep(9)")
        settle(page)
        assert HOSTILE[2] in page.locator("#anatomy").inner_text()
        assert page.locator(".keys h3").nth(1).inner_text() == HOSTILE[0]
        assert page.locator("#anatomy img, #anatomy b, #anatomy script").count() == 0


def test_messages_of_others_are_not_heard(page: Page) -> None:
    page.evaluate("postMessage({ kind: 'softgap-host' }, '*')")
    settle(page)
    assert page.evaluate("ANATOMY.host") is False


def test_anatomy_takes_room_from_other_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = story()
    with StudyWriter(tmp_path / "study", run.manifest) as writer:
        writer.append_anatomy(anatomy_of(run, *HEADS), batch=writer.append([run]))
    study = open_study(tmp_path / "study")
    whole = payload(study)
    monkeypatch.setattr("softgap.report.payload.VALUES", 20_000)
    small = payload(study)
    assert len(small.document["samples"][0]["data"]["anatomy"]) == 2
    assert len(small.document["samples"][0]["data"]["arrays"]) < len(whole.document["samples"][0]["data"]["arrays"])

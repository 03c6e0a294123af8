"""The explorer under other conditions: keyboard only, hostile text, a phone, dark, studies, very little, very much."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.analysis import GapSums, gap_sums
from support.explorer_examples import (
    HOSTILE,
    choose,
    chosen,
    labelled_runs,
    opened,
    report_of,
    settle,
    story,
    with_fitted,
)

# What has the focus, by whatever names it.
FOCUSED = """(() => {
  const here = document.activeElement;
  return here.id || here.dataset.sort || here.getAttribute('role') || here.name || here.ariaLabel || here.textContent;
})()"""


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("one"), story())


@pytest.fixture(scope="session")
def study_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("many"), *labelled_runs(6))


def test_everything_is_reached_with_the_keyboard(browser: Browser, report: Path) -> None:
    with opened(browser, report) as page:
        walk_with_the_keyboard(page)


def walk_with_the_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = []
    for _ in range(60):
        page.keyboard.press("Tab")
        where = page.evaluate(FOCUSED)
        if where in reached and where not in ("option", "gridcell"):
            break
        reached.append(where)
    for wanted in (
        "mechanism",
        "theme",
        "shade",
        "option",
        "from",
        "clear",
        "quantity",
        "gridcell",
        "view",
        "lines",
        "search",
    ):
        assert wanted in reached or wanted == "clear", (wanted, reached)
    page.locator("#tokens .t").first.focus()
    page.keyboard.press("End")
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    settle(page)
    assert page.evaluate("STATE.range") == [4, 8]
    assert page.locator('#tokens [aria-selected="true"]').count() == 4
    page.keyboard.press("Escape")
    settle(page)
    assert page.evaluate("STATE.range") is None
    page.locator('#map .cell[tabindex="0"]').focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
        page.keyboard.press(key)
    settle(page)
    assert chosen(page) == ["2.1"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Shift+Enter")
    settle(page)
    assert chosen(page) == ["2.1", "2.2"]
    page.locator("#lines").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+PageDown")
    settle(page)
    assert page.evaluate("STATE.range") == [1, 27]


def test_hostile_text_is_only_text(browser: Browser, tmp_path: Path) -> None:
    run = story(words=HOSTILE, sample_id=HOSTILE[0], label=HOSTILE[2])
    other = story(words=HOSTILE, sample_id=HOSTILE[1], label=HOSTILE[0], seed=1)
    with opened(browser, report_of(tmp_path, run, other)) as page:
        shown = page.locator("#tokens .t").evaluate_all("(all) => all.map((t) => t.textContent)")
        assert "".join(shown) == "".join(HOSTILE[i % len(HOSTILE)] for i in range(101))
        assert page.locator("main img, main b[onmouseover], script[src]").count() == 0
        for step in range(11, 21):
            page.locator(f'.t[data-step="{step}"]').hover()
        assert page.locator("#samples td", has_text="onerror").count() >= 1
        choose(page, "1.1")
        with page.expect_download() as saving:
            page.locator("#csv-trajectories").click()
        rows = list(csv.DictReader(io.StringIO(saving.value.path().read_text(encoding="utf-8"), newline="")))
        assert rows[7]["token"] == "'=HYPERLINK(1)"


def test_a_phone_shows_it_without_scrolling_sideways(browser: Browser, report: Path) -> None:
    device = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
    with opened(browser, report, **device) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        for chart in ("map", "lines", "plane"):
            box = page.locator(f"#{chart} svg").first.bounding_box()
            assert box is not None
            assert box["width"] <= 360
        # Heads in columns, layers in rows.
        assert page.locator("#map .axis-name").all_text_contents() == ["head", "layer"]
        page.locator('#map .cell[data-row="8"]').tap()
        settle(page)
        assert chosen(page) == ["1.2"]
        page.locator('.t[data-step="12"]').tap()
        settle(page)
        assert "token 12" in page.locator("#token-readout").inner_text()


def test_dark_and_light_follow_the_system_and_the_button(browser: Browser, report: Path) -> None:
    def ground(page: Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3]))

    def first_cell(page: Page) -> str | None:
        return page.locator("#map .cell").first.get_attribute("fill")

    with opened(browser, report, color_scheme="dark") as page:
        assert ground(page) < 150
        dark = first_cell(page)
        page.emulate_media(color_scheme="light")
        settle(page)
        assert ground(page) > 600
        assert first_cell(page) != dark
        page.locator("#theme").click()
        page.locator("#theme").click()
        settle(page)
        assert page.locator("#theme").inner_text() == "Theme: dark"
        assert ground(page) < 150
        assert first_cell(page) == dark


def test_a_study_opens_with_all_samples_and_its_groups_follow_the_mechanism(browser: Browser, tmp_path: Path) -> None:
    runs = [with_fitted(run, 0.1 + 0.1 * i) for i, run in enumerate(labelled_runs(6))]
    gaps = [gap for gap in map(gap_sums, runs) if gap is not None]
    with opened(browser, report_of(tmp_path, *runs)) as page:
        assert "all 6 samples" in page.inner_text("#map-caption")
        numbers = page.evaluate("quantityNow().numbers")
        np.testing.assert_allclose(numbers, GapSums.of_samples(gaps).left.ravel(), rtol=1e-5)
        drawn = []
        for name in ("fitted", "elu1"):
            page.locator("#mechanism").select_option(name)
            settle(page)
            drawn.append(page.locator("#groups .trace").first.get_attribute("d"))
            assert page.inner_text("#groups-caption").startswith(f"Divergence from {name} at every token")
            place = page.evaluate("STATE.heads[STATE.heads.length - 1]")
            calm = [run.select(name).divergence.reshape(24, -1)[place].mean() for run in runs if run.label == "calm"]
            table = page.inner_text("#groups-table")
            assert f", {name}" in table.splitlines()[0].rpartition("head ")[2]
            assert f"{np.mean(calm):.3f} ±" in table
        assert drawn[0] != drawn[1]
        # A range is one of the sample that is shown, so the map turns to it.
        page.evaluate("chooseRange(15, 30)")
        settle(page)
        assert page.input_value("#scope") == "sample"
        assert "tokens 15 to 30" in page.inner_text("#map-caption")
        page.locator("#scope").select_option(label="label calm")
        settle(page)
        assert "the 3 samples labelled calm (the range does not apply)" in page.inner_text("#map-caption")


def test_a_study_has_samples_and_groups(browser: Browser, study_report: Path) -> None:
    with opened(browser, study_report) as page:
        assert page.locator("#samples tbody tr").count() == 6
        assert page.locator("#groups .trace").count() == 2
        table = page.locator("#groups-table").inner_text()
        assert "calm" in table
        assert "±" in table
        runs = labelled_runs(6)
        wild = np.mean([run.divergence.mean(dtype=np.float64) for run in runs if run.label == "wild"])
        assert f"{wild:.3f} ±" in table
        page.get_by_role("button", name="Open sample s3").click()
        settle(page)
        assert page.locator("#tokens .t").count() == 11 + 45
        page.locator("#sample").select_option(label="s1 (wild)")
        settle(page)
        assert page.locator("#tokens .t").count() == 11 + 35
        page.locator("#scope").select_option(label="label wild")
        settle(page)
        assert "the 3 samples labelled wild" in page.locator("#map-caption").inner_text()
        expected = np.mean([run.divergence[1, 2].mean() for run in runs if run.label == "wild"])
        label = page.locator('#map .cell[data-row="8"]').get_attribute("aria-label")
        assert label is not None
        assert float(label.split()[-1]) == pytest.approx(float(expected), abs=6e-4)
        page.locator("#search-samples").fill("calm")
        assert page.locator("#samples tbody tr").count() == 3


def test_short_runs_say_what_is_missing(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(tmp_path, story(steps=3, prompt_steps=0, focus=False))) as page:
        assert "no head to show" in page.locator("#plane-note").inner_text()
        expect(page.locator("#plane-card")).to_be_hidden()
        page.locator('input[name="view"][value="entropy"]').check(force=True)
        settle(page)
        assert "too few" in page.locator("#lines").inner_text()
        assert page.locator('#quantity option[value="sparsity"]').count() == 0


def test_one_mechanism_and_one_token_are_enough(browser: Browser, tmp_path: Path) -> None:
    run = story(steps=1, prompt_steps=0, layers=1, heads=1, mechanisms=("taylor2",))
    with opened(browser, report_of(tmp_path, run)) as page:
        assert page.locator("#map .cell").count() == 1
        assert page.locator('#quantity option[value="distance"]').count() == 0
        assert "uniform was not measured" in page.locator("#about").inner_text()


@pytest.mark.slow
def test_a_large_run_is_small_and_soon_ready(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = story(layers=30, heads=9, steps=1960, prompt_steps=40, mechanisms=("elu1", "taylor2", "uniform"), focus=False)
    path = report_of(tmp_path, run)
    assert path.stat().st_size < 12e6
    with opened(browser, path) as page:
        ready = page.evaluate("Number(document.documentElement.dataset.ready)")
        assert page.locator("#map .cell").count() == 270
        assert page.locator("#tokens .t").count() == 2000
    with capsys.disabled():
        print(f"\n270 heads x 2,000 tokens x 3 mechanisms: {path.stat().st_size / 1e6:.2f} MB, ready in {ready} ms")  # noqa: T201

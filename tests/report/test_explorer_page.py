"""The explorer in a real browser, opened from disk: its numbers, and everything that is linked to something else."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.analysis import gap_sums
from softgap.kinds import UNKNOWN_KINDS
from softgap.signal import permutation_entropy
from support.explorer_examples import choose, chosen, drag_over_chart, opened, report_of, settle, story, with_fitted

RUN = story()


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_of(tmp_path_factory.mktemp("one"), RUN)


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as shown:
        yield shown


def test_a_report_opened_from_disk_shows_everything(page: Page) -> None:
    expect(page).to_have_title("tiny · softgap explorer")
    assert page.locator("#map .cell").count() == 24
    assert page.locator("#tokens .prompt .t").count() == 11
    assert page.locator("#tokens .completion .t").count() == 90
    assert page.locator("#tokens .completion .t").first.inner_text() == " Then"
    assert page.locator("#lines .trace").count() == 2
    assert page.locator("#plane .dot").count() == 24
    assert page.locator("#plane .known").count() > 3
    assert page.locator("#heads tbody tr").count() == 24
    assert "tiny" in page.locator("#about").inner_text()
    assert "not hallucination" in page.locator("#guide").inner_text()
    expect(page.locator("#samples-card")).to_be_hidden()
    expect(page.locator("#failure")).to_be_hidden()
    page.locator("summary", has_text="Licence of D3").click()
    expect(page.locator(".licence")).to_contain_text("Redistributions in binary form must reproduce")


def test_the_numbers_are_those_of_the_run(page: Page) -> None:
    assert RUN.prompt is not None
    whole = np.concatenate([RUN.prompt.quantities["divergence"], RUN.quantities["divergence"]], axis=-1)
    elu1, uniform = whole.astype(np.float64).reshape(2, 24, 101)
    for a, b in ((11, 101), (20, 95)):
        page.evaluate(f"update({{range: {'null' if a == 11 else [a, b]}}})")
        settle(page)

        def shown(key: str) -> list[float]:
            found: list[float] = page.evaluate(f"quantityNow(quantity('{key}')).numbers")
            return found

        part = elu1[:, a:b]
        np.testing.assert_allclose(shown("divergence"), part.mean(axis=1), atol=1e-5)
        np.testing.assert_allclose(shown("distance"), np.abs(part - uniform[:, a:b]).mean(axis=1), atol=1e-5)
        slopes = [100 * np.polyfit(np.arange(b - a), row, 1)[0] for row in part]
        np.testing.assert_allclose(shown("slope"), slopes, atol=1e-4)
        # The page counts patterns of values of 16 bits, so a pattern of near ties may differ.
        exact = permutation_entropy(np.diff(part), order=3).value
        np.testing.assert_allclose(shown("entropy"), exact, atol=5e-3)
        sparsity = np.concatenate([RUN.prompt.focus["sparsity"], RUN.focus["sparsity"]], axis=-1).reshape(24, 101)
        np.testing.assert_allclose(shown("sparsity"), sparsity[:, a:b].mean(axis=1), atol=1e-5)


def test_entropies_of_the_page_are_those_of_the_signal_room(page: Page) -> None:
    series = np.random.default_rng(3).normal(size=200)
    found = page.evaluate("(x) => permutationEntropy(x, 64)", series.tolist())
    assert found == pytest.approx(float(permutation_entropy(series, order=3).value), abs=1e-12)
    windows = page.evaluate("(x) => windowedEntropy(x, 64)", series.tolist())
    assert len(windows) == 200 - 65
    expected = permutation_entropy(series[7 : 7 + 66], order=3).value
    assert windows[7] == {"at": pytest.approx(7 + 32.5), "value": pytest.approx(float(expected), abs=1e-12)}
    assert page.evaluate("Number.isNaN(permutationEntropy([1, 2, 3, 4], 64))")


def test_click_chooses_a_head_and_shift_click_compares(page: Page) -> None:
    choose(page, "1.2")
    assert chosen(page) == ["1.2"]
    choose(page, "3.5", shift=True)
    choose(page, "0.0", shift=True)
    assert chosen(page) == ["1.2", "3.5", "0.0"]
    assert page.locator("#lines .trace").count() == 3
    assert page.locator("#plane .dot.chosen").count() == 3
    assert page.locator("#heads tr.chosen").count() == 3
    assert page.locator('#map .cell[aria-selected="true"]').count() == 3
    choose(page, "3.5", shift=True)
    assert chosen(page) == ["1.2", "0.0"]
    page.get_by_role("button", name="Remove head 1.2").click()
    settle(page)
    assert chosen(page) == ["0.0"]
    choose(page, "0.0")
    assert chosen(page) == []
    # Scrolling may have brought the chart under the pointer.
    page.evaluate("update({ cursor: null })")
    settle(page)
    assert "Select a head" in page.locator("#lines-readout").inner_text()


def test_key_value_groups_are_set_apart(page: Page) -> None:
    tops = [page.locator(f'#map .cell[data-row="{row}"]').bounding_box() for row in range(4)]
    y = [box["y"] for box in tops if box is not None]
    assert y[1] - y[0] < y[2] - y[1] - 3
    assert y[3] - y[2] == pytest.approx(y[1] - y[0], abs=0.5)
    page.locator('#map .cell[data-row="7"]').hover()
    assert "shares keys and values with 1.0" in page.locator("#map-readout").inner_text()
    assert page.locator("#map .mate").count() == 1


def test_a_range_brushed_in_the_chart_reaches_map_text_and_table(page: Page) -> None:
    before = page.locator('#map .cell[data-row="0"]').get_attribute("aria-label")
    drag_over_chart(page, 30, 60)
    assert page.evaluate("STATE.range") == [30, 61]
    assert "tokens 30 to 60" in page.locator("#map-caption").inner_text()
    assert page.locator('#map .cell[data-row="0"]').get_attribute("aria-label") != before
    assert page.locator("#tokens .t.in").count() == 31
    assert page.locator("#from").input_value() == "30"
    assert page.locator("#to").input_value() == "60"
    assert "tokens 30 to 60" in page.locator("#table-caption").inner_text()
    page.locator("#quantity").select_option("z")
    settle(page)
    assert "(the range does not apply)" in page.locator("#map-caption").inner_text()
    page.locator("#clear").click()
    settle(page)
    assert page.evaluate("STATE.range") is None
    assert page.locator("#tokens .t.in").count() == 0
    assert page.locator("#lines .selection").evaluate("(node) => node.style.display") == "none"


def test_a_range_dragged_in_the_text_reaches_the_chart(page: Page) -> None:
    page.locator('.t[data-step="20"]').hover()
    page.mouse.down()
    page.locator('.t[data-step="26"]').hover()
    page.mouse.up()
    settle(page)
    assert page.evaluate("STATE.range") == [20, 27]
    box = page.locator("#lines .selection").bounding_box()
    overlay = page.locator("#lines .overlay").bounding_box()
    assert box is not None
    assert overlay is not None
    assert box["width"] / overlay["width"] == pytest.approx(7 / 101, abs=0.01)


def test_a_range_typed_in_is_the_range(page: Page) -> None:
    page.locator("#from").fill("40")
    page.locator("#to").fill("15")
    page.locator("#to").press("Enter")
    settle(page)
    assert page.evaluate("STATE.range") == [15, 41]
    page.locator("#to").fill("4000")
    page.locator("#to").press("Enter")
    settle(page)
    assert page.evaluate("STATE.range") == [15, 101]
    # A number is not taken away while it is typed, whatever else chooses a range meanwhile.
    page.locator("#from").focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("33")
    page.evaluate("update({ range: [60, 70] })")
    settle(page)
    assert page.locator("#from").input_value() == "33"
    page.keyboard.press("Enter")
    settle(page)
    assert page.evaluate("STATE.range") == [33, 70]
    assert page.locator("#from").input_value() == "33"


def test_text_and_chart_point_at_each_other(page: Page) -> None:
    page.locator('.t[data-step="50"]').hover()
    settle(page)
    readout = page.locator("#token-readout").inner_text()
    assert re.search(r"token 50 \(completion, predicted at position 50\)", readout)
    assert f"log-probability {RUN.logprob[39]:.3f}".replace("-0", "−0").replace(" -", " −") in readout
    assert page.locator("#lines .cursor").get_attribute("visibility") is None
    assert "Token 50" in page.locator("#lines-readout").inner_text()
    page.locator("#lines").scroll_into_view_if_needed()
    box = page.locator("#lines .overlay").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 70.5 / 101, box["y"] + 40)
    settle(page)
    assert page.locator("#tokens .at").get_attribute("data-step") == "70"


def test_shades_of_the_text(page: Page) -> None:
    def colours() -> list[str]:
        found: list[str] = page.locator("#tokens .t").evaluate_all("(all) => all.map((t) => t.style.backgroundColor)")
        return found

    seen = {"divergence": colours()}
    for shade in ("logprob", "entropy", "none"):
        page.locator("#shade").select_option(shade)
        settle(page)
        seen[shade] = colours()
    assert len({tuple(found) for found in seen.values()}) == 4
    assert set(seen["none"]) == {""}
    # The least likely token carries the strongest colour: in light the darkest.
    assert RUN.prompt is not None
    logprob = np.concatenate([RUN.prompt.logprob, RUN.logprob])
    light = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in seen["logprob"]]
    assert light[int(logprob.argmin())] == min(light)
    page.locator("#shade").select_option("divergence")
    for of, words in (("layer", "mean of layer 2"), ("heads", "head 2.3"), ("all", "mean of all 24 heads")):
        choose(page, "2.3") if chosen(page) != ["2.3"] else None
        page.locator("#shade-of").select_option(of)
        settle(page)
        assert words in (page.locator("#text-legend").text_content() or "")


def test_views_of_the_trajectories(page: Page) -> None:
    paths = {}
    for view, words in (("raw", "Divergence from elu1"), ("diff", "Change of"), ("entropy", "Permutation entropy")):
        page.locator(f'input[name="view"][value="{view}"]').check(force=True)
        settle(page)
        assert words in page.locator("#lines-caption").inner_text()
        paths[view] = page.locator("#lines .trace").first.get_attribute("d")
    assert len(set(paths.values())) == 3


def test_quantities_and_mechanisms_of_the_map(page: Page) -> None:
    keys = page.locator("#quantity option").evaluate_all("(all) => all.map((one) => one.value)")
    assert {"divergence", "distance", "slope", "entropy", "z", "complexity", "relative_l2", "sparsity"} <= set(keys)
    for key in keys:
        page.locator("#quantity").select_option(key)
        settle(page)
        fills = page.locator("#map .cell").evaluate_all("(all) => all.map((cell) => cell.getAttribute('fill'))")
        assert len(set(fills)) > 5, key
    page.locator("#quantity").select_option("distance")
    page.locator("#mechanism").select_option("uniform")
    settle(page)
    assert page.evaluate("STATE.quantity") == "divergence"
    assert "from uniform" in page.locator("#map-caption").inner_text()


def test_the_plane_chooses_heads_and_zooms(page: Page) -> None:
    page.locator('#plane .dot[data-row="9"]').dispatch_event("click")
    settle(page)
    assert chosen(page) == ["1.3"]
    page.locator('#plane .dot[data-row="20"]').dispatch_event("click", {"shiftKey": True})
    settle(page)
    assert chosen(page) == ["1.3", "3.2"]
    near = page.locator("#plane .known").count()
    page.locator('input[name="zoom"][value="whole"]').check(force=True)
    settle(page)
    assert page.locator("#plane .known").count() > near
    assert page.locator("#plane .bound").count() == 2


def test_the_table_sorts_searches_and_chooses(page: Page) -> None:
    def column(index: int) -> list[float]:
        cells = page.locator(f"#heads tbody td:nth-child({index})").all_inner_texts()
        return [float(cell.replace("−", "-")) for cell in cells]

    # The table is filled after the page is ready.
    page.locator("#heads tbody tr").nth(23).wait_for()
    assert column(5) == sorted(column(5), reverse=True)
    page.locator('[data-sort="divergence"]').click()
    assert column(5) == sorted(column(5))
    assert page.locator('th[aria-sort="ascending"]').inner_text().startswith("mean divergence")
    page.locator('[data-sort="slope"]').click()
    assert column(8) == sorted(column(8), reverse=True)
    for words, count in (("2", 6), ("2.3", 1), ("head 4", 4), ("kv 1", 8), ("nothing such", 0), ("", 24)):
        page.locator("#search").fill(words)
        assert page.locator("#heads tbody tr").count() == count, words
    page.get_by_role("checkbox", name="Show head 0.4").check()
    settle(page)
    assert "0.4" in chosen(page)


def test_what_was_chosen_is_saved_as_csv(page: Page) -> None:
    choose(page, "2.1")
    choose(page, "0.3", shift=True)
    drag_over_chart(page, 5, 14)
    with page.expect_download() as saving:
        page.locator("#csv-trajectories").click()
    assert saving.value.suggested_filename == "softgap-trajectories.csv"
    rows = list(csv.DictReader(io.StringIO(saving.value.path().read_text())))
    assert [row["step"] for row in rows] == [str(step) for step in range(5, 15)]
    assert [row["part"] for row in rows] == ["prompt"] * 6 + ["completion"] * 4
    assert float(rows[-1]["divergence from elu1 of head 2.1"]) == pytest.approx(
        float(RUN.divergence[2, 1, 3]), abs=1e-4
    )
    with page.expect_download() as saving:
        page.locator("#csv-heads").click()
    table = list(csv.DictReader(io.StringIO(saving.value.path().read_text())))
    assert {(row["layer"], row["head"]) for row in table} == {("2", "1"), ("0", "3")}


@pytest.mark.parametrize("chart", ["heads", "trajectories", "plane"])
def test_charts_are_saved_as_pictures(page: Page, chart: str) -> None:
    with page.expect_download() as saving:
        page.get_by_role("button", name=f"Save the chart of {chart} as SVG").click()
    picture = ElementTree.parse(saving.value.path()).getroot()
    assert picture.tag.endswith("svg")
    shapes = [node for node in picture.iter() if node.get("fill") not in (None, "none")]
    assert len(shapes) > 10
    assert "var(" not in saving.value.path().read_text()
    with page.expect_download() as saving:
        page.get_by_role("button", name=f"Save the chart of {chart} as PNG").click()
    content = saving.value.path().read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 3000


def test_the_page_opens_with_one_sentence(browser: Browser, tmp_path: Path) -> None:
    plain = story(mechanisms=("elu1", "uniform"))
    fitted = with_fitted(plain, 0.2)
    for run, words in ((fitted, "On this text a fitted linear attention closes 80 %"), (plain, "`softgap calibrate`")):
        with opened(browser, report_of(tmp_path / words[:3], run)) as page:
            assert words in page.inner_text("#headline")
            first = page.input_value("#mechanism"), page.inner_text("#map-caption").split(" (")[0]
            expected = ("fitted", "Share of the gap left") if run is fitted else ("elu1", "Mean divergence")
            assert first == expected
            if run is fitted:
                assert page.inner_text("#held-out") == UNKNOWN_KINDS
            else:
                expect(page.locator("#held-out")).to_be_hidden()


def test_a_share_above_1_is_shown_as_such_in_the_map_and_in_its_picture(browser: Browser, tmp_path: Path) -> None:
    shares = np.full((4, 6), 0.3)
    shares[1, 2], shares[3, 5] = 1.25, 1.05
    held_out = {"gap_closed": 0.81, "against_profile": 0.69, "explained": 0.7, "rank_correlation": 0.74}
    with opened(browser, report_of(tmp_path, with_fitted(RUN, shares, held_out))) as page:
        assert "most of all 1.2 (125 %) and 3.5 (105 %)" in page.inner_text("#headline")
        assert "69 % of the gap that profile" in page.inner_text("#held-out")
        assert page.locator("#map text.beyond").text_content() == "above 1: 2 heads, up to 1.25"
        colours = [
            page.locator(f'#map .cell[data-row="{row}"]').evaluate("(cell) => cell.getAttribute('fill')")
            for row in (6 + 2, 18 + 5, 0, 1)
        ]
        assert colours[0] == colours[1] != colours[2] == colours[3]
        assert chosen(page)[0] == "1.2"
        with page.expect_download() as saving:
            page.get_by_role("button", name="Save the chart of heads as SVG").click()
        assert "above 1: 2 heads, up to 1.25" in saving.value.path().read_text()


def test_the_opening_map_follows_the_range_and_the_mechanism(browser: Browser, tmp_path: Path) -> None:
    run = with_fitted(story(steps=120), 0.2)
    assert run.prompt is not None
    whole = np.concatenate([run.prompt.quantities["divergence"], run.quantities["divergence"]], axis=-1)
    fitted, elu1, uniform = (whole[i].astype(np.float64).reshape(24, -1) for i in (2, 0, 1))
    with opened(browser, report_of(tmp_path, run)) as page:

        def shown() -> list[float]:
            found: list[float] = page.evaluate("quantityNow().numbers")
            return found

        gap = gap_sums(run)
        assert gap is not None
        np.testing.assert_allclose(shown(), gap.left.ravel(), rtol=2e-4)
        drag_over_chart(page, 20, 40)
        a, b = page.evaluate("STATE.range")
        expected = fitted[:, a:b].sum(axis=1) / uniform[:, a:b].sum(axis=1)
        np.testing.assert_allclose(shown(), expected, rtol=2e-4)
        assert f"tokens {a} to {b - 1}" in page.inner_text("#map-caption")
        page.locator("#mechanism").select_option("elu1")
        settle(page)
        np.testing.assert_allclose(shown(), elu1[:, a:b].sum(axis=1) / uniform[:, a:b].sum(axis=1), rtol=2e-4)
        assert "from elu1" in page.inner_text("#map-caption")

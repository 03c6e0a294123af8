"""The map by kind in a real browser: it opens a page where kinds are known, and everything in it can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.kinds import COLOURS, KINDS, LETTERS, letters_of_kinds, numbers_of_counts
from softgap.report import explorer
from softgap.report.kinds import kinds_of_page, rows_of_run
from softgap.trajectories import Trajectories, open_study
from support.explorer_examples import opened, report_of, save_study, settle, story, violations, with_fitted
from support.kind_examples import sufficiency_of

# Four layers of six heads: every kind, and not the same number of heads of each.
LABELS = tuple(tuple(KINDS[(head * (layer + 1)) % 6 if layer < 3 else 2] for head in range(6)) for layer in range(4))
SUFFICIENCY = sufficiency_of(LABELS)
COUNTS = {kind: sum(row.count(kind) for row in LABELS) for kind in KINDS}


def with_kinds(run: Trajectories, **changes: Any) -> Trajectories:
    """The run as one of a calibrated model stores it."""
    rows = dict(zip(map(str, run.layers), letters_of_kinds(LABELS), strict=True))
    held_out = {**numbers_of_counts(SUFFICIENCY.counts, 67.0), "kinds": rows}
    shares = np.full((len(run.layers), 6), 0.3)
    # The largest share, yet not the largest divergence.
    shares[0, 0] = 0.45
    return with_fitted(run, shares, {**held_out, **changes})


RUN = with_kinds(story())


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a study whose calibration is at hand."""
    folder = tmp_path_factory.mktemp("kinds")
    path = folder / "report.html"
    study = open_study(save_study(folder / "study", [RUN]))
    path.write_text(explorer(study, sufficiency=SUFFICIENCY), encoding="utf-8")
    return path


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as page:
        yield page


def fills(page: Page) -> list[str]:
    """The colour of each head of the map, heads in the order of the study."""
    cells: list[list[int]] = page.evaluate(
        """Array.from(document.querySelectorAll('#map .cell'), (cell) => {
          const { r, g, b } = d3.rgb(cell.getAttribute('fill'));
          return [Number(cell.dataset.row), ...[r, g, b].map(Math.round)];
        })"""
    )
    return [f"#{red:02x}{green:02x}{blue:02x}" for _, red, green, blue in sorted(cells)]


def test_the_page_opens_with_one_colour_and_one_letter_per_kind(page: Page) -> None:
    assert page.input_value("#quantity") == "kind"
    assert page.inner_text("#headline").startswith(SUFFICIENCY.sentence)
    flat = [kind for row in LABELS for kind in row]
    assert fills(page) == [COLOURS[kind] for kind in flat]
    letters = page.locator("#map [role=row] .letter").all_text_contents()
    assert sorted(letters) == sorted(LETTERS[kind] for kind in flat)
    # Each letter lies on the cell of its head.
    for row in (0, 8, 23):
        box = page.locator(f'#map .cell[data-row="{row}"]').bounding_box()
        assert box is not None
        at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        on = page.evaluate(
            """({ x, y }) => Array.from(document.querySelectorAll('#map [role=row] .letter')).filter((letter) => {
              const r = letter.getBoundingClientRect();
              return r.left <= x && x <= r.right && r.top <= y && y <= r.bottom;
            }).map((letter) => letter.textContent)""",
            at,
        )
        assert on == [LETTERS[flat[row]]]
    expect(page.locator("#kinds-hint")).to_be_hidden()
    # The heads that are drawn first are still those that keep most and least of their gap.
    assert page.evaluate("STATE.heads")[0] == 0


def test_the_legend_counts_and_words_tell_what_colours_do(page: Page) -> None:
    assert page.locator("#map .kind .count").all_text_contents() == [f"{kind} {COUNTS[kind]}" for kind in KINDS]
    label = page.locator("#map svg").get_attribute("aria-label") or ""
    assert label.startswith("Map of heads: kind of substitute; constant ")
    for kind in KINDS:
        assert f"{kind} {COUNTS[kind]} head" in label
    cell = page.locator('#map .cell[data-row="8"]')
    assert cell.get_attribute("aria-label") == f"head 1.2, KV group 1, kind of substitute {LABELS[1][2]}"


def test_pointing_at_a_head_tells_its_kind_and_what_others_leave(page: Page) -> None:
    row = next(i for i, kind in enumerate(LABELS[0]) if kind == "softmax")
    for place, words in ((8, f"{LABELS[1][2]} suffices"), (row, "needs softmax, nothing cheaper suffices")):
        page.locator(f'#map .cell[data-row="{place}"]').hover()
        shown = page.inner_text("#map-readout")
        head = place % 6
        assert f"(layer {place // 6}, head {head}, " in shown
        assert words in shown
        for kind in ("window", "fitted", "hybrid"):
            left = SUFFICIENCY.gap_left[kind][place // 6][head]
            assert f"{kind} leaves {left:.3f} of the gap and {left:.3f} of the energy" in shown
        assert "profile leaves" not in shown


def test_another_quantity_is_one_choice_away(page: Page) -> None:
    by_kind = fills(page)
    page.locator("#quantity").select_option("gap")
    settle(page)
    assert page.inner_text("#map-caption").startswith("Share of the gap left")
    assert fills(page) != by_kind
    assert page.locator("#map .letter, #map .kind").count() == 0
    page.locator("#quantity").select_option("kind")
    settle(page)
    assert fills(page) == by_kind


def test_the_table_names_and_finds_kinds(page: Page) -> None:
    page.locator("#search").fill("softmax")
    settle(page)
    lines = page.locator("#heads tbody tr").all_inner_texts()
    assert len(lines) == COUNTS["softmax"]
    assert all("softmax" in line for line in lines)


def test_the_picture_of_the_map_keeps_letters_and_legend(page: Page) -> None:
    with page.expect_download() as saving:
        page.get_by_role("button", name="Save the chart of heads as SVG").click()
    texts = [node.text for node in ElementTree.parse(saving.value.path()).getroot().iter() if node.text]
    assert f"window {COUNTS['window']}" in texts
    assert texts.count("S") == COUNTS["softmax"] + 1
    assert "var(" not in saving.value.path().read_text()


@pytest.mark.parametrize(
    "context",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}],
    ids=["light", "dark", "phone"],
)
def test_no_serious_violation_and_every_letter_can_be_read(
    browser: Browser, report: Path, context: dict[str, Any]
) -> None:
    with opened(browser, report, bypass_csp=True, **context) as page:
        assert violations(page) == []
        contrast = page.evaluate(
            """() => {
              const light = (colour) => { const { r, g, b } = d3.rgb(colour);
                const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
                const [x, y, z] = [r, g, b].map((part) => linear(part / 255));
                return 0.2126 * x + 0.7152 * y + 0.0722 * z; };
              return PAYLOAD.kinds.colours.map((ground) => { const [a, b] = [light(ground), light(inkOn(ground))];
                return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
            }"""
        )
        assert min(contrast) > 4.5
        # Nothing of the legend is cut off.
        outside = page.evaluate(
            """() => { const r = document.querySelector('#map svg').getBoundingClientRect();
              return Array.from(document.querySelectorAll('#map .count')).filter((x) => {
                const s = x.getBoundingClientRect();
                return s.right > r.right + 1 || s.bottom > r.bottom + 1;
              }).length; }"""
        )
        assert outside == 0


def test_without_kinds_the_page_opens_as_before_and_says_how_to_get_them(browser: Browser, tmp_path: Path) -> None:
    for name, run, opening in (
        ("plain", story(), "divergence"),
        ("old", with_fitted(story(), 0.2, {"gap_closed": 0.8}), "gap"),
    ):
        with opened(browser, report_of(tmp_path / name, run)) as page:
            assert page.input_value("#quantity") == opening
            assert "kind" not in page.locator("#quantity option").evaluate_all("(all) => all.map((x) => x.value)")
            said = page.locator("#headline" if name == "plain" else "#held-out")
            expect(said).to_contain_text("Run `softgap calibrate`")
            expect(page.locator("#kinds-hint")).to_be_hidden()


def test_a_page_knows_kinds_without_the_calibration_but_not_what_others_leave(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, report_of(tmp_path, RUN)) as page:
        assert page.input_value("#quantity") == "kind"
        page.locator('#map .cell[data-row="8"]').hover()
        assert page.inner_text("#map-readout").endswith(f"{LABELS[1][2]} suffices")


def some_layers(run: Trajectories, rows: list[int], heads: int) -> Trajectories:
    """The run limited to some layers, and there to the first heads."""
    return replace(
        run,
        layers=tuple(run.layers[row] for row in rows),
        kv_group=run.kv_group[rows, :heads],
        heads_per_layer=(heads,) * len(rows),
        quantities={name: array[:, rows, :heads] for name, array in run.quantities.items()},
        focus={name: array[rows, :heads] for name, array in run.focus.items()},
        prompt=None if run.prompt is None else some_layers(run.prompt, rows, heads),
    )


def test_a_run_of_some_layers_and_heads_shows_theirs(browser: Browser, tmp_path: Path) -> None:
    part = some_layers(RUN, [1, 3], 4)
    expected = [kind for row in (LABELS[1], LABELS[3]) for kind in row[:4]]
    found = kinds_of_page(part, SUFFICIENCY)
    assert found is not None
    assert [KINDS[label] for label in found["labels"]] == expected
    assert found["left"]["window"]["gap"] == pytest.approx(
        [*SUFFICIENCY.gap_left["window"][1][:4], *SUFFICIENCY.gap_left["window"][3][:4]]
    )
    with opened(browser, report_of(tmp_path, part)) as page:
        assert fills(page) == [COLOURS[kind] for kind in expected]
        assert page.locator('#map .cell[data-row="4"]').get_attribute("aria-label") == (
            f"head 3.0, KV group 0, kind of substitute {LABELS[3][0]}"
        )


def test_rows_of_a_model_are_found_by_the_numbers_of_its_layers() -> None:
    numbered = with_kinds(replace(story(), layers=(3, 7, 11, 15), prompt=None))
    part = some_layers(numbered, [1, 3], 6)
    assert rows_of_run("abcd", part) == ["b", "d"]
    assert rows_of_run("abcd", numbered) == ["a", "b", "c", "d"]
    plain = some_layers(replace(story(), prompt=None), [0, 2], 6)
    assert rows_of_run("abcd", plain) == ["a", "c"]
    assert rows_of_run("ab", replace(plain, layers=(0, 5))) == ["a", "b"]
    assert rows_of_run("a", replace(plain, layers=(0, 5))) == ["a", ()]


def test_labels_of_a_calibration_count_where_the_study_has_none() -> None:
    plain = story()
    found = kinds_of_page(plain, SUFFICIENCY)
    assert found is not None
    assert [KINDS[label] for label in found["labels"]] == [kind for row in LABELS for kind in row]
    assert kinds_of_page(plain) is None
    # Of another calibration only the labels of the study are shown, and nothing that contradicts them.
    other = kinds_of_page(RUN, sufficiency_of([["window"] * 6] * 4))
    assert other is not None
    assert [KINDS[label] for label in other["labels"]] == [kind for row in LABELS for kind in row]
    assert other["left"] == {}

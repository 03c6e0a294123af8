"""Two studies on one page: the difference map, ranges, the linked cursor, hostile text, phone and dark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.errors import SoftgapError
from softgap.linearize import swap
from softgap.probe import read
from softgap.report import write_difference
from softgap.report.pair import pair_names, pair_payload
from softgap.trajectories import Trajectories, open_study
from support.explorer_examples import HOSTILE, labelled_runs, opened, save_study, settle, story, violations
from support.model_examples import byte_tokenizer, tiny_llama

ONE = story(mechanisms=("elu1", "window", "uniform"))
# Another prompt: five tokens shorter, so that the same place of the completion is another step.
OTHER = story(mechanisms=("elu1", "uniform"), prompt_steps=6, steps=80, seed=7, level=0.1)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_study(folder / "calm", [ONE])
    save_study(folder / "wild", [OTHER])
    return write_difference(folder / "calm", folder / "wild").path


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as shown:
        yield shown


def numbers(page: Page, key: str) -> list[float]:
    asked = f"quantityNow(quantity('{key}')).numbers"
    # The first time an array may still be on its way.
    page.evaluate(asked)
    settle(page)
    shown: list[float] = page.evaluate(asked)
    return shown


def test_the_map_shows_the_difference_of_the_means(page: Page, report: Path) -> None:
    assert report.name == "difference-wild.html"
    expect(page).to_have_title("wild minus calm · softgap explorer")
    expected = OTHER.head_means() - ONE.head_means()
    np.testing.assert_allclose(numbers(page, "divergence"), expected.ravel(), atol=2e-5)
    assert "from elu1, wild minus calm" in page.locator("#map-caption").inner_text()
    assert page.evaluate("PAYLOAD.mechanisms") == ["elu1", "uniform"]
    # The heads that change most, up and down, are chosen at the start.
    assert page.evaluate("STATE.heads") == [int(expected.argmax()), int(expected.argmin())]
    assert "It changes most in the heads" in page.locator("#headline").inner_text()
    page.locator('#map .cell[data-row="3"]').hover()
    words = page.locator("#head-tip").inner_text()
    assert f"calm {ONE.head_means()[0, 3]:.3f}, wild {OTHER.head_means()[0, 3]:.3f}" in words


def test_a_range_is_the_same_place_of_both_completions(page: Page) -> None:
    page.evaluate("chooseRange(21, 40)")  # of the first: tokens 10 to 29 of its completion
    settle(page)
    part = slice(10, 30)
    expected = OTHER.divergence[..., part].mean(axis=-1) - ONE.divergence[..., part].mean(axis=-1)
    np.testing.assert_allclose(numbers(page, "divergence"), expected.ravel(), atol=2e-5)
    assert "tokens 21 to 40 of calm and the same place of wild" in page.locator("#map-caption").inner_text()
    gap = [
        part_sum[0] / part_sum[1]
        for part_sum in (run.quantities["divergence"][[0, -1]][..., part].sum(axis=-1) for run in (ONE, OTHER))
    ]
    np.testing.assert_allclose(numbers(page, "gap"), (gap[1] - gap[0]).ravel(), atol=1e-4)


def test_the_cursor_and_the_chart_are_linked(page: Page) -> None:
    page.locator('#tokens [data-step="31"]').hover()
    settle(page)
    assert page.locator("#other-tokens .at").get_attribute("data-other") == "26"
    page.locator('#other-tokens [data-other="30"]').hover()
    settle(page)
    assert page.evaluate("STATE.cursor") == 35
    page.locator('#map .cell[data-row="3"]').click()
    settle(page)
    assert page.locator("#lines .trace").count() == 2
    page.locator("#sample").select_option(label="wild: fox (wild)")
    settle(page)
    assert "calm, with the same cursor" in page.locator("#other-title").inner_text()
    np.testing.assert_allclose(numbers(page, "divergence"), (OTHER.head_means() - ONE.head_means()).ravel(), atol=2e-5)


def test_groups_follow_the_mechanism(page: Page) -> None:
    first = page.locator("#groups .trace").first.get_attribute("d")
    page.locator("#mechanism").select_option("uniform")
    settle(page)
    assert "Divergence from uniform" in page.locator("#groups-caption").inner_text()
    assert page.locator("#groups .trace").first.get_attribute("d") != first


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}],
    ids=["light", "dark", "phone"],
)
def test_no_serious_violation(browser: Browser, report: Path, options: dict[str, Any]) -> None:
    with opened(browser, report, bypass_csp=True, **options) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(page) == []


def test_studies_of_many_samples_are_compared_by_their_means(browser: Browser, tmp_path: Path) -> None:
    runs = [labelled_runs(3), [replace(run, label=None) for run in labelled_runs(4)]]
    for name, several in zip(("one", "two"), runs, strict=True):
        save_study(tmp_path / name, several)
    path = write_difference(tmp_path / "one", tmp_path / "two", tmp_path / "pair.html").path
    with opened(browser, path) as page:
        means = [np.mean([run.head_means() for run in several], axis=0) for several in runs]
        np.testing.assert_allclose(numbers(page, "divergence"), (means[1] - means[0]).ravel(), atol=1e-5)
        assert "means over their samples" in page.locator("#map-caption").inner_text()
        assert page.locator("#other-text").is_hidden()


def test_hostile_text_stays_text(browser: Browser, tmp_path: Path) -> None:
    names = "<b onmouseover=alert(2)>", "{{script}}"
    for name, seed in zip(names, (1, 2), strict=True):
        save_study(tmp_path / name, [story(words=HOSTILE, sample_id=HOSTILE[0], label=HOSTILE[1], seed=seed)])
    path = write_difference(tmp_path / names[0], tmp_path / names[1], tmp_path / "pair.html").path
    with opened(browser, path) as page:
        page.locator("#other-tokens .t").nth(3).hover()
        settle(page)
        assert f"{names[1]} minus {names[0]}" in page.locator("#map-caption").inner_text()
        shown = "".join(page.locator("#other-tokens .t").all_text_contents())
        assert shown == "".join(HOSTILE[i % len(HOSTILE)] for i in range(101))
        assert page.locator("main img, main b[onmouseover], script[src]").count() == 0


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    save_study(tmp_path / "one", [story()])
    save_study(tmp_path / "heads", [story(heads=4)])
    save_study(tmp_path / "mechanism", [story(mechanisms=("relu",))])
    save_study(tmp_path / "neither", [story(heads=4, mechanisms=("relu",))])
    # The live page needs the same heads.
    with pytest.raises(
        SoftgapError, match="the same heads on both sides, got 4 layers with 24 heads in 'one' and 4 la"
    ):
        pair_payload(open_study(tmp_path / "one"), open_study(tmp_path / "heads"), ("one", "heads"))
    with pytest.raises(SoftgapError, match="need a mechanism in common, got elu1, uniform in 'one' and relu"):
        write_difference(tmp_path / "one", tmp_path / "neither")
    with pytest.raises(SoftgapError, match="need a mechanism in common, got elu1, uniform in 'one' and relu"):
        write_difference(tmp_path / "one", tmp_path / "mechanism")
    with pytest.raises(SoftgapError, match=r"two different studies can be compared, got '.*one' twice"):
        write_difference(tmp_path / "one", tmp_path / "one")


def with_kinds(run: Trajectories, *rows: str) -> Trajectories:
    """The run with the kinds of its heads, a string of letters per layer."""
    kinds = {str(layer): row for layer, row in zip(run.layers, rows, strict=True)}
    return replace(run, manifest=replace(run.manifest, extra={"held_out": {"kinds": kinds}}))


def test_models_of_different_shape_are_compared_by_depth(browser: Browser, tmp_path: Path) -> None:
    deep = story(layers=5, heads=2, mechanisms=("elu1", "relu", "uniform"))
    wide = story(layers=3, heads=4, mechanisms=("elu1", "uniform"), level=0.2, seed=3)
    save_study(tmp_path / "deep", [with_kinds(deep, "wS", "wS", "hS", "ff", "pc")])
    save_study(tmp_path / HOSTILE[2], [with_kinds(wide, "wwSS", "wwSS", "hhhh")])
    written = write_difference(tmp_path / "deep", tmp_path / HOSTILE[2], tmp_path / "pair.html")
    assert (written.samples, written.carried) == (2, 0)
    for look in ({"color_scheme": "dark"}, {"viewport": {"width": 360, "height": 740}}):
        context = browser.new_context(bypass_csp=True, **look)
        page = context.new_page()
        page.goto(written.path.as_uri())
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        words = page.locator("main").inner_text()
        assert f"deep (5 layers, 10 heads) and {HOSTILE[2]} (3 layers, 12 heads) have different shapes" in words
        assert page.locator("main b, script").count() == 0
        rows = [row.split("\t") for row in page.locator("tbody").first.inner_text().splitlines()]
        sides = ("deep", HOSTILE[2])
        assert [row[:2] for row in rows] == [[name, side] for name in ("elu1", "uniform") for side in sides]
        # The first third of five layers is the first two: at depths 0 and 1/4.
        means = deep.head_means()
        for cell, expected in zip(rows[0][2:6], (means, means[:2], means[2:3], means[3:]), strict=True):
            assert float(cell) == pytest.approx(float(expected.mean()), abs=1e-4)
        gap = wide.head_means().mean() / wide.select("uniform").divergence.mean()
        assert float(rows[1][6]) == pytest.approx(float(gap), abs=1e-3)
        kinds = page.locator("tbody").nth(1).inner_text()
        assert "softmax\t3 of 10 (30%)\t4 of 12 (33%)" in kinds
        assert page.locator("figure img").count() == 1
        context.close()


def test_names_tell_the_paths_apart() -> None:
    assert pair_names("runs/a/fox", "runs/b/fox") == ("a/fox", "b/fox")
    assert pair_names("runs/fox", "runs/wolf/") == ("fox", "wolf")


def test_a_model_with_swapped_heads_against_itself(tmp_path: Path) -> None:
    model, tokenizer = tiny_llama(), byte_tokenizer()
    text = "A fox went out at night."
    read(model, tokenizer, text, mechanisms=["elu1", "uniform"]).save(tmp_path / "original")
    with swap(model, [(0, 1)], "elu1"):
        read(model, tokenizer, text, mechanisms=["elu1", "uniform"]).save(tmp_path / "swapped")
    studies = open_study(tmp_path / "original"), open_study(tmp_path / "swapped")
    data = pair_payload(*studies, ("original", "swapped"))
    # A swapped head passes on what its substitute gives.
    before, after = (entry["divergence"][0] for entry in data.document["samples"])
    assert after < before
    assert "It changes most in the heads 0.1 (" in data.document["headline"]

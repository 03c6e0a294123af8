"""The live page in a real browser, with the embedded model: it writes, stops, and goes on without its tab."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from softgap.trajectories import load
from support.explorer_examples import HOSTILE, save_study, settle, story, violations
from support.kind_examples import calibrated_folder
from support.live_examples import Live, context, ended, generate, pane, served, steps, visit, waited

FOX = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("live")
    (folder / "runs").mkdir()
    save_study(folder / "runs" / "saved-story", [story()])
    with served(folder) as started:
        yield started


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    problems: list[str] = []
    with context(browser, problems) as made:
        yield visit(made, live, problems)
        live.until_idle()


def test_a_run_is_shown_while_it_is_written_and_equals_what_is_saved(page: Page, live: Live) -> None:
    generate(page, FOX, 24)
    frame = pane(page)
    early = steps(frame)
    assert frame.locator("#map .cell").count() == 270
    expect(page.locator("#queue-state")).to_have_text("1 running, 0 waiting")
    assert ended(frame) == "finished"
    assert early < 24
    run = load(live.studies / str(frame.evaluate("PAYLOAD.live.run")))
    assert run.prompt is not None
    for mechanism in ("elu1", "uniform"):
        saved = np.concatenate(
            [part.select(mechanism).divergence.reshape(270, -1) for part in (run.prompt, run)], axis=-1
        )
        shown = frame.evaluate(
            f"Array.from(new Uint8Array(unpacked.get(SAMPLE.data.arrays['divergence/{mechanism}']).values.buffer))"
        )
        assert np.array_equal(np.frombuffer(bytes(shown), "<f4").reshape(270, -1), saved)
    np.testing.assert_allclose(
        frame.evaluate("SAMPLE.data.logprob.slice(SAMPLE.data.promptSteps)"), run.logprob, rtol=1e-5
    )
    text = "".join(frame.locator("#tokens .completion .t:not(.hidden-token)").all_text_contents())
    assert text == run.completion_text
    assert frame.locator("#lines .trace").count() == 2
    assert "smollm2-135m" in frame.locator("#about").inner_text()


def test_the_map_by_kind_is_there_from_the_first_token(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    model = calibrated_folder(tmp_path / "tiny")
    problems: list[str] = []
    with served(tmp_path, "--model", str(model)) as calibrated, context(browser, problems) as made:
        page = visit(made, calibrated, problems)
        generate(page, FOX, 6)
        frame = pane(page)
        assert ended(frame) == "finished"
        assert frame.locator("#quantity").input_value() == "kind"
        settle(page)
        assert sorted(frame.locator("#map [role=row] .letter").all_text_contents()) == sorted("wSfhcpww")
        frame.locator('#map .cell[data-row="3"]').hover()
        expect(frame.locator("#map-readout")).to_contain_text("hybrid suffices; window leaves ")
        frame.locator("#quantity").select_option("divergence")
        expect(frame.locator("#map .letter")).to_have_count(0)
        saved = load(calibrated.studies / str(frame.evaluate("PAYLOAD.live.run")))
        assert saved.manifest.extra["held_out"]["kinds"] == {"0": "wSfh", "1": "cpww"}


def test_the_settings_reach_the_model(page: Page, live: Live) -> None:
    page.locator("#temperature").fill("0.7")
    page.locator("#seed").fill("3")
    page.get_by_text("Mechanisms", exact=True).click()
    page.get_by_label("elu1", exact=True).uncheck()
    page.get_by_label("taylor2", exact=True).check()
    generate(page, FOX, 4)
    frame = pane(page)
    assert ended(frame) == "finished"
    run = load(live.studies / str(frame.evaluate("PAYLOAD.live.run")))
    assert run.mechanisms == ("taylor2", "uniform")
    assert (run.manifest.seed, run.manifest.options["temperature"], run.n_steps) == (3, 0.7, 4)
    assert frame.locator("#mechanism").input_value() == "taylor2"


def test_stop_keeps_what_is_there(page: Page, live: Live) -> None:
    generate(page, FOX, 400)
    frame = pane(page)
    steps(frame, 3)
    page.locator(".pane-head").get_by_role("button", name="Stop").click()
    assert ended(frame) == "stopped"
    count = steps(frame)
    assert 3 <= count < 400
    run = load(live.studies / str(frame.evaluate("PAYLOAD.live.run")))
    assert run.n_steps == count
    assert frame.evaluate("unpacked.get(0).columns") == frame.evaluate("stepCount()")


def test_a_head_can_be_chosen_while_tokens_arrive(page: Page) -> None:
    generate(page, FOX, 300)
    frame = pane(page)
    steps(frame, 2)
    frame.locator('#map .cell[data-row="100"]').click()
    expect(frame.locator("#chosen span")).to_have_text("head 11.1")
    frame.locator("#heads input:not(:checked)").first.check()
    expect(frame.locator("#chosen span")).to_have_count(2)


def test_a_run_goes_on_without_its_tab_and_is_there_when_it_comes_back(browser: Browser, live: Live) -> None:
    problems: list[str] = []
    with context(browser, problems) as made:
        first = visit(made, live, problems)
        generate(first, FOX, 300)
        before = steps(pane(first), 2)
        run_id = str(pane(first).evaluate("PAYLOAD.live.run"))
        first.close()
        waited(lambda: next(run for run in live.runs() if run["id"] == run_id)["steps"] > before + 2)
        again = pane(visit(made, live, problems))
        assert again.evaluate("PAYLOAD.live.run") == run_id
        assert steps(again, before + 3) > before
        more = steps(again)
        assert steps(again, more + 2) > more
    live.until_idle()


def test_a_lost_connection_goes_on_where_it_was(browser: Browser, live: Live) -> None:
    problems: list[str] = []
    with context(browser, problems) as made:
        page = visit(made, live, problems)
        generate(page, FOX, 300)
        frame = pane(page)
        before = steps(frame, 2)
        made.set_offline(True)
        page.evaluate("STREAM.source.dispatchEvent(new Event('error')); watch(STREAM.runs)")
        expect(page.locator("#connection")).to_have_text("no connection; reconnecting")
        made.set_offline(False)
        expect(page.locator("#connection")).to_have_text("connected")
        # The pane refuses a step that is not the next one, so more of them means that none was lost or came twice.
        assert steps(frame, before + 3) > before
        problems[:] = [problem for problem in problems if "ERR_INTERNET_DISCONNECTED" not in problem]
    live.until_idle()


def test_two_tabs_see_the_same_run_and_the_queue(browser: Browser, live: Live) -> None:
    problems: list[str] = []
    with context(browser, problems) as made:
        one, other = (visit(made, live, problems) for _ in range(2))
        generate(one, FOX, 300)
        steps(pane(one), 2)
        other.locator("#runs").get_by_role("button", name="Show the run").first.click()
        steps(pane(other), 2)
        generate(other, "And now about a crow.", 4)
        expect(one.locator("#queue-state")).to_have_text("1 running, 1 waiting")
        expect(one.locator("#runs li").first).to_contain_text("waiting, position 1 in the queue")
        assert pane(other).evaluate("SAMPLE.steps") == 0
        one.locator(".pane-head").get_by_role("button", name="Stop").click()
        assert ended(pane(other)) == "finished"
    live.until_idle()


def test_two_prompts_side_by_side(page: Page) -> None:
    generate(page, FOX, 4, second="Tell me a story about a crow.")
    assert [ended(pane(page, i)) for i in range(2)] == ["finished", "finished"]
    boxes = [page.locator("iframe").nth(i).bounding_box() for i in range(2)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert "crow" in pane(page, 1).locator("#tokens .prompt").inner_text()


def test_saved_studies_are_opened_and_downloaded(page: Page, tmp_path: Path) -> None:
    page.get_by_role("button", name="Show the study saved-story", exact=True).click()
    frame = pane(page)
    expect(frame.locator("#map .cell")).to_have_count(24)
    assert frame.evaluate("window.origin") == "null"
    for words, ending in (("HTML", ".html"), ("ZIP", ".zip")):
        with page.expect_download() as started:
            page.locator(".pane-head").get_by_role("link", name=words).click()
        path = tmp_path / f"file{ending}"
        started.value.save_as(path)
        assert started.value.suggested_filename == f"saved-story{ending}"
    assert b"softgap explorer" in (tmp_path / "file.html").read_bytes()[:5000]
    with zipfile.ZipFile(tmp_path / "file.zip") as archive:
        archive.extractall(tmp_path)
    assert load(tmp_path / "saved-story").equals(story())


def test_a_server_that_is_started_again(browser: Browser, tmp_path: Path) -> None:
    problems: list[str] = []
    with context(browser, problems) as made:
        with served(tmp_path) as first:
            page = visit(made, first, problems)
            page.locator("#seed").fill("11")
            generate(page, FOX, 300)
            steps(pane(page), 3)
            run_id = str(pane(page).evaluate("PAYLOAD.live.run"))
        # Ctrl-C has saved what was there.
        saved = load(tmp_path / "runs" / run_id)
        assert saved.n_steps >= 3
        expect(page.locator("#connection")).to_have_text("no connection; reconnecting")
        with served(tmp_path, port=first.port) as second:
            expect(page.locator("#connection")).to_have_text("connected")
            frame = pane(page)
            assert frame.url == f"{second.address}studies/{run_id}"
            assert frame.evaluate("current().tokens.length - current().promptSteps") == saved.n_steps
            assert page.locator("#prompt").input_value() == FOX
            assert page.locator("#seed").input_value() == "11"
            generate(page, FOX, 2)
            assert ended(pane(page)) == "finished"
        problems[:] = [problem for problem in problems if "ERR_CONNECTION" not in problem and "ERR_INC" not in problem]


def test_hostile_text_stays_text(page: Page) -> None:
    prompt = "Repeat: " + " ".join(HOSTILE)
    generate(page, prompt, 3)
    frame = pane(page)
    assert ended(frame) == "finished"
    assert "</script><img src=x onerror=alert(1)>" in frame.locator("#tokens .prompt").inner_text()
    assert "</script>" in page.locator("#runs li").first.inner_text()
    for place in (page, frame):
        assert place.locator("img").count() == 0
        assert place.evaluate("document.querySelectorAll('script').length") < 6


def test_refusals_are_sentences_on_the_page(page: Page) -> None:
    for prompt, length, words in (
        ("", "4", "A prompt must contain text"),
        (FOX, "4000", "max_new_tokens must be a whole number from 1 to 1,000, got 4000."),
        ("fox " * 2100, "4", "A prompt may have at most 2,000 tokens here"),
        ("fox " * 20000, "4", "A request may have at most 65,536 bytes"),
    ):
        page.locator("#prompt").fill(prompt)
        page.locator("#length").evaluate(f"(field) => {{ field.value = '{length}'; field.removeAttribute('max'); }}")
        page.locator("#generate").click()
        expect(page.locator("#refused")).to_contain_text(words[1:])
        expect(page.locator("#generate")).to_be_enabled()


@pytest.mark.parametrize(
    "options", [{"viewport": {"width": 360, "height": 740}}, {"color_scheme": "dark"}], ids=["phone", "dark"]
)
def test_phone_and_dark(browser: Browser, live: Live, options: dict[str, object]) -> None:
    problems: list[str] = []
    with context(browser, problems, bypass_csp=True, **options) as made:
        page = visit(made, live, problems)
        generate(page, FOX, 3)
        frame = pane(page)
        assert ended(frame) == "finished"
        for place in (page, frame):
            assert place.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(page) == []
        paper = "getComputedStyle(document.body).backgroundColor"
        dark = options.get("color_scheme") == "dark"
        assert page.evaluate(paper) == frame.evaluate(paper) == ("rgb(20, 22, 26)" if dark else "rgb(246, 245, 241)")
        page.locator("#theme").click()
        settle(page)
        assert page.evaluate(paper) == frame.evaluate(paper) == "rgb(246, 245, 241)"


def test_the_keyboard_is_enough(page: Page) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#prompt").focus()
    page.keyboard.type(FOX)
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("3")
    page.locator("#prompt").focus()
    page.keyboard.press("Control+Enter")
    frame = pane(page)
    assert ended(frame) == "finished"
    frame.locator("#map .cell[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+Enter")
    expect(frame.locator("#chosen span")).to_have_count(3)

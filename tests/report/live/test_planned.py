"""The live server under a plan, over plain HTTP and in a real browser: it shows what the plan saves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

import softgap
from softgap.attention import resolve
from softgap.linearize import Generation, Substitute, export_plan, generate, load_plan
from softgap.linearize.plan import plan_of
from support.cli_examples import failure
from support.explorer_examples import HOSTILE, settle, violations
from support.live_examples import Live, context, ended, served, visit, waited
from support.live_examples import generate as ask
from support.live_examples import pane as pane_of
from support.model_examples import save_folder, tiny_llama

FOX = "Tell me a story about a fox."
FREED = ((0, 0), (0, 1), (1, 2), (1, 3))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a plan of it, one that cannot stream, one that cannot generate, and an exported folder."""
    place = tmp_path_factory.mktemp("planned")
    model, tokenizer = softgap.load_model(save_folder(place / "tiny", tiny_llama(max_position_embeddings=512)))
    for name, heads, mechanism in (
        ("plan", FREED, "elu1+window:w=5,sinks=2"),
        ("keeps", FREED, "relu2_scores"),
        ("part", FREED[:1], "window:w=4,sinks=1,far=3"),
    ):
        plan_of(model, heads, Substitute(resolve(mechanism))).save(place / f"{name}.json")
    export_plan(model, load_plan(place / "plan.json"), place / "folder", format="folder", tokenizer=tokenizer)
    return place


@pytest.fixture(scope="module")
def live(files: Path) -> Iterator[Live]:
    with served(files, "--model", str(files / "tiny"), "--plan", str(files / "plan.json")) as started:
        yield started


@pytest.fixture
def page(browser: Browser, live: Live) -> Iterator[Page]:
    problems: list[str] = []
    with context(browser, problems) as made:
        yield visit(made, live, problems)
        live.until_idle()


def expected(files: Path, prompt: str, length: int, **settings: Any) -> Generation:
    model, tokenizer = softgap.load_model(files / "tiny")
    return generate(model, tokenizer, load_plan(files / "plan.json"), prompt, length, **settings)


def told(live: Live, **values: object) -> list[tuple[str, dict[str, object]]]:
    """The events of one run, from its beginning to its end."""
    status, answer = live.post("/runs", {"prompts": [FOX], "max_new_tokens": 6, **values})
    assert status == 202, answer
    events = []
    for kind, _, data in live.events(answer["runs"][0]):
        if kind in ("begin", "step", "end"):
            events.append((kind, data))
        if kind == "end":
            break
    return events


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_a_run_is_that_of_the_python_surface(live: Live, files: Path, sampling: dict[str, object]) -> None:
    made = expected(files, FOX, 6, **sampling)
    (_, begun), *steps, (_, end) = told(live, **sampling)
    assert (begun["promptTokens"], begun["steps"]) == (made.prompt_tokens[0], 6)
    text: list[str] = []
    for _, data in steps:
        text[int(str(data["from"])) :] = str(data["text"])
    assert "".join(text) == made.text
    assert [data["step"] for _, data in steps] == list(range(6))
    last = steps[-1][1]
    assert (last["bytes"], last["original"]) == (made.cache_bytes, made.original_bytes)
    assert (end["state"], end["saved"]) == ("finished", False)
    assert str(end["sentence"]).startswith(made.sentence().partition(";")[0])
    assert not (live.studies / str(end["run"])).exists()


def test_nothing_is_measured(live: Live) -> None:
    status, answer = live.post("/runs", {"prompts": [FOX], "mechanisms": ["elu1"]})
    assert status == 400
    assert answer["error"] == "a server under a plan compares with no mechanisms; leave mechanisms out"


def test_the_page_shows_what_the_plan_saves(page: Page, files: Path, live: Live) -> None:
    expect(page.locator("#mechanism-choice")).to_be_hidden()
    notes = page.locator("#plan-notes").inner_text()
    assert "This server runs the model under the plan plan.json." in notes
    assert "It frees 2 of 4 KV groups and 0 whole layers." in notes
    assert "Heads are not measured under a plan" in notes
    ask(page, FOX, 40)
    frame = pane_of(page)
    assert ended(frame) == "finished"
    settle(page)
    made = expected(files, FOX, 40)
    assert frame.locator("#written").text_content() == made.text
    assert frame.locator("#asked").text_content() == FOX
    facts = frame.locator("#facts").inner_text()
    assert f"cache now, under the plan\n{made.cache_bytes / 1e3:.1f} kB" in facts
    assert f"cache now, of the original\n{made.original_bytes / 1e3:.1f} kB" in facts
    assert re.search(r"per token under the plan, mean\n\d+\.\d ms", facts)
    expect(frame.locator("#saving")).to_contain_text("under the plan and")
    drawn = frame.evaluate("[RUN.bytes, RUN.original]")
    assert [len(values) for values in drawn] == [40, 40]
    assert (drawn[0][-1], drawn[1][-1]) == (made.cache_bytes, made.original_bytes)
    assert frame.locator("#bytes path.mean").count() == frame.locator("#bytes path.planned-trace").count() == 1
    assert page.locator(".pane-head").get_by_role("link", name="HTML").count() == 0
    assert "Without --plan, softgap serve measures the original model" in frame.locator("#notes").inner_text()
    assert not any(live.studies.iterdir()) if live.studies.exists() else True


def test_stop_and_two_prompts(page: Page) -> None:
    ask(page, FOX, 400, second="And a crow.")
    page.locator(".pane-head").get_by_role("button", name="Stop").first.click()
    assert ended(pane_of(page)) in ("stopped", "finished")
    # The second has its button only until it has ended by itself.
    stop = page.locator(".pane-head").get_by_role("button", name="Stop")
    if stop.count():
        stop.first.click()
    assert ended(pane_of(page, 1)) in ("stopped", "finished")
    expect(pane_of(page, 1).locator("#asked")).to_have_text("And a crow.")


def test_a_page_that_comes_back_finds_its_run(browser: Browser, live: Live) -> None:
    problems: list[str] = []
    with context(browser, problems) as made:
        first = visit(made, live, problems)
        ask(first, FOX, 30)
        ended(pane_of(first))
        text = pane_of(first).locator("#written").text_content()
        first.close()
        again = pane_of(visit(made, live, problems))
        assert ended(again) == "finished"
        waited(lambda: again.locator("#written").text_content() == text)
        assert again.evaluate("RUN.steps") == 30


def test_hostile_text_stays_text(page: Page) -> None:
    prompt = "Repeat: " + " ".join(HOSTILE)
    ask(page, prompt, 3)
    frame = pane_of(page)
    assert ended(frame) == "finished"
    assert "</script><img src=x onerror=alert(1)>" in frame.locator("#asked").inner_text()
    for place in (page, frame):
        assert place.locator("img").count() == 0


@pytest.mark.parametrize(
    "options", [{"viewport": {"width": 360, "height": 740}}, {"color_scheme": "dark"}], ids=["phone", "dark"]
)
def test_phone_and_dark(browser: Browser, live: Live, options: dict[str, object]) -> None:
    problems: list[str] = []
    with context(browser, problems, bypass_csp=True, **options) as made:
        page = visit(made, live, problems)
        ask(page, FOX, 12)
        frame = pane_of(page)
        assert ended(frame) == "finished"
        for place in (page, frame):
            assert place.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert violations(page) == []
        paper = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == frame.evaluate(paper)


def test_a_folder_brings_plan_and_model_and_a_plan_without_states_says_so(files: Path, tmp_path: Path) -> None:
    with served(tmp_path, "--plan", str(files / "folder")) as folder:
        assert told(folder)[-1][1]["state"] == "finished"
        assert b"under the plan softgap_plan.json" in folder.request("GET", "/")[2]
    with served(tmp_path, "--model", str(files / "tiny"), "--plan", str(files / "keeps.json")) as keeps:
        assert b"The plan frees no cache, so the model keeps all keys and values." in keeps.request("GET", "/")[2]
        assert "has no state of constant size" in str(told(keeps)[-1][1]["sentence"])


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ("no.json", "cannot read the plan"),
        ("part.json", "far keys need all query heads of a KV group"),
    ],
)
def test_bad_plans_are_refused_at_the_start(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: str, sentence: str
) -> None:
    command = ["serve", "--model", str(files / "tiny"), "--plan", str(files / plan), "--studies", str(tmp_path)]
    assert sentence in failure(command, capsys)


def test_a_plan_of_another_model_is_refused_at_the_start(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_folder(tmp_path / "other", tiny_llama(seed=3))
    command = ["serve", "--model", str(other), "--plan", str(files / "plan.json"), "--studies", str(tmp_path / "runs")]
    capsys.readouterr()  # the bar of save_pretrained
    assert failure(command, capsys).startswith("the plan is for the model ")

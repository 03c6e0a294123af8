"""The page of an evaluation: every score with its interval and verdict, and one picture, in one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from softgap.evaluation import Evaluation, Row
from softgap.intervals import Interval
from softgap.report import write_explorer
from softgap.report.evaluation_page import draw_evaluation, evaluation_document
from support.cli_examples import failure
from support.explorer_examples import HOSTILE, violations


def row(task: str, metric: str, value: float, distance: tuple[int, int] | None = None, **fields: Any) -> Row:
    settings = {"setting": "", "length": 1024, "contexts": 16, "questions": 64, "floor": 0.25, **fields}
    original = Interval(value, value - 0.03, value + 0.03)
    changed = Interval(value - 0.2, value - 0.24, value - 0.16)
    return Row(
        task, distance=distance, metric=metric, original=original, changed=changed,
        change=Interval(-0.2, -0.23, -0.17), **settings,
    )  # fmt: skip


ROWS = (
    row("recall", "first", 0.9, setting="4 pairs"),
    row("recall", "first", 0.8, (128, 256), setting="4 pairs", length=512),
    row("recall", "first", 0.95, (0, 128), setting="4 pairs", long_range=False),
    row("recall", "first", 0.85, (128, 256), setting="4 pairs", long_range=True),
    row("needle", "whole", 0.2),
    row("loss", "loss", 3.0, floor=10.0),
    row("loss", "loss", 3.5, (0, 128), floor=10.0),
    row("loss", "loss", 2.5, (128, 256), floor=10.0),
)
FOUND = Evaluation(HOSTILE[0], "abc123", "plan.json (0f0f)", 7, 64, ROWS, ("induction at 512 tokens was left out: x",))


def test_the_page_shows_every_score_offline(browser: Browser, tmp_path: Path) -> None:
    FOUND.save(tmp_path / "found.json")
    report = write_explorer(tmp_path / "found.json")
    assert report.path == tmp_path / "found.html"
    made = browser.new_context()
    page = made.new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url.split(":")[0]))
    page.goto(report.path.as_uri())
    text = page.inner_text("body")
    assert FOUND.sentence() in text
    scores, spans = page.locator("table").all()
    cells = scores.locator("tbody tr").first.locator("td").all_inner_texts()
    assert cells[:2] == ["recall, 4 pairs", "1024"]
    assert cells[4:7] == ["0.900 (0.870 to 0.930)", "0.700 (0.660 to 0.740)", "-0.200 (-0.230 to -0.170)"]
    assert cells[-1] == "worse"
    needle = scores.locator("tbody tr").nth(1).locator("td").all_inner_texts()
    assert needle[-1] == "not measurable with this model"
    assert "0 to 127 (in window)" in spans.inner_text()
    assert spans.locator("tbody tr").count() == 5
    assert page.evaluate("document.querySelector('figure img').naturalWidth") > 300
    assert "induction at 512 tokens was left out" in text
    assert violations(page) == []
    assert set(requests) <= {"file", "data"}
    assert page.locator("script").count() == 0
    made.close()


def test_the_picture_shows_recall_by_distance_and_loss_by_position_at_the_greatest_length() -> None:
    figure = draw_evaluation(FOUND)
    assert figure is not None
    recall, loss = figure.axes
    assert (recall.get_title(), loss.get_title()) == ("recall, 4 pairs, 1,024 tokens", "loss, 1,024 tokens")
    first, second = (container.lines[0].get_ydata() for container in recall.containers)  # type: ignore[attr-defined]
    assert list(first) == [0.95, 0.85]
    assert list(second) == pytest.approx([0.75, 0.65])
    ends = recall.containers[0].lines[2][0].get_segments()[0][:, 1]  # type: ignore[attr-defined]
    assert list(ends) == pytest.approx([0.92, 0.98])
    assert [tick.get_text() for tick in loss.get_xticklabels()] == ["0", "128"]


def test_the_model_alone_has_no_columns_of_a_change() -> None:
    rows = tuple(replace(each, changed=None, change=None) for each in ROWS if each.distance is None)
    document = evaluation_document(replace(FOUND, label="", rows=rows))
    assert document.pictures == ()  # nothing by distance
    (table,) = document.tables
    assert table.columns == ("task", "tokens", "metric", "floor", "original", "contexts", "verdict")
    assert [cells[-1] for cells in table.rows] == ["measurable", "not measurable with this model", "measurable"]


def test_a_file_that_is_no_evaluation_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    assert "other.json' holds no evaluation" in failure(["report", str(tmp_path / "other.json")], capsys)
    assert not (tmp_path / "other.html").exists()

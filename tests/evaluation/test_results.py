"""Rows of an evaluation: their verdicts, and the way to a file and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from softgap.errors import StoreError
from softgap.evaluation import Evaluation, Row
from softgap.intervals import Interval

ROW = Row("recall", "12 pairs", 512, None, "first", 16, 192, 1 / 12, Interval(0.8, 0.7, 0.9), long_range=True)


@pytest.mark.parametrize(
    ("metric", "change", "verdict"),
    [
        ("first", (0.0, -0.02, 0.03), "equivalent"),
        ("first", (-0.03, -0.05, -0.01), "equivalent"),
        ("first", (-0.04, -0.06, -0.01), "worse"),
        ("first", (0.1, 0.01, 0.2), "better"),
        ("first", (0.0, -0.06, 0.06), "undecided"),
        ("answer_loss", (0.2, 0.1, 0.3), "worse"),
        ("answer_loss", (-0.2, -0.3, -0.1), "better"),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_margin(
    metric: str, change: tuple[float, float, float], verdict: str
) -> None:
    floor = math.nan if metric == "answer_loss" else 0.1
    assert replace(ROW, metric=metric, floor=floor, change=Interval(*change)).verdict == verdict


@pytest.mark.parametrize(
    ("metric", "floor", "original", "verdict"),
    [
        ("first", 0.25, (0.5, 0.36, 0.7), "equivalent"),
        ("first", 0.25, (0.5, 0.34, 0.7), "too few contexts"),
        ("first", 0.25, (0.3, 0.26, 0.7), "not measurable with this model"),
        ("loss", 5.0, (4.0, 3.9, 4.1), "equivalent"),
        ("loss", 5.0, (4.9, 4.7, 5.1), "too few contexts"),
        ("loss", 5.0, (5.1, 4.9, 5.3), "not measurable with this model"),
        ("first", 0.95, (1.0, 1.0, 1.0), "equivalent"),
    ],
)
def test_a_model_that_is_no_better_than_chance_is_not_measured(
    metric: str, floor: float, original: tuple[float, float, float], verdict: str
) -> None:
    row = replace(ROW, metric=metric, floor=floor, original=Interval(*original), change=Interval(0, 0, 0))
    assert row.measurable is (verdict == "equivalent")
    assert row.verdict == verdict


def test_an_evaluation_is_saved_and_read_back(tmp_path: Path) -> None:
    rows = (ROW, replace(ROW, distance=(128, 256), metric="loss", change=Interval(0.1, 0, 0.2), long_range=None))
    found = Evaluation("tiny", "f" * 32, "plan", 3, 64, rows, ("left out",))
    assert Evaluation.load(found.save(tmp_path / "found.json")) == found
    assert found.select(metric="first", distance=None) == (ROW,)
    assert found.to_json()["rows"][0]["verdict"] == ""
    without_floor = replace(ROW, floor=math.nan)
    assert math.isnan(Row.from_json(without_floor.to_json()).floor)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("seed", "three"),
        ("notes", [3]),
        ("model", None),
        ("rows", [3]),
        ("task", 3),
        ("metric", "mood"),
        ("length", -512),
        ("contexts", True),
        ("distance", [128]),
        ("original", {"value": "0.5", "low": 0, "high": 1}),
        ("margin", "wide"),
        ("long_range", "yes"),
    ],
)
def test_an_evaluation_with_values_of_other_types_is_refused(tmp_path: Path, place: str, value: object) -> None:
    found = Evaluation("tiny", "f" * 32, "", 3, 64, (ROW,), ())
    document = found.to_json()
    assert Evaluation.from_json(document) == found
    target = document if place in document else document["rows"][0]
    target[place] = value
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match=r"^'.*' holds no evaluation \(.+\); give a file that softgap evaluate wrote$"):
        Evaluation.load(tmp_path / "x.json")


@pytest.mark.parametrize("text", ["", "{}", "[]"])
def test_a_file_that_holds_no_evaluation_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StoreError, match="holds no evaluation"):
        Evaluation.load(tmp_path / "x.json")

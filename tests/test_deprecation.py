"""Renamed public names: the old ones still work, and say what they are called now."""

from __future__ import annotations

import pytest

import softgap
from softgap.study import LabelCounts
from softgap.theory.injectivity.collision_search import Search
from softgap.theory.position.lab import Correction
from softgap.theory.separation.training import Score

RENAMED = [
    ("analysis", "ComparisonPlan", "Preregistration"),
    ("analysis", "read_plan", "read_preregistration"),
    ("linearize", "Passages", "Sequences"),
    ("linearize", "lookups", "recall_sequences"),
    ("linearize", "passages_of", "split_sequences"),
    ("linearize", "repaired", "fit_output_correction"),
    ("linearize", "tuned", "distil_substitute"),
    ("signal", "Interval", "EntropyInterval"),
    ("study", "Labelled", "LabelCounts"),
]


@pytest.mark.parametrize(("package", "old", "new"), RENAMED)
def test_an_old_name_warns_and_is_the_new_one(package: str, old: str, new: str) -> None:
    module = getattr(softgap, package)
    with pytest.warns(DeprecationWarning, match=f"softgap.{package}.{old} is now softgap.{package}.{new}"):
        assert getattr(module, old) is getattr(module, new)


def test_other_names_are_missing_as_before() -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match=r"module 'softgap\.linearize' has no attribute 'no_such_name'"):
        getattr(softgap.linearize, name)


ATTRIBUTES = [
    (LabelCounts(3, 2, 1), "given", "labels"),
    (LabelCounts(3, 2, 1), "changed", "new"),
    (LabelCounts(3, 2, 1), "without", "unlabelled"),
    (Correction("minus uniform", 0.2, 0.9), "left", "trend_left"),
    (Correction("minus uniform", 0.2, 0.9), "kept", "variance_left"),
    (Score(0.5, 0.4, 0.6, seeds=3), "mean", "value"),
    (Search("elu1", None, "", 1, 1, 1, 0.1), "found", "has_collision"),
]


@pytest.mark.parametrize(("result", "old", "new"), ATTRIBUTES)
def test_an_old_attribute_warns_and_is_the_new_one(result: object, old: str, new: str) -> None:
    owner = type(result).__name__
    with pytest.warns(DeprecationWarning, match=f"{owner}.{old} is now {owner}.{new}"):
        value = getattr(result, old)
    assert value == getattr(result, new)

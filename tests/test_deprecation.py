"""Renamed public names: the old ones still work, and say what they are called now."""

from __future__ import annotations

import pytest

import softgap

RENAMED = [
    ("analysis", "ComparisonPlan", "Preregistration"),
    ("analysis", "read_plan", "read_preregistration"),
    ("linearize", "Passages", "Sequences"),
    ("linearize", "lookups", "recall_sequences"),
    ("linearize", "passages_of", "split_sequences"),
    ("linearize", "repaired", "fit_output_correction"),
    ("linearize", "tuned", "distil_substitute"),
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

"""Renamed public names: the old ones still work, and say what they are called now."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import softgap
from softgap.deprecation import deprecated_keywords

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


@deprecated_keywords(asked="recall_lists")
def score(model: str, *, recall_lists: int = 0) -> tuple[str, int]:
    return model, recall_lists


def test_an_old_keyword_warns_and_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"keyword 'asked' of score\(\) is now 'recall_lists'"):
        assert score("small", asked=3) == ("small", 3)  # type: ignore[call-arg]
    assert score("small", recall_lists=3) == ("small", 3)


def test_an_old_keyword_beside_the_new_one_is_refused() -> None:
    with pytest.raises(TypeError, match="got 'recall_lists' and its old name 'asked'"):
        score("small", asked=3, recall_lists=3)  # type: ignore[call-arg]


OLD_KEYWORDS = [
    (softgap.linearize.distil_substitute, {"asked": "recall_lists", "read": "sequences"}),
    (softgap.linearize.find_plan, {"repair": "correct", "tune": "distil"}),
    (softgap.linearize.fit_output_correction, {"read": "sequences"}),
    (
        softgap.linearize.frontier,
        {"asked": "recall_lists", "fit_asked": "fit_recall_lists", "repair": "correct", "tune": "distil"},
    ),
    (softgap.linearize.head_scores, {"asked": "recall_lists", "read": "sequences"}),
    (softgap.linearize.impact, {"controls": "baselines"}),
]


@pytest.mark.parametrize(("function", "keywords"), OLD_KEYWORDS)
def test_public_functions_accept_their_old_keywords(function: Callable[..., object], keywords: dict[str, str]) -> None:
    for old, new in keywords.items():
        assert new in inspect.signature(function).parameters
        with (
            pytest.warns(DeprecationWarning, match=f"keyword '{old}' of .* is now '{new}'"),
            pytest.raises(TypeError, match="missing"),
        ):
            function(**{old: None})

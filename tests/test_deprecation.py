"""Renamed public names: the old ones still work, and say what they are called now."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest

import softgap
from softgap.deprecation import deprecated_keywords
from softgap.study import LabelCounts
from softgap.theory.injectivity.collision_search import Search
from softgap.theory.position.lab import Correction
from softgap.theory.separation.training import Score

RENAMED = [
    ("analysis", "ComparisonPlan", "Preregistration"),
    ("attention", "Comparison", "OutputComparison"),
    ("analysis", "read_plan", "read_preregistration"),
    ("calibration", "judge", "evaluate_held_out"),
    ("linearize", "Passages", "Sequences"),
    ("linearize", "lookups", "recall_sequences"),
    ("linearize", "passages_of", "split_sequences"),
    ("linearize", "repaired", "fit_output_correction"),
    ("linearize", "tuned", "distil_substitute"),
    ("stats", "Matched", "MatchedSamples"),
    ("stats", "Step", "VerdictStep"),
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
    (softgap.analysis.compare_study, {"plan": "preregistration", "planned": "preregistration_file"}),
    (softgap.calibration.fit_maps, {"wanted": "target_scores"}),
    (softgap.stats.cohens_kappa, {"one": "first_labels", "other": "second_labels"}),
    (softgap.stats.label_noise, {"judge": "decide"}),
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


OLD_ATTRIBUTES = [
    (softgap.analysis.ComparisonFindings, "found", "surviving_units"),
    (softgap.analysis.ComparisonFindings, "kept", "varying"),
    (softgap.analysis.ComparisonFindings, "plan", "preregistration"),
    (softgap.analysis.ComparisonFindings, "tried", "log_entries"),
    (softgap.analysis.Headline, "kept", "gap_left"),
    (softgap.calibration.Calibration, "elsewhere", "conditions"),
    (softgap.stats.Comparison, "found", "significant_units"),
    (softgap.stats.Incremental, "chosen", "fold_counts"),
    (softgap.stats.JointControl, "kept", "indices"),
    (softgap.stats.LabelNoise, "kept", "replication_rate"),
    (softgap.stats.MatchedSamples, "kept", "indices"),
    (softgap.tasks.Prompt, "asked", "without_completion"),
]


@pytest.mark.parametrize(("kind", "old", "new"), OLD_ATTRIBUTES)
def test_an_old_attribute_of_a_class_leads_to_the_new_one(kind: type, old: str, new: str) -> None:
    result: object = object.__new__(kind)
    if not hasattr(kind, new):
        result.__dict__[new] = object()
    with pytest.warns(DeprecationWarning, match=rf"{kind.__name__}\.{old} is now {kind.__name__}\.{new}"):
        assert getattr(result, old) == getattr(result, new)


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

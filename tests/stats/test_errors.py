"""Bad input to the statistics: one sentence each, with the value that was given."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from softgap import stats
from softgap.errors import ShapeError, SoftgapError, UnknownNameError, UnsupportedError, ValueInputError
from support.stats_cases import RNG

x = RNG(0).standard_normal((12, 3, 2))
labels = np.arange(12) < 5
rng = RNG(1)
spoilt = x.copy()
spoilt[4, 1, 0] = np.nan
equal = x.copy()
equal[:, 2, 1] = 0.1
mixed = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
found = stats.compare_table(x, labels, permutations=19, rng=rng)
Values = dict[str, tuple[Callable[[], object], type[SoftgapError], str]]

CASES: Values = {
    "one group only": (
        lambda: stats.compare_table(x, ["a"] * 12, rng=rng),
        ValueInputError,
        "labels must name two groups, got only 'a'; add samples of another group",
    ),
    "three groups": (
        lambda: stats.compare_table(x, ["a", "b", "c"] * 4, rng=rng),
        ValueInputError,
        "labels must name two groups, got 3 ('a', 'b', 'c'); choose two of them",
    ),
    "a group of one": (
        lambda: stats.compare_table(x, ["right"] * 11 + ["wrong"], rng=rng),
        ValueInputError,
        "each group needs at least 2 samples, got 1 in group 'wrong'; add samples",
    ),
    "a group of one by itself": (
        lambda: stats.compare(x[:1], x, rng=rng),
        ValueInputError,
        "each group needs at least 2 samples, got 1 in group 'a'; add samples",
    ),
    "all-equal features": (
        lambda: stats.compare_table(equal, labels, rng=rng),
        ValueInputError,
        "a unit must vary among the samples compared, got all equal values at unit (2, 1) (1 such units); "
        "leave such units out",
    ),
    "one all-equal feature": (
        lambda: stats.compare(np.ones(4), np.ones(5), rng=rng),
        ValueInputError,
        "a unit must vary among the samples compared, got all equal values in all of them; leave such units out",
    ),
    "equal within groups": (
        lambda: stats.hedges_g(np.ones(4), np.zeros(5)),
        ValueInputError,
        "a unit must vary within groups, got all equal values in all of them; leave such units out",
    ),
    "NaN": (
        lambda: stats.compare_table(spoilt, labels, rng=rng),
        ValueInputError,
        "values must be finite, got nan at sample 4, unit (1, 0) (1 such values); leave out units or samples that "
        "were not measured",
    ),
    "covariates of wrong length": (
        lambda: stats.compare_table(x, labels, covariates=np.zeros((11, 1)), rng=rng),
        ShapeError,
        "covariates must have one row per sample, got 11 for 12 samples",
    ),
    "as many covariates as samples": (
        lambda: stats.compare_table(x, labels, covariates=RNG(2).standard_normal((12, 9)), rng=rng),
        ValueInputError,
        "covariates must leave degrees of freedom, got 9 independent ones for 12 rows in 1 blocks; use fewer "
        "covariates or more samples",
    ),
    "a covariate that is the label": (
        lambda: stats.compare_table(x, labels, covariates=labels[:, None].astype(float), rng=rng),
        ValueInputError,
        "the covariates explain the labels completely within blocks, so that no difference is left to measure; use "
        "fewer covariates or samples that overlap",
    ),
    "NaN in a group": (lambda: stats.auroc(x, spoilt), ValueInputError, "group b must be finite, got nan at sample 4"),
    "labels of wrong length": (
        lambda: stats.compare_table(x, labels[:-1], rng=rng),
        ShapeError,
        "labels must have one entry per sample, got 11 for 12 samples; give each sample its own entry",
    ),
    "clusters of wrong length": (
        lambda: stats.compare_table(x, labels, clusters=[1, 2], rng=rng),
        ShapeError,
        "clusters must have one entry per sample, got 2 for 12 samples",
    ),
    "a named stratum of wrong length": (
        lambda: stats.compare_table(x, labels, strata={"difficulty": [1, 2]}, rng=rng),
        ShapeError,
        "stratum 'difficulty' must have one entry per sample, got 2 for 12 samples",
    ),
    "a label unknown": (
        lambda: stats.compare_table(x, ["a"] * 6 + ["b"] * 5 + [None], rng=rng),
        ValueInputError,
        "labels must be known for every sample, got None at sample 11 (1 such entries); leave those samples out",
    ),
    "labels of two types": (
        lambda: stats.compare_table(x, np.array(["a", 1] * 6, object), rng=rng),
        ValueInputError,
        "labels must be of one type, got int, str; write all of them as text",
    ),
    "a first group that is none": (
        lambda: stats.compare_table(x, labels, first="yes", rng=rng),
        ValueInputError,
        "the first group must be one of 'False', 'True', got 'yes'",
    ),
    "units that differ": (
        lambda: stats.compare(x, x[:, :2], rng=rng),
        ShapeError,
        "the groups must hold the same units, got [3, 2] in a and [2, 2] in b; samples come first, units behind them",
    ),
    "no numbers": (
        lambda: stats.compare_table(np.array([["a"]] * 12), labels, rng=rng),
        ValueInputError,
        "values must hold real numbers, got an array of <U1",
    ),
    "a number": (
        lambda: stats.auroc(1.0, x),
        ShapeError,
        "group a must have one row per sample, got the single number",
    ),
    "no units": (
        lambda: stats.compare_table(np.empty((12, 0)), labels, rng=rng),
        ShapeError,
        "values must hold at least one sample and one unit, got the shape [12, 0]",
    ),
    "a seed": (
        lambda: stats.compare_table(x, labels, rng=3),  # type: ignore[arg-type]
        ValueInputError,
        "rng must be a numpy Generator, got 3; use np.random.default_rng(seed)",
    ),
    "too few permutations": (
        lambda: stats.compare_table(x, labels, permutations=9, rng=rng),
        ValueInputError,
        "permutations must be a whole number from 19, got 9; fewer could never reach p = 0.05",
    ),
    "alpha": (
        lambda: stats.compare_table(x, labels, alpha=5, rng=rng),
        ValueInputError,
        "alpha must be between 0 and 1, both excluded, got 5; 0.05 is usual",
    ),
    "exchange": (
        lambda: stats.compare_table(x, labels, clusters=mixed, exchange="withn", rng=rng),
        UnknownNameError,
        "unknown exchange 'withn'; did you mean 'within'?",
    ),
    "exchange without clusters": (
        lambda: stats.compare_table(x, labels, exchange="within", rng=rng),
        ValueInputError,
        "exchange 'within' needs clusters, got none; give them or use 'auto'",
    ),
    "between with mixed clusters": (
        lambda: stats.compare_table(x, labels, clusters=mixed, exchange="between", rng=rng),
        ValueInputError,
        "exchange 'between' needs one label per cluster, got 1 clusters with both; use 'within' or 'whole'",
    ),
    "clusters across strata": (
        lambda: stats.compare_table(x, np.repeat([0, 1], 6), clusters=mixed, strata=[0, 1] * 6, rng=rng),
        ValueInputError,
        "a cluster must lie in one stratum where labels move with whole clusters, got 12 pairs of cluster and stratum "
        "for 6 clusters; use strata that describe clusters, or exchange 'within'",
    ),
    "strata of one label": (
        lambda: stats.compare_table(x, labels, strata=labels, rng=rng),
        ValueInputError,
        "labels can be exchanged only where both groups meet, got no stratum with both; use coarser strata",
    ),
    "one cluster in a group": (
        lambda: stats.compare_table(x, np.arange(12) < 2, clusters=mixed, rng=rng),
        ValueInputError,
        "each group needs at least 2 clusters where labels can be exchanged, got 1 and 5; add samples or use coarser",
    ),
    "level": (
        lambda: stats.auroc(x, x, level=95),
        ValueInputError,
        "level must be between 0 and 1, both excluded, got 95; 0.95 is",
    ),
    "clusters without rng": (
        lambda: stats.auroc(x[labels], x[~labels], clusters=mixed),
        ValueInputError,
        "an interval over clusters is drawn at random, got rng None; give rng",
    ),
    "scores that differ": (
        lambda: stats.auroc_difference(x[:, 0, 0], x[:5, 0, 0], labels),
        ShapeError,
        "both scores must have one number per sample, got [12] and [5]",
    ),
    "margin": (
        lambda: stats.equivalence(found.contrast, 0),
        ValueInputError,
        "margin must be a positive number, got 0; 0.2 standard deviations are small",
    ),
    "margin of a verdict": (
        lambda: stats.verdict(found, margin=-1),
        ValueInputError,
        "margin must be a positive number, got -1; 0.5 standard deviations are usual",
    ),
    "a control of other units": (
        lambda: stats.verdict(
            found, margin=1, controls={"late": stats.compare_table(x[:, 0], labels, permutations=19, rng=rng)}
        ),
        ShapeError,
        "a control must be of the same units, got [2] in 'late' for [3, 2]; compare the same table",
    ),
    "a control of another alpha": (
        lambda: stats.verdict(
            found, margin=1, controls={"late": stats.compare_table(x, labels, alpha=0.1, permutations=19, rng=rng)}
        ),
        ValueInputError,
        "a control must keep alpha 0.05 and power 0.8, got 0.1 and 0.8 in 'late'; compare with the same options",
    ),
    "matching": (
        lambda: stats.match(labels, x[:, 0, 0], method="calipers"),
        UnknownNameError,
        "unknown matching 'calipers'; did you mean 'caliper'?",
    ),
    "caliper": (
        lambda: stats.match(labels, x[:, 0, 0], caliper=-1),
        ValueInputError,
        "caliper must be a positive number of standard deviations, got -1; 0.1 is usual",
    ),
    "nothing alike": (
        lambda: stats.match(labels, np.where(labels, 0.0, 9.0) + np.linspace(0, 1, 12)),
        ValueInputError,
        "matching needs samples of both groups that are alike, got none; widen the caliper or use fewer covariates",
    ),
    "axes of recurrence": (
        lambda: stats.recurrence(x[:, 0], labels, rng=rng),
        ShapeError,
        "values must be [sample, mode, head], got 2 axes; put other axes into one",
    ),
    "top of all heads": (
        lambda: stats.recurrence(x, labels, top=2, rng=rng),
        ValueInputError,
        "top must be a whole number from 1 to 1, got 2; with all heads on top nothing can recur",
    ),
    "duplicate ids": (
        lambda: stats.confirmation_split(["a", "b", "a"]),
        ValueInputError,
        "sample ids must differ, got 'a' more than once; name every sample once",
    ),
    "a split of nothing": (
        lambda: stats.confirmation_split(["a"]),
        ValueInputError,
        "a split needs samples on both sides, got ",
    ),
    "a fraction": (
        lambda: stats.confirmation_split(["a", "b"], fraction=1.5),
        ValueInputError,
        "fraction must be between 0 and 1, both excluded, got 1.5; 0.3 is usual",
    ),
    "baselines of other samples": (
        lambda: stats.incremental_auroc(x, labels, baselines=x[:5, 0], rng=rng),
        ValueInputError,
        "baselines must have one row per sample, got 5 for 12 samples; give each sample its own row",
    ),
    "too many folds": (
        lambda: stats.incremental_auroc(x, labels, folds=8, rng=rng),
        ValueInputError,
        "every fold needs samples of both groups, got 8 folds for 5 and 7 clusters with them; use fewer folds or more",
    ),
    "one category": (
        lambda: stats.cohens_kappa(["a", "a"], ["a", "a"]),
        ValueInputError,
        "agreement beyond chance needs two categories, got only 'a'; label samples of both kinds",
    ),
    "scorers of other samples": (
        lambda: stats.cohens_kappa(["a", "b"], ["a"]),
        ShapeError,
        "both scorers must label the same samples, got [2] and [1] labels; leave out samples that one of them skipped",
    ),
    "a rate of noise": (
        lambda: stats.label_noise(lambda _: stats.verdict(found, margin=1), labels, rates=(2,), rng=rng),
        ValueInputError,
        "each of rates must be between 0 and 1, both excluded, got 2; 0.1 is usual",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_sentence(name: str) -> None:
    call, kind, text = CASES[name]
    with pytest.raises(kind, match=re.escape(text)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_too_many_pairs_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softgap.stats.matching._PAIRS", 34)
    with pytest.raises(UnsupportedError, match="at most 34, got 35; use method 'coarsened'"):
        stats.match(labels, x[:, 0, 0])


def test_a_study_too_small_for_its_alpha_says_so() -> None:
    """Twenty relabellings cannot reach p = 0.01, and the verdict does not pretend."""
    small = stats.compare_table(x, labels, alpha=0.01, permutations=20, rng=rng)
    assert small.critical == np.inf
    verdict = stats.verdict(small, margin=0.5)
    assert verdict.outcome == "not enough data"
    assert "could find no effect at all" in verdict.sentence
    assert verdict.caution == ""


def step(name: str, p: float, *, able: bool, convincing: bool) -> stats.VerdictStep:
    return stats.VerdictStep(name, able, convincing, p, 0.4 if able else 1.3, 0.9, 0.95, ())


@pytest.mark.parametrize(
    ("outcome", "steps", "words"),
    [
        ("separated", [step("all samples", 0.001, able=True, convincing=True)], ""),
        ("not separated", [step("all samples", 0.3, able=True, convincing=False)], ""),
        (
            "not enough data",
            [step("all samples", 0.012, able=False, convincing=False)],
            "p = 0.012 in all samples looks significant, but only effects from 1.30 on can be found in all samples, so "
            "that a difference counts only if the interval of a single unit lies beyond 0.5; none does.",
        ),
        (
            "not separated",
            [
                step("all samples", 0.001, able=True, convincing=True),
                step("length matched", 0.4, able=True, convincing=False),
            ],
            "p = 0.001 in all samples looks significant, but length matched could have found such a difference and did "
            "not (p = 0.4).",
        ),
        (
            "not separated",
            [step("all samples", 0.001, able=True, convincing=True)],
            "p = 0.001 in all samples looks significant, but it counts only if every control that was asked for finds "
            "the same units.",
        ),
    ],
)
def test_a_small_p_that_does_not_count_is_explained(outcome: str, steps: list[stats.VerdictStep], words: str) -> None:
    verdict = stats.Verdict(outcome, "The verdict.", tuple(steps), (), 0.5, 0.05)
    assert verdict.caution == words
    assert str(verdict).splitlines()[:2] == ["The verdict.", words or str(steps[0])]

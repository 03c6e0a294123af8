"""Simulated studies with known truth: what is not there is not found, and what is there is.

Each simulation has a fast version and, marked slow, one with enough studies to see a few per cent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats as scipy_stats

from softgap import stats
from softgap.stats import Comparison
from support.stats_cases import RNG, confounded, heads, labels_of, length_confound, planted, questions, randomised

DESIGNS = ["samples", "strata", "between", "within", "whole"]
PERMUTATIONS = 99
many = pytest.param(3000, marks=pytest.mark.slow)


def null_study(kind: str, rng: np.random.Generator, units: int = 8) -> Comparison:
    """A study without any effect, compared the way ``kind`` says."""
    if kind == "samples":
        return stats.compare_table(heads(rng, 24, units), labels_of(rng, 24, 9), permutations=PERMUTATIONS, rng=rng)
    if kind == "strata":
        stratum = rng.integers(0, 3, 36)
        labels = rng.random(36) < np.array([0.2, 0.5, 0.8])[stratum]
        x = heads(rng, 36, units) + stratum[:, None]
        return stats.compare_table(x, labels, strata={"difficulty": stratum}, permutations=PERMUTATIONS, rng=rng)
    x, labels, clusters = questions(rng, 20, 4, units, mixed=kind != "between")
    return stats.compare_table(x, labels, clusters=clusters, exchange=kind, permutations=PERMUTATIONS, rng=rng)


def above(nominal: float, studies: int, errors: float = 3.5) -> float:
    """A rate that chance exceeds once in thousands of tests."""
    return nominal + errors * math.sqrt(nominal * (1 - nominal) / studies)


@pytest.mark.parametrize("studies", [150, many])
@pytest.mark.parametrize("kind", DESIGNS)
def test_p_values_of_the_null_are_uniform(kind: str, studies: int) -> None:
    rng = RNG(DESIGNS.index(kind))
    found = [null_study(kind, rng) for _ in range(studies)]
    every = {
        "unit": [float(x.p[0]) for x in found],
        "max-T": [x.maximum.p for x in found],
        "mean t": [x.omnibus.mean_t.p for x in found],
        "any": [x.omnibus.any.p for x in found],
    }
    for name, p in every.items():
        # Values of the smallest p are few and tie: "any" may be conservative, never liberal.
        side: Literal["greater", "two-sided"] = "greater" if name == "any" else "two-sided"
        test = scipy_stats.kstest(randomised(p, PERMUTATIONS, rng), "uniform", alternative=side)
        assert test.pvalue > 1e-3, name
    wrong = np.mean([(x.p_max <= 0.05).any() for x in found])
    assert wrong <= above(0.05, studies)


def test_unequal_spread_in_unequal_groups_is_no_difference() -> None:
    """The smaller group has three times the spread: a difference of means that is not studentised fails here."""
    rng = RNG(10)
    x = np.concatenate([3 * rng.standard_normal((40, 2000)), rng.standard_normal((160, 2000))])
    labels = np.arange(200) < 40
    found = stats.compare_table(x, labels, permutations=499, rng=rng)
    assert (found.p <= 0.05).mean() <= above(0.05, 2000)
    drawn = np.stack([labels, *(rng.permutation(labels) for _ in range(199))])
    plain = np.abs(drawn @ x / 40 - ~drawn @ x / 160)
    assert ((plain >= plain[0]).mean(axis=0) <= 0.05).mean() > 0.2


def family_wise(
    study: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]], studies: int, seed: int
) -> tuple[float, float]:
    """Share of null studies that max-T, and the test for any difference, call significant at 0.05."""
    rng = RNG(seed)
    found = [stats.compare_table(*study(rng), permutations=PERMUTATIONS, rng=rng) for _ in range(studies)]
    return float(np.mean([x.maximum.p <= 0.05 for x in found])), float(
        np.mean([x.omnibus.any.p <= 0.05 for x in found])
    )


@pytest.mark.parametrize("studies", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [(15, 45), (16, 64), (20, 30)])
def test_unequal_spread_in_small_groups_keeps_the_family_wise_error(sizes: tuple[int, int], studies: int) -> None:
    """Plain studentised permutation calls too many of these; docs/stats.md cites the slow version."""

    def study(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        x = rng.standard_normal((sum(sizes), 30))
        x[: sizes[0]] *= 3
        return x, np.arange(sum(sizes)) < sizes[0]

    largest, any_difference = family_wise(study, studies, 11)
    say(f"{sizes[0]} against {sizes[1]}, three times the spread", studies, largest, any_difference)
    assert largest <= above(0.05, studies)
    assert any_difference <= above(0.05, studies)


@pytest.mark.parametrize("studies", [150, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first", [15, 30])
def test_rounded_data_keep_the_family_wise_error(first: int, studies: int) -> None:
    def study(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return np.round(rng.standard_normal((60, 30))), labels_of(rng, 60, first)

    largest, any_difference = family_wise(study, studies, 12)
    say(f"rounded, {first} of 60", studies, largest, any_difference)
    assert largest <= above(0.05, studies)
    assert any_difference <= above(0.05, studies)


def controlled_verdict(kind: str, rng: np.random.Generator, samples: int) -> tuple[stats.Verdict, bool]:
    """The verdict on a confounded null study under the joint control, in explored and in confirmed samples."""
    x, labels, confounders, hard = confounded(rng, samples, kind)

    def compared(rows: np.ndarray, joint: bool) -> Comparison:
        options: dict[str, Any] = {}
        if joint:
            given = {name: values[rows] for name, values in confounders.items()}
            control = stats.joint_control(labels[rows], given, strata=hard[rows])
            rows, options = rows[control.indices], {"strata": control.stratum, "covariates": control.covariates}
        return stats.compare_table(x[rows], labels[rows], permutations=PERMUTATIONS, rng=rng, **options)

    explored, confirmed = np.arange(samples) < 0.6 * samples, np.arange(samples) >= 0.6 * samples
    first = compared(np.flatnonzero(explored), joint=False)
    control = compared(np.flatnonzero(explored), joint=True)
    controls = {"joint": control, "confirmation": compared(np.flatnonzero(confirmed), joint=True)}
    alone = stats.verdict(first, margin=1.0, controls={"joint": control}, joint=("joint",))
    return alone, stats.verdict(first, margin=1.0, controls=controls, joint=tuple(controls)).outcome == "separated"


@pytest.mark.parametrize("studies", [20, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("samples", [800, pytest.param(1200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["two", "three", "skewed", "noisy copy"])
def test_confounders_are_called_an_effect_at_most_at_the_nominal_rate(kind: str, samples: int, studies: int) -> None:
    """Under one joint control, before the confirmation and after it."""
    rng = RNG(["two", "three", "skewed", "noisy copy"].index(kind))
    found = [controlled_verdict(kind, rng, samples) for _ in range(studies)]
    assert np.mean([alone.steps[0].convincing for alone, _ in found]) > 0.9, "the confounders are strong"
    explored = float(np.mean([alone.outcome == "separated" for alone, _ in found]))
    confirmed = float(np.mean([confirmed for _, confirmed in found]))
    say(f"{kind} confounded, {samples} samples: separated when explored, and confirmed", studies, explored, confirmed)
    assert explored <= above(0.05, studies)
    assert confirmed <= above(0.05, studies)


def test_a_difference_that_recurs_in_other_units_has_its_own_sentence() -> None:
    """Without a joint control, a confirmation in which none of the units is found again does not confirm."""
    x, labels = planted(21, 400, 40, {3: 1.0})
    y, others = planted(22, 400, 40, {30: 1.0})
    first = stats.compare_table(x, labels, permutations=199, rng=RNG(1))
    again = stats.compare_table(y, others, permutations=199, rng=RNG(2))
    found = stats.verdict(first, margin=0.6, controls={"confirmation": again})
    assert found.outcome == "not separated"
    assert found.sentence == (
        "Not separated: confirmation differs as a whole (p = 0.01), but not in the 1 unit found in all samples."
    )
    joint = stats.verdict(first, margin=0.6, controls={"confirmation": again}, joint=("confirmation",))
    assert joint.outcome == "separated"
    assert joint.units == ()


@pytest.mark.parametrize("studies", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_nine_looks_at_a_ninth_of_alpha_keep_the_error(studies: int) -> None:
    """Each look at alpha would find something in nearly a fifth of all null studies."""
    rng = RNG(31)
    spent, unspent = [], []
    for _ in range(studies):
        x, labels = heads(rng, 180, 10), rng.random(180) < 0.5
        p = [
            stats.compare_table(x[:n], labels[:n], permutations=999, rng=rng).omnibus.any.p for n in range(20, 181, 20)
        ]
        spent.append(min(p) <= 0.05 / 9)
        unspent.append(min(p) <= 0.05)
    say("nine looks, alpha spent, and not", studies, float(np.mean(spent)), float(np.mean(unspent)))
    assert np.mean(spent) <= above(0.05, studies)
    assert np.mean(unspent) > 0.08


def say(what: str, studies: int, *rates: float) -> None:
    """Print rates with their exact 95 % intervals: the statistics page quotes them."""
    for rate in rates:
        interval = scipy_stats.binomtest(round(rate * studies), studies).proportion_ci()
        print(f"{what}: {rate:.3f} ({interval.low:.3f} to {interval.high:.3f}) of {studies}")  # noqa: T201


def test_five_heads_of_270_are_found() -> None:
    effects = {7: 0.8, 60: -0.8, 133: 0.7, 200: 0.9, 269: -0.7}
    x, labels = planted(0, 400, 270, effects)
    found = stats.compare_table(x.reshape(400, 30, 9), labels, permutations=1999, rng=RNG(1))
    assert {9 * layer + head for layer, head in found.significant_units()} == set(effects)
    for unit, effect in effects.items():
        where = divmod(unit, 9)
        assert found.contrast.low[where] < effect < found.contrast.high[where]
    assert stats.verdict(found, margin=0.5).outcome == "separated"


def test_many_small_effects_are_seen_together_where_none_is_by_itself() -> None:
    x, labels = planted(3, 120, 270, dict.fromkeys(range(270), 0.12), common=0.02)
    found = stats.compare_table(x, labels, permutations=999, rng=RNG(2))
    assert found.omnibus.mean_t.p <= 0.002
    assert found.omnibus.asymmetry.p <= 0.002
    assert found.omnibus.any.p <= 0.01
    assert found.p_max.min() > 0.05


def test_effects_of_both_signs_are_seen_by_higher_criticism() -> None:
    effects = {unit: 0.3 * (-1) ** unit for unit in range(120)}
    x, labels = planted(4, 120, 270, effects, common=0.02)
    found = stats.compare_table(x, labels, permutations=999, rng=RNG(3))
    assert found.omnibus.criticism.p <= 0.01
    assert found.omnibus.mean_t.p > 0.05


def matched_study(seed: int, samples: int, units: int) -> tuple[Comparison, Comparison, stats.MatchedSamples]:
    x, labels, length = length_confound(seed, samples, units)
    rng = RNG(seed)
    before = stats.compare_table(x, labels, permutations=199, rng=rng)
    like = stats.match(labels, np.log(length), caliper=0.1)
    kept = like.indices
    after = stats.compare_table(x[kept], labels[kept], strata=like.stratum, permutations=199, rng=rng)
    return before, after, like


def test_a_length_confound_is_separated_before_matching_and_not_after() -> None:
    before, after, like = matched_study(5, 1200, 40)
    assert abs(like.before[0]) > 0.8
    assert like.imbalance < 0.02
    assert stats.verdict(before, margin=0.5).outcome == "separated"
    verdict = stats.verdict(before, margin=0.5, controls={"length matched": after})
    assert verdict.outcome == "not separated"
    assert verdict.sentence.startswith("Not separated: length matched could have found an effect of 0.5")


@pytest.mark.parametrize("studies", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_after_matching_a_length_confound_is_called_at_the_nominal_rate(studies: int) -> None:
    found = [matched_study(100 + i, 300, 6) for i in range(studies)]
    assert np.mean([before.omnibus.any.p <= 0.05 for before, _, _ in found]) > 0.9
    assert np.mean([after.omnibus.any.p <= 0.05 for _, after, _ in found]) <= above(0.05, studies)


def test_an_effect_beyond_length_survives_matching() -> None:
    x, labels, length = length_confound(6, 1200, 40)
    x[labels, 3] += 0.8
    like = stats.match(labels, np.log(length), caliper=0.1)
    rng = RNG(7)
    before = stats.compare_table(x, labels, permutations=499, rng=rng)
    after = stats.compare_table(x[like.indices], labels[like.indices], strata=like.stratum, permutations=499, rng=rng)
    verdict = stats.verdict(before, margin=0.5, controls={"length matched": after})
    assert (verdict.outcome, verdict.units) == ("separated", ((3,),))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("studies", [60, pytest.param(600, marks=pytest.mark.slow)])
def test_repeated_questions_inflate_nothing(mixed: bool, studies: int) -> None:
    """Answers to one question resemble each other in label and value: taken as independent, they find effects."""
    rng = RNG(20 + mixed)
    naive, honest = [], []
    for _ in range(studies):
        x, labels, clusters = questions(rng, 24, 6, 4, mixed=mixed)
        naive.append(stats.compare_table(x, labels, permutations=PERMUTATIONS, rng=rng).maximum.p <= 0.05)
        found = stats.compare_table(x, labels, clusters=clusters, permutations=PERMUTATIONS, rng=rng)
        honest.append(found.maximum.p <= 0.05)
    assert np.mean(naive) > 0.15
    assert np.mean(honest) <= above(0.05, studies)


@pytest.mark.parametrize("draws", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_forty_of_a_null_of_four_hundred_are_not_enough(draws: int) -> None:
    x, labels = planted(8, 400, 270, {})
    rng = RNG(9)
    whole = stats.verdict(stats.compare_table(x, labels, permutations=999, rng=rng), margin=0.5)
    assert whole.outcome == "not separated"
    outcomes, tempting = [], 0
    for _ in range(draws):
        some = np.concatenate([rng.choice(np.flatnonzero(side), 20, replace=False) for side in (labels, ~labels)])
        small = stats.compare_table(x[some], labels[some], permutations=199, rng=rng)
        tempting += bool((small.p <= 0.05).any())
        outcomes.append(stats.verdict(small, margin=0.5).outcome)
    assert tempting > draws / 2, "single heads look like findings in most of them"
    assert set(outcomes) == {"not enough data"}


def test_a_large_effect_is_believed_in_a_small_study() -> None:
    x, labels = planted(11, 40, 270, {17: 4.0})
    found = stats.verdict(stats.compare_table(x, labels, permutations=999, rng=RNG(12)), margin=0.5)
    assert (found.outcome, found.units) == ("separated", ((17,),))
    assert not found.steps[0].able


@pytest.mark.parametrize("studies", [80, pytest.param(600, marks=pytest.mark.slow)])
def test_the_smallest_detectable_effect_is_detected_as_often_as_said(studies: int) -> None:
    rng = RNG(13)

    def study(effect: float, permutations: int) -> Comparison:
        x, labels = rng.standard_normal((60, 20)), labels_of(rng, 60, 30)
        x[labels, 4] += effect
        return stats.compare_table(x, labels, permutations=permutations, rng=rng)

    # One study's answer hangs on its own 999 relabellings, by about 1 % of power.
    said = np.mean([study(0, 999).power.smallest for _ in range(10)])
    hits = [study(float(said), 199).p_max[4] <= 0.05 for _ in range(studies)]
    assert np.mean(hits) == pytest.approx(0.8, abs=3.5 * np.sqrt(0.16 / studies))


@pytest.mark.parametrize("studies", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_intervals_cover(studies: int) -> None:
    rng = RNG(15)
    truth = 0.7
    a, b = rng.standard_normal((14, studies)) + truth, rng.standard_normal((25, studies))
    slack = 3.5 * np.sqrt(0.05 * 0.95 / studies)
    g = stats.hedges_g(a, b)
    assert ((g.low <= truth) & (truth <= g.high)).mean() == pytest.approx(0.95, abs=slack)
    assert g.value.mean() == pytest.approx(truth, abs=4 * g.value.std() / np.sqrt(studies))
    effect = stats.contrast_table(np.concatenate([3 * a, b]), np.arange(39) < 14)
    assert ((effect.low <= 3 * truth) & (3 * truth <= effect.high)).mean() == pytest.approx(0.95, abs=slack + 0.01)
    area = stats.auroc(a, b)
    expected = scipy_stats.norm.cdf(truth / np.sqrt(2))
    assert ((area.low <= expected) & (expected <= area.high)).mean() == pytest.approx(0.95, abs=slack + 0.015)


def test_the_bootstrap_of_g_keeps_clusters_together() -> None:
    """Every sample four times over says no more than once; only the cluster interval knows."""
    rng = RNG(16)
    a, b = rng.standard_normal(40) + 0.5, rng.standard_normal(40)
    once = stats.hedges_g(a, b, rng=RNG(17))
    again = stats.hedges_g(np.repeat(a, 4), np.repeat(b, 4), clusters=np.repeat(np.arange(80), 4), rng=RNG(17))
    naive = stats.hedges_g(np.repeat(a, 4), np.repeat(b, 4), rng=RNG(17))
    assert again.high - again.low == pytest.approx(once.high - once.low, rel=0.1)
    assert naive.high - naive.low < 0.6 * (once.high - once.low)
    exact = stats.hedges_g(a, b)
    assert once.high - once.low == pytest.approx(exact.high - exact.low, rel=0.2)


def test_the_bootstrap_of_the_auroc_keeps_clusters_together() -> None:
    rng = RNG(18)
    a, b = rng.standard_normal(50) + 0.7, rng.standard_normal(50)
    once = stats.auroc(a, b)
    again = stats.auroc(np.repeat(a, 4), np.repeat(b, 4), clusters=np.repeat(np.arange(100), 4), rng=rng)
    naive = stats.auroc(np.repeat(a, 4), np.repeat(b, 4))
    assert again.standard_error == pytest.approx(once.standard_error, rel=0.15)
    assert naive.standard_error < 0.6 * once.standard_error


def test_a_perfect_auroc_is_not_certain() -> None:
    found = stats.auroc(np.arange(10.0) + 100, np.arange(20.0))
    assert found.value == found.high == 1
    assert found.low == pytest.approx(0.025 ** (1 / 10))
    mirrored = stats.auroc(np.arange(20.0), np.arange(10.0) + 100)
    assert mirrored.low == mirrored.value == 0
    assert mirrored.high == pytest.approx(1 - 0.025 ** (1 / 10))

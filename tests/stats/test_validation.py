"""Matching, nested cross-validation, recurrence, splits and label noise, on data whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from softgap import stats
from softgap.stats.design import cluster_folds
from support.stats_cases import RNG, heads, labels_of, length_confound, planted, questions


def test_pairs_are_one_of_each_group_and_near() -> None:
    _, labels, length = length_confound(0, 300, 1)
    like = stats.match(labels, length, caliper=0.05)
    within = np.sqrt(np.mean([length[side].var() for side in (labels, ~labels)]))
    for pair in np.unique(like.stratum):
        members = like.indices[like.stratum == pair]
        assert sorted(labels[members]) == [False, True]
        assert np.ptp(length[members]) <= 0.052 * within
    assert len(like.indices) + like.dropped == 300
    assert like.imbalance < 0.03 < abs(like.before[0])


def test_as_many_pairs_as_possible_are_made() -> None:
    """Nearest first would take 1.0 for 0.95 and leave 0.9 without a partner."""
    like = stats.match([1, 1, 1, 0, 0, 0], [0.95, 0.9, 5.0, 1.0, 1.05, 5.0], caliper=0.06)
    assert sorted(like.indices.tolist()) == [0, 1, 2, 3, 4, 5]


def test_several_covariates_are_matched_together() -> None:
    rng = RNG(1)
    labels = labels_of(rng, 400, 150)
    on = rng.standard_normal((400, 2)) + 0.5 * labels[:, None]
    like = stats.match(labels, on, caliper=0.3)
    first, second = (like.indices[labels[like.indices] == side] for side in (True, False))
    order = [np.argsort(like.stratum[labels[like.indices] == side]) for side in (True, False)]
    apart = np.abs(on[first[order[0]]] - on[second[order[1]]])
    assert apart.max() < 0.32 * 1.1
    assert like.after.shape == (2,)


def test_bins_keep_more_and_balance_less() -> None:
    _, labels, length = length_confound(2, 400, 1)
    pairs, bins = stats.match(labels, length), stats.match(labels, length, method="coarsened", bins=8)
    assert bins.dropped < pairs.dropped
    assert pairs.imbalance < bins.imbalance < 0.5 * abs(bins.before[0])


@pytest.mark.parametrize("mixed", [False, True])
def test_matching_respects_clusters(mixed: bool) -> None:
    rng = RNG(3)
    x, labels, clusters = questions(rng, 60, 4, 3, mixed=mixed)
    length = 50 + 5 * rng.standard_normal(240) + 3 * labels
    like = stats.match(labels, length, clusters=clusters, caliper=0.5)
    kept = like.indices
    if mixed:
        for pair in np.unique(like.stratum):
            assert len(set(clusters[kept[like.stratum == pair]])) == 1
    else:
        for cluster in np.unique(clusters[kept]):
            assert (clusters[kept] == cluster).sum() == 4
            assert len(set(like.stratum[clusters[kept] == cluster])) == 1
    found = stats.compare_table(
        x[kept], labels[kept], clusters=clusters[kept], strata=like.stratum, permutations=99, rng=rng
    )
    assert found.contrast.kind == ("within" if mixed else "between")
    assert found.contrast.dropped == 0


@pytest.mark.parametrize("size", [1, 5])
def test_folds_keep_clusters_and_balance_labels(size: int) -> None:
    _, labels, clusters = questions(RNG(4), 40, size, 1, mixed=size > 1)
    fold = cluster_folds(labels, clusters, 5, RNG(5))
    for cluster in range(40):
        assert len(set(fold[clusters == cluster])) == 1
    counts = np.array([[(labels & (fold == f)).sum(), (~labels & (fold == f)).sum()] for f in range(5)])
    assert (np.ptp(counts, axis=0) <= 2 * size).all()


def with_baseline(seed: int, samples: int = 240, units: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heads of noise, labels that follow a baseline, and two baselines of which the first is that."""
    rng = RNG(seed)
    baselines = rng.standard_normal((samples, 2)) * np.array([10, 0.1]) + 100
    labels = rng.random(samples) < 1 / (1 + np.exp(-(baselines[:, 0] - 100) / 10))
    return heads(rng, samples, units, 0.2), labels, baselines


def test_heads_of_noise_add_nothing_to_baselines() -> None:
    x, labels, baselines = with_baseline(6)
    found = stats.incremental_auroc(x, labels, baselines=baselines, permutations=39, rng=RNG(7))
    assert found.baseline.value == pytest.approx(0.75, abs=0.07)
    assert abs(found.difference.value) < 0.04
    assert found.null.p > 0.05
    assert found.difference.low <= found.difference.value <= found.difference.high


def test_heads_that_follow_a_baseline_add_nothing_to_it() -> None:
    """Every head tells the groups apart, and none says more than the baseline."""
    x, labels, baselines = with_baseline(8)
    x = x + 0.1 * (baselines[:, :1] - 100)
    alone = stats.incremental_auroc(x, labels, permutations=19, rng=RNG(9))
    beside = stats.incremental_auroc(x, labels, baselines=baselines, permutations=39, rng=RNG(9))
    assert alone.null.p == pytest.approx(1 / 20)
    assert alone.baseline.value == 0.5
    assert beside.null.p > 0.05
    assert beside.difference.low < 0.01


def test_a_head_that_knows_more_is_found() -> None:
    x, labels, baselines = with_baseline(10)
    x[labels, 12] += 1.0
    found = stats.incremental_auroc(x, labels, baselines=baselines, permutations=39, rng=RNG(11))
    assert found.null.p == pytest.approx(1 / 40)
    assert found.difference.low > 0.02
    assert found.fold_counts[12] == 5
    assert found.combined.value > found.baseline.value


@pytest.mark.parametrize("studies", [12, pytest.param(150, marks=pytest.mark.slow)])
def test_selection_inside_the_permutations_is_honest(studies: int) -> None:
    p = []
    for i in range(studies):
        x, labels, baselines = with_baseline(50 + i, 90, 12)
        p.append(stats.incremental_auroc(x, labels, baselines=baselines, permutations=19, folds=3, rng=RNG(i)).null.p)
    assert np.mean(np.asarray(p) <= 0.1) <= 0.1 + 3.5 * np.sqrt(0.09 / studies)


def test_folds_that_divide_clusters_would_inflate() -> None:
    """Heads that know the question know its label, and nothing about the labels of other questions."""
    x, labels, clusters = questions(RNG(12), 40, 6, 40, mixed=False, share=0.9)
    leaking = stats.incremental_auroc(x, labels, sizes=(16, 40), permutations=19, rng=RNG(13))
    honest = stats.incremental_auroc(x, labels, clusters=clusters, sizes=(16, 40), permutations=19, rng=RNG(13))
    assert leaking.combined.value > 0.7
    assert honest.combined.value < 0.65
    assert honest.null.p > 0.05
    assert honest.difference.method == "cluster bootstrap"


def modes(seed: int, samples: int, resemblance: float, effects: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Four modes of 40 heads [sample, mode, head] that resemble each other."""
    x, labels = planted(seed, samples, 40, effects, common=0.0)
    noise = RNG(seed + 1000).standard_normal((samples, 4, 40))
    return np.sqrt(resemblance) * x[:, None] + np.sqrt(1 - resemblance) * noise, labels


def test_heads_that_recur_by_effect_are_told_from_those_by_resemblance() -> None:
    x, labels = modes(14, 100, 0.8, {})
    chance = stats.recurrence(x, labels, top=4, permutations=299, rng=RNG(15))
    assert chance.counts.sum() == 16
    assert chance.p_recurring.min() > 0.05
    assert chance.recurring[1] >= 2, "modes resemble each other, so heads recur without any effect"
    x, labels = modes(16, 100, 0.2, {3: 2.5, 30: -2.5})
    real = stats.recurrence(x, labels, top=4, permutations=299, rng=RNG(17))
    assert set(np.flatnonzero(real.counts == 4)) >= {3, 30}
    assert real.p_head[3] < 0.05
    assert real.p_recurring[3] < 0.05


@pytest.mark.parametrize("studies", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_recurrence_by_resemblance_is_not_significant(studies: int) -> None:
    p = []
    for i in range(studies):
        x, labels = modes(200 + i, 30, 0.7, {})
        p.append(stats.recurrence(x, labels, top=4, permutations=59, rng=RNG(i)).p_recurring)
    for least in range(4):
        wrong = np.mean(np.array(p)[:, least] <= 0.05)
        assert wrong <= 0.05 + 3.5 * np.sqrt(0.05 * 0.95 / studies)


def test_the_split_is_that_of_the_ids() -> None:
    ids = [f"q{i}" for i in range(500)]
    split = stats.confirmation_split(ids, fraction=0.3, salt="2026")
    assert split.confirmation.mean() == pytest.approx(0.3, abs=0.06)
    order = RNG(18).permutation(500)
    shuffled = stats.confirmation_split([ids[i] for i in order], fraction=0.3, salt="2026")
    np.testing.assert_array_equal(shuffled.confirmation, split.confirmation[order])
    assert shuffled.hash == split.hash
    more = stats.confirmation_split([*ids, "late"], fraction=0.3, salt="2026")
    np.testing.assert_array_equal(more.confirmation[:500], split.confirmation)
    assert more.hash != split.hash
    others = [
        stats.confirmation_split(ids, fraction=0.3, salt="2027"),
        stats.confirmation_split(ids, fraction=0.31, salt="2026"),
    ]
    assert len({split.hash, *(other.hash for other in others)}) == 3
    assert (others[0].confirmation != split.confirmation).any()


def test_the_split_is_the_same_on_every_machine() -> None:
    """Written down once: a change here reopens every confirmation split that anyone has locked."""
    split = stats.confirmation_split(["a", "b", "c", "d"], fraction=0.5, salt="s")
    assert (split.confirmation.tolist(), split.hash[:16]) == ([False, True, False, True], "766ecba6f0db1b7b")


def test_the_split_keeps_questions_together() -> None:
    ids, questions_of = [f"s{i}" for i in range(200)], [f"q{i // 4}" for i in range(200)]
    split = stats.confirmation_split(ids, clusters=questions_of)
    assert all(len(set(split.confirmation[i : i + 4])) == 1 for i in range(0, 200, 4))


def test_wrong_labels_dilute_a_finding() -> None:
    x, labels = planted(19, 160, 20, {2: 1.0})

    def judge(flipped: np.ndarray) -> stats.Verdict:
        return stats.verdict(stats.compare_table(x, flipped, permutations=199, rng=RNG(1)), margin=0.8)

    found = stats.label_noise(judge, labels, rates=(0.01, 0.4), draws=8, rng=RNG(20))
    assert found.share("separated")[0] == 1
    assert found.replication_rate[0] == 1
    assert found.share("separated")[1] < 0.7
    np.testing.assert_allclose(sum(found.share(outcome) for outcome in stats.OUTCOMES), 1)
    assert np.median(found.p[1]) > np.median(found.p[0])
    assert found.p.shape == (2, 8)


def test_labels_are_flipped_at_their_rate_and_with_their_question() -> None:
    x, labels = planted(19, 400, 2, {1: 2.0})
    question = np.arange(400) // 4
    constant = labels[question * 4]
    verdict = stats.verdict(stats.compare_table(x, labels, permutations=19, rng=RNG(0)), margin=1)
    for clusters, given in ((None, labels), (question, constant), (question, labels)):
        seen: list[np.ndarray] = []

        def judge(flipped: np.ndarray, seen: list[np.ndarray] = seen) -> stats.Verdict:
            seen.append(flipped)
            return verdict

        stats.label_noise(judge, given, rates=(0.1,), draws=40, rng=RNG(3), clusters=clusters)
        np.testing.assert_array_equal(seen[0], given)
        wrong = np.stack(seen[1:]) ^ given
        assert wrong.mean() == pytest.approx(0.1, abs=0.02)
        whole = (wrong.reshape(40, 100, 4).sum(axis=2) % 4 == 0).all()
        assert whole == (given is constant)


def test_a_control_that_cannot_be_made_is_not_convincing() -> None:
    x, labels = planted(21, 60, 10, {1: 1.6})
    found = stats.compare_table(x, labels, permutations=499, rng=RNG(22))
    judged = stats.verdict(found, margin=1.5, impossible={"length matched": "no pairs"})
    assert (judged.outcome, judged.sentence) == (
        "not enough data",
        "Not enough data: the control 'length matched' could not be made (no pairs).",
    )
    # What is not there without the control is not there because of it.
    assert stats.verdict(null_of(x, labels), margin=2, impossible={"a": "b"}).outcome == "not separated"


def test_full_agreement_is_not_certain() -> None:
    found = stats.cohens_kappa(["a", "b"] * 10, ["a", "b"] * 10)
    assert (found.value, found.high, found.standard_error) == (1, 1, 0)
    assert found.low == pytest.approx((0.025 ** (1 / 20) - 0.5) / 0.5)


def test_a_verdict_says_what_it_rests_on() -> None:
    x, labels = planted(21, 60, 10, {1: 1.6})
    found = stats.compare_table(x, labels, permutations=499, rng=RNG(22))
    text = str(stats.verdict(found, margin=1.5))
    assert text.splitlines()[0] == "Separated: the groups differ in 1 unit, without any control."
    assert text.splitlines()[1].startswith("all samples: convincing, p = 0.00")
    none = stats.verdict(found, margin=1.5, controls={"shuffled": null_of(x, labels)})
    assert none.outcome == "not separated"


def null_of(x: np.ndarray, labels: np.ndarray) -> stats.Comparison:
    return stats.compare_table(x, RNG(23).permutation(labels), permutations=499, rng=RNG(24))

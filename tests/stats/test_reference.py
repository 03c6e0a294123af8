"""The fast forms against plain loops, scipy and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats as scipy_stats
from sklearn.metrics import cohen_kappa_score, roc_auc_score

from softgap import stats
from softgap.stats import design as designs
from softgap.stats import reference as oracle
from softgap.stats.design import Design, design_of
from softgap.stats.effects import contrast_of
from softgap.stats.permutation import THRESHOLDS, numerator_and_error, statistic_terms, tail_counts
from support.stats_cases import RNG, heads, labels_of, questions

BLOCKS = np.array([0] * 9 + [1] * 5 + [2] * 2 + [3] * 7)


def blocked(seed: int, units: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Heads and labels of unequal blocks, each with both labels."""
    rng = RNG(seed)
    labels = np.array([1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0], bool)
    return heads(rng, len(labels), units) + BLOCKS[:, None], labels


def design_named(kind: str, seed: int = 0) -> Design:
    rng = RNG(seed)
    none = np.zeros(60, np.int64)
    if kind == "samples":
        return design_of(labels_of(rng, 60, 22), None, none)
    if kind == "balanced":
        return design_of(labels_of(rng, 60, 30), None, none)
    if kind == "strata":
        return design_of(labels_of(rng, 60, 22), None, rng.integers(0, 4, 60))
    _, labels, clusters = questions(rng, 15, 4, 1, mixed=kind != "between")
    return design_of(labels, clusters, none, kind)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 9), (40, 17)])
def test_one_block_is_welch(sizes: tuple[int, int]) -> None:
    rng = RNG(0)
    a, b = rng.standard_normal((sizes[0], 4)), 3 * rng.standard_normal((sizes[1], 4)) + 1
    ours = stats.contrast_table(np.concatenate([a, b]), [True] * sizes[0] + [False] * sizes[1])
    theirs = scipy_stats.ttest_ind(a, b, equal_var=False)
    interval = theirs.confidence_interval(0.95)
    np.testing.assert_allclose(ours.t, theirs.statistic, rtol=1e-12)
    np.testing.assert_allclose(ours.df, theirs.df, rtol=1e-12)
    np.testing.assert_allclose(ours.low, interval.low, rtol=1e-10)
    np.testing.assert_allclose(ours.high, interval.high, rtol=1e-10)


def test_pairs_are_the_paired_t() -> None:
    rng = RNG(1)
    before = rng.standard_normal((12, 5))
    after = before + 0.3 * rng.standard_normal((12, 5)) + 0.2
    pair = np.tile(np.arange(12), 2)
    ours = stats.contrast_table(np.concatenate([after, before]), np.arange(24) < 12, strata=pair)
    theirs = scipy_stats.ttest_rel(after, before)
    np.testing.assert_allclose(ours.t, theirs.statistic, rtol=1e-11)
    np.testing.assert_allclose(ours.df, theirs.df, rtol=1e-12)
    np.testing.assert_allclose(ours.low, theirs.confidence_interval(0.95).low, rtol=1e-10)


@pytest.mark.parametrize("seed", range(5))
def test_unequal_blocks_are_the_regression(seed: int) -> None:
    x, labels = blocked(seed)
    ours = stats.contrast_table(x, labels, strata=BLOCKS)
    for unit in range(x.shape[1]):
        effect, error = oracle.reference_coefficient(x[:, unit].tolist(), labels.tolist(), BLOCKS.tolist())
        assert ours.effect[unit] == pytest.approx(effect, rel=1e-11)
        assert ours.standard_error[unit] == pytest.approx(error, rel=1e-11)
        assert ours.t[unit] == pytest.approx(effect / error, rel=1e-11)


@pytest.mark.parametrize("seed", range(5))
def test_covariates_are_those_of_the_regression(seed: int) -> None:
    """One dummy per block, the covariates and the label by least squares, with HC2 from the hat matrix."""
    x, labels = blocked(seed)
    z = RNG(seed + 50).standard_normal((len(x), 3)) + labels[:, None]
    ours = stats.contrast_table(x, labels, strata=BLOCKS, covariates=z)
    dummies = (BLOCKS[:, None] == np.unique(BLOCKS)).astype(float)
    regressors = np.column_stack([labels.astype(float), dummies, z])
    inverse = np.linalg.inv(regressors.T @ regressors)
    leverage = np.einsum("ij,jk,ik->i", regressors, inverse, regressors)
    for unit in range(x.shape[1]):
        beta = inverse @ regressors.T @ x[:, unit]
        squared = (x[:, unit] - regressors @ beta) ** 2 / (1 - leverage)
        variance = inverse @ (regressors.T * squared) @ regressors @ inverse
        assert ours.effect[unit] == pytest.approx(beta[0], rel=1e-9)
        assert ours.standard_error[unit] == pytest.approx(np.sqrt(variance[0, 0]), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_what_covariates_explain_makes_no_difference(seed: int) -> None:
    """Adding any linear function of the covariates, and of the blocks, to the values changes no number."""
    x, labels = blocked(seed, units=6)
    rng = RNG(seed)
    z = rng.standard_normal((len(x), 2)) + labels[:, None]
    added = z @ rng.standard_normal((2, 6)) + rng.standard_normal((4, 6))[BLOCKS]
    options = stats.ComparisonOptions(strata=BLOCKS, covariates=z, permutations=99)
    plain = stats.compare_table(x, labels, rng=RNG(9), **options)
    moved = stats.compare_table(x + 5 * added, labels, rng=RNG(9), **options)
    np.testing.assert_allclose(moved.contrast.t, plain.contrast.t, rtol=1e-8)
    np.testing.assert_allclose(moved.p, plain.p)
    without = stats.compare_table(x + 5 * added, labels, strata=BLOCKS, permutations=99, rng=RNG(9))
    assert np.abs(without.contrast.t - plain.contrast.t).max() > 0.5


def test_clusters_of_one_label_are_their_means() -> None:
    x, labels, clusters = questions(RNG(2), 14, 3, 4, mixed=False)
    means = np.stack([x[clusters == c].mean(axis=0) for c in range(14)])
    of_means = np.array([labels[clusters == c][0] for c in range(14)])
    ours, theirs = stats.contrast_table(x, labels, clusters=clusters), stats.contrast_table(means, of_means)
    np.testing.assert_allclose(ours.t, theirs.t, rtol=1e-12)
    assert (ours.kind, ours.sizes) == ("between", (7, 7))


def test_labels_that_vary_within_clusters_are_compared_there() -> None:
    """Whatever a question adds to all its samples changes nothing, and questions with one label are left out."""
    x, labels, clusters = questions(RNG(3), 30, 4, 4, mixed=True)
    ours = stats.contrast_table(x, labels, clusters=clusters)
    shifted = stats.contrast_table(x + 10 * RNG(4).standard_normal(30)[clusters][:, None], labels, clusters=clusters)
    np.testing.assert_allclose(shifted.t, ours.t, rtol=1e-9)
    pure = [c for c in range(30) if len(set(labels[clusters == c])) == 1]
    assert ours.kind == "within"
    assert ours.dropped == 4 * len(pure) > 0
    kept = ~np.isin(clusters, pure)
    effect, error = oracle.reference_coefficient(x[kept, 0].tolist(), labels[kept].tolist(), clusters[kept].tolist())
    assert (ours.effect[0], ours.standard_error[0]) == pytest.approx((effect, error), rel=1e-10)


@pytest.mark.parametrize("kind", ["samples", "balanced", "strata", "between", "within", "whole"])
def test_relabelled_statistics_are_those_of_the_relabelled_study(kind: str) -> None:
    design = design_named(kind)
    rows = heads(RNG(5), design.rows, 7)
    drawn = design.permuted_labels(20, RNG(6))
    s, root = numerator_and_error(statistic_terms(rows, design), drawn, slice(None))
    for labels, t in zip(drawn.astype(bool), s / root, strict=True):
        again = Design("samples", labels, design.block, design.index, design.starts, design.cluster, 0)
        expected = contrast_of(rows, again, ("a", "b"), (7,), 0.95).t
        np.testing.assert_allclose(t, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["samples", "strata", "between", "within", "whole"])
def test_relabelling_keeps_the_numbers_of_every_block(kind: str) -> None:
    design = design_named(kind)
    drawn = design.permuted_labels(50, RNG(7))
    for block in range(design.blocks):
        where = design.block == block
        assert (drawn[:, where].sum(axis=1) == design.labels[where].sum()).all()
    assert len(np.unique(drawn, axis=0)) > 1


def test_whole_clusters_keep_their_label_vectors() -> None:
    design = design_named("whole")
    vectors = sorted(tuple(design.labels[design.cluster == c]) for c in np.unique(design.cluster))
    for labels in design.permuted_labels(20, RNG(8)):
        assert sorted(tuple(labels[design.cluster == c] > 0) for c in np.unique(design.cluster)) == vectors


def test_rows_change_places_with_whole_clusters() -> None:
    _, labels, clusters = questions(RNG(9), 12, 3, 1, mixed=False)
    order = designs.row_exchange(labels, clusters, RNG(10))
    assert sorted(order) == list(range(36))
    for c in range(12):
        assert len(set(clusters[order[clusters == c]])) == 1
    assert (clusters[order] != clusters).any()


@pytest.mark.parametrize("blocks", [[0] * 9, [0, 0, 0, 0, 1, 1, 1, 1, 1]])
def test_p_values_are_those_of_all_relabellings(blocks: list[int]) -> None:
    """Nine samples have few relabellings, so that the observed one comes back often: ties must count."""
    labels = [True, True, False, False, True, True, False, False, False]
    x = heads(RNG(11), 9, 4) + np.outer(labels, [3.0, 0, 1, -1])
    alone, adjusted = oracle.reference_p_values(x.tolist(), labels, blocks)
    found = stats.compare_table(x, labels, strata=blocks, permutations=20_000, rng=RNG(12))
    np.testing.assert_allclose(found.p, alone, atol=4 * 0.5 / np.sqrt(20_000))
    np.testing.assert_allclose(found.p_max, adjusted, atol=4 * 0.5 / np.sqrt(20_000))
    assert min(alone) < 0.06
    assert found.contrast.arrangements == pytest.approx(len(oracle.reference_permutations(labels, blocks)))


def test_a_perfect_separation_counts_its_own_relabelling() -> None:
    """Without any spread within groups t is a matter of rounding, and still p is the share of relabellings as good."""
    labels = np.arange(8) < 4
    found = stats.compare_table(np.where(labels, 1.0, 0.0), labels, permutations=9999, rng=RNG(0))
    assert found.p == pytest.approx(2 / 70, abs=0.006)


def test_p_of_one_unit_is_scipys() -> None:
    rng = RNG(13)
    a, b = rng.standard_normal(6) + 1, 2 * rng.standard_normal(7)

    def size(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.asarray(np.abs(scipy_stats.ttest_ind(x, y, equal_var=False, axis=axis).statistic))

    exact = scipy_stats.permutation_test((a, b), size, alternative="greater", n_resamples=10_000, vectorized=True)
    assert stats.compare(a, b, permutations=20_000, rng=rng).p == pytest.approx(exact.pvalue, abs=0.012)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = heads(RNG(14), 40, 50), labels_of(RNG(15), 40, 15)
    whole = stats.compare_table(x, labels, permutations=300, rng=RNG(16))
    monkeypatch.setattr("softgap.stats.permutation._UNITS", 7)
    monkeypatch.setattr("softgap.stats.permutation._PERMUTATIONS", 11)
    cut = stats.compare_table(x, labels, permutations=300, rng=RNG(16))
    np.testing.assert_array_equal(cut.p, whole.p)
    np.testing.assert_allclose(cut.maximum.sample, whole.maximum.sample, rtol=1e-5)
    np.testing.assert_allclose(cut.omnibus.mean_t.sample, whole.omnibus.mean_t.sample, atol=1e-5)
    np.testing.assert_allclose(cut.omnibus.criticism.sample, whole.omnibus.criticism.sample, atol=0.3)


def test_units_of_any_shape_are_one_family() -> None:
    x, labels = heads(RNG(17), 30, 24), labels_of(RNG(18), 30, 12)
    flat = stats.compare_table(x, labels, permutations=199, rng=RNG(19))
    shaped = stats.compare_table(x.reshape(30, 2, 3, 4), labels, permutations=199, rng=RNG(19))
    np.testing.assert_array_equal(shaped.p_max, flat.p_max.reshape(2, 3, 4))
    assert shaped.maximum.p == flat.maximum.p == flat.p_max.min()


def test_tails_are_counted() -> None:
    size = np.abs(3 * RNG(20).standard_normal((5, 200)))
    expected = (size[:, None, :] >= THRESHOLDS[:, None]).sum(axis=2)
    np.testing.assert_array_equal(tail_counts(size), expected)


def test_auroc_is_scikit_learns_with_ties() -> None:
    rng = RNG(21)
    a, b = rng.integers(0, 12, (30, 4)) + 1.0, rng.integers(0, 12, (23, 4)).astype(float)
    ours = stats.auroc(a, b)
    labels = np.arange(53) < 30
    for unit in range(4):
        scores = np.concatenate([a, b])[:, unit]
        assert ours.value[unit] == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
        assert ours.standard_error[unit] == pytest.approx(
            oracle.reference_delong(a[:, unit].tolist(), b[:, unit].tolist()), abs=1e-12
        )
    assert ((ours.low < ours.value) & (ours.value < ours.high)).all()


def test_replicates_of_the_auroc_are_areas_of_drawn_samples() -> None:
    rng = RNG(22)
    a, b = rng.integers(0, 9, 8).astype(float), rng.integers(0, 9, 7).astype(float)
    clusters = np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6])
    ours = stats.auroc(a, b, clusters=clusters, replicates=99, rng=RNG(23))
    from softgap.stats.design import bootstrap_weights

    drawn = bootstrap_weights(np.arange(15) < 8, clusters, 99, RNG(23)).astype(int)
    assert ours.sample is not None
    for times, area in zip(drawn, ours.sample, strict=True):
        first, second = np.repeat(a, times[:8]), np.repeat(b, times[8:])
        assert area == pytest.approx(oracle.reference_auroc(first.tolist(), second.tolist()), abs=1e-12)


def test_hedges_g_is_the_formula_and_its_interval_that_of_nct() -> None:
    rng = RNG(24)
    a, b = rng.standard_normal((9, 3)) + np.array([0, 1, -3]), rng.standard_normal((14, 3))
    ours = stats.hedges_g(a, b)
    pooled = np.sqrt((8 * a.var(axis=0, ddof=1) + 13 * b.var(axis=0, ddof=1)) / 21)
    d = (a.mean(axis=0) - b.mean(axis=0)) / pooled
    np.testing.assert_allclose(ours.value, d * (1 - 3 / (4 * 21 - 1)), rtol=1e-3)
    root = np.sqrt(9 * 14 / 23)
    for share, end in ((0.975, ours.low), (0.025, ours.high)):
        np.testing.assert_allclose(scipy_stats.nct.cdf(d * root, 21, end * root), share, atol=1e-9)
    contrast = stats.contrast_table(np.concatenate([a, b]), np.arange(23) < 9)
    np.testing.assert_allclose(contrast.g, ours.value, rtol=1e-12)


def test_kappa_is_scikit_learns() -> None:
    rng = RNG(25)
    one = rng.integers(0, 3, 80)
    other = np.where(rng.random(80) < 0.7, one, rng.integers(0, 3, 80))
    ours = stats.cohens_kappa(one, other)
    assert ours.value == pytest.approx(cohen_kappa_score(one, other), abs=1e-12)
    assert ours.value == pytest.approx(oracle.reference_kappa(one.tolist(), other.tolist()), abs=1e-12)


def test_the_error_of_kappa_is_that_of_repeated_samples() -> None:
    rng = RNG(26)
    share = np.array([[0.15, 0.45], [0.05, 0.35]])  # scorers that differ in how often they say yes
    pairs = np.array([(i, j) for i in range(2) for j in range(2)])
    drawn = [pairs[rng.choice(4, 200, p=share.ravel())] for _ in range(1500)]
    found = [stats.cohens_kappa(x[:, 0], x[:, 1]) for x in drawn]
    assert np.mean([k.standard_error for k in found]) == pytest.approx(np.std([k.value for k in found]), rel=0.07)


def test_equivalence_is_two_shifted_welch_tests() -> None:
    rng = RNG(27)
    a, b = rng.standard_normal(30), 2 * rng.standard_normal(45)
    contrast = stats.contrast_table(np.concatenate([a, b]), np.arange(75) < 30)
    ours = stats.equivalence(contrast, 1.1, standardized=False)
    above = scipy_stats.ttest_ind(a + 1.1, b, equal_var=False, alternative="greater").pvalue
    below = scipy_stats.ttest_ind(a - 1.1, b, equal_var=False, alternative="less").pvalue
    assert ours.p == pytest.approx(max(above, below), rel=1e-10)
    assert stats.equivalence(contrast, ours.bound_all, standardized=False).p == pytest.approx(0.05, rel=1e-9)

"""Laws of the statistics: what changes of sign, scale, label and order may and may not do."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from softgap import stats
from support.stats_cases import RNG, heads

PERMUTATIONS = 99
seeds = st.integers(0, 2**32 - 1)
sizes = st.tuples(st.integers(2, 9), st.integers(2, 9))
few = settings(max_examples=40)


@st.composite
def studies(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Heads, labels, and strata or none."""
    first, second = draw(sizes)
    rng = RNG(draw(seeds))
    labels = rng.permutation(first + second) < first
    x = heads(rng, first + second, draw(st.integers(1, 5)))
    strata = rng.integers(0, 2, first + second) if draw(st.booleans()) else None
    if strata is not None:
        useful = [s for s in (0, 1) if 0 < labels[strata == s].sum() < (strata == s).sum()]
        kept = np.isin(strata, useful)
        assume(min(labels[kept].sum(), (~labels[kept]).sum()) >= 2)
    return x, labels, strata


def compared(x: np.ndarray, labels: np.ndarray, strata: np.ndarray | None) -> stats.Comparison:
    return stats.compare_table(x, labels, strata=strata, permutations=PERMUTATIONS, rng=RNG(0))


def same_p(one: stats.Comparison, other: stats.Comparison) -> None:
    """One relabelling may fall on the other side by rounding."""
    step = 1.01 / (PERMUTATIONS + 1)
    np.testing.assert_allclose(one.p, other.p, atol=step)
    np.testing.assert_allclose(one.p_max, other.p_max, atol=step)
    np.testing.assert_allclose(one.maximum.sample, other.maximum.sample, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(one.omnibus.mean_t.sample, other.omnibus.mean_t.sample, rtol=1e-3, atol=1e-3)


@few
@given(study=studies())
def test_swapped_labels_turn_the_sign_and_nothing_else(study: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
    x, labels, strata = study
    one, other = compared(x, labels, strata), compared(x, ~labels, strata)
    np.testing.assert_allclose(other.effect, -one.effect, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(other.contrast.t, -one.contrast.t, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(other.contrast.low, -one.contrast.high, rtol=1e-9, atol=1e-12)
    same_p(one, other)


@few
@given(study=studies(), factor=st.floats(0.01, 100), shift=st.floats(-100, 100), turned=st.booleans())
def test_affine_maps_change_the_scale_of_the_effect_only(
    study: tuple[np.ndarray, np.ndarray, np.ndarray | None], factor: float, shift: float, turned: bool
) -> None:
    x, labels, strata = study
    factor = -factor if turned else factor
    one, other = compared(x, labels, strata), compared(factor * x + shift, labels, strata)
    np.testing.assert_allclose(other.effect, factor * one.effect, rtol=1e-6, atol=1e-9 * abs(factor))
    np.testing.assert_allclose(other.contrast.t, np.sign(factor) * one.contrast.t, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(other.contrast.g, np.sign(factor) * one.contrast.g, rtol=1e-6, atol=1e-9)
    same_p(one, other)


@few
@given(study=studies())
def test_the_order_of_units_is_theirs(study: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
    x, labels, strata = study
    one, other = compared(x, labels, strata), compared(x[:, ::-1], labels, strata)
    np.testing.assert_allclose(other.contrast.t, one.contrast.t[::-1], rtol=1e-12)
    np.testing.assert_allclose(other.p, one.p[::-1], atol=1.01 / (PERMUTATIONS + 1))
    np.testing.assert_allclose(other.maximum.sample, one.maximum.sample, rtol=1e-4)


@few
@given(study=studies())
def test_what_is_added_to_a_stratum_changes_nothing(study: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
    x, labels, strata = study
    assume(strata is not None)
    assert strata is not None
    one, other = compared(x, labels, strata), compared(x + 7.5 * strata[:, None], labels, strata)
    np.testing.assert_allclose(other.contrast.t, one.contrast.t, rtol=1e-7, atol=1e-9)
    same_p(one, other)


@given(study=studies())
@few
def test_adjusted_p_values_are_never_smaller(study: tuple[np.ndarray, np.ndarray, np.ndarray | None]) -> None:
    found = compared(*study)
    assert (found.p_max >= found.p).all()
    assert (found.q >= found.p - 1e-12).all()
    assert (found.q <= 1).all()
    assert found.omnibus.any.p >= 1 / (PERMUTATIONS + 1)


groups = st.tuples(
    st.lists(st.integers(-20, 20), min_size=2, max_size=15), st.lists(st.integers(-20, 20), min_size=2, max_size=15)
)


@given(pair=groups)
def test_areas_of_swapped_groups_make_one(pair: tuple[list[int], list[int]]) -> None:
    one, other = stats.auroc(*pair), stats.auroc(*pair[::-1])
    np.testing.assert_allclose(one.value + other.value, 1, atol=1e-12)
    np.testing.assert_allclose([one.low + other.high, one.high + other.low], 1, atol=1e-9)


@given(pair=groups)
def test_areas_know_only_the_order(pair: tuple[list[int], list[int]]) -> None:
    a, b = (np.asarray(x, np.float64) for x in pair)
    one, other = stats.auroc(a, b), stats.auroc(np.exp(a / 5) - 3, np.exp(b / 5) - 3)
    np.testing.assert_array_equal(one.value, other.value)
    np.testing.assert_array_equal(one.standard_error, other.standard_error)


@given(seed=seeds, size=sizes, factor=st.floats(0.01, 100), shift=st.floats(-50, 50))
def test_hedges_g_is_free_of_scale_and_turns_with_the_groups(
    seed: int, size: tuple[int, int], factor: float, shift: float
) -> None:
    rng = RNG(seed)
    a, b = (rng.standard_normal(n) for n in size)
    one, scaled, turned = (stats.hedges_g(*pair) for pair in ((a, b), (factor * a + shift, factor * b + shift), (b, a)))
    np.testing.assert_allclose(
        [scaled.value, scaled.low, scaled.high], [one.value, one.low, one.high], rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        [-turned.value, -turned.high, -turned.low], [one.value, one.low, one.high], rtol=1e-6, atol=1e-6
    )


@given(seed=seeds, size=sizes, margins=st.tuples(st.floats(0.01, 3), st.floats(0.01, 3)))
def test_a_wider_margin_is_easier_to_keep(seed: int, size: tuple[int, int], margins: tuple[float, float]) -> None:
    rng = RNG(seed)
    table, labels = rng.standard_normal((sum(size), 3)), np.arange(sum(size)) < size[0]
    contrast = stats.contrast_table(table, labels)
    narrow, wide = (stats.equivalence(contrast, margin) for margin in sorted(margins))
    assert (wide.p <= narrow.p + 1e-12).all()
    np.testing.assert_array_equal(wide.bound, narrow.bound)
    np.testing.assert_array_equal(wide.equivalent, wide.bound <= wide.margin)


@given(seed=seeds, n=st.integers(5, 40), k=st.integers(2, 4))
def test_kappa_is_symmetric_and_free_of_names(seed: int, n: int, k: int) -> None:
    rng = RNG(seed)
    one, other = rng.integers(0, k, n), rng.integers(0, k, n)
    one[:2], other[:2] = (0, 1), (0, 1)
    found, turned = stats.cohens_kappa(one, other), stats.cohens_kappa(other, one)
    named = stats.cohens_kappa([f"label {5 - i}" for i in one], [f"label {5 - i}" for i in other])
    for again in (turned, named):
        np.testing.assert_allclose([again.value, again.standard_error], [found.value, found.standard_error], atol=1e-12)


@given(seed=seeds, size=st.tuples(st.integers(3, 12), st.integers(3, 12)))
def test_pairs_do_not_depend_on_which_group_is_first(seed: int, size: tuple[int, int]) -> None:
    rng = RNG(seed)
    labels, on = np.arange(sum(size)) < size[0], rng.standard_normal(sum(size))
    on[:2], on[-2:] = (0.1, 0.2), (0.15, 0.25)  # two pairs at least
    one, other = (stats.match(y, on, caliper=1.5) for y in (labels, ~labels))
    assert len(one.indices) == len(other.indices)
    np.testing.assert_allclose(np.abs(one.before), np.abs(other.before), rtol=1e-9)

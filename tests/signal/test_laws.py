"""Laws of the ordinal measures, over drawn series, orders, delays and policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softgap import signal
from softgap.signal import reference as oracle

TIGHT = 1e-12
MEASURES = list(signal.MEASURES.values())
# Those that depend on the order of the values and on nothing else.
ORDINAL = [m for m in MEASURES if m is not signal.weighted_permutation_entropy]


@dataclass(frozen=True)
class Case:
    x: np.ndarray
    order: int
    delay: int
    ties: str

    def __call__(self, measure: Callable[..., signal.Entropy], x: np.ndarray | None = None) -> signal.Entropy:
        given = self.x if x is None else x
        return measure(given, self.order, self.delay, ties=self.ties, eligibility=1)


@st.composite
def cases(draw: st.DrawFn, tied: bool = True) -> Case:
    order, delay = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    length = draw(st.integers((order - 1) * delay + 1, 120))
    values = st.integers(-6, 6) if tied and draw(st.booleans()) else st.integers(-(10**6), 10**6)
    x = draw(st.lists(values, min_size=length, max_size=length, unique=not tied))
    return Case(np.array(x, float), order, delay, draw(st.sampled_from(["exclude", "stable"])))


def close(found: np.ndarray, expected: np.ndarray | float, tolerance: float = TIGHT) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@given(case=cases())
def test_patterns_are_those_of_the_reference(case: Case) -> None:
    found = signal.ordinal_patterns(case.x, case.order, case.delay, ties=case.ties)
    ranks = [tuple(signal.pattern_ranks(case.order)[i]) if i >= 0 else None for i in found.index]
    assert ranks == oracle.reference_patterns(case.x.tolist(), case.order, case.delay, case.ties)


@pytest.mark.parametrize("measure", ORDINAL)
@pytest.mark.parametrize("increasing", [np.arctan, lambda x: x**3, lambda x: 1e3 * x - 7, np.cbrt])
@given(case=cases())
@settings(max_examples=25)
def test_strictly_increasing_functions_change_nothing(
    measure: Callable[..., signal.Entropy], increasing: Callable[[np.ndarray], np.ndarray], case: Case
) -> None:
    changed = case(measure, increasing(case.x / 1e3))
    plain = case(measure)
    np.testing.assert_array_equal(changed.value, plain.value)
    np.testing.assert_array_equal(changed.tie_rate, plain.tie_rate)


@given(case=cases(), power=st.integers(-8, 8))
def test_weighted_entropy_ignores_shift_and_unit(case: Case, power: int) -> None:
    plain = case(signal.weighted_permutation_entropy)
    changed = case(signal.weighted_permutation_entropy, case.x * 2.0**power + 3.0)
    close(changed.value, plain.value, 1e-6)
    close(case(signal.weighted_permutation_entropy, case.x * 2.0**power).value, plain.value)


@pytest.mark.parametrize("measure", MEASURES)
@given(case=cases(tied=False))
@settings(max_examples=40)
def test_time_and_value_may_be_turned_round(measure: Callable[..., signal.Entropy], case: Case) -> None:
    plain = case(measure).value
    close(case(measure, case.x[::-1]).value, plain)
    close(case(measure, -case.x).value, plain)


@given(case=cases(tied=False))
def test_reversed_series_have_reversed_patterns(case: Case) -> None:
    found = signal.ordinal_patterns(case.x[::-1].copy(), case.order, case.delay).index[::-1]
    plain = signal.ordinal_patterns(case.x, case.order, case.delay).index
    ranks = signal.pattern_ranks(case.order)
    np.testing.assert_array_equal(ranks[found], ranks[plain][:, ::-1])


@pytest.mark.parametrize("measure", MEASURES)
@given(case=cases())
@settings(max_examples=40)
def test_values_lie_between_zero_and_one(measure: Callable[..., signal.Entropy], case: Case) -> None:
    found = case(measure)
    if found.eligible:
        assert -TIGHT <= found.value <= 1 + TIGHT
    else:
        assert np.isnan(found.value)
    assert 0 <= found.tie_rate <= 1


@given(case=cases())
def test_counts_add_up_and_bound_the_entropy(case: Case) -> None:
    found = signal.pattern_counts(case.x, case.order, case.delay, ties=case.ties, eligibility=1)
    windows = len(case.x) - (case.order - 1) * case.delay
    kept = windows if case.ties == "stable" else round(windows * (1 - float(found.tie_rate)))
    assert found.counts.sum() == found.windows == kept
    entropy = signal.permutation_entropy(
        case.x, case.order, case.delay, ties=case.ties, eligibility=1, normalised=False
    )
    if entropy.eligible:
        assert entropy.value <= math.log((found.counts > 0).sum()) + TIGHT


@given(case=cases(), grid=st.lists(st.floats(0, 60), min_size=2, max_size=5))
def test_renyi_entropy_falls_with_q(case: Case, grid: list[float]) -> None:
    found = signal.renyi_entropy(case.x, sorted(grid), case.order, case.delay, ties=case.ties, eligibility=1)
    if found.eligible:
        assert (np.diff(found.value) <= 1e-10).all()


@given(case=cases())
def test_links_have_the_entropy_of_nodes_and_sources(case: Case) -> None:
    found = signal.transition_entropy(case.x, case.order, case.delay, ties=case.ties, eligibility=1)
    if not found.eligible:
        assert np.isnan([found.link, found.node]).all()
        return
    expected = oracle.reference_transitions(case.x.tolist(), case.order, case.delay, case.ties)
    close(np.array([found.link, found.node]), np.array(expected))
    if case.delay == 1:  # neighbouring windows share all values but one
        assert found.node <= math.log(case.order) + TIGHT


@pytest.mark.parametrize("measure", MEASURES)
@given(
    case=cases(), rows=st.integers(1, 4), lengths=st.lists(st.integers(0, 120), min_size=8, max_size=8), data=st.data()
)
@settings(max_examples=25)
def test_a_ragged_batch_is_a_loop_over_cut_series(
    measure: Callable[..., signal.Entropy], case: Case, rows: int, lengths: list[int], data: st.DataObject
) -> None:
    steps = len(case.x)
    cut = np.minimum(np.array(lengths[: 2 * rows]).reshape(2, rows), steps)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = np.stack([[rng.permutation(case.x) for _ in range(rows)] for _ in range(2)])
    padded = np.where(np.arange(steps) < cut[..., None], x, np.nan)
    found = measure(padded, case.order, case.delay, ties=case.ties, eligibility=1, lengths=cut)
    for at in np.ndindex(2, rows):
        if cut[at] <= (case.order - 1) * case.delay:
            assert (bool(found.eligible[at]), int(found.windows[at])) == (False, 0)
            continue
        alone = case(measure, x[at][: cut[at]])
        np.testing.assert_array_equal(found.value[at], alone.value)
        assert (found.windows[at], found.tie_rate[at]) == (alone.windows, alone.tie_rate)


@given(case=cases(), block=st.integers(1, 130), seed=st.integers(0, 9))
@settings(max_examples=30)
def test_intervals_are_ordered_and_whole_blocks_change_nothing(case: Case, block: int, seed: int) -> None:
    found = signal.entropy_interval(
        case.x,
        case.order,
        case.delay,
        ties=case.ties,
        eligibility=1,
        rng=np.random.default_rng(seed),
        replicates=20,
        block=block,
    )
    if found.eligible:
        assert 0 <= found.low <= found.high <= 1
        if block >= found.windows:  # one block, closed to a circle, is the series itself
            close(found.samples, float(found.value))

"""The ordinal measures against ordpy and antropy, and the places where the definitions differ.

Both libraries rank equal values by appearance, so ties are compared under that policy.
"""

from __future__ import annotations

import math

import antropy
import numpy as np
import ordpy
import pytest

from softgap import signal
from softgap.errors import SoftgapError
from softgap.signal.complexity import plane
from support.signal_cases import series

SERIES = {name: x for name, x in series().items() if name != "integers"}
ALIKE: signal.Options = {"ties": "stable", "eligibility": 1}
TIGHT = 1e-12
Q = [0.0, 0.5, 1.0, 2.0, 5.0]

each_series = pytest.mark.parametrize("name", SERIES)
each_order = pytest.mark.parametrize("order", [3, 4, 5])


def close(found: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=TIGHT)


@each_series
@each_order
@pytest.mark.parametrize("delay", [1, 2])
def test_entropy_is_that_of_both_libraries(name: str, order: int, delay: int) -> None:
    x = SERIES[name]
    found = signal.permutation_entropy(x, order, delay, **ALIKE)
    close(found.value, ordpy.permutation_entropy(x, order, taux=delay))
    close(found.value, antropy.perm_entropy(x, order, delay, normalize=True))
    nats = signal.permutation_entropy(x, order, delay, normalised=False, **ALIKE)
    close(nats.value, antropy.perm_entropy(x, order, delay) * math.log(2))


@each_series
@each_order
def test_other_measures_are_those_of_ordpy(name: str, order: int) -> None:
    x = SERIES[name]
    # ordpy takes variances in the precision of the data, softgap always in float64.
    weighted = ordpy.weighted_permutation_entropy(x.astype(float), order)
    close(signal.weighted_permutation_entropy(x, order, **ALIKE).value, weighted)
    plane = signal.complexity_entropy(x, order, **ALIKE)
    close([plane.entropy, plane.complexity], ordpy.complexity_entropy(x, order))
    close(signal.renyi_entropy(x, Q, order, **ALIKE).value, ordpy.renyi_entropy(x, Q, order))
    fingerprint = signal.renyi_complexity(x, Q, order, **ALIKE)
    close(np.stack([fingerprint.entropy, fingerprint.complexity], -1), ordpy.renyi_complexity_entropy(x, Q, order))
    missing = signal.missing_patterns(x, order, **ALIKE)
    close(missing.fraction, ordpy.missing_patterns(x, order, return_missing=False))


@each_series
@each_order
def test_patterns_are_the_inverse_of_ordpy_s(name: str, order: int) -> None:
    """ordpy writes the permutation that sorts a window, softgap the ranks of its values."""
    found = signal.ordinal_patterns(SERIES[name], order, ties="stable").index
    sorting = np.argsort(signal.pattern_ranks(order)[found], axis=-1)
    np.testing.assert_array_equal(sorting, ordpy.ordinal_sequence(SERIES[name], order))


@each_series
@each_order
def test_node_entropy_weighs_by_links_that_leave_where_ordpy_takes_those_that_arrive(name: str, order: int) -> None:
    x = SERIES[name]
    network = signal.ordinal_network(x, order, ties="stable")
    arriving = np.bincount(network.target, network.count, minlength=network.patterns) / network.count.sum()
    local = np.nan_to_num(network.node_entropies())
    close((arriving * local).sum(), ordpy.global_node_entropy(x, order))
    found = signal.transition_entropy(x, order, **ALIKE)
    largest = math.log(math.factorial(order))
    assert abs(found.node - ordpy.global_node_entropy(x, order)) <= 2 * largest / found.links


@each_series
@each_order
def test_equal_values_are_left_out_unless_asked_for(name: str, order: int) -> None:
    x = SERIES[name]
    plain = signal.permutation_entropy(x, order, eligibility=1)
    same = np.isclose(plain.value, ordpy.permutation_entropy(x, order), rtol=0, atol=TIGHT)
    assert same == (plain.tie_rate == 0)


@pytest.mark.parametrize("order", [3, 4])
@pytest.mark.parametrize("pieces", [1, 4])
def test_bounds_are_those_of_ordpy_at_the_corners(order: int, pieces: int) -> None:
    """ordpy ends every piece of the upper curve at 1 / order!, too early for all but the last, which leaves gaps."""
    bounds = signal.complexity_bounds(order, points=100, per_piece=256)
    least = ordpy.minimum_complexity_entropy(order, size=100)
    close(np.stack([bounds.least_entropy, bounds.least_complexity], -1), least)
    entropy, complexity = ordpy.maximum_complexity_entropy(order, m=pieces).T
    if pieces == 1:
        corners = slice(0, -1, 256)
        close(bounds.greatest_entropy[corners], entropy)
        close(bounds.greatest_complexity[corners], complexity)
    ours = np.interp(entropy, bounds.greatest_entropy, bounds.greatest_complexity)
    np.testing.assert_allclose(complexity, ours, rtol=0, atol=2e-3)


def test_between_the_corners_ordpy_s_upper_curve_is_no_bound() -> None:
    """Two patterns of frequencies 1/4 and 3/4: on our curve, and above their chord, however many points it has."""
    p = np.array([[1, 3, 0, 0, 0, 0]]) / 4
    bounds = signal.complexity_bounds(3, per_piece=256)
    entropy, complexity = (float(value[0]) for value in plane(p))
    ours = np.interp(entropy, bounds.greatest_entropy, bounds.greatest_complexity)
    theirs = np.interp(entropy, *ordpy.maximum_complexity_entropy(3, m=256).T)
    assert complexity == pytest.approx(ours, abs=1e-6)
    assert complexity > theirs + 1e-3


@each_order
def test_one_window_is_a_number_to_the_others_and_none_to_softgap(order: int) -> None:
    x = SERIES["noise"][:order]
    assert ordpy.permutation_entropy(x, order) == 0
    assert antropy.perm_entropy(x, order, normalize=True) == 0
    found = signal.permutation_entropy(x, order)
    assert (bool(found.eligible), int(found.windows), bool(np.isnan(found.value))) == (False, 1, True)


@each_order
def test_variances_are_taken_in_float64_where_ordpy_takes_those_of_the_data(order: int) -> None:
    x = SERIES["float32"]
    found = signal.weighted_permutation_entropy(x, order, **ALIKE).value
    difference = abs(found - ordpy.weighted_permutation_entropy(x, order))
    assert 10 * TIGHT < difference < 1e-6


@each_order
def test_nan_is_an_error_where_the_others_go_on(order: int) -> None:
    x = SERIES["noise"].copy()
    x[100] = np.nan
    with pytest.raises(SoftgapError, match="got nan at step 100 of the series"):
        signal.permutation_entropy(x, order)
    largest = signal.permutation_entropy(np.nan_to_num(x, nan=1e9), order, eligibility=1).value
    close(ordpy.permutation_entropy(x, order), largest)
    theirs = antropy.perm_entropy(x, order, normalize=True)
    if order < 5:
        assert math.isnan(theirs)
    else:
        close(theirs, largest)


def test_many_series_are_one_call_where_the_others_take_one_or_mix_them() -> None:
    x = np.stack([SERIES["noise"][:200], SERIES["logistic map"][:200]])
    found = signal.permutation_entropy(x, 5, eligibility=1)
    assert found.value.shape == (2,)
    with pytest.raises(ValueError, match="2D input is only supported for order=3 and order=4"):
        antropy.perm_entropy(x, 5)
    counts = signal.pattern_counts(x, 5).counts.sum(axis=0)
    close(ordpy.permutation_entropy(x, 5), plane(counts[None] / counts.sum())[0][0])

"""Ordinal measures against the plain-loop reference: any order, delay, policy, leading axes and lengths."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from softgap import signal
from softgap.signal import reference as oracle
from support.signal_cases import ORDERS, autoregressive, largest, logistic, noise, series, with_ties

SERIES = series()
TIGHT = 1e-12


def close(found: object, expected: object, tolerance: float = TIGHT) -> bool:
    return bool(np.allclose(np.asarray(found), np.asarray(expected), rtol=0, atol=tolerance))


@pytest.fixture(params=["exclude", "stable"])
def ties(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("delay", [1, 3])
def test_patterns_and_counts_match_the_reference(name: str, order: int, delay: int, ties: str) -> None:
    x = SERIES[name]
    if len(x) <= (order - 1) * delay:
        x = np.concatenate([x, x[::-1]])
    expected = oracle.reference_patterns(x.tolist(), order, delay, ties)
    found = signal.ordinal_patterns(x, order, delay, ties=ties)
    ranks = [tuple(signal.pattern_ranks(order)[i]) if i >= 0 else None for i in found.index]
    assert ranks == expected
    tied = sum(p is None for p in oracle.reference_patterns(x.tolist(), order, delay))
    assert found.tie_rate == tied / len(expected)
    assert found.windows == len(expected) - (tied if ties == "exclude" else 0)
    if order < 7:
        counts = signal.pattern_counts(x, order, delay, ties=ties, eligibility=1)
        assert counts.counts.tolist() == oracle.reference_counts(x.tolist(), order, delay, ties)


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_numbers_match_the_reference(name: str, order: int, ties: str) -> None:
    x = SERIES[name]
    counts = oracle.reference_counts(x.tolist(), order, 2, ties)
    assert any(counts) or (name, order, ties) == ("ties", 5, "exclude")  # four levels: no window of five differs
    if not any(counts):
        return
    unit = largest(order)
    options: signal.Options = {"ties": ties, "eligibility": 1}
    assert close(signal.permutation_entropy(x, order, 2, **options).value, oracle.reference_entropy(counts) / unit)
    nats = signal.permutation_entropy(x, order, 2, normalised=False, **options)
    assert close(nats.value, oracle.reference_entropy(counts))
    weights = oracle.reference_weights(x.tolist(), order, 2, ties)
    weighted = signal.weighted_permutation_entropy(x, order, 2, normalised=False, **options)
    assert close(weighted.value, oracle.reference_entropy(weights), 1e-11)
    plane = signal.complexity_entropy(x, order, 2, **options)
    assert close(plane.complexity, oracle.reference_complexity(counts))
    assert close(plane.entropy, oracle.reference_entropy(counts) / unit)
    found = signal.irreversibility(x, order, 2, **options)
    assert close(found.value, oracle.reference_irreversibility(counts, order))
    if math.fsum(counts) > 1:
        network = signal.transition_entropy(x, order, 2, **options)
        expected = oracle.reference_transitions(x.tolist(), order, 2, ties)
        if network.eligible:
            assert close([network.link, network.node], expected)


@pytest.mark.parametrize("order", [3, 4, 5])
def test_renyi_measures_match_the_reference_over_q(order: int) -> None:
    x = noise(7, 90)
    counts = oracle.reference_counts(x.tolist(), order, 1)
    grid = [0.0, 0.3, 0.9, 1.2, 2.0, 7.5, 40.0]
    renyi = signal.renyi_entropy(x, grid, order, normalised=False, eligibility=1)
    assert close(renyi.value, [oracle.reference_renyi(counts, q) for q in grid])
    fingerprint = signal.renyi_complexity(x, grid, order, eligibility=1)
    assert close(fingerprint.complexity, [oracle.reference_renyi_complexity(counts, q) for q in grid], 1e-11)
    assert close(fingerprint.entropy, np.array([oracle.reference_renyi(counts, q) for q in grid]) / largest(order))


def test_renyi_measures_are_shannon_at_one_and_near_it() -> None:
    x = noise(8, 200)
    shannon = signal.permutation_entropy(x).value
    for q in (1.0, 1 + 1e-12, 1 - 1e-12):
        assert close(signal.renyi_entropy(x, q).value, shannon, 1e-10)
    plane = signal.complexity_entropy(x)
    fingerprint = signal.renyi_complexity(x, [1 - 1e-9, 1.0, 1 + 1e-9])
    assert close(fingerprint.complexity, plane.complexity, 1e-8)
    assert close(fingerprint.complexity[1], plane.complexity)


def test_renyi_keeps_its_digits_at_large_q() -> None:
    x = noise(9, 300)
    top = signal.pattern_counts(x, 4).counts.max() / 297
    found = signal.renyi_entropy(x, 500.0, 4, normalised=False)
    assert -math.log(top) < found.value < -math.log(top) * 500 / 499 + 1e-12
    assert np.isfinite(signal.renyi_complexity(x, [500.0], 4).complexity).all()


@pytest.mark.parametrize(
    "measure",
    [
        signal.permutation_entropy,
        signal.weighted_permutation_entropy,
        signal.statistical_complexity,
        signal.irreversibility,
        signal.missing_fraction,
        signal.corrected_entropy,
    ],
)
def test_leading_axes_and_lengths_equal_a_loop_over_cut_series(measure: Callable[..., signal.Entropy]) -> None:
    x = noise(10, 2, 3, 150)
    x[0, 1, 20:60] = np.round(x[0, 1, 20:60])
    lengths = np.array([[150, 90, 40], [70, 3, 0]])
    padded = x.copy()
    padded[np.arange(150) >= lengths[..., None]] = np.nan
    found = measure(padded, 3, lengths=lengths, eligibility=20)
    assert found.eligible.tolist() == [[True, True, True], [True, False, False]]
    for at in np.ndindex(2, 3):
        if lengths[at] < 3:
            assert int(found.windows[at]) == 0
            assert float(found.tie_rate[at]) == 0
            assert np.isnan(found.value[at])
            continue
        alone = measure(x[at][: lengths[at]], 3, eligibility=20)
        assert alone.value.shape == ()
        np.testing.assert_array_equal(found.value[at], alone.value)
        assert (found.windows[at], found.tie_rate[at]) == (alone.windows, alone.tie_rate)


def test_blocks_of_series_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.round(noise(11, 37, 60), 1)
    whole = signal.permutation_entropy(x, 4, eligibility=1)
    links = signal.ordinal_network(x, 4)
    monkeypatch.setattr("softgap.signal.patterns._BLOCK", 200)
    parts = signal.permutation_entropy(x, 4, eligibility=1)
    for name in ("value", "windows", "tie_rate", "eligible"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    again = signal.ordinal_network(x, 4)
    for name in ("series", "source", "target", "count"):
        np.testing.assert_array_equal(getattr(again, name), getattr(links, name))


@pytest.mark.parametrize(
    "measure",
    [
        signal.permutation_entropy,
        signal.weighted_permutation_entropy,
        signal.complexity_entropy,
        signal.irreversibility,
        signal.transition_entropy,
        signal.rarefied_entropy,
    ],
)
def test_memory_is_that_of_a_block(measure: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three series at a time, of 60: neither windows x order nor a copy of the series is ever held."""
    x = noise(27, 60, 20_000)
    measure(x[:2, :500], 5)  # compiles, which takes memory of its own
    monkeypatch.setattr("softgap.signal.patterns._BLOCK", 3 * 20_000)
    tracemalloc.start()
    try:
        measure(x, 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5e6 < x.nbytes


def test_views_that_are_not_contiguous_are_read_in_order() -> None:
    x = noise(12, 80, 5)
    found = signal.permutation_entropy(x.T[:, ::-1])
    expected = signal.permutation_entropy(np.ascontiguousarray(x.T[:, ::-1]))
    np.testing.assert_array_equal(found.value, expected.value)


def test_large_integers_keep_their_differences() -> None:
    """As float64 all of these are one number."""
    x = 2**60 + np.random.default_rng(0).permutation(100)
    assert signal.permutation_entropy(x).tie_rate == 0


def test_an_empty_leading_axis_gives_empty_results() -> None:
    found = signal.permutation_entropy(np.empty((2, 0, 50)))
    assert found.value.shape == (2, 0)
    assert signal.ordinal_network(np.empty((0, 50))).count.size == 0


def test_jitter_breaks_ties_at_random_and_leaves_the_rest() -> None:
    x = with_ties(13, 4000, levels=2)
    found = signal.pattern_counts(x, 2, ties="jitter", rng=np.random.default_rng(0))
    tied = signal.pattern_counts(x, 2)
    assert found.windows == 3999
    assert found.tie_rate == tied.tie_rate
    ups, downs = found.counts - tied.counts
    assert ups + downs == 3999 - tied.windows
    assert abs(ups - downs) < 5 * math.sqrt(ups + downs)
    same = signal.pattern_counts(x, 2, ties="jitter", rng=np.random.default_rng(0))
    np.testing.assert_array_equal(found.counts, same.counts)
    plain = noise(14, 100)
    free = signal.permutation_entropy(plain, ties="jitter", rng=np.random.default_rng(1))
    np.testing.assert_array_equal(free.value, signal.permutation_entropy(plain).value)


def test_jitter_weighs_windows_by_their_values() -> None:
    x = with_ties(15, 500) * 3.0
    weights = oracle.reference_weights(x.tolist(), 3, 1, "stable")
    found = signal.weighted_permutation_entropy(x, ties="jitter", rng=np.random.default_rng(0))
    stable = signal.weighted_permutation_entropy(x, ties="stable")
    assert close(stable.value, oracle.reference_entropy(weights) / largest(3))
    assert stable.value < found.value <= 1


def test_weights_survive_extreme_units() -> None:
    x = noise(16, 200)
    expected = signal.weighted_permutation_entropy(x).value
    for unit in (1e-200, 1e200):
        assert close(signal.weighted_permutation_entropy(x * unit).value, expected)


def test_constant_series_are_marked_and_say_why() -> None:
    found = signal.permutation_entropy(np.stack([np.full(100, 3.0), noise(17, 100)]))
    assert np.isnan(found.value[0])
    assert (found.windows[0], found.tie_rate[0], found.eligible.tolist()) == (0, 1.0, [False, True])
    assert "all windows hold equal values (tie rate 1), as in a constant series" in found.reason[0]
    assert found.reason[1] == ""
    stable = signal.permutation_entropy(np.full(100, 3.0), ties="stable")
    assert float(stable.value) == 0
    assert float(stable.tie_rate) == 1
    weighted = signal.weighted_permutation_entropy(np.full(100, 3.0), ties="stable")
    assert (bool(weighted.eligible), bool(np.isnan(weighted.value))) == (False, True)


@pytest.mark.parametrize(("rule", "least"), [("spread", 64), ("2*order!", 12), (5, 5)])
def test_series_below_the_rule_are_marked(rule: str | int, least: int) -> None:
    enough = signal.permutation_entropy(noise(18, least + 2), eligibility=rule)
    short = signal.permutation_entropy(noise(18, least + 1), eligibility=rule)
    assert (bool(enough.eligible), int(enough.windows)) == (True, least)
    assert (bool(short.eligible), int(short.windows)) == (False, least - 1)
    assert np.isfinite(enough.value)
    assert np.isnan(short.value)
    assert str(least - 1) in short.reason[()]


@pytest.mark.parametrize("order", [3, 4, 6])
def test_the_bounds_hold_the_plane(order: int) -> None:
    bounds = signal.complexity_bounds(order, points=2000)
    assert (np.diff(bounds.greatest_entropy) > 0).all()
    assert (np.diff(bounds.least_entropy) > 0).all()
    rng = np.random.default_rng(0)
    x = np.stack([autoregressive(s, c, 2000) for s, c in enumerate(rng.uniform(-0.99, 0.999, 20))] + [logistic(2000)])
    found = signal.complexity_entropy(x, order, eligibility=1)
    least = np.interp(found.entropy, bounds.least_entropy, bounds.least_complexity)
    greatest = np.interp(found.entropy, bounds.greatest_entropy, bounds.greatest_complexity)
    assert (found.complexity >= least - 1e-5).all()
    assert (found.complexity <= greatest + 1e-2).all()


def test_the_curves_meet_at_both_ends() -> None:
    bounds = signal.complexity_bounds(4)
    for curve in (
        (bounds.least_entropy, bounds.least_complexity),
        (bounds.greatest_entropy, bounds.greatest_complexity),
    ):
        assert close([c[0] for c in curve], [0, 0])
        assert close([c[-1] for c in curve], [1, 0])


def test_the_logistic_map_never_decreases_thrice() -> None:
    found = signal.missing_patterns(np.stack([logistic(1000), noise(19, 1000)]))
    assert found.missing.tolist() == [[False] * 5 + [True], [False] * 6]
    np.testing.assert_array_equal(found.forbidden, found.missing)
    assert close(found.fraction, [1 / 6, 0])


def test_a_pattern_missing_from_a_short_series_is_not_forbidden() -> None:
    found = signal.missing_patterns(logistic(90))
    assert found.missing[5]
    assert not found.forbidden.any()
    assert signal.missing_patterns(logistic(90), alpha=0.2).forbidden[5]


def test_white_noise_has_forbidden_patterns_less_often_than_alpha() -> None:
    """At 33 windows, the fewest at which alpha = 0.9 lets any pattern count as forbidden."""
    x = np.random.default_rng(20).random((4000, 35))
    found = signal.missing_patterns(x, alpha=0.9, eligibility=1)
    assert found.missing.any()
    np.testing.assert_array_equal(found.forbidden, found.missing)
    assert found.forbidden.any(axis=-1).mean() <= 0.9
    assert not signal.missing_patterns(x[:, :34], alpha=0.9, eligibility=1).forbidden.any()


def test_networks_hold_every_step() -> None:
    x = np.stack([noise(21, 300), with_ties(22, 300)])
    network = signal.ordinal_network(x, 3)
    index = signal.ordinal_patterns(x, 3).index
    for row in range(2):
        pairs = [(a, b) for a, b in zip(index[row], index[row][1:], strict=False) if a >= 0 and b >= 0]
        mine = network.series == row
        found = dict(
            zip(zip(network.source[mine], network.target[mine], strict=True), network.count[mine], strict=True)
        )
        assert found == {pair: pairs.count(pair) for pair in set(pairs)}
        assert signal.transition_entropy(x, 3, eligibility=1).links[row] == len(pairs)


def test_node_entropies_average_to_the_global_one() -> None:
    x = noise(23, 2, 500)
    network, entropy = signal.ordinal_network(x, 4), signal.transition_entropy(x, 4)
    leaving = np.zeros((2, 24))
    np.add.at(leaving, (network.series, network.source), network.count)
    local = network.node_entropies()
    assert local.shape == (2, 24)
    assert close((np.nan_to_num(local) * leaving).sum(-1) / leaving.sum(-1), entropy.node)
    assert np.isnan(signal.ordinal_network(np.arange(50.0)).node_entropies()[1:]).all()


@pytest.mark.parametrize("order", [3, 4])
def test_networks_of_noise_have_their_known_entropy(order: int) -> None:
    found = signal.transition_entropy(noise(24, 200_000), order)
    assert close(found.node, math.log(order + 1) - 2 * math.log(2) / (order + 1), 2e-3)


def test_irreversibility_sees_the_arrow_of_time() -> None:
    ramp = np.cumsum(np.tile([3.0, 3.1, -6.0], 200) + 0.01 * noise(25, 600))
    both = signal.irreversibility(np.stack([ramp, ramp[::-1]]))
    np.testing.assert_allclose(both.value[0], both.value[1], rtol=0, atol=TIGHT)
    assert both.value[0] > 0.3
    palindrome = np.r_[ramp, ramp[-2::-1]]
    assert close(signal.irreversibility(palindrome).value, 0, TIGHT)


def test_scales_are_entropies_of_means() -> None:
    x = noise(26, 2, 700)
    lengths = [700, 300]
    found = signal.multiscale_entropy(x, [1, 2, 7, 400, 701], lengths=lengths)
    assert found.value.shape == (2, 5)
    for row, length in enumerate(lengths):
        for column, scale in enumerate([1, 2, 7]):
            steps = length // scale
            coarse = [np.mean(x[row, scale * t : scale * (t + 1)]) for t in range(steps)]
            expected = signal.permutation_entropy(np.array(coarse))
            assert found.eligible[row, column] == expected.eligible
            np.testing.assert_allclose(found.value[row, column], expected.value, rtol=0, atol=TIGHT)
    assert found.windows[:, 3:].tolist() == [[0, 0], [0, 0]]
    assert not found.eligible[:, 3:].any()

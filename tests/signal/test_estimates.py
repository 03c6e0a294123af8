"""What keeps short series honest: the default rule, bias correction, nulls, rarefaction and intervals."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from softgap import signal
from softgap.signal import reference as oracle
from softgap.signal import transforms
from support.signal_cases import autoregressive, largest, noise, with_ties


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_the_default_rule_is_the_simulated_one(order: int) -> None:
    """At the least windows one white-noise series in forty scores below 0.95; at half of them, far more."""
    least = signal.LEAST_WINDOWS[order]
    rng = np.random.default_rng(0)
    assert signal.noise_spread(order, least, series=8000, rng=rng).low == pytest.approx(0.952, abs=0.003)
    assert signal.noise_spread(order, least // 2, series=4000, rng=rng).low < 0.92


def test_the_default_rule_is_nowhere_laxer_than_the_common_one() -> None:
    for order, least in signal.LEAST_WINDOWS.items():
        assert least >= 2 * math.factorial(order)


@pytest.mark.parametrize(("order", "length"), [(3, 70), (3, 402), (4, 150), (5, 500)])
def test_corrected_entropy_of_white_noise_is_one_on_average(order: int, length: int) -> None:
    x = np.random.default_rng(1).random((4000, length))
    corrected = signal.corrected_entropy(x, order).value
    error = 4 * corrected.std() / math.sqrt(len(x))
    assert abs(corrected.mean() - 1) < error
    assert signal.permutation_entropy(x, order).value.mean() < 1 - 5 * error


def test_miller_and_madow_correct_too_much_at_order_three() -> None:
    x = np.random.default_rng(2).random((4000, 402))
    plain = signal.permutation_entropy(x, normalised=False).value
    assert (plain + 5 / 800).mean() > math.log(6) + 4 * plain.std() / math.sqrt(len(x))
    assert signal.bias_factor(3, 400) == pytest.approx(0.69, abs=0.03)


def test_the_bias_factor_of_order_two_is_a_third() -> None:
    """The number of rises among N + 1 values has variance (N + 2) / 12 and not N / 4."""
    assert signal.bias_factor(2, 10_000) == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize("coefficient", [-0.5, 0.6, 0.9])
def test_correction_takes_most_of_the_bias_from_other_processes(coefficient: float) -> None:
    x = autoregressive(3, coefficient, 3000, 130)
    truth = signal.permutation_entropy(autoregressive(4, coefficient, 300_000)).value
    plain = signal.permutation_entropy(x).value.mean() - truth
    corrected = signal.corrected_entropy(x).value.mean() - truth
    assert plain < -0.006
    assert abs(corrected) < 0.2 * abs(plain)


def test_correction_counts_the_patterns_seen() -> None:
    """A series with one pattern has nothing to correct."""
    assert signal.corrected_entropy(np.arange(100.0)).value == 0


def test_differenced_noise_is_not_white() -> None:
    """docs/signal.md: z = -2.8 at order 3 and -5.4 at order 4 for 400 steps against a null without the transform."""
    for order, expected in ((3, -2.8), (4, -5.5)):
        white = signal.noise_null(400, order, samples=4000)
        differenced = signal.noise_null(400, order, transform="diff", samples=4000)
        assert (differenced.mean - white.mean) / white.deviation == pytest.approx(expected, abs=0.3)


@pytest.mark.parametrize("measure", signal.MEASURES)
@pytest.mark.parametrize("transform", ["raw", "diff2"])
def test_noise_scores_like_its_null(measure: str, transform: str) -> None:
    order = 4 if measure == "missing_fraction" else 3
    found = signal.z_scores(noise(5, 400, 140), order, measure=measure, transform=transform, eligibility=1)
    assert abs(found.z.mean()) < 0.25
    assert found.z.std() == pytest.approx(1, abs=0.2)
    for level in (0.05, 0.2, 0.5):
        assert (found.p <= level).mean() < level + 4 * math.sqrt(level * (1 - level) / 400)


def test_structure_stands_out() -> None:
    found = signal.z_scores(np.stack([autoregressive(6, 0.9, 300), noise(6, 300)]))
    assert found.z[0] < -5
    assert found.p.tolist()[0] == 2 / 1000
    assert abs(found.z[1]) < 3


def test_a_transform_may_be_a_function() -> None:
    x = noise(7, 3, 200)
    named = signal.z_scores(x, transform="diff")
    called = signal.z_scores(x, transform=lambda rows: np.diff(rows, axis=-1))
    for name in ("value", "z", "p"):
        np.testing.assert_array_equal(getattr(named, name), getattr(called, name))
    expected = signal.permutation_entropy(transforms.apply_transform(x, "diff"))
    np.testing.assert_array_equal(named.value, expected.value)
    assert named.nulls[197].length == 200


def test_series_are_scored_at_their_own_windows() -> None:
    x = noise(8, 2, 1, 300)
    x[0, 0, 150:] = np.nan
    x[1, 0, 50:60] = 7.0
    found = signal.z_scores(x, lengths=[[150], [300]], transform="diff")
    assert found.z.shape == (2, 1)
    tied = 299 - 2 - int(found.windows[1, 0])
    assert tied > 0
    assert {windows: null.length for windows, null in found.nulls.items()} == {147: 150, 297 - tied: 300 - tied}
    alone = signal.z_scores(x[0, 0, :150], transform="diff")
    assert (alone.value, alone.z, alone.p) == (found.value[0, 0], found.z[0, 0], found.p[0, 0])


def test_series_that_are_not_eligible_get_no_score() -> None:
    found = signal.z_scores(noise(9, 2, 100), lengths=[100, 30])
    assert found.eligible.tolist() == [True, False]
    assert np.isfinite(found.z[0])
    assert np.isnan([found.value[1], found.z[1], found.p[1]]).all()


def test_nulls_are_kept_by_seed_and_drawn_from_a_generator() -> None:
    assert signal.noise_null(100, rng=3) is signal.noise_null(100, rng=3)
    first = signal.noise_null(100, rng=np.random.default_rng(3))
    np.testing.assert_array_equal(first.values, signal.noise_null(100, rng=3).values)
    assert (signal.noise_null(100, rng=4).values != first.values).any()
    with pytest.raises(ValueError, match="read-only"):
        signal.noise_null(100, rng=3).values[0] = 0


def test_rarefied_entropy_is_that_of_stretches() -> None:
    x = np.stack([noise(10, 300), with_ties(11, 300, levels=30)])
    found = signal.rarefied_entropy(x, lengths=[300, 150], normalised=False)
    patterns = [p for p in oracle.reference_patterns(x[1, :150].tolist(), 3, 1) if p is not None]
    assert found.common == found.windows[1] == len(patterns)
    assert found.stretches.tolist() == [math.ceil(298 / found.common), 1]
    expected = oracle.reference_entropy([patterns.count(p) for p in set(patterns)])
    assert found.value[1] == pytest.approx(expected, abs=1e-12)
    starts = np.linspace(0, 298 - found.common, found.stretches[0]).astype(int)
    parts = [signal.permutation_entropy(x[0, s : s + found.common + 2], normalised=False).value for s in starts]
    assert found.value[0] == pytest.approx(np.mean(parts), abs=1e-12)


def test_rarefaction_removes_what_length_alone_does() -> None:
    x = noise(12, 2000, 600)
    lengths = np.repeat([600, 80], 1000)
    plain = signal.permutation_entropy(x, lengths=lengths).value
    rarefied = signal.rarefied_entropy(x, lengths=lengths).value
    error = math.hypot(rarefied[:1000].std(), rarefied[1000:].std()) / math.sqrt(1000)
    assert plain[:1000].mean() - plain[1000:].mean() > 10 * error
    assert abs(rarefied[:1000].mean() - rarefied[1000:].mean()) < 4 * error


def test_rarefaction_keeps_to_the_rule() -> None:
    x = noise(13, 2, 200)
    assert signal.rarefied_entropy(x, windows=63).eligible.tolist() == [False, False]
    assert signal.rarefied_entropy(x, windows=64).eligible.tolist() == [True, True]
    assert signal.rarefied_entropy(x, windows=199).eligible.tolist() == [False, False]
    found = signal.rarefied_entropy(x, lengths=[200, 20])
    assert (found.common, found.eligible.tolist()) == (198, [True, False])
    assert np.isnan(found.value[1])


@pytest.mark.parametrize(("coefficient", "order", "length"), [(0.6, 3, 130), (0.9, 3, 400), (0.6, 4, 400)])
def test_intervals_cover(coefficient: float, order: int, length: int) -> None:
    truth = signal.permutation_entropy(autoregressive(14, coefficient, 300_000), order).value
    x = autoregressive(15, coefficient, 400, length)
    found = signal.entropy_interval(x, order, rng=np.random.default_rng(0), replicates=299)
    covered = ((found.low <= truth) & (truth <= found.high)).mean()
    assert 0.90 < covered <= 0.995
    percentile = np.quantile(found.samples, [0.025, 0.975], axis=-1)
    assert ((percentile[0] <= truth) & (truth <= percentile[1])).mean() < covered


def test_resampled_entropies_are_those_of_the_drawn_blocks() -> None:
    x = with_ties(16, 90, levels=20)
    found = signal.entropy_interval(x, rng=np.random.default_rng(5), replicates=20, block=7, eligibility=1)
    patterns = [p for p in oracle.reference_patterns(x.tolist(), 3, 1) if p is not None]
    size = len(patterns)
    draws = np.random.default_rng(5).random((20, math.ceil(size / 7)))
    for replicate in range(20):
        starts = (draws[replicate] * size).astype(int)
        drawn = [patterns[(s + i) % size] for s in starts for i in range(7)][:size]
        expected = oracle.reference_entropy([drawn.count(p) for p in set(drawn)]) / largest(3)
        assert found.samples[replicate] == pytest.approx(expected, abs=1e-12)
    assert found.value == pytest.approx(signal.permutation_entropy(x, eligibility=1).value, abs=1e-15)
    assert found.block == 7


def test_intervals_of_a_batch_mark_short_series() -> None:
    found = signal.entropy_interval(noise(17, 2, 200), rng=np.random.default_rng(0), lengths=[200, 10], replicates=50)
    assert found.eligible.tolist() == [True, False]
    assert np.isnan([found.low[1], found.high[1], found.value[1]]).all()
    assert found.low[0] < found.value[0] <= found.high[0] <= 1


def test_kernels_compile_where_nothing_can_be_cached(tmp_path: Path) -> None:
    """A read-only install without a user cache: numba refuses to cache, softgap goes on without."""
    program = (
        "import numba.core.caching as caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "from softgap import signal\n"
        "print(signal.permutation_entropy([4, 7, 9, 10, 6, 11, 3], 2, eligibility=1).value)"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(0.9182958340544896, abs=1e-15)

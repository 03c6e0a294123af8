"""Closed forms of the sparsity: known values, quadrature, simulation, limits, bounds, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

import softgap
from softgap.errors import ShapeError, UnknownNameError, ValueInputError
from softgap.theory.focus import (
    FUNCTIONS,
    GaussianTable,
    decay_sparsity,
    finite_sparsity,
    iid_sparsity,
    linear_sparsity,
    log_sparsity,
    norm_ratio_bounds,
    simulate_sparsity,
    sparsity,
)
from softgap.theory.focus.reference import quadrature_sparsity, sample_mean

NAMES = sorted(FUNCTIONS)
LEAST_IDENTITY = math.sqrt(2 / math.pi)
wide = st.floats(-1e150, 1e150)
positive = st.floats(1e-150, 1e150)


@pytest.mark.parametrize(
    ("name", "beta", "gamma", "expected"),
    [
        ("relu2", 0, 1, 0.40825),
        ("relu2", 1, 1, 0.61277),
        ("relu2", -1, 1, 0.20526),
        ("relu2", -2, 1, 0.07201),
        ("relu2", -3, 0.8, 0.0041719),
        ("identity", 0, 1, 0.79788),
        ("identity", 1, 1, 0.82493),
        ("relu", 0, 1, 0.56419),
        ("exp", 7, 1, 0.60653),
    ],
)
def test_known_values(name: str, beta: float, gamma: float, expected: float) -> None:
    found = softgap.theory.focus.sparsity(name, beta=beta, gamma=gamma)
    assert float(found) == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("name", NAMES)
@given(z=st.floats(-30, 30), gamma=st.floats(0.05, 5))
def test_quadrature_agrees_to_ten_digits(name: str, z: float, gamma: float) -> None:
    found = float(sparsity(name, beta=z * gamma, gamma=gamma))
    assert found == pytest.approx(quadrature_sparsity(name, z * gamma, gamma), rel=1e-10)


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_the_two_sides_of_the_tail_meet(name: str) -> None:
    either = log_sparsity(name, beta=[np.nextafter(-2.0, -3.0), -2.0], gamma=1)
    np.testing.assert_allclose(either[0], either[1], rtol=1e-12)


@pytest.mark.parametrize("name", ["relu", "relu2"])
@pytest.mark.parametrize("z", [-50.0, -1e3, -1e8])
def test_the_far_tail_is_the_asymptote(name: str, z: float) -> None:
    # I_k = k! / |z|^(k+1) (1 - (k+1)(k+2) / 2z^2 + ...), so S = sqrt(phi) I_p / sqrt(I_2p).
    p = 1 if name == "relu" else 2
    log_phi = -(z**2) / 2 - math.log(2 * math.pi) / 2
    expected = 0.5 * log_phi + math.log(math.factorial(p)) - 0.5 * math.log(math.factorial(2 * p)) - 0.5 * math.log(-z)
    assert float(log_sparsity(name, beta=z, gamma=1)) == pytest.approx(expected, abs=10 / z**2, rel=1e-14)


@pytest.mark.parametrize("name", NAMES)
@given(beta=wide, gamma=positive)
def test_every_spread_gives_a_number_between_zero_and_one(name: str, beta: float, gamma: float) -> None:
    found = float(sparsity(name, beta=beta, gamma=gamma))
    assert 0 <= found <= 1 + 1e-12
    if name == "identity":
        assert found >= LEAST_IDENTITY * (1 - 1e-14)
        assert found == float(sparsity(name, beta=-beta, gamma=gamma))
    if name == "relu2" and beta >= 0:
        assert found >= 1 / math.sqrt(6) * (1 - 1e-12)
    if name == "relu" and beta >= 0:
        assert found >= 1 / math.sqrt(math.pi) * (1 - 1e-12)


@pytest.mark.parametrize("name", ["relu", "relu2", "identity"])
@given(z=st.floats(-20, 20), factor=st.floats(0.01, 100))
def test_only_the_ratio_of_mean_and_spread_counts(name: str, z: float, factor: float) -> None:
    one, other = sparsity(name, beta=[z, z * factor], gamma=[1.0, factor])
    assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("name", ["relu", "relu2"])
def test_relu_maps_focus_as_the_mean_falls(name: str) -> None:
    found = log_sparsity(name, beta=np.linspace(-40, 40, 2001), gamma=1)
    assert (np.diff(found) > -1e-13).all()
    assert found[0] < -200
    assert found[-1] > -0.01


def test_the_limit_of_no_spread() -> None:
    found = {name: sparsity(name, beta=[-1, 0, 1], gamma=0).tolist() for name in NAMES}
    assert found["exp"] == [1, 1, 1]
    assert found["identity"] == pytest.approx([1, LEAST_IDENTITY, 1])
    assert found["relu"] == pytest.approx([0, 1 / math.sqrt(math.pi), 1])
    assert found["relu2"] == pytest.approx([0, 1 / math.sqrt(6), 1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("beta", "gamma"), [(0.0, 1.0), (-1.0, 1.0), (0.7, 0.5)])
def test_simulation_agrees_within_its_error(name: str, beta: float, gamma: float) -> None:
    seen = simulate_sparsity(name, beta=beta, gamma=gamma, n=2**15, draws=100, rng=np.random.default_rng(1))
    assert float(sparsity(name, beta=beta, gamma=gamma)) == pytest.approx(seen.value, abs=4 * seen.error)
    assert seen.error < 2e-3


@pytest.mark.parametrize(("name", "beta"), [("relu2", -1.0), ("relu", -1.0), ("identity", 0.5)])
def test_the_mean_of_few_keys_is_its_integral(name: str, beta: float) -> None:
    n = 60
    seen = simulate_sparsity(name, beta=beta, gamma=1.0, n=n, draws=40_000, rng=np.random.default_rng(2))
    assert sample_mean(name, beta, 1.0, n) == pytest.approx(seen.value, abs=4 * seen.error)
    # Far enough from the limit for the number of keys to matter.
    assert abs(float(sparsity(name, beta=beta, gamma=1.0)) - seen.value) > 8 * seen.error


def test_the_integral_of_few_keys_where_it_is_known() -> None:
    for gamma, n in ((0.5, 7), (1.0, 2**14), (2.0, 300)):
        assert sample_mean("exp", 0.0, gamma, n) == pytest.approx(finite_sparsity(gamma, n), rel=1e-8)
    assert sample_mean("identity", 0.3, 1.0, 1) == pytest.approx(1, rel=1e-6)
    for name in NAMES:
        limit = float(sparsity(name, beta=-0.5, gamma=0.5))
        assert sample_mean(name, -0.5, 0.5, 10**9) == pytest.approx(limit, rel=1e-6)


@given(d=st.integers(1, 40), seed=st.integers(0, 2**32 - 1), power=st.floats(0.1, 8))
def test_the_norm_ratio_lies_where_it_is_said_to(d: int, seed: int, power: float) -> None:
    q = np.abs(np.random.default_rng(seed).standard_normal(d)) ** power
    low, high = norm_ratio_bounds(d)
    ratio = np.linalg.norm(q) / q.sum()
    assert low * (1 - 1e-12) <= ratio <= high * (1 + 1e-12)
    assert np.linalg.norm(np.ones(d)) / d == pytest.approx(low)
    assert iid_sparsity(np.eye(d)[0], 2.0) == pytest.approx(1 / math.sqrt(5))
    assert float(iid_sparsity(q, 1.5)) >= 1 / math.sqrt(1 + 1.5**2) * (1 - 1e-12)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 50), d=st.integers(1, 8))
def test_the_general_formula_is_exact(seed: int, n: int, d: int) -> None:
    rng = np.random.default_rng(seed)
    q, k = rng.random((3, d)) + 0.01, rng.random((n, d)) ** 3 + 0.01
    weights = q @ k.T
    measured = weights.sum(axis=1) / np.sqrt(n * np.square(weights).sum(axis=1))
    centred = k - k.mean(axis=0)
    found = linear_sparsity(q, k.mean(axis=0), centred.T @ centred / n)
    np.testing.assert_allclose(found, measured, rtol=1e-10)


def test_independent_features_follow_the_iid_formula() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.random((5, 16)), rng.gamma(0.5, size=(200_000, 16))
    weights = q @ k.T
    measured = weights.mean(axis=1) / np.sqrt(np.square(weights).mean(axis=1))
    np.testing.assert_allclose(iid_sparsity(q, math.sqrt(2.0)), measured, rtol=3e-3)


@given(decay=st.floats(1e-6, 1), n=st.integers(1, 400))
def test_decay_is_its_own_sum(decay: float, n: int) -> None:
    weights = decay ** np.arange(n, dtype=float)
    direct = weights.sum() / np.sqrt(n * np.square(weights).sum())
    assert float(decay_sparsity(decay, n)) == pytest.approx(direct, rel=1e-9)


def test_decay_keeps_its_digits_near_one_and_its_limit() -> None:
    assert float(decay_sparsity(1 - 1e-13, 1000)) == pytest.approx(1, abs=1e-12)
    assert float(decay_sparsity(1.0, 1000)) == 1
    assert float(decay_sparsity(0.9, 10**8)) * 1e4 == pytest.approx(math.sqrt(19), rel=1e-12)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 3.0, 8.0])
def test_finite_value_for_two_keys_is_a_single_integral(gamma: float) -> None:
    def mean(x: float) -> float:
        density = math.exp(-((x / gamma) ** 2) / 4) / (2 * gamma * math.sqrt(math.pi))
        return (1 + math.exp(x)) / math.sqrt(2 + 2 * math.exp(2 * x)) * density

    expected, _ = integrate.quad(mean, -15 * gamma, 15 * gamma, epsabs=0, epsrel=1e-12, limit=200)
    assert finite_sparsity(gamma, 2) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("gamma", "n"), [(3.0, 512), (1.0, 33), (6.0, 100)])
def test_finite_value_is_the_mean_of_a_simulation(gamma: float, n: int) -> None:
    seen = simulate_sparsity("exp", gamma=gamma, n=n, draws=20_000, rng=np.random.default_rng(0))
    assert finite_sparsity(gamma, n) == pytest.approx(seen.value, abs=3 * seen.error)


def test_finite_value_where_the_limit_is_far_off() -> None:
    # docs/theory/focus.md, Closed forms: at gamma = 3 and n = 512 the limit is .011, a simulation .133.
    assert float(sparsity("exp", gamma=3.0)) == pytest.approx(0.0111, rel=1e-2)
    assert finite_sparsity(3.0, 512) == pytest.approx(0.133, abs=1e-3)


def test_finite_value_tends_to_both_limits() -> None:
    assert finite_sparsity(0.5, 10**6) == pytest.approx(math.exp(-0.125), rel=1e-5)
    assert finite_sparsity(20.0, 64) == pytest.approx(1 / 8, rel=0.1)
    assert finite_sparsity(0.0, 7) == finite_sparsity(2.0, 1) == 1
    assert (np.diff([finite_sparsity(2.0, 2**i) for i in range(12)]) < 0).all()


def test_the_table_predicts_what_a_simulation_gives() -> None:
    table = GaussianTable.simulate(256, widest=6.0, draws=3000, rng=np.random.default_rng(0))
    scores = 1.3 * np.random.default_rng(1).standard_normal((2000, 200))
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = (
        1 / np.sqrt(200 * np.square(weights).sum(axis=1)),
        -(weights * np.log(weights)).sum(axis=1),
        weights.max(axis=1),
    )
    for found, simulated, unit in zip(table.predict(1.3, 200), expected, (None, 1.0, None), strict=True):
        mean = float(simulated.mean())
        # Both sides are means of draws. Between grid points a quarter apart, a line is off by at most h^2 / 8 times the
        # second derivative in gamma, about 1 for the entropy and for the logarithms of S and the largest weight.
        sampling = float(simulated.std()) * math.sqrt(1 / 2000 + 1 / 3000)
        assert float(found) == pytest.approx(mean, abs=4 * sampling + 0.25**2 / 8 * (unit or mean))
    assert [float(x) for x in table.predict(3.0, 1)] == pytest.approx([1, 0, 1])
    # Without spread all three are straight lines in log n, which interpolation keeps.
    assert [float(x) for x in table.predict(0.0, 64)] == pytest.approx([1, math.log(64), 1 / 64], rel=1e-9)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            lambda: sparsity("exp", gamma=-1),
            "gamma must be finite and not negative, got -1; it is a standard deviation",
        ),
        (lambda: sparsity("relu", beta=math.nan, gamma=1), "beta must be finite, got nan; exclude such scores"),
        (lambda: decay_sparsity(1.5, 3), "decay must be above 0 and at most 1, got 1.5"),
        (lambda: decay_sparsity(0.5, 0), "n must be at least 1, got 0; give the number of keys"),
        (lambda: finite_sparsity(1.0, 0), "n must be at least 1, got 0; give the number of keys"),
        (lambda: finite_sparsity(-2.0, 5), "gamma must be finite and not negative, got -2"),
        (lambda: iid_sparsity([-1.0, 1.0], 1), "query features must not be negative, got -1"),
        (lambda: iid_sparsity([1.0], -1), "noise must be positive, got -1"),
        (lambda: norm_ratio_bounds(0), "d must be at least 1, got 0"),
        (
            lambda: simulate_sparsity("relu", beta=-30, gamma=1, n=4, draws=5, rng=np.random.default_rng(0)),
            "fewer than two of 5 draws gave relu any weight at beta -30 and gamma 1; draw more keys",
        ),
    ],
)
def test_wrong_input_is_one_sentence(wrong: object, sentence: str) -> None:
    assert callable(wrong)
    with pytest.raises(ValueInputError) as caught:
        wrong()
    assert str(caught.value).startswith(sentence)


def test_unknown_functions_and_shapes() -> None:
    with pytest.raises(UnknownNameError, match="unknown function 'relu3'; did you mean 'relu"):
        sparsity("relu3", gamma=1)
    with pytest.raises(ShapeError, match=r"must share their features, got \[2, 3\], \[2\] and \[2, 2\]"):
        linear_sparsity(np.ones((2, 3)), np.ones(2), np.eye(2))

"""Oracle of the closed forms: the expectations behind S by adaptive quadrature, a few lines to believe by reading."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import integrate

__all__ = ["quadrature_sparsity", "sample_bias"]

_REACH = 12.0


def quadrature_sparsity(function: str, beta: float, gamma: float) -> float:
    """S = E|f(x)| / sqrt(E f(x)^2) for x ~ N(beta, gamma^2), to about twelve digits."""
    if function == "exp":
        first, second = (_exponential(k * gamma) for k in (1, 2))
        # exp((2 gamma)^2 / 2) under the root and exp(gamma^2 / 2) above it were taken out of the integrals.
        return first / math.sqrt(second) * math.exp(gamma**2 / 2 - gamma**2)
    power = {"relu": 1, "relu2": 2, "identity": 1}[function]
    z = abs(beta / gamma) if function == "identity" else beta / gamma
    first, second = (_positive_part(power * k, z) for k in (1, 2))
    if function == "identity":
        # |x| = relu(x) + relu(-x); the factor exp(-z^2 / 2) of the negative part was taken out of its integral.
        lost = math.exp(-(z**2) / 2)
        return (first + lost * _positive_part(1, -z)) / math.sqrt(second + lost * _positive_part(2, -z))
    return first / math.sqrt(second) * (math.exp(-(z**2) / 4) if z < 0 else 1.0)


def sample_bias(function: str, beta: float, gamma: float) -> float:
    """c such that the mean of S over samples of n scores is S (1 + c / n) to first order.

    S of a sample is m_1 / sqrt(m_2) of its own means. With mu_k = E|f(x)|^k, the second-order expansion of that
    quotient around the expectations gives c = 3/8 (mu_4 / mu_2^2 - 1) - 1/2 (mu_3 / (mu_1 mu_2) - 1).
    """
    if function == "exp":
        kurtosis, skew = math.exp(4 * gamma**2), math.exp(2 * gamma**2)
    else:
        mu = {k: _moment(function, k, beta / gamma) for k in (1, 2, 3, 4)}
        kurtosis, skew = mu[4] / mu[2] ** 2, mu[3] / (mu[1] * mu[2])
    return 3 / 8 * (kurtosis - 1) - (skew - 1) / 2


def _moment(function: str, k: int, z: float) -> float:
    """E|f(z + e)|^k for e ~ N(0, 1)."""
    if function == "identity":
        return _moment("relu", k, z) + _moment("relu", k, -z)
    power = k * {"relu": 1, "relu2": 2}[function]
    return _positive_part(power, z) * (math.exp(-(z**2) / 2) if z < 0 else 1.0)


def _exponential(k: float) -> float:
    """E exp(k e) / exp(k^2 / 2) for e ~ N(0, 1)."""
    return _integral(lambda e: math.exp(k * e - e**2 / 2 - k**2 / 2), k - _REACH, k + _REACH)


def _positive_part(power: int, z: float) -> float:
    """E relu(z + e)^power, for z < 0 over exp(-z^2 / 2)."""
    if z < 0:
        return _integral(lambda x: x**power * math.exp(z * x - x**2 / 2), 0.0, min(_REACH, 60 / -z))
    return _integral(lambda x: x**power * math.exp(-((x - z) ** 2) / 2), max(0.0, z - _REACH), z + _REACH)


def _integral(f: Callable[[float], float], low: float, high: float) -> float:
    value, _ = integrate.quad(f, low, high, epsabs=0.0, epsrel=1e-13, limit=400)
    return float(value) / math.sqrt(2 * math.pi)

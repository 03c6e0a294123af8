"""Oracle of the closed forms: the expectations behind S by adaptive quadrature, a few lines to believe by reading."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import integrate

__all__ = ["quadrature_sparsity", "sample_mean"]

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


def sample_mean(function: str, beta: float, gamma: float, n: int) -> float:
    """Mean of S over samples of n scores; a sample whose weights are all zero counts as 0.

    With w = |f(x)| and 1 / sqrt(y) as an integral over t,

        E[S] = sqrt(n / pi) * integral of t^(-1/2) E[w exp(-t w^2)] E[exp(-t w^2)]^(n-1) over t > 0:

    a trapezium sum in log t, the expectations by Gauss and Legendre on either side of the kink of f.
    """
    z = 0.0 if function == "exp" else beta / gamma
    e, mass = _nodes(z, 4 * gamma if function == "exp" else 0.0)
    if function == "exp":
        w = np.exp(gamma * e)
    else:
        w = np.abs(z + e) if function == "identity" else np.maximum(z + e, 0.0) ** (2 if function == "relu2" else 1)
    step = 0.1
    log_t = np.arange(-60.0, 30.0, step) - math.log(n * float(mass @ w**2))
    energy = np.exp(log_t)[:, None] * w**2
    key_term = np.exp(0.5 * log_t) * ((mass * w) * np.exp(-energy)).sum(axis=1)
    lost = (mass * -np.expm1(-energy)).sum(axis=1)
    return (
        math.sqrt(n / math.pi)
        * float((key_term * np.exp((n - 1) * np.log1p(-np.minimum(lost, 1 - 1e-16)))).sum())
        * step
    )


def _nodes(z: float, further: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Points of N(0, 1) with their share of its mass, on either side of the kink at -z."""
    edges = sorted({-_REACH, min(max(-z, -_REACH), _REACH), _REACH + further})
    x, weight = np.polynomial.legendre.leggauss(400)
    e = np.concatenate([(a + b + (b - a) * x) / 2 for a, b in itertools.pairwise(edges)])
    width = np.concatenate([(b - a) / 2 * weight for a, b in itertools.pairwise(edges)])
    return e, width * np.exp(-(e**2) / 2) / math.sqrt(2 * math.pi)


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

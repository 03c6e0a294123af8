"""Closed forms of the sparsity S(a) = E|a| / sqrt(E a^2) of attention weights; small is focused.

Source of all of them: Su 2023, kexue.fm 9889 ("Can attention focus?"). Derivations are in docs/theory/focus.md.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from softgap.errors import ShapeError, ValueInputError, unknown_name

__all__ = [
    "FUNCTIONS",
    "decay_sparsity",
    "iid_sparsity",
    "linear_sparsity",
    "log_sparsity",
    "norm_ratio_bounds",
    "sparsity",
]

Reals = NDArray[np.float64]

# Left of this the sums of the direct formulas cancel (relu^2 would lose z^8 of its digits).
_TAIL = -2.0
# Terms of the continued fraction; at z = _TAIL its error is below exp(-2 |z| sqrt(2 terms)) = 1e-24.
_TERMS = 100


def sparsity(function: str, *, beta: ArrayLike = 0.0, gamma: ArrayLike) -> Reals:
    """S of weights a_j proportional to f(s_j) with scores s_j ~ N(beta, gamma^2), as the number of keys grows.

    For a query q, keys N(mu, sigma^2 I) and the model's scaling s: beta = s q.mu and gamma = s sigma |q|. With
    z = beta / gamma, and phi and Phi the density and distribution function of N(0, 1):

        exp       exp(-gamma^2 / 2), whatever beta
        relu2     M_2 / sqrt(M_4)
        relu      M_1 / sqrt(M_2)
        identity  (sqrt(2 / pi) exp(-z^2 / 2) + z erf(z / sqrt 2)) / sqrt(z^2 + 1)

    where M_k = E[relu(z + e)^k]: M_1 = z Phi + phi, M_2 = (z^2 + 1) Phi + z phi,
    M_4 = (z^4 + 6 z^2 + 3) Phi + (z^3 + 5 z) phi. Negative weights (identity) count by their size.

    Parameters
    ----------
    function
        ``exp``, ``relu2``, ``identity`` or ``relu``.
    beta, gamma
        Mean and standard deviation of the scores; they broadcast. gamma = 0 is the limit gamma -> 0 at fixed beta.
    """
    return np.exp(log_sparsity(function, beta=beta, gamma=gamma))


def log_sparsity(function: str, *, beta: ArrayLike = 0.0, gamma: ArrayLike) -> Reals:
    """log S of :func:`sparsity`, finite where S itself would underflow."""
    if function not in FUNCTIONS:
        raise unknown_name("function", function, FUNCTIONS)
    mean, deviation = np.broadcast_arrays(np.asarray(beta, np.float64), np.asarray(gamma, np.float64))
    if not np.isfinite(mean).all():
        raise ValueInputError(f"beta must be finite, got {mean[~np.isfinite(mean)].flat[0]:g}; leave such scores out")
    if not (np.isfinite(deviation) & (deviation >= 0)).all():
        wrong = deviation[~(np.isfinite(deviation) & (deviation >= 0))].flat[0]
        raise ValueInputError(f"gamma must be finite and not negative, got {wrong:g}; it is a standard deviation")
    if function == "exp":
        with np.errstate(over="ignore"):
            return np.asarray(-0.5 * deviation**2)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        z = np.where(mean == 0, 0.0, mean / deviation)
    return FUNCTIONS[function](z)


def linear_sparsity(query: ArrayLike, mean: ArrayLike, covariance: ArrayLike) -> Reals:
    """S of weights phi(q).phi(k_j) that are nowhere negative, from the mean and covariance of the keys' features.

        1 / sqrt(1 + q~^T Sigma~ q~ / (q~.mu~)^2)

    Exact, for any number of keys, if mean and covariance (divided by n, not n - 1) are the sequence's own.

    Parameters
    ----------
    query
        Features of the queries, along the last axis.
    mean, covariance
        Of the features of the keys: ``[feature]`` and ``[feature, feature]``.

    Returns
    -------
    S per query; NaN for a query whose weights are all zero.
    """
    q, mu, sigma = (np.asarray(x, np.float64) for x in (query, mean, covariance))
    if q.shape[-1:] != mu.shape or sigma.shape != (*mu.shape, *mu.shape):
        raise ShapeError(
            f"query, mean and covariance must share their features, got {list(q.shape)}, {list(mu.shape)} and "
            f"{list(sigma.shape)}"
        )
    level = q @ mu
    spread = np.maximum(np.einsum("...i,ij,...j->...", q, sigma, q), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.abs(level) / np.hypot(level, np.sqrt(spread)))


def iid_sparsity(query: ArrayLike, noise: ArrayLike) -> Reals:
    """S of non-negative linear attention whose key features are independent and alike.

        1 / sqrt(1 + (sigma~ / mu~ * |q~|_2 / |q~|_1)^2)

    Parameters
    ----------
    query
        Features of the queries, along the last axis; none negative.
    noise
        sigma~ / mu~: standard deviation over mean of one key feature.
    """
    q = np.asarray(query, np.float64)
    if (q < 0).any():
        raise ValueInputError(
            f"query features must not be negative, got {q.min():g}; this form is for non-negative maps"
        )
    if not np.all(np.asarray(noise) >= 0):
        raise ValueInputError(f"noise is a ratio of positive numbers, got {np.min(noise):g}; use its size")
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.linalg.norm(q, axis=-1) / q.sum(axis=-1)
    return np.asarray(1.0 / np.hypot(1.0, np.asarray(noise, np.float64) * ratio))


def norm_ratio_bounds(d: int) -> tuple[float, float]:
    """The range of |q|_2 / |q|_1 for q in R^d: from 1 / sqrt(d) (all entries alike) to 1 (a single entry).

    The article gives sqrt(d) as its maximum. That is the maximum of the inverse ratio: by Cauchy and Schwarz
    |q|_1 <= sqrt(d) |q|_2, and |q|_2 <= |q|_1 always.
    """
    if d < 1:
        raise ValueInputError(f"d must be at least 1, got {d}")
    return d**-0.5, 1.0


def decay_sparsity(decay: ArrayLike, n: ArrayLike) -> Reals:
    """S of the weights lambda^(n-1), ..., lambda, 1.

        sqrt((1 - lambda^n)(1 + lambda) / (n (1 - lambda)(1 + lambda^n))) = sqrt(tanh(n u / 2) / (n tanh(u / 2)))

    with u = -log lambda; the second form keeps its digits near lambda = 1.
    """
    given, count = np.asarray(decay, np.float64), np.asarray(n, np.float64)
    if not ((given > 0) & (given <= 1)).all():
        raise ValueInputError(
            f"decay must be above 0 and at most 1, got {given[~((given > 0) & (given <= 1))].flat[0]:g}"
        )
    if not (count >= 1).all():
        raise ValueInputError(f"n must be at least 1, got {count.min():g}; give the number of keys")
    half = -0.5 * np.log(given)
    with np.errstate(invalid="ignore", divide="ignore"):
        squared = np.tanh(count * half) / (count * np.tanh(half))
    return np.sqrt(np.where(half == 0, 1.0, squared))


def _log_identity(z: Reals) -> Reals:
    z = np.abs(z)
    with np.errstate(invalid="ignore"):
        size = np.sqrt(2 / np.pi) * np.exp(-0.5 * np.square(np.minimum(z, 1e3))) + z * special.erf(z / np.sqrt(2))
        found = np.log(size / np.hypot(1.0, z))
    return np.where(np.isinf(z), 0.0, found)


def _log_relu(z: Reals) -> Reals:
    return _by_side(z, _log_relu_direct, lambda r, log_mass: np.asarray(0.5 * (log_mass + np.log(r[1] / r[2]))))


def _log_relu2(z: Reals) -> Reals:
    def tail(r: Reals, log_mass: Reals) -> Reals:
        # Ratios one by one: products of these numbers underflow.
        return np.asarray(0.5 * (log_mass + np.log(r[1] / r[3]) + np.log(r[2] / r[4])))

    return _by_side(z, _log_relu2_direct, tail)


def _by_side(z: Reals, direct: Callable[[Reals], Reals], tail: Callable[[Reals, Reals], Reals]) -> Reals:
    """The direct formula, or for z far below zero the ratios of I_k = integral of x^k exp(-x^2 / 2 + z x) over x > 0.

    M_k = phi(z) I_k, and r_k = I_k / I_(k-1) obeys r_k = k / (-z + r_(k+1)): positive terms only, nothing cancels.
    """
    found = np.empty_like(z)
    left = z < _TAIL
    found[~left] = direct(z[~left])
    t = -np.maximum(z[left], -np.finfo(np.float64).max)
    ratios = np.empty((5, t.size))
    with np.errstate(over="ignore"):
        r = np.zeros_like(t)
        for k in range(_TERMS, 0, -1):
            r = k / (t + r)
            if k < len(ratios):
                ratios[k] = r
        # log of phi(z) I_0, where I_0 is Mills' ratio.
        log_mass = -0.5 * np.square(t) - np.log(2.0) + np.log(special.erfcx(t / np.sqrt(2)))
    found[left] = np.where(np.isinf(log_mass), -np.inf, tail(ratios, log_mass)) if t.size else log_mass
    return found


def _log_relu_direct(z: Reals) -> Reals:
    unit, scaled, cdf, pdf = _scaled(z)
    first = scaled * cdf + unit * pdf
    second = (scaled**2 + unit**2) * cdf + scaled * unit * pdf
    return np.log(first) - 0.5 * np.log(second)


def _log_relu2_direct(z: Reals) -> Reals:
    unit, scaled, cdf, pdf = _scaled(z)
    second = (scaled**2 + unit**2) * cdf + scaled * unit * pdf
    fourth = (scaled**4 + 6 * scaled**2 * unit**2 + 3 * unit**4) * cdf
    fourth += (scaled**3 * unit + 5 * scaled * unit**3) * pdf
    return np.log(second) - 0.5 * np.log(fourth)


def _scaled(z: Reals) -> tuple[Reals, Reals, Reals, Reals]:
    """1 and z over max(1, |z|), so that no power overflows, with Phi(z) and phi(z)."""
    top = np.maximum(1.0, np.abs(z))
    scaled = np.where(np.isinf(z), 1.0, z / np.where(np.isinf(top), 1.0, top))
    with np.errstate(over="ignore"):
        pdf = np.exp(-0.5 * np.square(z)) / np.sqrt(2 * np.pi)
    return 1.0 / top, scaled, special.ndtr(z), pdf


FUNCTIONS: dict[str, Callable[[Reals], Reals]] = {
    "exp": lambda z: np.zeros_like(z),  # depends on gamma alone: see log_sparsity
    "relu2": _log_relu2,
    "identity": _log_identity,
    "relu": _log_relu,
}

"""The sparsity S(a) = E|a| / sqrt(E a^2) of attention weights: closed forms, and corrections for finitely many keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from softgap.errors import ShapeError, ValueInputError, unknown_name

__all__ = [
    "FUNCTIONS",
    "GaussianTable",
    "Simulated",
    "decay_sparsity",
    "finite_sparsity",
    "iid_sparsity",
    "linear_sparsity",
    "log_sparsity",
    "norm_ratio_bounds",
    "simulate_sparsity",
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
    """log S of ``sparsity``, finite where S itself would underflow."""
    if function not in FUNCTIONS:
        raise unknown_name("function", function, FUNCTIONS)
    mean, deviation = np.broadcast_arrays(np.asarray(beta, np.float64), np.asarray(gamma, np.float64))
    if not np.isfinite(mean).all():
        raise ValueInputError(f"beta must be finite, got {mean[~np.isfinite(mean)].flat[0]:g}; exclude such scores")
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
        raise ValueInputError(f"noise must be positive, got {np.min(noise):g}; use its absolute value")
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
    rate, count = np.asarray(decay, np.float64), np.asarray(n, np.float64)
    if not ((rate > 0) & (rate <= 1)).all():
        raise ValueInputError(f"decay must be above 0 and at most 1, got {rate[~((rate > 0) & (rate <= 1))].flat[0]:g}")
    if not (count >= 1).all():
        raise ValueInputError(f"n must be at least 1, got {count.min():g}; give the number of keys")
    half = -0.5 * np.log(rate)
    with np.errstate(invalid="ignore", divide="ignore"):
        squared = np.tanh(count * half) / (count * np.tanh(half))
    return np.sqrt(np.where(half == 0, 1.0, squared))


def _log_identity(z: Reals) -> Reals:
    z = np.abs(z)
    with np.errstate(invalid="ignore"):
        size = np.sqrt(2 / np.pi) * np.exp(-0.5 * np.square(np.minimum(z, 1e3))) + z * special.erf(z / np.sqrt(2))
        log_ratio = np.log(size / np.hypot(1.0, z))
    return np.where(np.isinf(z), 0.0, log_ratio)


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
    values = np.empty_like(z)
    left = z < _TAIL
    values[~left] = direct(z[~left])
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
    values[left] = np.where(np.isinf(log_mass), -np.inf, tail(ratios, log_mass)) if t.size else log_mass
    return values


def _log_relu_direct(z: Reals) -> Reals:
    unit, scaled, cdf, pdf = _normal_terms(z)
    first = scaled * cdf + unit * pdf
    second = (scaled**2 + unit**2) * cdf + scaled * unit * pdf
    return np.log(first) - 0.5 * np.log(second)


def _log_relu2_direct(z: Reals) -> Reals:
    unit, scaled, cdf, pdf = _normal_terms(z)
    second = (scaled**2 + unit**2) * cdf + scaled * unit * pdf
    fourth = (scaled**4 + 6 * scaled**2 * unit**2 + 3 * unit**4) * cdf
    fourth += (scaled**3 * unit + 5 * scaled * unit**3) * pdf
    return np.log(second) - 0.5 * np.log(fourth)


def _normal_terms(z: Reals) -> tuple[Reals, Reals, Reals, Reals]:
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


_DRAW_NUMBERS = 2**22


# Of both sums of finite_sparsity, in y = log(w sqrt t): exp(y - exp(2 y)) is analytic for |Im y| < pi / 4, so the error
# is of the order of exp(-2 pi (pi / 4) / step) = 1e-18.
_STEP = 0.12


# Deviations of a Gaussian beyond which nothing counts.
_REACH = 9.5


_ACTIVATIONS = {
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "relu": lambda x: np.maximum(x, 0.0),
    "identity": lambda x: x,
}


def finite_sparsity(gamma: float, n: int) -> float:
    """Mean of S over softmax rows of n keys with scores N(beta, gamma^2), exactly.

    With w = exp(gamma e), e ~ N(0, 1), S = sum_j w_j / sqrt(n sum_j w_j^2), and 1 / sqrt(x) as an integral over t,

        E[S] = sqrt(n / pi) * integral of t^(-1/2) E[w exp(-t w^2)] E[exp(-t w^2)]^(n-1) over t > 0.

    Both are trapezium sums, which converge geometrically here. It tends to exp(-gamma^2 / 2) for n >> exp(2 gamma^2)
    and to 1 / sqrt(n) as gamma grows.
    """
    if not (np.isfinite(gamma) and gamma >= 0):
        raise ValueInputError(f"gamma must be finite and not negative, got {gamma:g}; it is a standard deviation")
    if n < 1:
        raise ValueInputError(f"n must be at least 1, got {n}; give the number of keys")
    if gamma == 0 or n == 1:
        return 1.0
    step = _STEP / max(1.0, gamma)
    e = np.arange(-_REACH, _REACH, step)
    log_density = -0.5 * e**2 + np.log(step / np.sqrt(2 * np.pi))
    reach = 2 * _REACH * gamma
    log_t = np.arange(-reach - 2 * np.log(n) - 80, reach + 8, 2 * _STEP)
    total = 0.0
    for block in np.array_split(log_t, 1 + log_t.size * e.size // 2**20):
        x = 0.5 * block[:, None] + gamma * e
        tw = np.exp(2 * np.minimum(x, 300.0))
        key_term = np.exp(log_density + x - tw).sum(axis=1)
        # log E[exp(-t w^2)] from 1 - E[...], which is tiny for small t and is multiplied by n - 1.
        lost = (np.exp(log_density) * -np.expm1(-tw)).sum(axis=1)
        total += float((key_term * np.exp((n - 1) * np.log1p(-np.minimum(lost, 1 - 1e-16)))).sum()) * 2 * _STEP
    return float(np.sqrt(n / np.pi) * total)


@dataclass(frozen=True)
class Simulated:
    """A mean over independent draws of n keys, with its standard error."""

    value: float
    error: float
    draws: int


def simulate_sparsity(
    function: str, *, beta: float = 0.0, gamma: float, n: int, draws: int, rng: np.random.Generator
) -> Simulated:
    """Mean of S over draws of n Gaussian scores; draws whose weights are all zero are left out."""
    if function != "exp" and function not in _ACTIVATIONS:
        raise unknown_name("function", function, ("exp", *_ACTIVATIONS))
    if n < 1 or draws < 2:
        raise ValueInputError(f"a simulation needs n from 1 and draws from 2, got {n} and {draws}")
    chunks = []
    block = max(1, _DRAW_NUMBERS // n)
    for start in range(0, draws, block):
        scores = beta + gamma * rng.standard_normal((min(block, draws - start), n))
        if function == "exp":
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        else:
            weights = np.abs(_ACTIVATIONS[function](scores))
        total, energy = weights.sum(axis=1), np.square(weights).sum(axis=1)
        some = energy > 0
        chunks.append(total[some] / np.sqrt(n * energy[some]))
    values = np.concatenate(chunks)
    if values.size < 2:
        raise ValueInputError(
            f"fewer than two of {draws} draws gave {function} any weight at beta {beta:g} and gamma {gamma:g}; "
            "draw more keys"
        )
    return Simulated(float(values.mean()), float(values.std(ddof=1) / np.sqrt(values.size)), int(values.size))


@dataclass(frozen=True, eq=False)
class GaussianTable:
    """What softmax over n Gaussian scores gives on average: S, entropy in nats and the largest weight.

    Simulated once on a grid and interpolated in gamma and log n: the prediction for a head with as many visible keys
    and scores of that spread.
    """

    gammas: Reals
    counts: Reals
    sparsity: Reals
    entropy: Reals
    largest: Reals

    @classmethod
    def simulate(cls, longest: int, *, widest: float, draws: int = 400, rng: np.random.Generator) -> GaussianTable:
        """The table up to ``longest`` keys and a spread of ``widest``; each gamma sees the same draws."""
        if longest < 1 or not widest > 0:
            raise ValueInputError(f"a table needs longest from 1 and widest above 0, got {longest} and {widest:g}")
        gammas = np.unique(
            np.concatenate([np.linspace(0, min(4.0, widest), 17), np.geomspace(min(4.0, widest), widest, 9)])
        )
        counts = np.unique(np.round(np.geomspace(1, longest, 4 + 2 * int(np.log2(longest)))).astype(int))
        tables = np.empty((3, gammas.size, counts.size))
        for column, n in enumerate(counts):
            noise = rng.standard_normal((draws, n))
            noise -= noise.max(axis=1, keepdims=True)
            for row, gamma in enumerate(gammas):
                tables[:, row, column] = [x.mean() for x in _concentration(gamma * noise)]
        return cls(gammas, counts.astype(float), *tables)

    def predict(self, gamma: ArrayLike, n: ArrayLike) -> tuple[Reals, Reals, Reals]:
        """S, entropy and largest weight at a spread and a number of keys; beyond the widest spread, its values."""
        g, count = np.broadcast_arrays(np.asarray(gamma, np.float64), np.asarray(n, np.float64))
        row, right = _place(self.gammas, g)
        column, far = _place(np.log(self.counts), np.log(count))
        out = []
        # S and the largest weight fall exponentially with the spread, so their logarithms are interpolated.
        for table in (np.log(self.sparsity), self.entropy, np.log(self.largest)):
            near = table[row, column] * (1 - right) + table[np.minimum(row + 1, len(table) - 1), column] * right
            beyond = np.minimum(column + 1, table.shape[1] - 1)
            next_ = table[row, beyond] * (1 - right) + table[np.minimum(row + 1, len(table) - 1), beyond] * right
            out.append(near * (1 - far) + next_ * far)
        return np.exp(out[0]), out[1], np.exp(out[2])


def _place(grid: Reals, x: Reals) -> tuple[NDArray[np.intp], Reals]:
    """The cell of each x in a grid, and how far into it."""
    clipped = np.clip(x, grid[0], grid[-1])
    cell = np.clip(np.searchsorted(grid, clipped, side="right") - 1, 0, max(0, grid.size - 2))
    width = np.diff(grid, append=grid[-1] + 1.0)[cell]
    return cell, (clipped - grid[cell]) / width


def _concentration(scores: Reals) -> tuple[Reals, Reals, Reals]:
    """S, entropy and largest weight of softmax over the last axis; the largest score of each row is 0."""
    weights = np.exp(scores)
    weights /= weights.sum(axis=-1, keepdims=True)
    s = 1.0 / np.sqrt(scores.shape[-1] * np.square(weights).sum(axis=-1))
    return s, special.entr(weights).sum(axis=-1), weights.max(axis=-1)

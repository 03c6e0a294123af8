"""Sparsity with a finite number of keys, where the closed forms, which take n to infinity, are too small."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from softgap.errors import ValueInputError, unknown_name

__all__ = ["GaussianTable", "Simulated", "finite_sparsity", "simulate_sparsity"]

Reals = NDArray[np.float64]

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
        own = np.exp(log_density + x - tw).sum(axis=1)
        # log E[exp(-t w^2)] from 1 - E[...], which is tiny for small t and is multiplied by n - 1.
        lost = (np.exp(log_density) * -np.expm1(-tw)).sum(axis=1)
        total += float((own * np.exp((n - 1) * np.log1p(-np.minimum(lost, 1 - 1e-16)))).sum()) * 2 * _STEP
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
    found = []
    block = max(1, _DRAW_NUMBERS // n)
    for start in range(0, draws, block):
        scores = beta + gamma * rng.standard_normal((min(block, draws - start), n))
        if function == "exp":
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        else:
            weights = np.abs(_ACTIVATIONS[function](scores))
        total, energy = weights.sum(axis=1), np.square(weights).sum(axis=1)
        some = energy > 0
        found.append(total[some] / np.sqrt(n * energy[some]))
    values = np.concatenate(found)
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
        found = np.empty((3, gammas.size, counts.size))
        for column, n in enumerate(counts):
            noise = rng.standard_normal((draws, n))
            noise -= noise.max(axis=1, keepdims=True)
            for row, gamma in enumerate(gammas):
                found[:, row, column] = [x.mean() for x in _concentration(gamma * noise)]
        return cls(gammas, counts.astype(float), *found)

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

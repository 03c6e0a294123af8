"""Series that the tests of the ordinal measures share."""

from __future__ import annotations

import math

import numpy as np
from scipy.signal import lfilter

ORDERS = tuple(range(2, 9))


def noise(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def logistic(length: int, start: float = 0.3) -> np.ndarray:
    """The logistic map at r = 4."""
    x = np.empty(length)
    x[0] = start
    for t in range(1, length):
        x[t] = 4 * x[t - 1] * (1 - x[t - 1])
    return x


def autoregressive(seed: int, coefficient: float, *shape: int) -> np.ndarray:
    """AR(1) after a run-in."""
    shocks = noise(seed, *shape[:-1], shape[-1] + 200)
    return np.asarray(lfilter([1.0], [1.0, -coefficient], shocks, axis=-1))[..., 200:]


def with_ties(seed: int, length: int, levels: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, levels, length).astype(float)


def series() -> dict[str, np.ndarray]:
    """One series of each kind the fast forms and the other libraries are compared on."""
    return {
        "noise": noise(0, 400),
        "float32": noise(1, 301).astype(np.float32),
        "logistic map": logistic(350),
        "sine": np.sin(0.37 * np.arange(250)),
        "ties": with_ties(2, 300),
        "integers": np.random.default_rng(3).integers(-(2**62), 2**62, 200),
        "short": noise(4, 23),
        "longer than a block": noise(5, 2300),
    }


def largest(order: int) -> float:
    """The greatest entropy of an order, in nats."""
    return math.log(math.factorial(order))

"""Keys that fill up, keys of a chosen margin, and queries that sharpen: where softmax inverts, and how well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from softgap.theory.injectivity.collisions import softmax_collision
from softgap.theory.injectivity.inversion import key_condition, softmax_query, softmax_weights, weight_direction

__all__ = ["MarginSweep", "Prefix", "flat_keys", "log_margin_sweep", "prefixes", "weight_margin_sweep"]


@dataclass(frozen=True)
class Prefix:
    """Softmax over so many random keys.

    Attributes
    ----------
    margin
        Median of the margin in log-weights over the draws.
    injective
        Share of the draws in which the rank condition holds.
    collision
        Largest distance of the two distributions of a constructed collision; NaN where none can be constructed.
    error
        Largest relative error of the recovered query; NaN where the weights do not determine it.
    """

    keys: int
    margin: float
    injective: float
    collision: float
    error: float


@dataclass(frozen=True, eq=False)
class MarginSweep:
    """The error of the inverter along a falling margin.

    Attributes
    ----------
    margin, error
        The margin and the relative error of the recovered query.
    predicted
        What perturbation theory gives for that error.
    slope
        Of log error on log margin.
    """

    margin: Float64[np.ndarray, " point"]
    error: Float64[np.ndarray, " point"]
    predicted: Float64[np.ndarray, " point"]

    @property
    def slope(self) -> float:
        """Of log error on log margin, by least squares."""
        return float(np.polyfit(np.log(self.margin), np.log(self.error), 1)[0])

    @property
    def off(self) -> float:
        """Largest factor between error and prediction, either way."""
        return float(np.exp(np.abs(np.log(self.error / self.predicted)).max()))


def prefixes(dim: int, lengths: Sequence[int], *, draws: int, rng: np.random.Generator) -> tuple[Prefix, ...]:
    """For each number of random keys: a collision where the rank condition fails, the inverse where it holds."""
    scale, found = dim**-0.5, []
    for n in lengths:
        margins, distances, errors = [], [], []
        for _ in range(draws):
            keys, q = rng.standard_normal((n, dim)), rng.standard_normal(dim)
            condition = key_condition(keys)
            margins.append(condition.log_margin)
            if condition.injective:
                back = softmax_query(softmax_weights(q, keys, scale), keys, scale)
                errors.append(float(np.linalg.norm(back - q) / np.linalg.norm(q)))
            else:
                distances.append(softmax_collision(q, keys, scale=scale).distance)
        found.append(
            Prefix(
                keys=n,
                margin=float(np.median(margins)),
                injective=len(errors) / draws,
                collision=max(distances, default=float("nan")),
                error=max(errors, default=float("nan")),
            )
        )
    return tuple(found)


def flat_keys(dim: int, keys: int, rng: np.random.Generator) -> Float64[np.ndarray, "key dim"]:
    """Keys of full rank d on an affine hyperplane off the origin: no two alike, and yet they do not affinely span."""
    normal = rng.standard_normal(dim)
    normal /= np.linalg.norm(normal)
    free = rng.standard_normal((keys, dim))
    return np.asarray(free - np.outer(free @ normal, normal) + normal)


def log_margin_sweep(
    dim: int, keys: int, margins: Sequence[float], *, noise: float, rng: np.random.Generator
) -> MarginSweep:
    """Relative noise in the weights, along the direction that hurts most, against the smallest singular value of C.

    The keys are given singular values from 1 down to the margin. Logarithms that are off by e move the query by the
    pseudo-inverse of s C times e, at most |e| / (s margin), and by that much if e is its left singular vector.
    """
    scale = dim**-0.5
    errors, predicted = [], []
    for margin in margins:
        free = rng.standard_normal((keys, dim))
        left, _, right = np.linalg.svd(free - free.mean(axis=0), full_matrices=False)
        matrix = (left * np.geomspace(1.0, margin, dim)) @ right
        q = rng.standard_normal(dim)
        q *= np.sqrt(dim) / np.linalg.norm(q)
        disturbed = softmax_weights(q, matrix, scale) * np.exp(noise * left[:, -1])
        back = softmax_query(disturbed / disturbed.sum(), matrix, scale)
        errors.append(float(np.linalg.norm(back - q) / np.linalg.norm(q)))
        predicted.append(noise / (scale * margin * float(np.linalg.norm(q))))
    return MarginSweep(np.asarray(margins, dtype=np.float64), np.asarray(errors), np.asarray(predicted))


def weight_margin_sweep(
    dim: int, keys: int, gains: Sequence[float], *, noise: float, rng: np.random.Generator
) -> MarginSweep:
    """The same keys under a query that sharpens: a change of the weights of one size against the weight margin.

    The weights move by ``noise`` times the margin, in the direction the derivative sees least; the query moves by
    noise / s then, so an error of the weights of size e is one of the query of size e / (s margin).
    """
    scale = dim**-0.5
    matrix, q0 = rng.standard_normal((keys, dim)), rng.standard_normal(dim)
    margins, errors, predicted = [], [], []
    for gain in gains:
        q = gain * q0
        a = softmax_weights(q, matrix, scale)
        margin, _, direction = weight_direction(matrix, a)
        size = noise * margin
        back = softmax_query(a + size * direction, matrix, scale)
        margins.append(margin)
        errors.append(float(np.linalg.norm(back - q)) / size)
        predicted.append(1 / (scale * margin))
    return MarginSweep(np.asarray(margins), np.asarray(errors), np.asarray(predicted))

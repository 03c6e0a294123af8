"""Different queries with the same attention distribution: constructed, certified, and by the margin of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from softgap.attention import Mechanism, attention_weights, resolve
from softgap.attention.feature_maps import seeded_affine
from softgap.errors import ShapeError, UnsupportedError, ValueInputError
from softgap.theory.injectivity.inversion import (
    check_keys,
    key_condition,
    null_direction,
    softmax_query,
    softmax_weights,
    weight_direction,
)

__all__ = [
    "EXACT",
    "Collision",
    "MarginSweep",
    "Prefix",
    "affine_collision",
    "certify",
    "elu1_collision",
    "flat_keys",
    "log_margin_sweep",
    "mechanism_weights",
    "multiples_collision",
    "prefixes",
    "softmax_collision",
    "weight_margin_sweep",
]


# Up to this largest difference between two distributions they count as one.
EXACT = 1e-12


Queries = Float64[np.ndarray, "query dim"]


@dataclass(frozen=True, eq=False)
class Collision:
    """A certificate: queries, the distributions a mechanism gives them over the same keys, and how far those differ.

    Attributes
    ----------
    distance
        Largest difference of a weight between any two of the distributions.
    apart
        Smallest distance between two of the queries, over the norm of the longer one.
    angle
        Smallest angle between two of the queries, in degrees; 0 for multiples.
    """

    mechanism: str
    queries: Queries
    weights: Float64[np.ndarray, "query key"]
    distance: float
    apart: float
    angle: float

    @property
    def exact(self) -> bool:
        """Whether the distributions agree to 1e-12."""
        return self.distance <= EXACT

    def to_json(self) -> dict[str, Any]:
        """Plain values, queries and distributions included."""
        return {
            "mechanism": self.mechanism,
            "queries": self.queries.tolist(),
            "weights": self.weights.tolist(),
            "distance": self.distance,
            "apart": self.apart,
            "angle": self.angle,
        }


def mechanism_weights(
    mechanism: str | Mechanism, queries: Any, keys: Any, *, scale: float
) -> Float64[np.ndarray, "query key"]:
    """The distribution of each query over all the keys, in float64; a row is zero where the denominator is.

    Every query stands at the position of the last key: as many heads that share one KV head.
    """
    q = torch.as_tensor(np.atleast_2d(np.asarray(queries, dtype=np.float64)))
    k = torch.as_tensor(check_keys(keys))
    weights = attention_weights(mechanism, q[None, :, None], k[None, None], scale=scale, dtype=torch.float64)
    return np.asarray(weights[0, :, 0].numpy())


def certify(mechanism: str | Mechanism, queries: Any, keys: Any, *, scale: float) -> Collision:
    """Compute the distributions of some queries anew and say how far they lie apart."""
    rows = np.asarray(queries, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < 2:
        raise ShapeError(f"a collision needs at least 2 queries [query, dim], got shape {list(rows.shape)}")
    weights = mechanism_weights(mechanism, rows, keys, scale=scale)
    first, second = np.triu_indices(len(rows), 1)
    norms = np.linalg.norm(rows, axis=1)
    between = np.linalg.norm(rows[first] - rows[second], axis=1)
    unit = rows / np.where(norms > 0, norms, 1.0)[:, None]
    # arccos of a number near 1 loses half the digits; the chord does not.
    chords = np.linalg.norm(unit[first] - unit[second], axis=1)
    angles = 2 * np.arcsin(np.clip(chords / 2, 0, 1))
    return Collision(
        mechanism=resolve(mechanism).label,
        queries=rows,
        weights=weights,
        distance=float(np.abs(weights[first] - weights[second]).max()),
        apart=float((between / np.maximum(np.maximum(norms[first], norms[second]), 1e-300)).min()),
        angle=float(np.degrees(angles.min())),
    )


def softmax_collision(query: Any, keys: Any, *, scale: float, step: float = 1.0) -> Collision:
    """q and q + step n with K n = c 1: softmax where [K, 1] lacks full rank, as with N <= d keys."""
    q = np.asarray(query, dtype=np.float64)
    return certify("softmax", np.stack([q, q + step * null_direction(keys)]), keys, scale=scale)


def multiples_collision(
    query: Any, keys: Any, *, scale: float, factors: Sequence[float] = (0.5, 1.0, 7.0), mechanism: str = "relu"
) -> Collision:
    """Positive multiples of one query, for mechanisms whose weights are homogeneous in q before normalisation."""
    q = np.asarray(query, dtype=np.float64)
    return certify(mechanism, np.stack([_positive(c) * q for c in factors]), keys, scale=scale)


def elu1_collision(query: Any, keys: Any, *, scale: float, factors: Sequence[float] = (0.5, 1.0, 7.0)) -> Collision:
    """p_c = phi^-1(c phi(q)) for phi = elu + 1, whose range is all of (0, inf), so that every c > 0 will do."""
    q = np.asarray(query, dtype=np.float64)
    return certify("elu1", np.stack([_elu1_moved(q, _positive(c)) for c in factors]), keys, scale=scale)


def affine_collision(
    keys: Any,
    *,
    scale: float,
    rng: np.random.Generator,
    mechanism: str | Mechanism = "relu_affine",
    queries: int = 4,
    least_angle: float = 10.0,
    attempts: int = 100,
) -> Collision:
    """Queries of different directions and lengths with one distribution under phi(x) = relu(A x + b).

    For u > 0 the queries p_c = A^-1 (c u - b) have features c u, for every c > 0. With w = A^-1 u and h = A^-1 b their
    directions sweep the plane angle from -h to w; the factors are chosen so that neighbours are equally far apart,

        c = (|h| sin t) / (|w| sin(T - t)),   T the angle between -h and w,   t = T i / (queries + 1).

    Parameters
    ----------
    mechanism
        ``relu_affine`` with its seeded A and b, or with given ones; A must be square and invertible.
    least_angle
        In degrees, between any two of the queries. u is drawn again until w and -h leave room for it; they never do if
        b = 0, where all p_c are multiples.
    """
    matrix = check_keys(keys)
    a, b = _affine_parameters(resolve(mechanism), matrix.shape[1])
    h = np.linalg.solve(a, b)
    for _ in range(attempts):
        w = np.linalg.solve(a, np.exp(2 * rng.standard_normal(len(b))))
        collision = certify(mechanism, _spread_queries(w, h, queries), matrix, scale=scale)
        if collision.angle >= least_angle:
            return collision
    raise UnsupportedError(
        f"no {queries} queries at least {least_angle:g} degrees apart were found in {attempts} draws; "
        "ask for fewer queries or a smaller angle, and give b other than 0"
    )


def _spread_queries(w: np.ndarray, h: np.ndarray, queries: int) -> Queries:
    """A^-1 (c u - b) = c w - h at equal steps of the angle between -h and w."""
    length_w, length_h = np.linalg.norm(w), np.linalg.norm(h)
    whole = np.arccos(np.clip(-(w @ h) / max(length_w * length_h, 1e-300), -1, 1))
    steps = whole * np.arange(1, queries + 1) / (queries + 1)
    factors = length_h * np.sin(steps) / np.maximum(length_w * np.sin(whole - steps), 1e-300)
    return np.asarray(factors[:, None] * w - h)


def _affine_parameters(mechanism: Mechanism, d: int) -> tuple[np.ndarray, np.ndarray]:
    if {"A", "b"} <= set(mechanism.parameters):
        a, b = (mechanism.parameters[name].flatten(0, 1)[0].double().numpy() for name in ("A", "b"))
    else:
        a, b = (x.numpy() for x in seeded_affine(d, int(mechanism.options["seed"])))
    if a.shape != (d, d) or np.linalg.matrix_rank(a) < d:
        raise UnsupportedError(
            f"the construction needs a square invertible A of size {d}, got shape {list(a.shape)} and rank "
            f"{np.linalg.matrix_rank(a)}; use find_collision for other maps"
        )
    return a, b


def _elu1_moved(q: np.ndarray, factor: float) -> np.ndarray:
    feature = factor * np.where(q > 0, q + 1, np.exp(np.minimum(q, 0)))
    # Below 1 the inverse is the logarithm of c exp(q), taken as a sum so that it never underflows.
    below = np.log(factor) + np.where(q > 0, np.log1p(np.maximum(q, 0)), q)
    return np.where(feature >= 1, feature - 1, below)


def _positive(factor: float) -> float:
    if not 0 < factor < np.inf:
        raise ValueInputError(f"a factor must be above 0 and finite, got {factor}; any such number gives a collision")
    return float(factor)


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
    scale, entries = dim**-0.5, []
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
        entries.append(
            Prefix(
                keys=n,
                margin=float(np.median(margins)),
                injective=len(errors) / draws,
                collision=max(distances, default=float("nan")),
                error=max(errors, default=float("nan")),
            )
        )
    return tuple(entries)


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

"""When softmax weights determine the query, how firmly, and the query itself from its weights.

With weights a = softmax(s K q) and centred keys C = K - 1 mean(K)^T,

    log a - mean(log a) = s C q,

a linear system for q. It has one solution iff rank C = d, that is rank [K, 1] = d + 1: the keys affinely span R^d
(Han et al. 2024, arXiv:2412.06590, proposition 1, whose first condition rank K = d follows from the second).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.errors import ShapeError, UnsupportedError, ValueInputError

__all__ = [
    "KeyCondition",
    "check_keys",
    "inline_query",
    "key_condition",
    "null_direction",
    "softmax_query",
    "softmax_weights",
    "weight_direction",
    "weight_margin",
]

Keys = Float64[np.ndarray, "key dim"]
Weights = Float64[np.ndarray, " key"]
Vector = Float64[np.ndarray, " dim"]


@dataclass(frozen=True)
class KeyCondition:
    """The rank condition of a key matrix.

    Attributes
    ----------
    rank
        Of [K, 1]; singular values below max(N, d) eps of the largest count as zero.
    log_margin
        Smallest singular value of the centred keys, 0 for N <= d: an error e in the logarithms of the weights moves
        the recovered query by at most |e| / (s log_margin).
    largest
        Largest singular value of the centred keys.
    """

    keys: int
    dim: int
    rank: int
    log_margin: float
    largest: float

    @property
    def injective(self) -> bool:
        """Whether softmax weights over these keys determine the query."""
        return self.rank == self.dim + 1


def check_keys(keys: Any) -> Keys:
    """A matrix of finite keys with two rows at least, in float64."""
    matrix = np.asarray(keys, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[1] == 0:
        raise ShapeError(f"keys must be a matrix [key, dim], got shape {list(matrix.shape)}")
    if len(matrix) < 2:
        raise ValueInputError(
            f"a key matrix needs at least 2 rows, got {len(matrix)}; with one key every query has the same weights"
        )
    if not np.isfinite(matrix).all():
        raise ValueInputError("keys hold NaN or inf; injectivity is about finite numbers")
    return matrix


def key_condition(keys: Any, *, eps: float = float(np.finfo(np.float64).eps)) -> KeyCondition:
    """The rank of [K, 1] and the margin in log-weights.

    Parameters
    ----------
    keys
        ``[key, dim]``.
    eps
        Relative precision the keys are known to; float32 keys of a model are no better than 1.2e-7.
    """
    matrix = check_keys(keys)
    n, d = matrix.shape
    singular = np.linalg.svd(matrix - matrix.mean(axis=0), compute_uv=False)
    # The centred keys sum to zero, so N rows have rank N - 1 at most; rounding must not say otherwise.
    singular = np.pad(singular[: n - 1], (0, max(0, d - n + 1)))[:d]
    rank = 1 + int((singular > max(n, d) * eps * singular[0]).sum())
    return KeyCondition(n, d, rank, float(singular[-1]), float(singular[0]))


def softmax_weights(query: Any, keys: Any, scale: float) -> Weights:
    """softmax(s K q) in float64."""
    scores = scale * (np.asarray(keys, dtype=np.float64) @ np.asarray(query, dtype=np.float64))
    relative = np.exp(scores - scores.max())
    return np.asarray(relative / relative.sum())


def weight_margin(keys: Any, weights: Any) -> float:
    """Smallest singular value of (diag a - a a^T) K: how far the weights move for the least visible change of q.

    The derivative of a by q is s (diag a - a a^T) K. Where one weight is close to 1 this margin is tiny however well
    the keys span: injective need not mean distinguishable.
    """
    return weight_direction(keys, weights)[0]


def weight_direction(keys: Any, weights: Any) -> tuple[float, Vector, Weights]:
    """The weight margin with its unit vectors: a change of q that barely shows, and what it does to the weights."""
    matrix, a = check_keys(keys), np.asarray(weights, dtype=np.float64)
    if a.shape != (len(matrix),):
        raise ShapeError(f"weights must be one per key, {len(matrix)}, got shape {list(a.shape)}")
    left, singular, right = np.linalg.svd(a[:, None] * (matrix - a @ matrix), full_matrices=False)
    if len(matrix) <= matrix.shape[1]:
        return 0.0, np.asarray(null_direction(matrix)), np.zeros(len(matrix))
    return float(singular[-1]), right[-1], left[:, -1]


def softmax_query(weights: Any, keys: Any, scale: float) -> Vector:
    """The query whose softmax weights over the keys these are: least squares on centred logarithms."""
    matrix, a = check_keys(keys), np.asarray(weights, dtype=np.float64)
    if a.shape != (len(matrix),):
        raise ShapeError(f"weights must be one per key, {len(matrix)}, got shape {list(a.shape)}")
    if not (a > 0).all():
        worst = int(np.argmin(np.where(np.isnan(a), -np.inf, a)))
        raise ValueInputError(
            f"weights must all be above 0 to have logarithms, got {a[worst]:g} for key {worst}; "
            "use a query with smaller scores"
        )
    logs = np.log(a)
    return _least_squares_query(matrix, (logs - logs.mean()) / scale)


def inline_query(weights: Any, keys: Any, scale: float) -> Vector:
    """The query whose InLine weights these are: N w - 1 = s C q with the same centred keys C, so the same condition."""
    matrix, w = check_keys(keys), np.asarray(weights, dtype=np.float64)
    return _least_squares_query(matrix, (len(matrix) * w - 1) / scale)


def null_direction(keys: Any) -> Vector:
    """A unit vector n with K n = c 1: q and q + n have the same softmax weights.

    It exists iff the rank condition fails: the right singular vector of the centred keys with singular value 0.
    """
    matrix = check_keys(keys)
    condition = key_condition(matrix)
    if condition.injective:
        raise UnsupportedError(
            f"softmax over these keys is injective (rank [K, 1] = {condition.rank}, margin {condition.log_margin:g}); "
            "only keys that do not affinely span have a null vector"
        )
    return np.asarray(np.linalg.svd(matrix - matrix.mean(axis=0), full_matrices=True)[2][-1])


def _least_squares_query(matrix: Keys, target: Weights) -> Vector:
    condition = key_condition(matrix)
    if not condition.injective:
        raise UnsupportedError(
            f"these keys do not determine the query: rank [K, 1] is {condition.rank}, "
            f"{condition.dim + 1} is needed; use at least {condition.dim + 1} keys that affinely span the space"
        )
    return np.asarray(np.linalg.lstsq(matrix - matrix.mean(axis=0), target, rcond=None)[0])

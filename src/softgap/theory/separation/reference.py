"""The network of the separation as its source writes it: tensor products and loops in float64, for small sizes only."""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

__all__ = ["tensor_product_network", "tensor_product_scores"]


def tensor_product_scores(
    queries: Float[np.ndarray, "n d"], keys: Float[np.ndarray, "n d"], x: Float[np.ndarray, "d d"]
) -> Float[np.ndarray, "n n"]:
    """A1 X A2^T as (A1 kron A2) vec(X), vec by rows (Deng, Song and Zhou 2023)."""
    product = np.kron(queries, keys) @ x.reshape(-1)
    return np.asarray(product.reshape(len(queries), len(keys)))


def tensor_product_network(
    queries: Float[np.ndarray, "n d"],
    keys: Float[np.ndarray, "n d"],
    signs: Int[np.ndarray, "d m"],
    tau: float,
    *,
    exponential: bool,
) -> float:
    """F = relu(sum_{i,k} relu((C Y)_ik - tau)), C = diag(u 1)^-1 u A2, u = exp(A1 X A2^T) or A1 X A2^T, X = I."""
    scores = tensor_product_scores(queries, keys, np.eye(queries.shape[1]))
    total = 0.0
    for row in scores:
        u = [math.exp(s) if exponential else float(s) for s in row]
        alpha = sum(u)
        output = [sum(u[j] / alpha * keys[j, x] for j in range(len(keys))) for x in range(keys.shape[1])]
        for k in range(signs.shape[1]):
            total += max(0.0, sum(output[x] * signs[x, k] for x in range(len(output))) - tau)
    return max(0.0, total)

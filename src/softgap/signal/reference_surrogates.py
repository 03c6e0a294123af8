"""IAAFT as one reads it in the paper: one surrogate at a time, the oracle and the rival of the batched form."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

__all__ = ["iaaft_loop"]


def iaaft_loop(
    x: Float64[np.ndarray, " time"], start: Float64[np.ndarray, " time"], max_iterations: int
) -> tuple[Float64[np.ndarray, " time"], int]:
    """The surrogate that the iteration reaches from ``start``, a permutation of ``x``, and the iterations made.

    Schreiber and Schmitz 1996, PRL 77, 635: ``S -> |X| S / |S|``, back to time, values of x by rank, until nothing
    changes.
    """
    ordered = np.sort(x)
    amplitude = np.abs(np.fft.rfft(x))
    series = start.copy()
    for iteration in range(1, max_iterations + 1):
        spectrum = np.fft.rfft(series)
        shaped = np.fft.irfft(amplitude * np.exp(1j * np.angle(spectrum)), n=len(x))
        following = np.empty_like(series)
        following[np.argsort(shaped, kind="stable")] = ordered
        if np.array_equal(following, series):
            return series, iteration
        series = following
    return series, max_iterations

"""Random series with known statistics, each a function of a shape ``[..., n]``, its parameters and an ``rng``."""

from __future__ import annotations

import math

import numpy as np
import scipy.fft
import scipy.signal
from jaxtyping import Float64

__all__ = ["ar1", "brown", "fbm", "fgn_covariance", "fgn_from_normals", "markov_walk", "pink", "sine", "white"]

Shape = tuple[int, ...]
Batch = Float64[np.ndarray, "*batch time"]


def white(shape: Shape, *, rng: np.random.Generator) -> Batch:
    """Independent standard normal values."""
    return rng.standard_normal(shape)


def brown(shape: Shape, *, rng: np.random.Generator) -> Batch:
    """x_t = x_{t-1} + e_t, e standard normal: ordinary Brownian motion at whole times."""
    return rng.standard_normal(shape).cumsum(axis=-1)


def pink(shape: Shape, *, rng: np.random.Generator) -> Batch:
    """Gaussian noise with power proportional to 1 / f.

    White noise shaped in Fourier space by f^{-1/2}, without its mean. Made at twice the length and cut, since a
    Fourier sum is periodic and its end would run into its beginning.
    """
    n = shape[-1]
    long = scipy.fft.next_fast_len(2 * n, real=True)
    spectrum = scipy.fft.rfft(rng.standard_normal((*shape[:-1], long)), axis=-1)
    spectrum[..., 0] = 0
    spectrum[..., 1:] /= np.sqrt(np.arange(1, spectrum.shape[-1]) / long)
    return np.asarray(scipy.fft.irfft(spectrum, n=long, axis=-1)[..., :n]).copy()


def fbm(shape: Shape, *, rng: np.random.Generator, hurst: float) -> Batch:
    """Fractional Brownian motion at times 1..n, E (x_s - x_t)^2 = |s - t|^{2H}: the sum of its exact increments."""
    normals = rng.standard_normal((*shape[:-1], 2 * scipy.fft.next_fast_len(shape[-1], real=True)))
    return fgn_from_normals(normals, shape[-1], hurst).cumsum(axis=-1)


def fgn_covariance(n: int, hurst: float) -> Float64[np.ndarray, " lag"]:
    """gamma(k) = (|k + 1|^{2H} - 2 |k|^{2H} + |k - 1|^{2H}) / 2 at lags 0..n-1."""
    lag = np.arange(n, dtype=np.float64)
    power = 2 * hurst
    return np.asarray((lag + 1) ** power - 2 * lag**power + np.abs(lag - 1) ** power) / 2


def fgn_from_normals(normals: Batch, n: int, hurst: float) -> Batch:
    """Fractional Gaussian noise, a linear function of m >= 2n - 2 standard normal numbers (m even).

    The covariance of the noise is the corner of a circulant matrix of size m, whose eigenvalues, the Fourier
    transform of its first row, are not negative for any H in (0, 1): so the noise is exact at every length (Davies and
    Harte 1987, Biometrika 74, 95; Craigmile 2003 for the eigenvalues).
    """
    m = normals.shape[-1]
    half = fgn_covariance(m // 2 + 1, hurst)
    eigenvalues = scipy.fft.rfft(np.concatenate([half, half[-2:0:-1]])).real.clip(min=0)
    spectrum = np.empty((*normals.shape[:-1], m // 2 + 1), dtype=np.complex128)
    spectrum[..., 0], spectrum[..., -1] = normals[..., 0], normals[..., m // 2]
    spectrum[..., 1:-1] = (normals[..., 1 : m // 2] + 1j * normals[..., m // 2 + 1 :]) / math.sqrt(2)
    spectrum *= np.sqrt(eigenvalues * m)
    return np.asarray(scipy.fft.irfft(spectrum, n=m, axis=-1)[..., :n])


def ar1(shape: Shape, *, rng: np.random.Generator, phi: float) -> Batch:
    """x_t = phi x_{t-1} + e_t with variance 1, begun in its stationary law."""
    noise = rng.standard_normal(shape)
    noise[..., 1:] *= math.sqrt(1 - phi * phi)
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -phi], noise, axis=-1))


def sine(shape: Shape, *, rng: np.random.Generator, period: float) -> Batch:
    """sin(2 pi (t / period + u)), u uniform."""
    phase = rng.random((*shape[:-1], 1))
    return np.sin(2 * math.pi * (np.arange(shape[-1]) / period + phase))


def markov_walk(shape: Shape, *, rng: np.random.Generator, up: float, down: float) -> Batch:
    """The walk of a two-state chain: each step goes up in state 1 and down in state 0, by a length uniform in (0, 1).

    ``up`` is P(0 -> 1), ``down`` is P(1 -> 0). The states themselves would tie in nearly every window, and so would a
    walk of unit steps (up, down is a return); lengths that are continuous and independent of the states remove the
    ties and leave the chain in the signs.
    """
    uniform = rng.random(shape)
    state = np.empty(shape, dtype=bool)
    state[..., 0] = uniform[..., 0] < up / (up + down)
    for t in range(1, shape[-1]):
        before = state[..., t - 1]
        state[..., t] = np.where(before, uniform[..., t] >= down, uniform[..., t] < up)
    return (np.where(state, 1.0, -1.0) * rng.random(shape)).cumsum(axis=-1)

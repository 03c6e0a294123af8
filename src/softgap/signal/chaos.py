"""Chaotic maps and flows: deterministic series from random initial conditions, with the transient dropped.

Maps iterate; flows are integrated by Runge-Kutta of fourth order at a fixed step and sampled at ``interval``. The first
coordinate is the series.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.signal.kernels import compiled

__all__ = ["henon", "logistic", "lorenz", "mackey_glass", "rossler"]

Shape = tuple[int, ...]
SeriesArray = Float64[np.ndarray, "*batch time"]

_LORENZ, _ROSSLER = 0, 1

# Iterations of a map, and units of time of a flow (several times what is needed to reach the attractor).
_MAP_TRANSIENT = 1000
_LORENZ_TRANSIENT, _ROSSLER_TRANSIENT, _MACKEY_GLASS_TRANSIENT = 50.0, 300.0, 1000.0
_LORENZ_STEP, _ROSSLER_STEP, _MACKEY_GLASS_STEP = 0.01, 0.02, 0.1


def logistic(shape: Shape, *, rng: np.random.Generator, r: float) -> SeriesArray:
    """x_{t+1} = r x_t (1 - x_t), from x_0 uniform in (0.05, 0.95)."""
    return _rows(_logistic, shape, rng.uniform(0.05, 0.95, (*shape[:-1], 1)), r, _MAP_TRANSIENT)


def henon(shape: Shape, *, rng: np.random.Generator, a: float, b: float) -> SeriesArray:
    """x_{t+1} = 1 - a x_t^2 + y_t, y_{t+1} = b x_t, from a point near 0, inside the basin of the attractor."""
    return _rows(_henon, shape, rng.uniform(-0.1, 0.1, (*shape[:-1], 2)), a, b, _MAP_TRANSIENT)


def lorenz(
    shape: Shape, *, rng: np.random.Generator, sigma: float, rho: float, beta: float, interval: float
) -> SeriesArray:
    """x' = sigma (y - x), y' = x (rho - z) - y, z' = x y - beta z."""
    substeps = math.ceil(interval / _LORENZ_STEP)
    start = rng.uniform(-10, 10, (*shape[:-1], 3)) + np.array([0.0, 0.0, 25.0])
    transient = math.ceil(_LORENZ_TRANSIENT / interval)
    return _rows(_flow, shape, start, _LORENZ, sigma, rho, beta, interval / substeps, substeps, transient)


def rossler(shape: Shape, *, rng: np.random.Generator, a: float, b: float, c: float, interval: float) -> SeriesArray:
    """x' = -y - z, y' = x + a y, z' = b + z (x - c)."""
    substeps = math.ceil(interval / _ROSSLER_STEP)
    start = rng.uniform(-4, 4, (*shape[:-1], 3)) * np.array([1.0, 1.0, 0.0])
    transient = math.ceil(_ROSSLER_TRANSIENT / interval)
    return _rows(_flow, shape, start, _ROSSLER, a, b, c, interval / substeps, substeps, transient)


def mackey_glass(
    shape: Shape, *, rng: np.random.Generator, beta: float, gamma: float, tau: float, exponent: float, interval: float
) -> SeriesArray:
    """x'(t) = beta x(t - tau) / (1 + x(t - tau)^exponent) - gamma x(t), from a constant history in (0.5, 1.5).

    The step divides tau, so the past is known at grid points, and between them by the cubic through two values and
    two slopes. The series is read off at ``interval``, rounded to whole steps.
    """
    delay = math.ceil(tau / _MACKEY_GLASS_STEP)
    step = tau / delay
    substeps = max(1, round(interval / step))
    start = rng.uniform(0.5, 1.5, (*shape[:-1], 1))
    transient = math.ceil(_MACKEY_GLASS_TRANSIENT / interval)
    return _rows(_mackey_glass, shape, start, beta, gamma, exponent, step, delay, substeps, transient)


def _rows(
    kernel: Callable[..., Any], shape: Shape, start: Float64[np.ndarray, "*batch state"], *parameters: float
) -> SeriesArray:
    out = np.empty((math.prod(shape[:-1]), shape[-1]))
    kernel(out, start.reshape(len(out), -1), *parameters)
    return out.reshape(shape)


@compiled
def _logistic(out: np.ndarray, start: np.ndarray, r: float, transient: int) -> None:
    for i in range(out.shape[0]):
        x = start[i, 0]
        for _ in range(transient):
            x = r * x * (1 - x)
        for t in range(out.shape[1]):
            out[i, t] = x
            x = r * x * (1 - x)


@compiled
def _henon(out: np.ndarray, start: np.ndarray, a: float, b: float, transient: int) -> None:
    for i in range(out.shape[0]):
        x, y = start[i, 0], start[i, 1]
        for t in range(-transient, out.shape[1]):
            if t >= 0:
                out[i, t] = x
            x, y = 1 - a * x * x + y, b * x


@compiled
def _slope(kind: int, x: float, y: float, z: float, p: float, q: float, s: float) -> tuple[float, float, float]:
    if kind == _LORENZ:
        return p * (y - x), x * (q - z) - y, x * y - s * z
    return -y - z, x + p * y, q + z * (x - s)


@compiled
def _runge_kutta_step(
    kind: int, x: float, y: float, z: float, p: float, q: float, s: float, h: float
) -> tuple[float, float, float]:
    """One step h of the classical Runge-Kutta method."""
    x1, y1, z1 = _slope(kind, x, y, z, p, q, s)
    x2, y2, z2 = _slope(kind, x + h / 2 * x1, y + h / 2 * y1, z + h / 2 * z1, p, q, s)
    x3, y3, z3 = _slope(kind, x + h / 2 * x2, y + h / 2 * y2, z + h / 2 * z2, p, q, s)
    x4, y4, z4 = _slope(kind, x + h * x3, y + h * y3, z + h * z3, p, q, s)
    return (
        x + h / 6 * (x1 + 2 * x2 + 2 * x3 + x4),
        y + h / 6 * (y1 + 2 * y2 + 2 * y3 + y4),
        z + h / 6 * (z1 + 2 * z2 + 2 * z3 + z4),
    )


@compiled
def _flow(
    out: np.ndarray,
    start: np.ndarray,
    kind: int,
    p: float,
    q: float,
    s: float,
    step: float,
    substeps: int,
    transient: int,
) -> None:
    for i in range(out.shape[0]):
        x, y, z = start[i]
        for t in range(-transient, out.shape[1]):
            if t >= 0:
                out[i, t] = x
            for _ in range(substeps):
                x, y, z = _runge_kutta_step(kind, x, y, z, p, q, s, step)


@compiled
def _growth(past: float, beta: float, exponent: float) -> float:
    grown: float = beta * past / (1 + past**exponent)
    return grown


@compiled
def _mackey_glass(
    out: np.ndarray,
    start: np.ndarray,
    beta: float,
    gamma: float,
    exponent: float,
    step: float,
    delay: int,
    substeps: int,
    transient: int,
) -> None:
    # Rings over [t - tau, t]: values at grid points, and in the middle of the step that begins there.
    values, middles = np.empty(delay + 1), np.empty(delay + 1)
    for i in range(out.shape[0]):
        values[:], middles[:] = start[i, 0], start[i, 0]
        now, growth = 0, _growth(start[i, 0], beta, exponent)
        for t in range(-transient, out.shape[1]):
            if t >= 0:
                out[i, t] = values[now]
            for _ in range(substeps):
                old, following = (now + 1) % (delay + 1), (now + 2) % (delay + 1)
                x = values[now]
                k1 = growth - gamma * x
                middle, growth = _growth(middles[old], beta, exponent), _growth(values[following], beta, exponent)
                k2 = middle - gamma * (x + step / 2 * k1)
                k3 = middle - gamma * (x + step / 2 * k2)
                k4 = growth - gamma * (x + step * k3)
                end = x + step / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
                middles[now] = (x + end) / 2 + step / 8 * (k1 - (growth - gamma * end))
                now = old
                values[now] = end

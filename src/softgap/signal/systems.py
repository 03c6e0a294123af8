"""Known stochastic and chaotic systems by name, generated at the length of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import scipy.fft
from jaxtyping import Float64

from softgap.errors import ValueInputError, unknown_name
from softgap.inputs import check_count, check_rng
from softgap.signal import chaos

__all__ = ["System", "fgn_covariance", "fgn_from_normals", "simulate", "systems"]


Shape = tuple[int, ...]


SeriesArray = Float64[np.ndarray, "*batch time"]


def white(shape: Shape, *, rng: np.random.Generator) -> SeriesArray:
    """Independent standard normal values."""
    return rng.standard_normal(shape)


def brown(shape: Shape, *, rng: np.random.Generator) -> SeriesArray:
    """x_t = x_{t-1} + e_t, e standard normal: ordinary Brownian motion at whole times."""
    return rng.standard_normal(shape).cumsum(axis=-1)


def pink(shape: Shape, *, rng: np.random.Generator) -> SeriesArray:
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


def fbm(shape: Shape, *, rng: np.random.Generator, hurst: float) -> SeriesArray:
    """Fractional Brownian motion at times 1..n, E (x_s - x_t)^2 = |s - t|^{2H}: the sum of its exact increments."""
    normals = rng.standard_normal((*shape[:-1], 2 * scipy.fft.next_fast_len(shape[-1], real=True)))
    return fgn_from_normals(normals, shape[-1], hurst).cumsum(axis=-1)


def fgn_covariance(n: int, hurst: float) -> Float64[np.ndarray, " lag"]:
    """gamma(k) = (|k + 1|^{2H} - 2 |k|^{2H} + |k - 1|^{2H}) / 2 at lags 0..n-1."""
    lag = np.arange(n, dtype=np.float64)
    power = 2 * hurst
    return np.asarray((lag + 1) ** power - 2 * lag**power + np.abs(lag - 1) ** power) / 2


def fgn_from_normals(normals: SeriesArray, n: int, hurst: float) -> SeriesArray:
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


def ar1(shape: Shape, *, rng: np.random.Generator, phi: float) -> SeriesArray:
    """x_t = phi x_{t-1} + e_t with variance 1, begun in its stationary law."""
    import scipy.signal  # half a second, for one filter

    noise = rng.standard_normal(shape)
    noise[..., 1:] *= math.sqrt(1 - phi * phi)
    return np.asarray(scipy.signal.lfilter([1.0], [1.0, -phi], noise, axis=-1))


def sine(shape: Shape, *, rng: np.random.Generator, period: float) -> SeriesArray:
    """sin(2 pi (t / period + u)), u uniform."""
    phase = rng.random((*shape[:-1], 1))
    return np.sin(2 * math.pi * (np.arange(shape[-1]) / period + phase))


def markov_walk(shape: Shape, *, rng: np.random.Generator, up: float, down: float) -> SeriesArray:
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


@dataclass(frozen=True)
class Range:
    """Where a parameter may lie; a bound that is ``open`` does not belong to it."""

    low: float
    high: float
    open: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` lies in the range."""
        return self.low < value < self.high if self.open else self.low <= value <= self.high

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"above {self.low:g}" if self.open else f"at least {self.low:g}"
        return f"between {self.low:g} and {self.high:g}" + (", both excluded" if self.open else "")


_ANY = Range(-math.inf, math.inf)


_POSITIVE = Range(0, math.inf, open=True)


_PROBABILITY = Range(0, 1, open=True)


@dataclass(frozen=True, eq=False, repr=False)
class System:
    """A system whose statistics are known.

    Attributes
    ----------
    name
        What it is called.
    kind
        "noise", "periodic", "map" or "flow".
    description
        The rule, and what is known about it.
    parameters
        Names and defaults.
    ranges
        Where each parameter may lie.
    """

    name: str
    kind: str
    description: str
    make: Callable[..., Float64[np.ndarray, "*batch time"]]
    parameters: Mapping[str, float]
    ranges: Mapping[str, Range]

    def __repr__(self) -> str:
        return f"System({self.name})"

    def check_parameters(self, values: Mapping[str, Any]) -> dict[str, float]:
        """All parameters, the given ones in their ranges."""
        for name, value in values.items():
            if name not in self.parameters:
                if not self.parameters:
                    raise ValueInputError(f"system '{self.name}' has no parameters, got {name}={value!r}")
                raise unknown_name(f"parameter of system '{self.name}'", name, self.parameters)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not self.ranges[name].holds(value):
                allowed = "" if self.ranges[name] is _ANY else f" {self.ranges[name]}"
                raise ValueInputError(f"{name} of system '{self.name}' must be a number{allowed}, got {value!r}")
        return {name: float(values.get(name, default)) for name, default in self.parameters.items()}


def systems() -> Mapping[str, System]:
    """All known systems by name."""
    return _SYSTEMS


def simulate(
    name: str, n: int, *, rng: np.random.Generator, size: int | tuple[int, ...] = (), **parameters: float
) -> Float64[np.ndarray, "*size n"]:
    """Series of ``n`` steps of a known system.

    Parameters
    ----------
    name
        One of ``systems``.
    n
        Steps; take those of the data, since entropies depend on length.
    rng
        Draws the noise, or the initial condition of a deterministic system: the same state, the same series.
    size
        Leading axes: independent series.
    parameters
        Of the system, by name; its defaults otherwise.

    Examples
    --------
    >>> import numpy as np
    >>> simulate("fbm", 400, rng=np.random.default_rng(0), size=100, hurst=0.7).shape
    (100, 400)
    """
    if name not in _SYSTEMS:
        raise unknown_name("system", name, _SYSTEMS)
    check_rng(rng)
    axes = size if isinstance(size, tuple) else (size,)
    shape = (*(check_count("size", axis) for axis in axes), check_count("n", n))
    system = _SYSTEMS[name]
    values = system.check_parameters(parameters)
    series = system.make(shape, rng=rng, **values)
    if not np.isfinite(series).all():
        raise ValueInputError(f"system '{name}' runs off to infinity with {values}; stay nearer to its defaults")
    return series


_BUILT_IN = (
    System(
        "white",
        "noise",
        "Independent normal values. All patterns equally likely: entropy 1.",
        white,
        {},
        {},
    ),
    System(
        "pink",
        "noise",
        "Gaussian noise with power 1 / f: between white and brown.",
        pink,
        {},
        {},
    ),
    System(
        "brown",
        "noise",
        "Sum of white noise, power 1 / f^2; fBm with H = 1/2. At order 3 the two monotone patterns have 1/4 each, the "
        "others 1/8: entropy 0.9671.",
        brown,
        {},
        {},
    ),
    System(
        "fbm",
        "noise",
        "Fractional Brownian motion of Hurst exponent H, exact (Davies and Harte 1987). E (x_s - x_t)^2 = |s - t|^2H; "
        "fractal dimension of its graph 2 - H; power 1 / f^(2H + 1). Each monotone pattern of order 3 has probability "
        "arcsin(2^(H - 1)) / pi (Bandt and Shiha 2007), so entropy falls as H grows.",
        fbm,
        {"hurst": 0.5},
        {"hurst": _PROBABILITY},
    ),
    System(
        "ar1",
        "noise",
        "x_t = phi x_{t-1} + e_t, stationary with variance 1: autocorrelation phi^k.",
        ar1,
        {"phi": 0.9},
        {"phi": Range(-1, 1, open=True)},
    ),
    System(
        "sine",
        "periodic",
        "A sine of random phase. The default period, 10 pi, is no whole number, so no value returns.",
        sine,
        {"period": 10 * math.pi},
        {"period": Range(2, math.inf, open=True)},
    ),
    System(
        "logistic",
        "map",
        "x -> r x (1 - x) (May 1976). At r = 4 chaotic with Lyapunov exponent log 2 and density "
        "1 / (pi sqrt(x (1 - x))); never strictly decreasing over three steps. Where r gives a cycle, windows tie.",
        chaos.logistic,
        {"r": 4.0},
        {"r": Range(0, 4)},
    ),
    System(
        "henon",
        "map",
        "x -> 1 - a x^2 + y, y -> b x (Henon 1976): |x| < 1.3, Lyapunov exponent 0.419; never strictly decreasing "
        "over three steps.",
        chaos.henon,
        {"a": 1.4, "b": 0.3},
        {"a": _ANY, "b": _ANY},
    ),
    System(
        "lorenz",
        "flow",
        "x of the Lorenz flow (Lorenz 1963), sampled every `interval`, about 7 times per turn by default: |x| < 20.",
        chaos.lorenz,
        {"sigma": 10.0, "rho": 28.0, "beta": 8 / 3, "interval": 0.1},
        {"sigma": _ANY, "rho": _ANY, "beta": _ANY, "interval": _POSITIVE},
    ),
    System(
        "rossler",
        "flow",
        "x of the Rossler flow (Rossler 1976), sampled every `interval`, about 8 times per turn of 5.9 by default.",
        chaos.rossler,
        {"a": 0.2, "b": 0.2, "c": 5.7, "interval": 0.75},
        {"a": _ANY, "b": _ANY, "c": _ANY, "interval": _POSITIVE},
    ),
    System(
        "mackey_glass",
        "flow",
        "x' = beta x(t - tau) / (1 + x(t - tau)^exponent) - gamma x (Mackey and Glass 1977), sampled every `interval`; "
        "chaotic from tau = 17 on.",
        chaos.mackey_glass,
        {"beta": 0.2, "gamma": 0.1, "tau": 17.0, "exponent": 10.0, "interval": 6.0},
        {"beta": _POSITIVE, "gamma": _POSITIVE, "tau": _POSITIVE, "exponent": _POSITIVE, "interval": _POSITIVE},
    ),
    System(
        "markov_fair",
        "noise",
        "Walk of a two-state chain that forgets: up or down with probability 1/2, by a length uniform in (0, 1). The "
        "patterns of order 3 are those of brown noise.",
        markov_walk,
        {"up": 0.5, "down": 0.5},
        {"up": _PROBABILITY, "down": _PROBABILITY},
    ),
    System(
        "markov_biased",
        "noise",
        "The same walk of a chain that prefers up: P(0 -> 1) = `up`, P(1 -> 0) = `down`. Order 3: rising "
        "p1 (1 - down), falling p0 (1 - up), the other four p0 up / 2 each, with p1 = up / (up + down).",
        markov_walk,
        {"up": 0.7, "down": 0.3},
        {"up": _PROBABILITY, "down": _PROBABILITY},
    ),
)


_SYSTEMS: Mapping[str, System] = MappingProxyType({system.name: system for system in _BUILT_IN})

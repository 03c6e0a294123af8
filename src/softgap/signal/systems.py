"""Known systems by name, generated at the length of the data, to place heads against."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float64

from softgap.errors import ValueInputError, unknown_name
from softgap.signal import chaos, noises
from softgap.signal.checked import checked_count, checked_rng

__all__ = ["System", "simulate", "systems"]


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

    def checked(self, given: Mapping[str, Any]) -> dict[str, float]:
        """All parameters, the given ones in their ranges."""
        for name, value in given.items():
            if name not in self.parameters:
                if not self.parameters:
                    raise ValueInputError(f"system '{self.name}' has no parameters, got {name}={value!r}")
                raise unknown_name(f"parameter of system '{self.name}'", name, self.parameters)
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not self.ranges[name].holds(value):
                allowed = "" if self.ranges[name] is _ANY else f" {self.ranges[name]}"
                raise ValueInputError(f"{name} of system '{self.name}' must be a number{allowed}, got {value!r}")
        return {name: float(given.get(name, default)) for name, default in self.parameters.items()}


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
        One of :func:`systems`.
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
    checked_rng(rng)
    axes = size if isinstance(size, tuple) else (size,)
    shape = (*(checked_count("size", axis) for axis in axes), checked_count("n", n))
    system = _SYSTEMS[name]
    values = system.checked(parameters)
    series = system.make(shape, rng=rng, **values)
    if not np.isfinite(series).all():
        raise ValueInputError(f"system '{name}' runs off to infinity with {values}; stay nearer to its defaults")
    return series


_BUILT_IN = (
    System(
        "white",
        "noise",
        "Independent normal values. All patterns equally likely: entropy 1.",
        noises.white,
        {},
        {},
    ),
    System(
        "pink",
        "noise",
        "Gaussian noise with power 1 / f: between white and brown.",
        noises.pink,
        {},
        {},
    ),
    System(
        "brown",
        "noise",
        "Sum of white noise, power 1 / f^2; fBm with H = 1/2. At order 3 the two monotone patterns have 1/4 each, the "
        "others 1/8: entropy 0.9671.",
        noises.brown,
        {},
        {},
    ),
    System(
        "fbm",
        "noise",
        "Fractional Brownian motion of Hurst exponent H, exact (Davies and Harte 1987). E (x_s - x_t)^2 = |s - t|^2H; "
        "fractal dimension of its graph 2 - H; power 1 / f^(2H + 1). Each monotone pattern of order 3 has probability "
        "arcsin(2^(H - 1)) / pi (Bandt and Shiha 2007), so entropy falls as H grows.",
        noises.fbm,
        {"hurst": 0.5},
        {"hurst": _PROBABILITY},
    ),
    System(
        "ar1",
        "noise",
        "x_t = phi x_{t-1} + e_t, stationary with variance 1: autocorrelation phi^k.",
        noises.ar1,
        {"phi": 0.9},
        {"phi": Range(-1, 1, open=True)},
    ),
    System(
        "sine",
        "periodic",
        "A sine of random phase. The default period, 10 pi, is no whole number, so no value returns.",
        noises.sine,
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
        noises.markov_walk,
        {"up": 0.5, "down": 0.5},
        {"up": _PROBABILITY, "down": _PROBABILITY},
    ),
    System(
        "markov_biased",
        "noise",
        "The same walk of a chain that prefers up: P(0 -> 1) = `up`, P(1 -> 0) = `down`. Order 3: rising "
        "p1 (1 - down), falling p0 (1 - up), the other four p0 up / 2 each, with p1 = up / (up + down).",
        noises.markov_walk,
        {"up": 0.7, "down": 0.3},
        {"up": _PROBABILITY, "down": _PROBABILITY},
    ),
)
_SYSTEMS: Mapping[str, System] = MappingProxyType({system.name: system for system in _BUILT_IN})

"""The findings about every mechanism of a study, as a page carries them; or the sentence why there are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from softgap.analysis import Findings, analyze
from softgap.errors import SoftgapError
from softgap.report.samples import rounded
from softgap.signal import complexity_bounds
from softgap.trajectories import Study

__all__ = ["dynamics"]

_NUMBERS = ("entropy", "low", "high", "z", "q", "complexity")
_WORDS = ("nearest", "reason")

Progress = Callable[[str, float], None]


def dynamics(study: Study, mechanisms: tuple[str, ...], progress: Progress | None = None) -> dict[str, Any]:
    """By mechanism the columns of its heads, and once the settings, the known systems and the bounds of the plane."""
    found: dict[str, Findings] = {}
    try:
        for mechanism in mechanisms:
            found[mechanism] = analyze(study, mechanism=mechanism, progress=progress)
    except SoftgapError as error:
        return {"reason": str(error)}
    first = found[mechanisms[0]]
    order = int(first.settings["order"])
    bounds = complexity_bounds(order)
    names = ("transform", "order", "delay", "segment", "ties", "least_windows", "seed")
    return {
        "settings": {name: first.settings[name] for name in names},
        "alpha": first.alpha,
        "samples": first.samples,
        "noise": first.noise_entropy,
        "mechanisms": {mechanism: _columns(findings) for mechanism, findings in found.items()},
        "systems": [[system.name, system.kind, system.entropy, system.complexity] for system in first.systems],
        "least": _curve(bounds.least_entropy, bounds.least_complexity),
        "greatest": _curve(bounds.greatest_entropy, bounds.greatest_complexity),
    }


def _columns(findings: Findings) -> dict[str, Any]:
    numbers = {name: rounded(np.array([getattr(head, name) for head in findings.heads])) for name in _NUMBERS}
    return {**numbers, **{name: [getattr(head, name) for head in findings.heads] for name in _WORDS}}


def _curve(entropy: np.ndarray, complexity: np.ndarray) -> list[list[float | None]]:
    return [list(point) for point in zip(rounded(entropy), rounded(complexity), strict=True)]

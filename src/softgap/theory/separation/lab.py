"""The separation lab: whether the network of Deng, Song and Zhou tells D0 from D1, where, and by which attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from softgap.inputs import as_items
from softgap.theory.claims import Claim
from softgap.theory.separation.claims import separation_claims
from softgap.theory.separation.data import Construction, construct
from softgap.theory.separation.phase_map import Axis, PhaseMap, parse_axes, phase_maps, turning_point
from softgap.theory.separation.probe import Ablation, Probe, normaliser_ablation, probe_outputs
from softgap.theory.separation.trained import Trained
from softgap.theory.separation.trials import Trial, named, trials
from softgap.trajectories.display import Displayed

__all__ = ["Scaled", "Separation", "separation_lab"]

Progress = Callable[[str, float], None]

_SCALES = (512, 2048, 8192, 16384, 32768)
# The probe holds whole outputs: n x d numbers for each sample.
_PROBE_ROWS = 128
_PROBE_SAMPLES = 40
_PROBED = ("softmax", "identity", "elu1", "uniform")
_MAPPED = ("softmax", "identity")


@dataclass(frozen=True)
class Scaled:
    """Softmax and linear attention at one n, with t = 1 and the least a1 of the source, 0.7."""

    n: int
    trials: tuple[Trial, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Separation(Displayed):
    """What the lab found.

    Attributes
    ----------
    trials
        Every mechanism at the construction asked for, with the same draws.
    maps
        One map per mapped mechanism.
    scaled, turning
        Growth in n at a1 = 0.7, and the n from which the marked row of softmax no longer reaches the threshold (None:
        not below 2^24).
    ablation, probes
        What the normaliser does (nothing where n is not (d - 2) t), and what a linear classifier sees.
    trained
        Small trained models, where they were asked for.
    """

    construction: Construction
    settings: Mapping[str, Any]
    trials: tuple[Trial, ...]
    maps: tuple[PhaseMap, ...]
    scaled: tuple[Scaled, ...]
    turning: int | None
    ablation: tuple[Ablation, ...]
    probes: tuple[Probe, ...]
    trained: Trained | None = None

    @property
    def claims(self) -> Sequence[Claim]:
        """The verdicts, read from the numbers above."""
        return (*separation_claims(self), *(self.trained.claims if self.trained else ()))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "lab": "separation",
            "construction": self.construction.to_json(),
            "settings": dict(self.settings),
            "claims": [claim.to_json() for claim in self.claims],
            "trials": [one.to_json() for one in self.trials],
            "maps": [one.to_json() for one in self.maps],
            "scaled": [{"n": one.n, "trials": [found.to_json() for found in one.trials]} for one in self.scaled],
            "turning": self.turning,
            "ablation": [one.to_json() for one in self.ablation],
            "probes": [one.to_json() for one in self.probes],
            "trained": self.trained.to_json() if self.trained else None,
        }


def separation_lab(
    sizes: Mapping[str, Any] | None = None,
    *,
    mechanisms: Sequence[str] | None = None,
    axes: tuple[Axis, Axis] | None = None,
    mapped: Sequence[str] | None = None,
    draws: int = 30,
    map_draws: int = 20,
    allow_breaks: bool = False,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> Separation:
    """Run the lab.

    Parameters
    ----------
    sizes
        What :func:`softgap.theory.separation.construct` takes: n, d, t, m, a0, a1, b, c, cross.
    mechanisms
        Names to put in the network beside softmax and identity; every one that can be computed by default.
    axes
        Axes of the phase map; d against b by default.
    mapped
        Mechanisms to map; softmax and identity by default.
    draws, map_draws
        Draws of rows and signs, at the construction and in each cell of the map.
    """
    show = progress or _silent
    given = {name: value for name, value in (sizes or {}).items() if value is not None}
    construction = construct(**given, allow_breaks=allow_breaks)
    names = named(mechanisms)
    # A stream per part, so that asking for another map does not change the trials.
    streams = rng.spawn(5)
    show("every mechanism", 0.0)
    found = trials(names, construction, draws, rng=streams[0])
    maps = phase_maps(
        tuple(dict.fromkeys(as_items(mapped or _MAPPED))),
        *(axes or parse_axes("d,b")),
        # The default map spans d itself, so a given n or d is not held against it.
        {name: value for name, value in given.items() if axes is not None or name not in ("n", "d")},
        map_draws,
        rng=streams[1],
        allow_breaks=allow_breaks,
        progress=lambda stage, part: show(stage, 0.2 + 0.4 * part),
    )
    show("growing n", 0.6)
    scaled = tuple(Scaled(n, trials(_MAPPED, construct(n=n, t=1, a1=0.7), map_draws, rng=streams[2])) for n in _SCALES)
    show("normaliser and probe", 0.9)
    ablation = normaliser_ablation(construction, max(4, draws), rng=streams[3]) if construction.regular else ()
    probed = construct(n=_PROBE_ROWS, t=1, a0=construction.a0, a1=construction.a1)
    return Separation(
        construction,
        {"draws": draws, "map_draws": map_draws},
        found,
        maps,
        scaled,
        turning_point("softmax", a1=0.7, b=0.5),
        ablation,
        probe_outputs(_PROBED, probed, _PROBE_SAMPLES, rng=streams[4]),
    )


def _silent(stage: str, part: float) -> None:
    """Show nothing."""

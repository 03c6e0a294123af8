"""The separation lab: whether the network of Deng, Song and Zhou tells D0 from D1, and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from softgap.inputs import as_items
from softgap.progress import Progress, silent
from softgap.theory.lab import Claim, Verdict
from softgap.theory.separation.ablation import Ablation, Probe, normaliser_ablation, probe_outputs
from softgap.theory.separation.classes import Construction, construct
from softgap.theory.separation.network import Trial, mechanism_names, trials
from softgap.theory.separation.phase_map import Axis, PhaseMap, parse_axes, phase_maps, turning_point
from softgap.theory.separation.training import Trained
from softgap.trajectories.run import Displayed
from softgap.trajectories.validation import BASELINE

__all__ = ["Separation", "separation_lab"]


_PAPER = "Deng, Song and Zhou 2023"


# "With high probability", for verdicts.
_MOSTLY = 0.9


def separation_claims(lab: Separation) -> tuple[Claim, ...]:
    """One verdict per claim."""
    claims = [_softmax_separates(lab), _linear_fails(lab), _only_softmax(lab), _large_n(lab)]
    mapped = next((grid for grid in lab.maps if grid.mechanism == "softmax"), None)
    if mapped is not None:
        claims += [_everywhere(mapped), _argument_predicts(mapped, "argued"), _argument_predicts(mapped, "median")]
    linear = next((grid for grid in lab.maps if grid.mechanism == "identity"), None)
    if mapped is not None and linear is not None:
        claims.append(_linear_ahead(mapped, linear))
    claims.append(_bound_holds(lab.maps))
    if lab.ablation:
        claims.append(_normaliser(lab))
    claims.append(_linear_probe(lab))
    return tuple(claims)


def _of(lab: Separation, name: str) -> Trial:
    return next(trial for trial in lab.trials if trial.mechanism == name)


def _softmax_separates(lab: Separation) -> Claim:
    softmax, size = _of(lab, "softmax"), lab.construction
    verdict: Verdict = "holds" if softmax.success.value >= _MOSTLY else "does not hold"
    return Claim(
        "softmax separates",
        f"{_PAPER}, section 1.1",
        f"With softmax the network is 0 on D0 and positive on D1 (n = {size.n}, d = {size.d}, b = {size.b:g}).",
        verdict,
        "",
        {
            "P(F > 0 | D0)": softmax.fires_d0.value,
            "P(F > 0 | D1)": softmax.fires_d1.value,
            "P(both right)": softmax.success.value,
            "at least": softmax.success.low,
        },
    )


def _linear_fails(lab: Separation) -> Claim:
    identity = _of(lab, "identity")
    numbers = {
        "P(F > 0 | D0)": identity.fires_d0.value,
        "P(F > 0 | D1)": identity.fires_d1.value,
        "P(both right)": identity.success.value,
    }
    mapped = next((grid for grid in lab.maps if grid.mechanism == "identity"), None)
    cells = np.zeros(0, bool) if mapped is None else mapped.low > 0.5
    if mapped is not None:
        numbers |= {"cells it separates": float(cells.sum()), "cells": float((~np.isnan(mapped.success)).sum())}
    verdict: Verdict = "holds" if identity.success.value < 0.5 else "does not hold"
    condition = ""
    if mapped is not None and cells.any():
        j, i = np.unravel_index(int(np.nanargmax(np.where(cells, mapped.low, np.nan))), cells.shape)
        condition = (
            f"the sizes are not like {mapped.x.name} = {mapped.x.values[i]:g}, "
            f"{mapped.y.name} = {mapped.y.values[j]:g}, where linear attention separates "
            f"with P = {mapped.success[j, i]:.2f}"
        )
        verdict = "holds only when" if verdict == "holds" else verdict
    statement = "With linear attention the same network cannot tell D0 from D1."
    return Claim("linear fails", f"{_PAPER}, section 1.1", statement, verdict, condition, numbers)


def _only_softmax(lab: Separation) -> Claim:
    others = {trial.mechanism: trial.success.value for trial in lab.trials if trial.mechanism != "softmax"}
    able = {name: value for name, value in others.items() if value >= 0.5}
    return Claim(
        "only softmax",
        f"{_PAPER}, first open question",
        "At these sizes no other mechanism separates the classes in the same network.",
        "does not hold" if able else "holds",
        f"{len(able)} of {len(others)} others do: {', '.join(able)}" if able else f"none of {len(others)} others does",
        able or {"best P(both right)": max(others.values(), default=math.nan)},
    )


def _large_n(lab: Separation) -> Claim:
    numbers = {f"P(both right), n = {size.n}": size.trials[0].success.value for size in lab.scaled}
    return Claim(
        "a1 = 0.7 at any n",
        f"{_PAPER}, section 6",
        "a1 of at least 0.7 is enough for softmax, however long the sequence (b = c = 0.5, t = 1).",
        "holds" if lab.turning is None else "holds only when",
        "" if lab.turning is None else f"n is below {lab.turning:,}: beyond, a1^2 + b^2 < 1 loses the marked row",
        numbers,
    )


def _everywhere(grid: PhaseMap) -> Claim:
    known = ~np.isnan(grid.success)
    works = grid.success[known] > 0.5
    verdict: Verdict = "holds" if works.all() else "holds only when" if works.any() else "does not hold"
    return Claim(
        "any size",
        f"{_PAPER}, section 6",
        f"Softmax separates at every construction of the map {grid.x.name} against {grid.y.name}.",
        verdict,
        _boundary_words(grid) if verdict == "holds only when" else "",
        {"cells that work": float(works.sum()), "cells": float(known.sum())},
    )


def _boundary_words(grid: PhaseMap) -> str:
    """Where success turns along x, for up to three values of y."""
    crossed = [(y, x, row) for y, x, row in zip(grid.y.values, grid.boundary(), grid.success, strict=True) if x == x]
    if not crossed:
        fine = [f"{y:g}" for y, row in zip(grid.y.values, grid.success, strict=True) if np.nanmin(row) > 0.5]
        return f"{grid.y.name} is one of {', '.join(fine)}" if fine else "the cell is one that works in the map"
    samples = [crossed[0], crossed[len(crossed) // 2], crossed[-1]] if len(crossed) > 2 else crossed
    words = []
    for y, x, row in samples:
        side = "above" if row[~np.isnan(row)][-1] > 0.5 else "below"
        words.append(f"{grid.x.name} is {side} {x:.3g} at {grid.y.name} = {y:g}")
    return ", ".join(words)


def _argument_predicts(grid: PhaseMap, which: Literal["argued", "median"]) -> Claim:
    measured, argued = np.array(grid.boundary()), np.array(grid.boundary(which))
    both = ~np.isnan(measured) & ~np.isnan(argued)
    ratio = float(np.median(measured[both] / argued[both])) if both.any() else math.nan
    agreement = grid.agreement(which)
    z = "sqrt(2 log m)" if which == "argued" else "the median of the largest of m / 2 normal numbers"
    return Claim(
        "b / sqrt(d - 2)" if which == "argued" else "b / sqrt(d - 2), median",
        "softgap",
        f"b (w + z / sqrt(d - 2)) < 0.1, z = {z}, with a marked row above the threshold, says where softmax works.",
        "holds" if agreement >= _MOSTLY else "does not hold",
        "",
        {"cells that agree": agreement, "measured over predicted boundary": ratio},
    )


def _linear_ahead(softmax: PhaseMap, linear: PhaseMap) -> Claim:
    ahead = (linear.low > 0.5) & (softmax.high < 0.5)
    numbers = {"cells": float(ahead.sum())}
    condition = ""
    if ahead.any():
        j, i = np.unravel_index(int(np.argmax(np.where(ahead, linear.success - softmax.success, -1))), ahead.shape)
        condition = f"at {linear.x.name} = {linear.x.values[i]:g}, {linear.y.name} = {linear.y.values[j]:g}"
        numbers |= {"P(both right), linear": float(linear.success[j, i]), "softmax": float(softmax.success[j, i])}
    return Claim(
        "linear ahead",
        f"{_PAPER}, third open question, for its fixed network",
        "There are constructions that linear attention separates and softmax does not.",
        "holds" if ahead.any() else "does not hold",
        condition,
        numbers,
    )


def _bound_holds(maps: tuple[PhaseMap, ...]) -> Claim:
    broken = sum(grid.broken_promises for grid in maps)
    promised = sum(int((grid.bound < 0.5).sum()) for grid in maps)
    works = sum(int((grid.success > 0.5).sum()) for grid in maps if not np.isnan(grid.bound).all())
    return Claim(
        "Hoeffding's bound",
        f"{_PAPER}, section 6",
        "No cell fails more often than Hoeffding's inequality allows.",
        "not decided" if not promised else "holds" if not broken else "does not hold",
        "" if promised else "the bound promises nothing in this map",
        {"cells above the bound": broken, "cells promised to work": promised, "cells that work": works},
    )


def _normaliser(lab: Separation) -> Claim:
    tuned = {(cell.weights, cell.normalised): cell.tuned.value for cell in lab.ablation}
    needed = tuned["exp", False] < 0.5 and tuned["linear", True] >= 0.5
    return Claim(
        "normaliser",
        f"a summary of {_PAPER}",
        "Linear attention fails because it lacks the normalisation of softmax.",
        "holds" if needed else "does not hold",
        ""
        if needed
        else "exp and linear differ with the normaliser and without it"
        if min(tuned["exp", True], tuned["exp", False]) > max(tuned["linear", True], tuned["linear", False])
        else "",
        {
            f"{weights}, {'with' if normalised else 'without'} it, tuned threshold": value
            for (weights, normalised), value in tuned.items()
        },
    )


def _linear_probe(lab: Separation) -> Claim:
    probes = [probe for probe in lab.probes if probe.mechanism == "identity"]
    clean = min(probes, key=lambda probe: probe.noise)
    numbers = {f"accuracy, noise {probe.noise:g} L": probe.accuracy.value for probe in probes}
    numbers |= {"accuracy from the mean of rows": clean.pooled.value}
    numbers |= {"column 1 of row j, D0": clean.marked_d0, "D1": clean.marked_d1}
    return Claim(
        "no linear classifier",
        f"a summary of {_PAPER}",
        "No linear classifier separates the outputs of linear attention on D0 and D1.",
        "does not hold" if clean.accuracy.low > 0.5 else "holds",
        "",
        numbers,
    )


_SCALES = (512, 2048, 8192, 16384, 32768)


# The probe holds whole outputs: n x d numbers for each sample.
_PROBE_ROWS = 128


_PROBE_SAMPLES = 40


_PROBED = ("softmax", "identity", "elu1", BASELINE)


_MAPPED = ("softmax", "identity")


@dataclass(frozen=True)
class SizeTrials:
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
    scaled: tuple[SizeTrials, ...]
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
            "trials": [trial.to_json() for trial in self.trials],
            "maps": [grid.to_json() for grid in self.maps],
            "scaled": [{"n": size.n, "trials": [trial.to_json() for trial in size.trials]} for size in self.scaled],
            "turning": self.turning,
            "ablation": [cell.to_json() for cell in self.ablation],
            "probes": [probe.to_json() for probe in self.probes],
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
    """Test whether the network of Deng, Song and Zhou separates two classes of sequences, and where.

    Parameters
    ----------
    sizes
        What ``softgap.theory.separation.construct`` takes: n, d, t, m, a0, a1, b, c, cross.
    mechanisms
        Names to put in the network beside softmax and identity; every one that can be computed by default.
    axes
        Axes of the phase map; d against b by default.
    mapped
        Mechanisms to map; softmax and identity by default.
    draws, map_draws
        Draws of rows and signs, at the construction and in each cell of the map.
    allow_breaks
        Whether sizes may break the conditions of the construction.
    rng
        The generator of rows and signs.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Separation
        A verdict for each claim, and the phase maps.

    Examples
    --------
    >>> import numpy as np
    >>> from softgap.theory import separation_lab
    >>> lab = separation_lab(
    ...     mechanisms=["elu1"], draws=4, map_draws=2, mapped=["softmax"], rng=np.random.default_rng(0)
    ... )
    >>> lab.claims[0].name, lab.claims[0].verdict
    ('softmax separates', 'holds')
    """
    show = progress or silent
    settings = {name: value for name, value in (sizes or {}).items() if value is not None}
    construction = construct(**settings, allow_breaks=allow_breaks)
    names = mechanism_names(mechanisms)
    # A stream per part, so that asking for another map does not change the trials.
    streams = rng.spawn(5)
    show("every mechanism", 0.0)
    network_trials = trials(names, construction, draws, rng=streams[0])
    maps = phase_maps(
        tuple(dict.fromkeys(as_items(mapped or _MAPPED))),
        *(axes or parse_axes("d,b")),
        # The default map spans d itself, so a given n or d is not held against it.
        {name: value for name, value in settings.items() if axes is not None or name not in ("n", "d")},
        map_draws,
        rng=streams[1],
        allow_breaks=allow_breaks,
        progress=lambda stage, part: show(stage, 0.2 + 0.4 * part),
    )
    show("growing n", 0.6)
    scaled = tuple(
        SizeTrials(n, trials(_MAPPED, construct(n=n, t=1, a1=0.7), map_draws, rng=streams[2])) for n in _SCALES
    )
    show("normaliser and probe", 0.9)
    ablation = normaliser_ablation(construction, max(4, draws), rng=streams[3]) if construction.regular else ()
    probed = construct(n=_PROBE_ROWS, t=1, a0=construction.a0, a1=construction.a1)
    return Separation(
        construction,
        {"draws": draws, "map_draws": map_draws},
        network_trials,
        maps,
        scaled,
        turning_point("softmax", a1=0.7, b=0.5),
        ablation,
        probe_outputs(_PROBED, probed, _PROBE_SAMPLES, rng=streams[4]),
    )

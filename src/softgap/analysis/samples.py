"""The trajectories of a study as plain series, transformed and cut, never more of them in memory than needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int

from softgap.analysis.cuts import CONTROL, Cut
from softgap.analysis.settings import Settings
from softgap.errors import SoftgapError, ValueInputError, unknown_name
from softgap.trajectories import Trajectories

__all__ = ["Sample", "Samples", "samples_of", "transformed"]

_CONTROLLER = "uniform"


@dataclass(frozen=True, eq=False)
class Sample:
    """The heads of one sample, padding left out."""

    series: Float64[np.ndarray, "head step"]
    positions: Int[np.ndarray, " step"]


@dataclass(frozen=True, eq=False)
class Samples:
    """A study's samples, readable again and again, with the places of their heads.

    ``positions`` are those of every sample's steps, ``used`` says which samples are long enough for one window, and
    ``control`` is the mechanism that is subtracted, if any.
    """

    runs: Iterable[Trajectories]
    mechanism: str
    quantity: str
    layers: tuple[int, ...]
    real: Bool[np.ndarray, "layer head"]
    kv_group: Int[np.ndarray, "layer head"]
    positions: tuple[Int[np.ndarray, " step"], ...]
    used: tuple[bool, ...]
    mechanisms: tuple[str, ...]
    control: str | None = None

    @property
    def n_heads(self) -> int:
        """Heads over all layers."""
        return int(self.real.sum())

    def used_positions(self) -> tuple[Int[np.ndarray, " step"], ...]:
        """The positions of the used samples."""
        return tuple(at for at, use in zip(self.positions, self.used, strict=True) if use)

    def controlled(self) -> Samples:
        """The same with the control subtracted."""
        if _CONTROLLER not in self.mechanisms or self.mechanism == _CONTROLLER:
            raise ValueInputError(
                f"transform '{CONTROL}' subtracts '{_CONTROLLER}' from another mechanism of the study, got "
                f"'{self.mechanism}' of {', '.join(self.mechanisms)}; measure both or use transform 'residual'"
            )
        return replace(self, control=_CONTROLLER)

    def __iter__(self) -> Iterator[Sample]:
        for run in self.runs:
            values = run.quantities[self.quantity][run.mechanisms.index(self.mechanism)]
            series = values[self.real].astype(np.float64)
            if self.control is not None:
                series -= run.quantities[self.quantity][run.mechanisms.index(self.control)][self.real]
            bad = ~np.isfinite(series)
            if bad.any():
                head, step = (int(i) for i in np.argwhere(bad)[0])
                layer, place = (int(i) for i in np.argwhere(self.real)[head])
                raise ValueInputError(
                    f"the {self.quantity} of head {self.layers[layer]}.{place} must be a number at every step, got "
                    f"{series[head, step]} at step {step} of sample '{run.sample_id}'; choose another quantity or "
                    "leave the sample out"
                )
            yield Sample(series, run.positions.astype(np.int64))


def samples_of(runs: Iterable[Trajectories], settings: Settings) -> Samples:
    """Look through a study once: all its samples must have the same heads."""
    first: Trajectories | None = None
    positions = []
    for run in runs:
        first = first or run
        if run.layers != first.layers or run.heads_per_layer != first.heads_per_layer:
            raise ValueInputError(
                f"all samples of an analysis must have the same heads, got {run.n_heads} in sample '{run.sample_id}' "
                f"and {first.n_heads} in '{first.sample_id}'; analyse them apart"
            )
        positions.append(run.positions.astype(np.int64))
    if first is None or not sum(map(len, positions)):
        path = getattr(runs, "path", None)
        where = f"study '{path}'" if path else "a study"
        raise SoftgapError(
            f"an analysis needs trajectories, got {where} without any; use `softgap run` or `softgap read` first"
        )
    name = first.mechanisms[0] if settings.mechanism is None else settings.mechanism
    if name not in first.mechanisms:
        raise unknown_name("mechanism of this study", name, first.mechanisms)
    used = tuple(settings.windows(len(at)) > 0 for at in positions)
    if not any(used):
        raise ValueInputError(
            f"no sample holds one window of order {settings.order} and delay {settings.delay} after transform "
            f"'{settings.transform}' and segment '{settings.segment}', the longest has {max(map(len, positions))} "
            "steps; use longer runs or a lower order"
        )
    real = first.kv_group >= 0
    found = Samples(
        runs, name, settings.quantity, first.layers, real, first.kv_group, tuple(positions), used, first.mechanisms
    )
    if settings.transform == CONTROL:
        found.controlled()  # refused before anything is read
    return found


def transformed(samples: Samples, cut: Cut, heads: slice) -> Iterator[Float64[np.ndarray, "head left"]]:
    """The series of some heads after the cut, one used sample after the other."""
    if cut.transform == CONTROL:
        samples = samples.controlled()
    chosen = (sample for sample, use in zip(samples, samples.used, strict=True) if use)
    kept = ((sample.series[heads], sample.positions) for sample in chosen)
    if cut.fits_a_trend:
        series, positions = zip(*kept, strict=True)
        yield from cut(series, positions)
        return
    for one, at in kept:
        yield cut([one], [at])[0]

"""The trajectories of a study as plain series, transformed and cut, never more of them in memory than needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float64, Int

from softgap.errors import SoftgapError, ValueInputError, unknown_name
from softgap.signal import TRANSFORMS, apply_transform, residuals, segment_slice, steps_lost
from softgap.signal.transforms import SEGMENTS
from softgap.trajectories import QUANTITIES, Trajectories

__all__ = ["Cut", "Sample", "Samples", "controlled", "samples_of", "transformed"]

CONTROL = "control"
"""The transform that subtracts, step by step, the same quantity of the mechanism `uniform`.

It takes away what the position lab finds behind the trend (the running mean of values and the concentration of
softmax) and leaves what the mechanism itself adds.
"""
_CONTROLLER = "uniform"

# Numbers of a study that are held at once where all its samples are needed together (float64: 256 MiB).
_HELD = 2**25


@dataclass(frozen=True)
class Cut:
    """What is done to every series: a transform, then a segment of what it leaves."""

    transform: str
    segment: str

    def __post_init__(self) -> None:
        if self.transform not in (*TRANSFORMS, CONTROL):
            raise unknown_name("transform", self.transform, (*TRANSFORMS, CONTROL))
        if self.segment not in SEGMENTS:
            raise unknown_name("segment", self.segment, SEGMENTS)

    @property
    def _own(self) -> str:
        # The control is subtracted where samples are read, so that noise, which has none, passes as it is.
        return "raw" if self.transform == CONTROL else self.transform

    def length(self, steps: int) -> int:
        """Steps that are left of so many."""
        left = max(0, steps - steps_lost(self._own))
        if left < 3:
            return left if self.segment == "full" else 0
        part = segment_slice(left, self.segment)
        return int(part.stop - part.start)

    def __call__(
        self, series: Sequence[Float64[np.ndarray, "series step"]], positions: Sequence[Int[np.ndarray, " step"]]
    ) -> list[Float64[np.ndarray, "series left"]]:
        """The series of one or all samples; the residual is that of the samples given together."""
        if self.transform == "residual":
            changed: Sequence[np.ndarray] = residuals(series, positions).series
        else:
            changed = [apply_transform(x, self._own) for x in series]
        return [x[..., segment_slice(x.shape[-1], self.segment)] for x in changed]


@dataclass(frozen=True, eq=False)
class Sample:
    """The heads of one sample, padding left out."""

    series: Float64[np.ndarray, "head step"]
    positions: Int[np.ndarray, " step"]


@dataclass(frozen=True, eq=False)
class Samples:
    """A study's samples, readable again and again, with the places of their heads; ``control`` is subtracted."""

    runs: Iterable[Trajectories]
    mechanism: str
    quantity: str
    layers: tuple[int, ...]
    real: Bool[np.ndarray, "layer head"]
    kv_group: Int[np.ndarray, "layer head"]
    lengths: tuple[int, ...]
    mechanisms: tuple[str, ...]
    control: str | None = None

    @property
    def n_heads(self) -> int:
        """Heads over all layers."""
        return int(self.real.sum())

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


def samples_of(runs: Iterable[Trajectories], mechanism: str | None, quantity: str) -> Samples:
    """Look through a study once: all its samples must have the same heads."""
    if quantity not in QUANTITIES:
        raise unknown_name("quantity", quantity, QUANTITIES)
    first: Trajectories | None = None
    lengths = []
    for run in runs:
        first = first or run
        if run.layers != first.layers or run.heads_per_layer != first.heads_per_layer:
            raise ValueInputError(
                f"all samples of an analysis must have the same heads, got {run.n_heads} in sample '{run.sample_id}' "
                f"and {first.n_heads} in '{first.sample_id}'; analyse them apart"
            )
        lengths.append(run.n_steps)
    if first is None or not sum(lengths):
        raise SoftgapError("an analysis needs trajectories, got a study without any; run `softgap run` or `read` first")
    name = first.mechanisms[0] if mechanism is None else mechanism
    if name not in first.mechanisms:
        raise unknown_name("mechanism of this study", name, first.mechanisms)
    return Samples(
        runs, name, quantity, first.layers, first.kv_group >= 0, first.kv_group, tuple(lengths), tuple(first.mechanisms)
    )


def controlled(samples: Samples, cut: Cut) -> Samples:
    """The samples with the control subtracted, if that is the cut's transform."""
    if cut.transform != CONTROL:
        return samples
    if _CONTROLLER not in samples.mechanisms or samples.mechanism == _CONTROLLER:
        raise ValueInputError(
            f"transform '{CONTROL}' subtracts '{_CONTROLLER}' from another mechanism of the study, got "
            f"'{samples.mechanism}' of {', '.join(samples.mechanisms)}; measure both or use transform 'residual'"
        )
    return replace(samples, control=_CONTROLLER)


def transformed(
    samples: Samples, cut: Cut, used: Sequence[bool]
) -> Iterator[tuple[int, slice, Float64[np.ndarray, "head left"]]]:
    """The used samples as (number among the used, which heads, their series after the cut)."""
    if cut.transform != "residual":
        chosen = (sample for sample, use in zip(samples, used, strict=True) if use)
        for i, sample in enumerate(chosen):
            yield i, slice(0, samples.n_heads), cut([sample.series], [sample.positions])[0]
        return
    # A trend is fitted over all samples of a head: some heads at a time, and the study read anew for the next.
    total = sum(length for length, use in zip(samples.lengths, used, strict=True) if use)
    step = max(1, _HELD // max(1, total))
    for start in range(0, samples.n_heads, step):
        heads = slice(start, min(samples.n_heads, start + step))
        kept = [(sample.series[heads], sample.positions) for sample, use in zip(samples, used, strict=True) if use]
        for i, series in enumerate(cut([x for x, _ in kept], [at for _, at in kept])):
            yield i, heads, series

"""The trajectories of a study as plain series: settings, transforms and segments, read sample by sample."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int

from softgap.errors import SoftgapError, ValueInputError, unknown_name
from softgap.inputs import check_count, check_share
from softgap.signal import SEGMENTS, TRANSFORMS, apply_transform, residuals, segment_slice, steps_lost
from softgap.signal.patterns import check_batch, least_windows
from softgap.signal.transforms import fewest_steps
from softgap.trajectories import QUANTITIES, Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = ["CONTROL_TRANSFORM", "Cut", "Samples", "Settings", "samples_of", "transform_series"]


CONTROL_TRANSFORM = "control"


"""The transform that subtracts, step by step, the same quantity of the mechanism `uniform`.

It takes away what the position lab finds behind the trend (the running mean of values and the concentration of
softmax) and leaves what the mechanism itself adds.
"""


@dataclass(frozen=True)
class Cut:
    """A transform and a segment, by name."""

    transform: str
    segment: str

    def __post_init__(self) -> None:
        if self.transform not in (*TRANSFORMS, CONTROL_TRANSFORM):
            raise unknown_name("transform", self.transform, (*TRANSFORMS, CONTROL_TRANSFORM))
        if self.segment not in SEGMENTS:
            raise unknown_name("segment", self.segment, SEGMENTS)

    @property
    def fits_a_trend(self) -> bool:
        """Whether all samples of a study are needed at once."""
        return self.transform == "residual"

    @property
    def _array_transform(self) -> str:
        # The baseline is subtracted where samples are read, so that noise, which has none, passes as it is.
        return "raw" if self.transform == CONTROL_TRANSFORM else self.transform

    def length(self, steps: int) -> int:
        """Steps that are left of so many; 0 where they are too few for the transform or the segment."""
        if self.fits_a_trend and steps < fewest_steps():
            return 0
        left = max(0, steps - steps_lost(self._array_transform))
        if left < 3:
            return left if self.segment == "full" else 0
        part = segment_slice(left, self.segment)
        return int(part.stop - part.start)

    def __call__(
        self, series: Sequence[Float64[np.ndarray, "series step"]], positions: Sequence[Int[np.ndarray, " step"]]
    ) -> list[Float64[np.ndarray, "series left"]]:
        """The series of one or all samples; the residual is that of the samples given together."""
        if self.fits_a_trend:
            changed: Sequence[np.ndarray] = residuals(series, positions).series
        else:
            changed = [apply_transform(x, self._array_transform) for x in series]
        return [x[..., segment_slice(x.shape[-1], self.segment)] for x in changed]


@dataclass(frozen=True)
class Settings:
    """All that the numbers of an analysis depend on beside the trajectories; see ``softgap.analysis.analyze``."""

    mechanism: str | None
    quantity: str
    transform: str
    order: int
    delay: int
    segment: str
    ties: str
    eligibility: str | int
    alpha: float
    seed: int

    def __post_init__(self) -> None:
        check_share("alpha", self.alpha, usual=0.05)
        check_count("seed", self.seed, least=0)
        if self.quantity not in QUANTITIES:
            raise unknown_name("quantity", self.quantity, QUANTITIES)
        # Order, delay, ties and eligibility by the rules of ``softgap.signal``.
        rng = np.random.default_rng(0)
        options: Any = {"ties": self.ties, "rng": rng, "eligibility": self.eligibility}
        check_batch(np.zeros(1), self.order, self.delay, options, short=True)
        Cut(self.transform, self.segment)

    @property
    def cut(self) -> Cut:
        """What is done to every series before its windows are taken."""
        return Cut(self.transform, self.segment)

    @property
    def span(self) -> int:
        """Steps from the first to the last value of a window."""
        return (self.order - 1) * self.delay

    @property
    def patterns(self) -> int:
        """The number of patterns, order!."""
        return math.factorial(self.order)

    @property
    def least(self) -> int:
        """Windows that a head needs to be eligible."""
        return least_windows(self.eligibility, self.order)

    def windows(self, steps: int) -> int:
        """Windows of a sample of so many steps, after the cut."""
        return max(0, self.cut.length(steps) - self.span)

    def to_json(self, mechanism: str) -> dict[str, Any]:
        """As plain values, with the mechanism that was taken and the rule as a number."""
        values = {name: value for name, value in asdict(self).items() if name != "alpha"}
        return {**values, "mechanism": mechanism, "least_windows": self.least}


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
    eligible: tuple[bool, ...]
    mechanisms: tuple[str, ...]
    control: str | None = None

    @property
    def n_heads(self) -> int:
        """Heads over all layers."""
        return int(self.real.sum())

    def used_positions(self) -> tuple[Int[np.ndarray, " step"], ...]:
        """The positions of the used samples."""
        return tuple(at for at, use in zip(self.positions, self.eligible, strict=True) if use)

    def controlled(self) -> Samples:
        """The same with the baseline subtracted."""
        if BASELINE not in self.mechanisms or self.mechanism == BASELINE:
            raise ValueInputError(
                f"transform '{CONTROL_TRANSFORM}' subtracts '{BASELINE}' from another mechanism of the study, got "
                f"'{self.mechanism}' of {', '.join(self.mechanisms)}; measure both or use transform 'residual'"
            )
        return replace(self, control=BASELINE)

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
    eligible = tuple(settings.windows(len(at)) > 0 for at in positions)
    if not any(eligible):
        raise ValueInputError(
            f"no sample holds one window of order {settings.order} and delay {settings.delay} after transform "
            f"'{settings.transform}' and segment '{settings.segment}', the longest has {max(map(len, positions))} "
            "steps; use longer runs or a lower order"
        )
    real = first.kv_group >= 0
    samples = Samples(
        runs, name, settings.quantity, first.layers, real, first.kv_group, tuple(positions), eligible, first.mechanisms
    )
    if settings.transform == CONTROL_TRANSFORM:
        samples.controlled()  # refused before anything is read
    return samples


def transform_series(samples: Samples, cut: Cut, heads: slice) -> Iterator[Float64[np.ndarray, "head left"]]:
    """The series of some heads after the cut, one eligible sample after the other."""
    if cut.transform == CONTROL_TRANSFORM:
        samples = samples.controlled()
    eligible_samples = (sample for sample, use in zip(samples, samples.eligible, strict=True) if use)
    selected = ((sample.series[heads], sample.positions) for sample in eligible_samples)
    if cut.fits_a_trend:
        series, positions = zip(*selected, strict=True)
        yield from cut(series, positions)
        return
    for values, at in selected:
        yield cut([values], [at])[0]

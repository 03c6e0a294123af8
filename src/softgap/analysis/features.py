"""Compute the features that a comparison tests, for every head and sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from jaxtyping import Bool, Float64, Int64

from softgap.analysis.pattern_counts import HELD_VALUES
from softgap.analysis.preregistration import Preregistration
from softgap.analysis.series import CONTROL_TRANSFORM, Cut
from softgap.errors import ValueInputError, unknown_name
from softgap.signal import pattern_counts
from softgap.signal.complexity import plane
from softgap.signal.patterns import least_windows
from softgap.trajectories import Study, Trajectories
from softgap.trajectories.validation import BASELINE

__all__ = ["FeatureTable", "Mode", "feature_table"]


@dataclass(frozen=True)
class Mode:
    """One way of looking at all heads; ``windows`` are counted in every sample alike, 0 where none are."""

    mechanism: str
    feature: str
    transform: str = ""
    order: int = 0
    segment: str = ""
    windows: int = 0

    def __str__(self) -> str:
        how = f" ({self.transform}, order {self.order}, {self.segment})" if self.order else ""
        return " ".join(filter(None, (self.mechanism, self.feature))) + how


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Features of the used samples.

    Attributes
    ----------
    values
        NaN nowhere.
    modes, skipped
        What was looked at, and what could not be, with the reason.
    layer, head
        Of every column: the head, or the KV head where ``collapsed``.
    used
        Which samples of the study were long enough.
    """

    values: Float64[np.ndarray, "sample mode head"]
    modes: tuple[Mode, ...]
    skipped: dict[str, str]
    layer: Int64[np.ndarray, " head"]
    head: Int64[np.ndarray, " head"]
    collapsed: bool
    eligible: Bool[np.ndarray, " sample"]
    tie_rate: float


def feature_table(
    study: Study,
    steps: Sequence[int],
    eligible: Bool[np.ndarray, " sample"],
    preregistration: Preregistration,
    tell: Callable[[float], None],
) -> FeatureTable:
    """The features of the used samples of a study, whose parts have so many steps."""
    first = _part(next(iter(study)), preregistration.part)
    modes, skipped = _modes(first, [n for n, use in zip(steps, eligible, strict=True) if use], preregistration)
    real = first.kv_group >= 0
    layer, head = (index.astype(np.int64) for index in np.nonzero(real))
    values = np.full((int(eligible.sum()), len(modes), len(layer)), np.nan)
    ties = 0.0
    row = 0
    for i, run in enumerate(study):
        tell(i / len(study))
        if not eligible[i]:
            continue
        part = _part(run, preregistration.part)
        if part.layers != first.layers or part.heads_per_layer != first.heads_per_layer:
            raise ValueInputError(
                f"all samples of a comparison must have the same heads, got {run.n_heads} in sample '{run.sample_id}' "
                f"and {first.n_heads} in '{first.sample_id}'; compare them apart"
            )
        ties = max(ties, _fill(values[row], part, real, modes, preregistration))
        row += 1
    total_steps = sum(n for n, use in zip(steps, eligible, strict=True) if use)
    eligible_parts = partial(_eligible_parts, study, eligible, preregistration.part)
    ties = max(ties, _fill_residuals(values, eligible_parts, total_steps, real, modes, preregistration))
    layers = np.array(first.layers)[layer]
    if preregistration.collapse:
        values, layers, head = _collapse_groups(values, layers, first.kv_group[real])
    return FeatureTable(values, modes, skipped, layers, head, preregistration.collapse, eligible, ties)


def _part(run: Trajectories, part: str) -> Trajectories:
    if part == "completion":
        return run
    if run.prompt is None:
        raise ValueInputError(
            f"part 'prompt' needs the steps of the prompts, got sample '{run.sample_id}' without; use part 'completion'"
        )
    return run.prompt


def _eligible_parts(study: Study, eligible: np.ndarray, part: str) -> Iterator[Trajectories]:
    return (_part(run, part) for run, use in zip(study, eligible, strict=True) if use)


def _modes(
    run: Trajectories, steps: Sequence[int], preregistration: Preregistration
) -> tuple[tuple[Mode, ...], dict[str, str]]:
    names = preregistration.mechanisms or run.mechanisms
    for name in names:
        if name not in run.mechanisms:
            raise unknown_name("mechanism of this study", name, run.mechanisms)
    shortest = min(steps)
    modes: list[Mode] = []
    skipped: dict[str, str] = {}
    for name, feature in product(names, [f for f in preregistration.features if f in ("mean", "slope")]):
        if feature == "slope" and shortest < 2:
            skipped[str(Mode(name, feature))] = f"a slope needs 2 steps, the shortest sample has {shortest}"
        else:
            modes.append(Mode(name, feature))
    pattern_features = [feature for feature in preregistration.features if feature in ("entropy", "complexity")]
    for name, feature, transform, order, segment in product(
        names, pattern_features, preregistration.transforms, preregistration.orders, preregistration.segments
    ):
        windows = max(0, Cut(transform, segment).length(shortest) - (order - 1))
        least = least_windows(preregistration.eligibility, order)
        mode = Mode(name, feature, transform, order, segment, windows)
        if transform == CONTROL_TRANSFORM and (name == BASELINE or BASELINE not in run.mechanisms):
            skipped[str(mode)] = f"it subtracts '{BASELINE}' from another mechanism"
        elif windows < least:
            skipped[str(mode)] = f"the shortest sample has {windows} windows and {least} are needed; set min_steps"
        else:
            modes.append(mode)
    if "sparsity" in preregistration.features:
        if "sparsity" in run.focus:
            modes.append(Mode("", "sparsity"))
        elif len(preregistration.features) == 1:  # one of several is passed over in silence
            skipped["sparsity"] = "it was not recorded; measure the study with --focus"
    if not modes:
        raise ValueInputError(
            f"a comparison needs at least one feature, got none that can be measured ({next(iter(skipped.values()))})"
        )
    return tuple(modes), skipped


def _series(
    run: Trajectories, mechanism: str, real: np.ndarray, preregistration: Preregistration, control: bool
) -> np.ndarray:
    def values_of(name: str) -> np.ndarray:
        return np.asarray(run.quantities[preregistration.quantity][run.mechanisms.index(name)][real], np.float64)

    series = values_of(mechanism) - values_of(BASELINE) if control else values_of(mechanism)
    bad = ~np.isfinite(series)
    if bad.any():
        head, step = (int(i) for i in np.argwhere(bad)[0])
        raise ValueInputError(
            f"the {preregistration.quantity} of '{mechanism}' must be a number at every step, got {series[head, step]} "
            f"at step {step} of sample '{run.sample_id}'; choose another quantity or leave the sample out"
        )
    return np.asarray(series)


def _fill(
    row: Float64[np.ndarray, "mode head"],
    run: Trajectories,
    real: np.ndarray,
    modes: Sequence[Mode],
    preregistration: Preregistration,
) -> float:
    """Fill in one sample, residuals aside; return the largest share of windows with equal values."""
    ties = 0.0
    for mechanism in dict.fromkeys(mode.mechanism for mode in modes):
        mechanism_modes = [(k, mode) for k, mode in enumerate(modes) if mode.mechanism == mechanism]
        if not mechanism:
            for k, _ in mechanism_modes:
                row[k] = run.focus["sparsity"][real].astype(np.float64).mean(axis=-1)
            continue
        series = _series(run, mechanism, real, preregistration, control=False)
        for k, mode in mechanism_modes:
            if mode.feature == "mean":
                row[k] = series.mean(axis=-1)
            elif mode.feature == "slope":
                time = np.arange(series.shape[-1]) - (series.shape[-1] - 1) / 2
                row[k] = 100 * series @ time / (time @ time)
        for transform, segment in dict.fromkeys((m.transform, m.segment) for _, m in mechanism_modes if m.order):
            if transform == "residual":
                continue
            source = (
                _series(run, mechanism, real, preregistration, control=True)
                if transform == CONTROL_TRANSFORM
                else series
            )
            left = Cut(transform, segment)([source], [run.positions])[0]
            ties = max(
                ties,
                _fill_patterns(
                    row, left, [p for p in mechanism_modes if (p[1].transform, p[1].segment) == (transform, segment)]
                ),
            )
    return ties


def _fill_patterns(
    row: Float64[np.ndarray, "mode head"], left: np.ndarray, numbered_modes: Sequence[tuple[int, Mode]]
) -> float:
    """Entropy and complexity of the first windows: as many in every sample, whatever its length."""
    ties = 0.0
    for order, windows in dict.fromkeys((mode.order, mode.windows) for _, mode in numbered_modes if mode.order):
        counted = pattern_counts(left[:, : windows + order - 1], order, 1, ties="stable")
        pattern_values = dict(zip(("entropy", "complexity"), plane(counted.counts / windows), strict=True))
        ties = max(ties, float(counted.tie_rate.max()))
        for k, mode in numbered_modes:
            if mode.order == order:
                row[k] = pattern_values[mode.feature]
    return ties


def _fill_residuals(
    values: Float64[np.ndarray, "sample mode head"],
    runs: Callable[[], Iterator[Trajectories]],
    steps: int,
    real: np.ndarray,
    modes: Sequence[Mode],
    preregistration: Preregistration,
) -> float:
    """Fill in residuals, whose trend is fitted over all samples: some heads at a time where all would not fit."""
    ties, at_once = 0.0, max(1, HELD_VALUES // steps)
    residual_modes = [(k, mode) for k, mode in enumerate(modes) if mode.transform == "residual"]
    for mechanism, segment in dict.fromkeys((mode.mechanism, mode.segment) for _, mode in residual_modes):
        segment_modes = [
            (k, mode) for k, mode in residual_modes if (mode.mechanism, mode.segment) == (mechanism, segment)
        ]
        for start in range(0, values.shape[-1], at_once):
            heads = slice(start, start + at_once)
            # A copy, or the other heads of every sample would stay in memory behind these.
            pairs = [
                (_series(run, mechanism, real, preregistration, control=False)[heads].copy(), run.positions)
                for run in runs()
            ]
            for row, left in zip(values, Cut("residual", segment)(*zip(*pairs, strict=True)), strict=True):
                ties = max(ties, _fill_patterns(row[:, heads], left, segment_modes))
    return ties


def _collapse_groups(
    values: np.ndarray, layer: np.ndarray, group: np.ndarray
) -> tuple[np.ndarray, Int64[np.ndarray, " head"], Int64[np.ndarray, " head"]]:
    """Means over the heads that share a KV head."""
    places, codes = np.unique(np.stack([layer, group]), axis=1, return_inverse=True)
    codes = codes.reshape(-1)
    belongs = codes[:, None] == np.arange(places.shape[1])
    return values @ (belongs / belongs.sum(axis=0)), places[0].astype(np.int64), places[1].astype(np.int64)

"""The samples of a comparison: their features, groups, clusters and free baselines, one row each."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64

from softgap.analysis.features import FeatureTable, feature_table
from softgap.analysis.preregistration import Preregistration
from softgap.errors import ValueInputError
from softgap.tasks.sources import stored_prompts
from softgap.trajectories import Study
from softgap.trajectories.folder import Folder

__all__ = [
    "BASELINES",
    "ComparisonSamples",
    "baseline_table",
    "comparison_samples",
    "drop_repeats",
    "repeated_prompts",
    "samples_frame",
]


# Columns of a study's samples that are known without any field of its prompts.
_LENGTHS = {"length": "steps", "prompt_length": "n_prompt"}


# Two samples are the same if all features agree to single precision. They are nearly the same if they are closer than
# this share of the usual distance to the tenth neighbour (or the tenth part of all), and features are at least so many.
_SAME, _NEAR, _NEIGHBOUR, _NEAR_UNITS = 1e-5, 0.05, 10, 10


# Pairs of samples whose distance is held at once.
_PAIRS = 2**24


@dataclass(frozen=True, eq=False)
class ComparisonSamples:
    """The samples that are compared, one row each.

    Attributes
    ----------
    table, varying
        All features, and which of them vary: the units.
    values
        Of the units.
    frame
        The study's samples table with the fields of the prompts beside it.
    labels, clusters
        The group of every sample, and what it belongs to; None where every sample stands alone.
    """

    table: FeatureTable
    values: Float64[np.ndarray, "sample unit"]
    varying: Bool[np.ndarray, "mode head"]
    frame: pd.DataFrame
    labels: np.ndarray
    clusters: np.ndarray | None

    def rows(self, selection: np.ndarray) -> ComparisonSamples:
        """Some of the samples."""
        clusters = None if self.clusters is None else self.clusters[selection]
        return replace(
            self,
            values=self.values[selection],
            frame=self.frame[selection].reset_index(drop=True),
            labels=self.labels[selection],
            clusters=clusters,
        )

    def with_labels(self, labels: np.ndarray) -> ComparisonSamples:
        """The same samples with other labels."""
        return replace(self, labels=labels)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of which sample has which label."""
        pairs = sorted(zip(self.frame["sample_id"].tolist(), self.labels.tolist(), strict=True))
        return hashlib.sha256(json.dumps(pairs, ensure_ascii=False).encode()).hexdigest()

    def numbers(self, name: str) -> Float64[np.ndarray, " sample"]:
        """A number that every sample has."""
        values = pd.to_numeric(_field(self.frame, name), errors="coerce")
        if values.isna().any():
            raise ValueInputError(f"samples are matched on a number that all have, got none in some for '{name}'")
        return values.to_numpy(float)

    def words(self, name: str) -> list[str]:
        """A field of every sample as text."""
        return [str(value) for value in _field(self.frame, name)]


def samples_frame(study: Study, preregistration: Preregistration) -> pd.DataFrame:
    """The samples table with the fields of the prompts beside it, and the number of steps compared."""
    frame = study.samples()
    if frame.empty:
        raise ValueInputError(f"a comparison needs samples, but '{study.path}' holds none; measure some first")
    prompts = stored_prompts(Folder.at(study.path)) or {}
    rows = [prompts[i][0].to_json() if i in prompts else {} for i in frame["sample_id"]]
    given = dict.fromkeys(key for row in rows for key in row)
    measured = {*frame.columns, *_LENGTHS, *_LENGTHS.values()} - {"sample_id", "prompt", "completion", "label"}
    frame.attrs["ambiguous"] = sorted(measured.intersection(given))
    for name in given:
        if name not in frame.columns:
            frame[name] = [row.get(name) for row in rows]
    column = "positions" if preregistration.part == "completion" else "prompt_positions"
    missing = frame["sample_id"][frame[column].isna()].tolist()
    if missing:
        raise ValueInputError(
            f"part 'prompt' needs the steps of the prompts, got sample '{missing[0]}' without; use part 'completion'"
        )
    frame["steps"] = [len(steps) for steps in frame[column]]
    return frame


def _field(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    if name in frame.attrs.get("ambiguous", ()):
        raise ValueInputError(
            f"the prompts have a field '{name}', which is also the name of something that softgap measures; measure "
            "again with the field under another name"
        )
    column = _LENGTHS.get(name, name)
    if column not in frame.columns:
        known = [c for c in frame.columns if frame[c].map(lambda v: isinstance(v, str | int | float)).any()]
        raise ValueInputError(f"no sample has a field '{name}', they have {', '.join(known)}; choose one of them")
    return frame[column]


def comparison_samples(
    study: Study,
    frame: pd.DataFrame,
    locked: Bool[np.ndarray, " sample"],
    preregistration: Preregistration,
    tell: Callable[[float], None],
) -> tuple[ComparisonSamples, dict[str, int]]:
    """The samples of the two groups, and how many were left out for which reason.

    Units are features that vary among the locked samples and among the others, so that both can be compared.
    """
    group_names = _field(frame, preregistration.by)
    labels = np.array([None if value is None or value != value else str(value) for value in group_names], dtype=object)
    known = np.array([label is not None for label in labels])
    in_groups = known & np.isin(labels, preregistration.between) if preregistration.between else known
    long_enough = (frame["steps"] >= preregistration.min_steps).to_numpy()
    eligible = np.asarray(in_groups & long_enough & (frame["steps"] > 0).to_numpy())
    left_out = {
        "without a label": int((~known).sum()),
        "of other groups": int((known & ~in_groups).sum()),
        "too short": int((in_groups & ~eligible).sum()),
    }
    _check_groups(labels[eligible], preregistration, left_out)
    for name in (*preregistration.match, *preregistration.strata):
        _field(frame, name)
    table = feature_table(study, frame["steps"].tolist(), eligible, preregistration, tell)
    varying = _varying_units(table.values[locked[eligible]]) & _varying_units(table.values[~locked[eligible]])
    if not varying.any():
        raise ValueInputError(
            "every feature is the same in all samples, so that there is nothing to compare; choose another part, "
            "quantity or feature"
        )
    samples = frame[eligible].reset_index(drop=True)
    names = labels[eligible].astype(str)
    clusters = _clusters(samples, names, preregistration)
    return ComparisonSamples(table, table.values[:, varying], varying, samples, names, clusters), left_out


def _clusters(frame: pd.DataFrame, labels: np.ndarray, preregistration: Preregistration) -> np.ndarray | None:
    """What samples belong to: the field that the plan names, or their prompts where no sample has it and some repeat.

    Repeated prompts that nobody declared: if most samples share their prompt with one of the other group, labels are
    exchanged within prompts, as for a declared cluster; else a prompt's samples of one group belong together.
    """
    if preregistration.clusters in frame.columns and frame[preregistration.clusters].notna().any():
        # A sample without a group belongs to nobody but itself.
        column = frame[preregistration.clusters]
        clusters = np.array([f"alone/{i}" if g is None or g != g else f"group/{g}" for i, g in enumerate(column)])
    else:
        prompts = repeated_prompts(frame)
        if prompts is None:
            return None
        clusters = np.array([f"prompt/{text}" for text in prompts])
        mixed = pd.Series(labels).groupby(clusters).transform("nunique").to_numpy() > 1
        if mixed.mean() < 0.5 and preregistration.exchange == "auto":
            clusters = np.array([f"{cluster}/{label}" for cluster, label in zip(clusters, labels, strict=True)])
    return None if len(set(clusters)) == len(clusters) else clusters


def repeated_prompts(frame: pd.DataFrame) -> list[str] | None:
    """The prompt of every sample, letters and digits only, where some repeat; None if none does, or all are one."""
    if "prompt" not in frame.columns or frame["prompt"].isna().any():
        return None
    texts = ["".join(filter(str.isalnum, str(text).casefold())) or str(text) for text in frame["prompt"]]
    return texts if 1 < len(set(texts)) < len(texts) else None


def drop_repeats(data: ComparisonSamples) -> tuple[ComparisonSamples, int]:
    """Samples that are the same or nearly the same in all features count once; also how many were left out.

    Only samples of one group and cluster are joined. Copies carry no new evidence, and counted as samples they would
    make any difference significant.
    """
    scale = data.values.std(axis=0)
    scaled = (data.values - data.values.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
    within = [f"{label}/{'' if data.clusters is None else data.clusters[i]}" for i, label in enumerate(data.labels)]
    codes = np.unique(within, return_inverse=True)[1]
    reach = _SAME * math.sqrt(scaled.shape[1])
    if scaled.shape[1] >= _NEAR_UNITS and len(scaled) > _NEIGHBOUR:
        reach = max(reach, _NEAR * _typical_distance(scaled))
    first = _first_duplicate(scaled, codes, reach)
    distinct = first == np.arange(len(first))
    return (data, 0) if distinct.all() else (data.rows(distinct), int((~distinct).sum()))


def _check_groups(labels: np.ndarray, preregistration: Preregistration, left_out: Mapping[str, int]) -> None:
    names = sorted(set(labels))
    without = "; ".join(f"{count} samples {why}" for why, count in left_out.items() if count)
    exclusions = f" ({without})" if without else ""
    if len(names) > 2:
        shown = ", ".join(names[:6])
        raise ValueInputError(
            f"two groups are compared, got {len(names)} values of '{preregistration.by}' ({shown}); choose two with "
            "--between"
        )
    if len(names) < 2:
        got = f"only '{names[0]}'" if names else "none"
        raise ValueInputError(
            f"two groups are compared, got {got} in '{preregistration.by}'{exclusions}; add samples of another group "
            "or label them"
        )
    if preregistration.first is not None and preregistration.first not in names:
        raise ValueInputError(
            f"the first group must be one of {', '.join(names)}, got '{preregistration.first}'; choose one"
        )


def _varying_units(values: Float64[np.ndarray, "sample mode head"]) -> Bool[np.ndarray, "mode head"]:
    """Which features are not the same in all samples, rounding aside; all of them where no two samples are."""
    if len(values) < 2:
        return np.ones(values.shape[1:], bool)
    return np.asarray(np.ptp(values, axis=0) > 1e-9 * np.maximum(np.abs(values).max(axis=0), 1e-300))


def _distances(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Euclidean distances of some rows to all rows, with the number of the first of them."""
    squares = (values**2).sum(axis=1)
    step = max(1, _PAIRS // len(values))
    for start in range(0, len(values), step):
        rows = slice(start, start + step)
        yield start, np.sqrt(np.maximum(squares[rows, None] + squares - 2 * values[rows] @ values.T, 0))


def _typical_distance(values: np.ndarray) -> float:
    """The median distance to a neighbour so far off that it is no copy."""
    place = max(_NEIGHBOUR, len(values) // _NEIGHBOUR)
    neighbour_distances = [np.partition(distances, place, axis=1)[:, place] for _, distances in _distances(values)]
    return float(np.median(np.concatenate(neighbour_distances)))


def _first_duplicate(values: np.ndarray, codes: np.ndarray, reach: float) -> np.ndarray:
    """The first row within reach of each row, among rows of the same code."""
    first = np.arange(len(values))
    for start, distances in _distances(values):
        for row, distance in enumerate(distances, start):
            like = np.flatnonzero((distance[:row] <= reach) & (codes[:row] == codes[row]))
            if len(like):
                first[row] = first[like[0]]
    return first


BASELINES = ("length", "mean entropy", "maximum entropy", "perplexity", "minimum probability", "first-token entropy")


"""Columns of the table of baselines."""


def baseline_table(samples: pd.DataFrame) -> Float64[np.ndarray, "sample baseline"]:
    """The baselines of each row of a study's samples table; what a sample does not know is the others' mean."""
    rows = [
        _row(np.asarray(x, float), np.asarray(y, float))
        for x, y in zip(samples["entropy"], samples["logprob"], strict=True)
    ]
    table = np.array(rows, float).reshape(len(rows), len(BASELINES))
    known = np.isfinite(table)
    counts = known.sum(axis=0)
    means = np.where(known, table, 0).sum(axis=0) / np.maximum(counts, 1)
    return np.where(known, table, means)


def _row(entropy: np.ndarray, logprob: np.ndarray) -> list[float]:
    sure, scored = entropy[np.isfinite(entropy)], logprob[np.isfinite(logprob)]
    return [
        float(len(entropy)),
        float(sure.mean()) if len(sure) else np.nan,
        float(sure.max()) if len(sure) else np.nan,
        float(np.exp(-scored.mean())) if len(scored) else np.nan,
        float(np.exp(scored.min())) if len(scored) else np.nan,
        float(sure[0]) if len(sure) else np.nan,
    ]

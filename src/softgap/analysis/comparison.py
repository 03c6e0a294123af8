"""Compare two groups of a study: all features at once, with controls, baselines, label noise and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from softgap.analysis.comparison_data import (
    ComparisonSamples,
    baseline_table,
    comparison_samples,
    drop_repeats,
    repeated_prompts,
    samples_frame,
)
from softgap.analysis.comparison_findings import ComparisonFindings, Reliability, top_units
from softgap.analysis.preregistration import ComparisonLog, Preregistration
from softgap.deprecation import deprecated_keywords
from softgap.errors import SoftgapError, ValueInputError
from softgap.progress import Progress, silent
from softgap.stats import (
    Comparison,
    Incremental,
    JointControl,
    Kappa,
    Recurrence,
    Split,
    Verdict,
    cohens_kappa,
    compare_table,
    confirmation_split,
    equivalence,
    incremental_auroc,
    joint_control,
    label_noise,
    recurrence,
    verdict,
)
from softgap.trajectories import Study, open_study
from softgap.trajectories.folder import Folder

__all__ = ["compare_study"]

_RATES = (0.02, 0.05, 0.1, 0.2)
_TOP = 5
# Permutations in each of the many comparisons with flipped labels.
_FLIPPED = 499


@deprecated_keywords(plan="preregistration", planned="preregistration_file")
def compare_study(
    path: str,
    preregistration: Preregistration | None = None,
    *,
    preregistration_file: str | None = None,
    open_confirmation: bool = False,
    second: Mapping[str, str | None] | None = None,
    progress: Progress | None = None,
) -> ComparisonFindings:
    """Compare two groups of the samples of a study under a preregistration.

    Parameters
    ----------
    path
        The study, a folder or URI.
    preregistration
        The preregistration: all decisions about the comparison. None takes its defaults.
    preregistration_file
        The file that the preregistration was read from; its hash goes into the study's log before the labels are read.
    open_confirmation
        Unlock the confirmation set (one time only in the life of a study).
    second
        Labels of some samples by another scorer, or by hand, by sample id.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    ComparisonFindings
        The verdict, the comparison with its controls, and whether it was planned or exploratory.

    Raises
    ------
    ValueInputError
        If the study does not hold two groups that can be compared.

    Examples
    --------
    ``runs/counts`` is a folder that ``softgap study run`` wrote, with samples labelled "even" and "odd":

    >>> import softgap
    >>> decisions = softgap.analysis.Preregistration(features=("mean",), permutations=99, refits=19)
    >>> findings = softgap.analysis.compare_study("runs/counts", decisions)
    >>> findings.status.partition(":")[0]
    'exploratory'
    """
    preregistration = preregistration or Preregistration()
    tell = progress or silent
    study = open_study(path)
    log = ComparisonLog(Folder.at(path))
    if preregistration_file is not None:
        log.record_preregistration(preregistration, preregistration_file)
    share = preregistration.confirm if preregistration.confirm is not None else log.locked_share
    if open_confirmation and share is None:
        raise ValueInputError(
            "no samples of this study are locked for confirmation, so that none can be opened; lock some with confirm "
            "first"
        )
    if open_confirmation:
        log.refuse_second_opening()
    samples = _read_samples(study, log, preregistration, share, open_confirmation, tell)
    data = samples.data
    kappa = None if second is None else _agreement(data, second)
    if samples.split is not None and open_confirmation:
        log.open(samples.split)  # everything that can be refused has been: this cannot be taken back
    results = _run_tests(data, samples.confirmation, preregistration, tell)
    tell("flipping labels", 0.0)
    reliability = _reliability(data, samples.confirmation, results.comparison.contrast.groups, preregistration, kappa)
    labels_hash = data.fingerprint
    status = log.status(preregistration, labels_hash, from_file=preregistration_file is not None)
    log.add(
        "looked",
        hash=preregistration.hash,
        status=status,
        outcome=results.verdict.outcome,
        samples=len(data.labels),
        labels=labels_hash,
        plan=preregistration.to_json(),
    )
    return ComparisonFindings(
        preregistration=preregistration,
        status=status,
        log_entries=log.entries,
        table=data.table,
        varying=data.varying,
        left_out=samples.left_out,
        source=_source(study),
        split=samples.split,
        opened=open_confirmation,
        reliability=reliability,
        **vars(results),
    )


@dataclass(frozen=True, eq=False)
class _SplitSamples:
    """The samples to explore, those of the confirmation set if it is open, and how many were left out and why."""

    data: ComparisonSamples
    confirmation: ComparisonSamples | None
    split: Split | None
    left_out: dict[str, int]


def _read_samples(
    study: Study,
    log: ComparisonLog,
    preregistration: Preregistration,
    share: float | None,
    open_confirmation: bool,
    tell: Progress,
) -> _SplitSamples:
    """Measure the features of all samples, lock a share of them for confirmation, and drop repeats."""
    frame = samples_frame(study, preregistration)
    split = None if share is None else _lock_split(log, frame, share)
    locked = np.zeros(len(frame), bool) if split is None else split.confirmation
    data, left_out = comparison_samples(
        study, frame, locked, preregistration, lambda part: tell("measuring features", part)
    )
    confirmation = None
    if split is not None:
        locked_rows = np.isin(data.frame["sample_id"], frame["sample_id"][locked])
        confirmation, data = data.rows(locked_rows) if open_confirmation else None, data.rows(~locked_rows)
    data, repeats = drop_repeats(data)
    if confirmation is not None:
        confirmation, confirmation_repeats = drop_repeats(confirmation)
        repeats += confirmation_repeats
    left_out["repeats of another sample"] = repeats
    return _SplitSamples(data, confirmation, split, left_out)


@dataclass(frozen=True, eq=False)
class _Results:
    comparison: Comparison
    controls: dict[str, Comparison]
    impossible: dict[str, str]
    verdict: Verdict
    equivalent: Any
    incremental: Incremental | None
    recurring: Recurrence | None
    top: tuple[dict[str, Any], ...]


def _run_tests(
    data: ComparisonSamples, confirmation: ComparisonSamples | None, preregistration: Preregistration, tell: Progress
) -> _Results:
    decision = _decide(data, confirmation, preregistration, tell)
    first, impossible = decision.comparison, dict(decision.impossible)

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        tell(name, 0.0)
        try:
            return work()
        except SoftgapError as error:
            impossible[name] = str(error)
            return None

    beyond = attempt("beyond baselines", lambda: _incremental_auroc(data, preregistration))
    recurring = (
        attempt("recurrence", lambda: _head_recurrence(data, preregistration)) if len(data.table.modes) > 1 else None
    )
    equivalence_test = equivalence(first.contrast, preregistration.margin, alpha=preregistration.alpha_per_look)
    rng = np.random.default_rng([preregistration.seed, 5])
    top = top_units(first, data.values, data.labels == first.contrast.groups[0], data.clusters, rng)
    return _Results(first, decision.controls, impossible, decision.verdict, equivalence_test, beyond, recurring, top)


@dataclass(frozen=True, eq=False)
class _Decision:
    comparison: Comparison
    controls: dict[str, Comparison]
    impossible: dict[str, str]
    verdict: Verdict


def _decide(
    data: ComparisonSamples,
    confirmation: ComparisonSamples | None,
    preregistration: Preregistration,
    tell: Progress = silent,
) -> _Decision:
    """All samples compared, then every control of the plan, then the verdict: the same for any labels."""
    tell("comparing", 0.0)
    first = _compare_samples(data, preregistration)
    control = preregistration.control_name
    attempts: dict[str, Callable[[], Comparison]] = {}
    if control:
        attempts[control] = lambda: _compare_controlled(data, preregistration)
    if confirmation is not None:
        attempts[f"confirmation, {control}" if control else "confirmation"] = lambda: _compare_controlled(
            confirmation, preregistration
        )
    controls: dict[str, Comparison] = {}
    impossible: dict[str, str] = {}
    for name, work in attempts.items():
        tell(name, 0.0)
        try:
            controls[name] = work()
        except SoftgapError as error:
            impossible[name] = str(error)
    joint = tuple(attempts) if control else ()
    outcome = verdict(first, margin=preregistration.margin, controls=controls, impossible=impossible, joint=joint)
    return _Decision(first, controls, impossible, outcome)


def _lock_split(log: ComparisonLog, frame: pd.DataFrame, share: float) -> Split:
    """The split by groups where every sample has one, else by prompts where some repeat, else by sample ids."""
    ids = frame["sample_id"].tolist()
    groups = frame["group"].tolist() if "group" in frame.columns and frame["group"].notna().all() else None
    split = confirmation_split(ids, fraction=share, clusters=groups)
    if groups is None and log.locked_hash != split.hash:  # a lock of 0.1 knew no prompts, and stays as it is
        split = confirmation_split(ids, fraction=share, clusters=repeated_prompts(frame))
    log.lock(split)
    return split


def _compare_samples(
    data: ComparisonSamples, preregistration: Preregistration, control: JointControl | None = None
) -> Comparison:
    rows = np.arange(len(data.labels)) if control is None else control.indices
    return compare_table(
        data.values[rows],
        data.labels[rows],
        rng=np.random.default_rng([preregistration.seed, 1]),
        first=preregistration.first,
        clusters=None if data.clusters is None else data.clusters[rows],
        strata=None if control is None else control.stratum,
        covariates=None if control is None else control.covariates,
        exchange=preregistration.exchange if data.clusters is not None else "auto",
        permutations=preregistration.permutations,
        alpha=preregistration.alpha_per_look,
        power=preregistration.power,
    )


def _compare_controlled(data: ComparisonSamples, preregistration: Preregistration) -> Comparison:
    """The comparison with every named confounder held fixed at once."""
    control = joint_control(
        data.labels,
        {name: data.numbers(name) for name in preregistration.match},
        strata={name: data.words(name) for name in preregistration.strata} or None,
        clusters=data.clusters,
        first=preregistration.first,
    )
    return _compare_samples(data, preregistration, control)


def _incremental_auroc(data: ComparisonSamples, preregistration: Preregistration) -> Incremental:
    return incremental_auroc(
        data.values,
        data.labels,
        rng=np.random.default_rng([preregistration.seed, 2]),
        baselines=baseline_table(data.frame),
        clusters=data.clusters,
        first=preregistration.first,
        permutations=preregistration.refits,
    )


def _head_recurrence(data: ComparisonSamples, preregistration: Preregistration) -> Recurrence:
    """Over the heads that vary in every mode."""
    full = np.full((len(data.values), *data.varying.shape), np.nan)
    full[:, data.varying] = data.values
    heads = data.varying.all(axis=0)
    if heads.sum() <= _TOP:
        raise ValueInputError(f"recurrence needs more than {_TOP} heads that vary in every mode, got {heads.sum()}")
    return recurrence(
        full[:, :, heads],
        data.labels,
        rng=np.random.default_rng([preregistration.seed, 3]),
        top=_TOP,
        clusters=data.clusters,
        exchange=preregistration.exchange if data.clusters is not None else "auto",
        first=preregistration.first,
        permutations=min(preregistration.permutations, 1999),
    )


def _reliability(
    data: ComparisonSamples,
    confirmation: ComparisonSamples | None,
    groups: tuple[str, str],
    preregistration: Preregistration,
    kappa: Kappa | None,
) -> Reliability:
    """The verdict under flipped labels, of locked samples too where they were opened, with every control made anew."""
    quick = replace(preregistration, permutations=min(preregistration.permutations, _FLIPPED))
    parts = [data] if confirmation is None else [data, confirmation]

    def decide(flipped: np.ndarray) -> Verdict:
        labels = np.where(flipped, *groups)
        main, confirmation_labels = data.with_labels(labels[: len(data.labels)]), labels[len(data.labels) :]
        return _decide(
            main, None if confirmation is None else confirmation.with_labels(confirmation_labels), quick
        ).verdict

    try:
        noise = label_noise(
            decide,
            np.concatenate([part.labels for part in parts]),
            rng=np.random.default_rng([preregistration.seed, 4]),
            rates=_RATES,
            draws=preregistration.draws,
            first=groups[0],
            clusters=None if data.clusters is None else np.concatenate([part.clusters for part in parts]),
        )
    except SoftgapError as error:
        return Reliability(None, str(error), kappa)
    return Reliability(noise, "", kappa)


def _agreement(data: ComparisonSamples, second: Mapping[str, str | None]) -> Kappa:
    label_pairs = [
        (label, other)
        for sample_id, label in zip(data.frame["sample_id"], data.labels, strict=True)
        if (other := second.get(sample_id)) is not None
    ]
    if len(label_pairs) < 2:
        raise ValueInputError(
            f"a second scorer must label at least 2 of the samples compared, got {len(label_pairs)}; add labels"
        )
    return cohens_kappa([a for a, _ in label_pairs], [b for _, b in label_pairs])


def _source(study: Study) -> dict[str, Any]:
    names: Sequence[str] = ("model", "weights", "versions", "inputs", "options")
    return {"study": study.path, **{name: getattr(study.manifest, name) for name in names}}

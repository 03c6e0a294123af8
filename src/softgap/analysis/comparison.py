"""Two groups of a study compared: the whole family at once, controls, baselines, reliability, and a verdict first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool

from softgap.analysis.baselines import baseline_table
from softgap.analysis.comparison_findings import ComparisonFindings, Reliability
from softgap.analysis.features import FeatureTable, feature_table
from softgap.analysis.plan import ComparisonPlan
from softgap.analysis.tried import Tried
from softgap.errors import SoftgapError, ValueInputError
from softgap.stats import (
    Comparison,
    Incremental,
    LabelNoise,
    Recurrence,
    Split,
    Verdict,
    cohens_kappa,
    compare_table,
    confirmation_split,
    equivalence,
    incremental_auroc,
    label_noise,
    match,
    recurrence,
    verdict,
)
from softgap.study.files import stored_prompts
from softgap.trajectories import Study, open_study
from softgap.trajectories.folder import Folder

__all__ = ["compare_study"]

Progress = Callable[[str, float], None]

_RATES = (0.02, 0.05, 0.1, 0.2)
_TOP = 5
# Columns of a study's samples that are known without any field of its prompts.
_LENGTHS = {"length": "steps", "prompt_length": "n_prompt"}


@dataclass(frozen=True, eq=False)
class _Data:
    """The samples that are compared, one row each."""

    table: FeatureTable
    values: np.ndarray
    kept: Bool[np.ndarray, "mode head"]
    frame: pd.DataFrame
    labels: np.ndarray
    clusters: np.ndarray | None

    def rows(self, chosen: np.ndarray) -> _Data:
        clusters = None if self.clusters is None else self.clusters[chosen]
        return replace(
            self,
            values=self.values[chosen],
            frame=self.frame[chosen].reset_index(drop=True),
            labels=self.labels[chosen],
            clusters=clusters,
        )


def compare_study(
    path: str,
    plan: ComparisonPlan | None = None,
    *,
    planned: str | None = None,
    open_confirmation: bool = False,
    second: Mapping[str, str | None] | None = None,
    progress: Progress | None = None,
) -> ComparisonFindings:
    """Compare two groups of the samples of a study under a plan.

    Parameters
    ----------
    planned
        The file that the plan was read from; its hash goes into the study's log before the labels are read.
    open_confirmation
        Look at the locked samples too: once in the life of a study.
    second
        Labels of some samples by another scorer, or by hand, by sample id.
    """
    plan = plan or ComparisonPlan()
    tell = progress or (lambda *_: None)
    study = open_study(path)
    log = Tried(Folder.at(path))
    if planned is not None:
        log.record_plan(plan, planned)
    share = plan.confirm if plan.confirm is not None else log.locked_share
    if open_confirmation and share is None:
        raise ValueInputError(
            "no samples of this study are locked for confirmation, so that none can be opened; lock some with confirm "
            "first"
        )
    frame = _frame(study, plan)
    for name in (*plan.match, *plan.strata):
        _field(frame, name)
    split = None if share is None else _locked(log, frame, share)
    tell("measuring features", 0.0)
    data, left_out = _data(study, frame, plan, tell)
    confirmation = None
    if split is not None:
        held = np.isin(data.frame["sample_id"], frame["sample_id"][split.confirmation])
        confirmation, data = data.rows(held), data.rows(~held)
    if split is not None and open_confirmation:
        # Once in the life of a study: not before all that can be refused has been.
        log.open(split)
    found = _found(data, confirmation if open_confirmation else None, plan, tell)
    reliability = _reliability(data, second, plan, tell)
    status = log.status(plan, from_file=planned is not None)
    log.add("looked", hash=plan.hash, status=status, outcome=found.verdict.outcome, plan=plan.to_json())
    return ComparisonFindings(
        plan=plan,
        status=status,
        tried=log.entries,
        table=data.table,
        kept=data.kept,
        left_out=left_out,
        source=_source(study),
        split=split,
        opened=open_confirmation,
        reliability=reliability,
        **vars(found),
    )


@dataclass(frozen=True, eq=False)
class _Found:
    comparison: Comparison
    controls: dict[str, Comparison]
    impossible: dict[str, str]
    verdict: Verdict
    equivalent: Any
    incremental: Incremental | None
    recurring: Recurrence | None
    top: tuple[dict[str, Any], ...]


def _found(data: _Data, confirmation: _Data | None, plan: ComparisonPlan, tell: Progress) -> _Found:
    from softgap.analysis.comparison_findings import top_units

    tell("comparing", 0.0)
    first = _compared(data, plan)
    controls: dict[str, Comparison] = {}
    impossible: dict[str, str] = {}

    def attempt(name: str, work: Callable[[], Any]) -> Any:
        tell(name, 0.0)
        try:
            return work()
        except SoftgapError as error:
            impossible[name] = str(error)
            return None

    wanted: dict[str, Callable[[], Comparison]] = {}
    if plan.match:
        wanted[f"matched on {', '.join(plan.match)}"] = lambda: _matched(data, plan)
    if plan.strata:
        wanted[f"within {', '.join(plan.strata)}"] = lambda: _compared(data, plan, _strata(data, plan))
    if confirmation is not None:
        wanted["confirmation"] = lambda: _compared(confirmation, plan)
    for name, work in wanted.items():
        result = attempt(name, work)
        if result is not None:
            controls[name] = result
    judged = verdict(first, margin=plan.margin, controls=controls)
    if judged.outcome == "separated" and impossible:
        name, reason = next(iter(impossible.items()))
        sentence = f"Not enough data: the control '{name}' could not be made ({reason})."
        judged = replace(judged, outcome="not enough data", sentence=sentence)
    beyond = attempt("beyond baselines", lambda: _beyond(data, plan))
    recurring = attempt("recurrence", lambda: _recurring(data, plan)) if len(data.table.modes) > 1 else None
    tested = equivalence(first.contrast, plan.margin, alpha=plan.alpha)
    rng = np.random.default_rng([plan.seed, 5])
    top = top_units(first, data.values, data.labels == first.contrast.groups[0], data.clusters, rng)
    return _Found(first, controls, impossible, judged, tested, beyond, recurring, top)


def _frame(study: Study, plan: ComparisonPlan) -> pd.DataFrame:
    """The samples table with the fields of the prompts beside it, and the number of steps compared."""
    frame = study.samples()
    if frame.empty:
        raise ValueInputError(f"a comparison needs samples, but '{study.path}' holds none; measure some first")
    prompts = stored_prompts(Folder.at(study.path)) or {}
    rows = [prompts[i][0].to_json() if i in prompts else {} for i in frame["sample_id"]]
    for name in dict.fromkeys(key for row in rows for key in row):
        if name not in frame.columns:
            frame[name] = [row.get(name) for row in rows]
    column = "positions" if plan.part == "completion" else "prompt_positions"
    missing = frame["sample_id"][frame[column].isna()].tolist()
    if missing:
        raise ValueInputError(
            f"part 'prompt' needs the steps of the prompts, got sample '{missing[0]}' without; use part 'completion'"
        )
    frame["steps"] = [len(steps) for steps in frame[column]]
    return frame


def _field(frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    column = _LENGTHS.get(name, name)
    if column not in frame.columns:
        known = [c for c in frame.columns if frame[c].map(lambda v: isinstance(v, str | int | float)).any()]
        raise ValueInputError(f"no sample has a field '{name}', they have {', '.join(known)}; choose one of them")
    return frame[column]


def _locked(log: Tried, frame: pd.DataFrame, share: float) -> Split:
    """The split by sample ids, or by groups where every sample has one."""
    groups = frame["group"].tolist() if "group" in frame.columns and frame["group"].notna().all() else None
    split = confirmation_split(frame["sample_id"].tolist(), fraction=share, clusters=groups)
    log.lock(split)
    return split


def _data(study: Study, frame: pd.DataFrame, plan: ComparisonPlan, tell: Progress) -> tuple[_Data, dict[str, int]]:
    given = _field(frame, plan.by)
    labels = np.array([None if value is None or value != value else str(value) for value in given], dtype=object)
    known = np.array([label is not None for label in labels])
    wanted = known & np.isin(labels, plan.between) if plan.between else known
    long_enough = (frame["steps"] >= plan.min_steps).to_numpy()
    used = np.asarray(wanted & long_enough & (frame["steps"] > 0).to_numpy())
    left_out = {
        "without a label": int((~known).sum()),
        "of other groups": int((known & ~wanted).sum()),
        "too short": int((wanted & ~used).sum()),
    }
    _check_groups(labels[used], plan, left_out)
    table = feature_table(study, frame["steps"].tolist(), used, plan, lambda share: tell("measuring features", share))
    flat = table.values.reshape(len(table.values), -1)
    spread = np.ptp(flat, axis=0)
    kept = (spread > 1e-9 * np.maximum(np.abs(flat).max(axis=0), 1e-300)).reshape(table.values.shape[1:])
    if not kept.any():
        raise ValueInputError(
            "every feature is the same in all samples, so that there is nothing to compare; choose another part, "
            "quantity or feature"
        )
    chosen = frame[used].reset_index(drop=True)
    clusters = None
    if plan.clusters in chosen.columns and chosen[plan.clusters].notna().any():
        # A sample without a group belongs to nobody but itself.
        clusters = np.array(
            [f"alone/{i}" if g is None or g != g else f"group/{g}" for i, g in enumerate(chosen[plan.clusters])]
        )
        if len(set(clusters)) == len(clusters):
            clusters = None
    values = table.values[:, kept]
    return _Data(table, values, kept, chosen, labels[used].astype(str), clusters), left_out


def _check_groups(labels: np.ndarray, plan: ComparisonPlan, left_out: Mapping[str, int]) -> None:
    names = sorted(set(labels))
    without = "; ".join(f"{count} samples {why}" for why, count in left_out.items() if count)
    rest = f" ({without})" if without else ""
    if len(names) > 2:
        shown = ", ".join(names[:6])
        raise ValueInputError(
            f"two groups are compared, got {len(names)} values of '{plan.by}' ({shown}); choose two with --between"
        )
    if len(names) < 2:
        got = f"only '{names[0]}'" if names else "none"
        raise ValueInputError(
            f"two groups are compared, got {got} in '{plan.by}'{rest}; add samples of another group or label them"
        )
    if plan.first is not None and plan.first not in names:
        raise ValueInputError(f"the first group must be one of {', '.join(names)}, got '{plan.first}'; choose one")


def _compared(data: _Data, plan: ComparisonPlan, strata: Any = None, rows: Any = None) -> Comparison:
    chosen = np.arange(len(data.labels)) if rows is None else rows
    return compare_table(
        data.values[chosen],
        data.labels[chosen],
        rng=np.random.default_rng([plan.seed, 1]),
        first=plan.first,
        clusters=None if data.clusters is None else data.clusters[chosen],
        strata=strata,
        exchange=plan.exchange if data.clusters is not None else "auto",
        permutations=plan.permutations,
        alpha=plan.alpha,
        power=plan.power,
    )


def _matched(data: _Data, plan: ComparisonPlan) -> Comparison:
    columns = [_numbers(data.frame, name) for name in plan.match]
    like = match(data.labels, np.stack(columns, axis=1), clusters=data.clusters, first=plan.first)
    return _compared(data, plan, like.stratum, like.kept)


def _numbers(frame: pd.DataFrame, name: str) -> np.ndarray:
    values = pd.to_numeric(_field(frame, name), errors="coerce")
    if values.isna().any():
        raise ValueInputError(f"samples are matched on a number that all have, got none in some for '{name}'")
    return values.to_numpy(float)


def _strata(data: _Data, plan: ComparisonPlan) -> dict[str, list[str]]:
    return {name: [str(value) for value in _field(data.frame, name)] for name in plan.strata}


def _beyond(data: _Data, plan: ComparisonPlan) -> Incremental:
    return incremental_auroc(
        data.values,
        data.labels,
        rng=np.random.default_rng([plan.seed, 2]),
        baselines=baseline_table(data.frame),
        clusters=data.clusters,
        first=plan.first,
        permutations=plan.refits,
    )


def _recurring(data: _Data, plan: ComparisonPlan) -> Recurrence:
    """Over the heads that vary in every mode."""
    full = np.full((len(data.values), *data.kept.shape), np.nan)
    full[:, data.kept] = data.values
    heads = data.kept.all(axis=0)
    if heads.sum() <= _TOP:
        raise ValueInputError(f"recurrence needs more than {_TOP} heads that vary in every mode, got {heads.sum()}")
    return recurrence(
        full[:, :, heads],
        data.labels,
        rng=np.random.default_rng([plan.seed, 3]),
        top=_TOP,
        clusters=data.clusters,
        exchange=plan.exchange if data.clusters is not None else "auto",
        first=plan.first,
        permutations=min(plan.permutations, 1999),
    )


def _reliability(
    data: _Data, second: Mapping[str, str | None] | None, plan: ComparisonPlan, tell: Progress
) -> Reliability:
    tell("flipping labels", 0.0)
    noise: LabelNoise | None = None
    reason = ""
    try:
        noise = label_noise(
            data.values,
            data.labels,
            margin=plan.margin,
            rng=np.random.default_rng([plan.seed, 4]),
            rates=_RATES,
            draws=plan.draws,
            first=plan.first,
            clusters=data.clusters,
            alpha=plan.alpha,
            power=plan.power,
            permutations=min(plan.permutations, 499),
        )
    except SoftgapError as error:
        reason = str(error)
    if second is None:
        return Reliability(noise, reason, None)
    both = [
        (label, other)
        for sample_id, label in zip(data.frame["sample_id"], data.labels, strict=True)
        if (other := second.get(sample_id)) is not None
    ]
    if len(both) < 2:
        raise ValueInputError(
            f"a second scorer must label at least 2 of the samples compared, got {len(both)}; add labels"
        )
    return Reliability(noise, reason, cohens_kappa([a for a, _ in both], [b for _, b in both]))


def _source(study: Study) -> dict[str, Any]:
    names: Sequence[str] = ("model", "weights", "versions", "inputs", "options")
    return {"study": study.path, **{name: getattr(study.manifest, name) for name in names}}

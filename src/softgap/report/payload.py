"""A study as the data of a page: one JSON document, and the packed arrays it points to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap import __version__
from softgap.analysis import Findings, analyze
from softgap.analysis.headline import (
    FITTED,
    GapSums,
    Opening,
    gap_sums,
    opening,
)
from softgap.errors import SoftgapError, StoreError, ValueInputError
from softgap.inputs import as_items
from softgap.progress import Progress, silent
from softgap.report.anatomy import anatomy_json
from softgap.report.columns import Column
from softgap.report.documents import Document
from softgap.report.kinds import kinds_of_page, opening_view
from softgap.report.samples import (
    LEVEL,
    VALUE_CHARACTERS,
    VALUES,
    Group,
    Groups,
    PackedArray,
    Selection,
    array_keys,
    head_means,
    pack,
    round_values,
    sample_payload,
    sample_row,
    select_samples,
)
from softgap.signal import complexity_bounds
from softgap.trajectories import Manifest, NonFinite, Study, Trajectories
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from softgap.calibration.sufficiency import Sufficiency

__all__ = ["OPENING", "Payload", "about", "dynamics", "opening_of", "payload"]


_NUMBERS = ("entropy", "low", "high", "z", "q", "complexity")


_WORDS = ("nearest", "reason")


def dynamics(study: Study, mechanisms: tuple[str, ...], progress: Progress | None = None) -> dict[str, Any]:
    """By mechanism the columns of its heads, and once the settings, the known systems and the bounds of the plane."""
    by_mechanism: dict[str, Findings] = {}
    try:
        for mechanism in mechanisms:
            by_mechanism[mechanism] = analyze(study, mechanism=mechanism, progress=progress)
    except SoftgapError as error:
        return {"reason": str(error)}
    first = by_mechanism[mechanisms[0]]
    order = int(first.settings["order"])
    bounds = complexity_bounds(order)
    names = ("transform", "order", "delay", "segment", "ties", "least_windows", "seed")
    return {
        "settings": {name: first.settings[name] for name in names},
        "alpha": first.alpha,
        "samples": first.samples,
        "noise": first.noise_entropy,
        "mechanisms": {mechanism: _columns(findings) for mechanism, findings in by_mechanism.items()},
        "systems": [[system.name, system.kind, system.entropy, system.complexity] for system in first.systems],
        "least": _curve(bounds.least_entropy, bounds.least_complexity),
        "greatest": _curve(bounds.greatest_entropy, bounds.greatest_complexity),
    }


def _columns(findings: Findings) -> dict[str, Any]:
    numbers = {name: round_values(np.array([getattr(head, name) for head in findings.heads])) for name in _NUMBERS}
    return {**numbers, **{name: [getattr(head, name) for head in findings.heads] for name in _WORDS}}


def _curve(entropy: np.ndarray, complexity: np.ndarray) -> list[list[float | None]]:
    return [list(point) for point in zip(round_values(entropy), round_values(complexity), strict=True)]


def about(study: Study, first: Trajectories, embedded: int, keys: tuple[str, ...], whole: bool) -> list[list[str]]:
    """Pairs of a heading and a sentence or two; without ``keys`` nothing is said of what a file carries."""
    manifest = study.manifest
    rows = [
        ["Model", _model(manifest, first)],
        ["Text", _text(manifest, study)],
        ["Mechanisms", _mechanisms(manifest, first)],
        ["Excluded tokens", _excluded_tokens(manifest)],
        ["Computation", _machine(manifest)],
        ["Contents of this file", _contents(len(study), embedded, keys, whole) if keys else ""],
        ["Command", manifest.command],
        ["Versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())],
        ["Time", _times(manifest, study.state)],
    ]
    return [row for row in rows if row[1]]


def _model(manifest: Manifest, run: Trajectories) -> str:
    layers, heads = len(run.layers), run.n_heads
    groups = len({(layer, group) for layer, row in enumerate(run.kv_group.tolist()) for group in row if group >= 0})
    shared = (
        f" Query heads share keys and values in {groups} KV groups; only whole groups save memory."
        if groups < heads
        else ""
    )
    name = manifest.model or "Unnamed model"
    weights = f" (weights {manifest.weights})" if manifest.weights else ""
    return f"{name}{weights}: {layers} layers with attention, {heads} query heads in total.{shared}"


def _text(manifest: Manifest, study: Study) -> str:
    options = manifest.options
    count = "One sample" if len(study) == 1 else f"{len(study):,} samples"
    if options.get("mode") == "replay":
        how = "read by the model, not written by it"
    elif options.get("do_sample"):
        how = f"written by the model, sampled with seed {manifest.seed}"
        how += f" at temperature {options['temperature']:g}" if "temperature" in options else ""
    elif options.get("mode") == "live":
        how = "written by the model with greedy decoding"
    else:
        return f"{count}."
    chat = " The prompt was wrapped in the model's chat template; the tokens of the template are in italics."
    return f"{count}, {how}.{chat if options.get('chat') else ''}"


def _mechanisms(manifest: Manifest, run: Trajectories) -> str:
    named = []
    for name in run.mechanisms:
        options = manifest.mechanisms.get(name, {})
        settings = ", ".join(f"{key} {value}" for key, value in options.items())
        named.append(f"{name} ({settings})" if settings else name)
    control = (
        f" {BASELINE} is the baseline: the plain mean of all visible values, which ignores the query."
        if BASELINE in run.mechanisms
        else f" The baseline {BASELINE} was not measured, so mechanisms cannot be compared with it."
    )
    return f"{', '.join(named)}, each on the same queries, keys and values as softmax.{control}"


def _excluded_tokens(manifest: Manifest) -> str:
    n = manifest.dropped_sinks
    return f"The first {n} tokens (sink tokens) were hidden from softmax and from the mechanisms." if n else ""


def _machine(manifest: Manifest) -> str:
    threads = f" on {manifest.threads} threads" if manifest.threads else ""
    parts = [part for part in (manifest.dtype, manifest.backend) if part]
    model = f"The model ran in {' with '.join(parts)} attention{threads}; " if parts else ""
    return f"{model}softgap did not change the output of the model, and computed in float32."


def _contents(samples: int, embedded: int, keys: tuple[str, ...], whole: bool) -> str:
    which = (
        "Token by token: "
        if embedded == samples
        else f"Token by token for {embedded:,} of {samples:,} samples (select others with report --sample NAME): "
    )
    omission = "" if whole else "; all other quantities as means per head only, to keep the file small"
    return (
        f"{which}{', '.join(key.replace('/', ' from ') for key in keys)}{omission}. Values are rounded to 16 bits "
        "between the minimum and the maximum of each head; the study holds the exact values."
    )


def _times(manifest: Manifest, state: str) -> str:
    if not manifest.started:
        return ""
    ended = f"finished {manifest.finished}" if manifest.finished else "not finished"
    return (
        f"Started {manifest.started}, {ended if state == 'finished' else 'still running when this page was written'}."
    )


OPENING = {"quantity": "gap", "mechanism": FITTED}


"""The view of a page where a fitted map was measured: what its opening sentence is about."""


@dataclass(frozen=True, eq=False)
class Payload:
    """What a page shows.

    Attributes
    ----------
    document
        Plain values only. Wherever it says an index of an array, that of ``arrays`` is meant.
    arrays
        See ``softgap.report.samples``.
    findings
        Sections of their own.
    """

    document: dict[str, Any]
    arrays: tuple[PackedArray, ...]
    findings: tuple[Document, ...] = ()


def payload(
    study: Study,
    *,
    samples: Sequence[str] = (),
    columns: Sequence[Column] = (),
    findings: Sequence[Document] = (),
    sufficiency: Sufficiency | None = None,
    progress: Progress | None = None,
) -> Payload:
    """Gather the data of the explorer.

    Parameters
    ----------
    study
        Its samples must have the same heads.
    samples
        Names of the samples to carry token by token; by default as many as the page holds.
    columns
        Quantities of the heads that were measured elsewhere.
    findings
        Shown as sections of the page.
    sufficiency
        The kinds of heads by a calibration, for a study that does not store them, and what each kind leaves.
    progress
        Called with what is being done and the share of it that is done.
    """
    tell = progress or silent
    first = _first(study)
    anatomy = _stored_anatomy(study, as_items(samples))
    used = sum(len(head["packed"].text) for heads in anatomy.values() for head in heads)
    selection = select_samples(study, first, as_items(samples), values=max(0, VALUES - int(used / VALUE_CHARACTERS)))
    arrays: list[PackedArray] = []
    measured_elsewhere = [column.to_json(first) for column in columns]

    def store(packed: PackedArray) -> int:
        arrays.append(packed)
        return len(arrays) - 1

    groups, lines, gaps, counts = Groups(), [], [], NonFinite()
    for i, run in enumerate(study):
        tell("reading the study", i / len(study))
        _check_same_heads(run, first)
        means = head_means(run)
        groups.add(run, means)
        entry = sample_row(run, means)
        entry["data"] = (
            sample_payload(run, selection.keys, means, store) if run.sample_id in selection.samples else None
        )
        if entry["data"] is not None and run.sample_id in anatomy:
            entry["data"]["anatomy"] = [{**head, "packed": store(head["packed"])} for head in anatomy[run.sample_id]]
        lines.append(entry)
        gaps.append(gap_sums(run))
        counts += run.non_finite
    sentences = opening_of(gaps, first, counts, sufficiency)
    has_gap = sentences.headline is not None and sentences.headline.heads > 0
    view = {**OPENING, "scope": "0" if len(study) > 1 else "sample"} if has_gap else {}
    kinds = kinds_of_page(first, sufficiency)
    document = {
        **_frame(study, first, selection),
        "headline": sentences.title,
        "heldOut": sentences.rest,
        "opening": opening_view(kinds, view),
        "kinds": kinds,
        "samples": lines,
        "groups": [_group(group, store) for group in groups.result()] if len(study) > 1 else [],
        "dynamics": dynamics(study, first.mechanisms, progress),
        "columns": measured_elsewhere,
        "shapes": [[array.rows, array.columns] for array in arrays],
    }
    return Payload(document, tuple(arrays), tuple(findings))


def _stored_anatomy(study: Study, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """What a page carries of the heads of each sample, in a third of its room at most; of samples asked for, all."""
    carried: dict[str, list[dict[str, Any]]] = {}
    used = 0
    if not study.has_anatomy:
        return carried
    for sample_id in names or study.ids:
        # What is no sample is refused where samples are selected.
        heads = anatomy_json(study.anatomy(sample_id), lambda packed: packed) if sample_id in study.ids else []
        size = sum(len(head["packed"].text) for head in heads)
        if heads and (names or not carried or used + size <= VALUES * VALUE_CHARACTERS / 3):
            carried[sample_id] = heads
            used += size
    return carried


def opening_of(
    gaps: Sequence[GapSums | None],
    first: Trajectories,
    non_finite: NonFinite,
    sufficiency: Sufficiency | None = None,
) -> Opening:
    """The sentences that a page opens with."""
    measured = [gap for gap in gaps if gap is not None]
    kinds = "" if sufficiency is None else sufficiency.sentence
    gap = None if not measured else measured[0] if len(gaps) == 1 else GapSums.of_samples(measured)
    return opening(gap, first.manifest, first.layers, kinds, non_finite.sentence)


def _first(study: Study) -> Trajectories:
    """The first sample, if the study has anything to show."""
    if len(study) == 0:
        raise StoreError(
            f"a report needs trajectories, but the study at '{study.path}' has no sample; "
            "finish it, or measure into a new folder with `softgap run` or `softgap read`"
        )
    first, steps = None, 0
    for run in study:
        first = first or run
        steps += run.n_steps
        if steps:
            return first
    raise StoreError(
        f"a report needs steps, but no sample of the study at '{study.path}' has any; let the model write at least "
        "one token"
    )


def _check_same_heads(run: Trajectories, first: Trajectories) -> None:
    same = run.layers == first.layers and run.heads_per_layer == first.heads_per_layer
    if not same or array_keys(run) != array_keys(first):
        raise ValueInputError(
            f"all samples of a report must have the same heads and quantities, got {run.n_heads} heads in sample "
            f"'{run.sample_id}' and {first.n_heads} in '{first.sample_id}'; write one report for each"
        )


def _frame(study: Study, first: Trajectories, selection: Selection) -> dict[str, Any]:
    """What holds for all samples."""
    return {
        "softgap": __version__,
        "title": study.manifest.model or "a model without a name",
        "model": study.manifest.model,
        "layers": list(first.layers),
        "headsPerLayer": list(first.heads_per_layer),
        "kvGroup": first.kv_group.tolist(),
        "mechanisms": list(first.mechanisms),
        "keys": list(array_keys(first)),
        "about": about(
            study, first, len(selection.samples), selection.keys, whole=len(selection.keys) == len(array_keys(first))
        ),
    }


def _group(group: Group, store: Callable[[PackedArray], int]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "label": group.label,
        "samples": group.samples,
        "level": LEVEL,
        "heads": {
            **{key: round_values(sums.mean()) for key, sums in group.heads.items()},
            **{key: round_values(values) for key, values in group.gap_left().items()},
        },
        "halfWidth": {
            key: round_values(sums.half_width()) for key, sums in group.heads.items() if key.startswith("divergence/")
        },
        "overall": {
            key: round_values(np.stack([sums.mean()[0], sums.half_width()[0]])) for key, sums in group.overall.items()
        },
    }
    entry["steps"] = {
        key: {
            "mean": store(pack(sums.mean())),
            "halfWidth": store(pack(sums.half_width())),
            "samples": [int(n) for n in sums.count[0]],
        }
        for key, sums in group.steps.items()
    }
    return entry

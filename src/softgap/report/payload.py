"""A study as the data of a page: one JSON document, and the packed arrays it points to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from softgap import __version__
from softgap.analysis.headline import FITTED, UNKNOWN, GapSums, gap_sums, headline, held_out_sentence
from softgap.errors import StoreError, ValueInputError
from softgap.inputs import as_items
from softgap.report.chosen import Chosen, array_keys, choose
from softgap.report.columns import Column
from softgap.report.document import Document
from softgap.report.dynamics import dynamics
from softgap.report.groups import LEVEL, Group, Groups
from softgap.report.packing import Packed, pack
from softgap.report.samples import carried, head_means, line, rounded
from softgap.report.words import about
from softgap.trajectories import Study, Trajectories

__all__ = ["OPENING", "Payload", "opening_sentence", "payload"]

OPENING = {"quantity": "gap", "mechanism": FITTED}
"""What a page shows first where a fitted map was measured: what its opening sentence is about."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Payload:
    """What a page shows.

    Attributes
    ----------
    document
        Plain values only. Wherever it says an index of an array, that of ``arrays`` is meant.
    arrays
        See :mod:`softgap.report.packing`.
    findings
        Sections of their own.
    """

    document: dict[str, Any]
    arrays: tuple[Packed, ...]
    findings: tuple[Document, ...] = ()


def payload(
    study: Study,
    *,
    samples: Sequence[str] = (),
    columns: Sequence[Column] = (),
    findings: Sequence[Document] = (),
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
    progress
        Called with what is being done and the share of it that is done.
    """
    tell = progress or (lambda *_: None)
    first = _first(study)
    chosen = choose(study, first, as_items(samples))
    arrays: list[Packed] = []
    measured_elsewhere = [column.to_json(first) for column in columns]

    def store(packed: Packed) -> int:
        arrays.append(packed)
        return len(arrays) - 1

    groups, lines, gaps = Groups(), [], []
    for i, run in enumerate(study):
        tell("reading the study", i / len(study))
        _check_alike(run, first)
        means = head_means(run)
        groups.add(run, means)
        entry = line(run, means)
        entry["data"] = carried(run, chosen.keys, means, store) if run.sample_id in chosen.samples else None
        lines.append(entry)
        gaps.append(gap_sums(run))
    sentence, found = opening_sentence(gaps, first)
    document = {
        **_frame(study, first, chosen),
        "headline": sentence,
        "heldOut": held_out_sentence(study.manifest.extra.get("held_out", {})) if found else "",
        "opening": {**OPENING, "scope": "0" if len(study) > 1 else "sample"} if found else {},
        "samples": lines,
        "groups": [_group(group, store) for group in groups.result()] if len(study) > 1 else [],
        "dynamics": dynamics(study, first.mechanisms, progress),
        "columns": measured_elsewhere,
        "shapes": [[array.rows, array.columns] for array in arrays],
    }
    return Payload(document, tuple(arrays), tuple(findings))


def opening_sentence(gaps: Sequence[GapSums | None], first: Trajectories) -> tuple[str, bool]:
    """The sentence that a page opens with, and whether a share of the gap is known."""
    measured = [gap for gap in gaps if gap is not None]
    if not measured:
        return UNKNOWN, False
    found = headline(measured[0] if len(gaps) == 1 else GapSums.of_samples(measured), first.layers)
    return ("", False) if found is None else (found.sentence, found.heads > 0)


def _first(study: Study) -> Trajectories:
    """The first sample, if the study has anything to show."""
    if len(study) == 0:
        raise StoreError(
            f"a report needs trajectories, but the study at '{study.path}' holds no sample; "
            "finish it, or run `softgap run` or `softgap read` into a new folder"
        )
    first, steps = None, 0
    for run in study:
        first = first or run
        steps += run.n_steps
        if steps:
            return first
    raise StoreError(
        f"a report needs steps, but the study at '{study.path}' holds none in any sample; let the model write at least "
        "one token"
    )


def _check_alike(run: Trajectories, first: Trajectories) -> None:
    same = run.layers == first.layers and run.heads_per_layer == first.heads_per_layer
    if not same or array_keys(run) != array_keys(first):
        raise ValueInputError(
            f"all samples of a report must have the same heads and quantities, got {run.n_heads} heads in sample "
            f"'{run.sample_id}' and {first.n_heads} in '{first.sample_id}'; report them apart"
        )


def _frame(study: Study, first: Trajectories, chosen: Chosen) -> dict[str, Any]:
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
            study, first, len(chosen.samples), chosen.keys, whole=len(chosen.keys) == len(array_keys(first))
        ),
    }


def _group(group: Group, store: Callable[[Packed], int]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "label": group.label,
        "samples": group.samples,
        "level": LEVEL,
        "heads": {
            **{key: rounded(sums.mean()) for key, sums in group.heads.items()},
            **{key: rounded(values) for key, values in group.gap_left().items()},
        },
        "halfWidth": {
            key: rounded(sums.half_width()) for key, sums in group.heads.items() if key.startswith("divergence/")
        },
        "overall": {
            key: rounded(np.stack([sums.mean()[0], sums.half_width()[0]])) for key, sums in group.overall.items()
        },
    }
    found["steps"] = {
        key: {
            "mean": store(pack(sums.mean())),
            "halfWidth": store(pack(sums.half_width())),
            "samples": [int(n) for n in sums.count[0]],
        }
        for key, sums in group.steps.items()
    }
    return found

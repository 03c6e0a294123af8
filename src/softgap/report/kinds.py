"""The map by kind of a page: which kind of substitute suffices for each head, and what the others leave there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from softgap.errors import ValueInputError
from softgap.kinds import COLOURS, KINDS, LETTERS, stored_kinds
from softgap.report.figures import draw_kinds
from softgap.report.samples import round_values
from softgap.trajectories import Trajectories

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from softgap.calibration.sufficiency import Sufficiency
    from softgap.trajectories import Study

__all__ = ["draw_kinds_of_study", "kinds_of_page", "opening_view", "rows_of_run"]

# Of the kinds that keep equally much: what each leaves stands beside the kind of a head.
_COMPARED = ("window", "fitted", "hybrid")


def kinds_of_page(run: Trajectories, sufficiency: Sufficiency | None = None) -> dict[str, Any] | None:
    """Everything that a page needs for the map by kind; None where the kind of no head is known.

    Parameters
    ----------
    run
        Its heads are those of the page. Its manifest stores the kinds if it was measured with a calibrated mechanism.
    sufficiency
        The report of a calibration. Its labels count where the manifest has none. What each kind leaves in a head is
        shown where its labels are those of the page.
    """
    reported = None if sufficiency is None else _values_of_run(sufficiency.labels, run)
    labels = _stored(run) or reported
    if labels is None:
        return None
    return {
        "names": list(KINDS),
        "letters": [LETTERS[kind] for kind in KINDS],
        "colours": [COLOURS[kind] for kind in KINDS],
        "labels": [KINDS.index(kind) if kind in KINDS else None for row in labels for kind in row],
        "left": {} if sufficiency is None or labels != reported else _left(run, sufficiency),
    }


def opening_view(kinds: Mapping[str, Any] | None, view: Mapping[str, Any]) -> dict[str, Any]:
    """What a page shows first: the map by kind where it is known, else ``view``, which ranks the heads either way."""
    if kinds is None:
        return dict(view)
    return {**view, "quantity": "kind", "ranking": view.get("quantity", "divergence")}


def draw_kinds_of_study(study: Study, sufficiency: Sufficiency | None = None) -> Figure:
    """The map by kind of a study's heads, one column of a paper wide."""
    run = next(iter(study), None)
    labels = None
    if run is not None:
        labels = _stored(run) or (None if sufficiency is None else _values_of_run(sufficiency.labels, run))
    if run is None or labels is None:
        raise ValueInputError(
            f"the figure of a study shows the kinds of its heads, which the study at '{study.path}' does not hold; "
            "calibrate its model with softgap calibrate and measure again, or leave --format out"
        )
    return draw_kinds(labels, run.layers, column=True)


def rows_of_run(rows: Sequence[Sequence[Any]], run: Trajectories) -> list[Sequence[Any]]:
    """Of the rows of a model, one per attention layer, those of a run's layers; empty where there is no such layer."""
    held_out = run.manifest.extra.get("held_out", {})
    numbered = sorted(map(int, held_out.get("kinds", ())))
    numbers = next((known for known in (numbered, run.layers) if len(known) == len(rows)), range(len(rows)))
    by_number = dict(zip(numbers, rows, strict=True))
    return [by_number.get(layer, ()) for layer in run.layers]


def _stored(run: Trajectories) -> tuple[tuple[str | None, ...], ...] | None:
    return stored_kinds(run.manifest.extra.get("held_out", {}), run.layers, run.heads_per_layer)


def _values_of_run(rows: Sequence[Sequence[Any]], run: Trajectories) -> tuple[tuple[Any, ...], ...]:
    return tuple(
        tuple(row[head] if head < len(row) else None for head in range(heads))
        for row, heads in zip(rows_of_run(rows, run), run.heads_per_layer, strict=True)
    )


def _left(run: Trajectories, sufficiency: Sufficiency) -> dict[str, dict[str, list[float | None]]]:
    """By kind, the shares of gap and energy that it leaves in each head."""
    shares = {"gap": sufficiency.gap_left, "energy": sufficiency.energy_left}
    return {
        kind: {name: _flat(by_kind[kind], run) for name, by_kind in shares.items()}
        for kind in _COMPARED
        if all(kind in by_kind for by_kind in shares.values())
    }


def _flat(values: Sequence[Sequence[float | None]], run: Trajectories) -> list[float | None]:
    return round_values(np.array([x for row in _values_of_run(values, run) for x in row], dtype=float))

"""Two studies as one page: their difference, head by head; or two models of different shape, by relative depth."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64

from softgap.analysis.headline import FITTED, NO_GAP
from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.kinds import KINDS, stored_kinds
from softgap.progress import Progress
from softgap.report.documents import Cell, Document, Picture, Table
from softgap.report.explorer import Report, check_report_target, write_page
from softgap.report.figures import figure_bytes, new_figure
from softgap.report.page import render, render_documents
from softgap.report.payload import Payload, payload
from softgap.report.samples import head_means
from softgap.trajectories import Study, StudyWriter, Trajectories, open_study
from softgap.trajectories.validation import BASELINE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["depth_document", "pair_names", "pair_payload", "write_difference"]

_SHOWN = 3

# By quantity and mechanism the mean of each head over the steps of a sample.
Means = Mapping[str, Float64[np.ndarray, " head"]]


def write_difference(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write one page about two studies: the difference, second minus first, of everything that the explorer shows.

    Heads of models of different shape have no counterparts. The page then shows both models side by side, by the
    relative depth of their layers.

    Parameters
    ----------
    first, second
        Folders or URIs of studies. Mechanisms that only one of them has are left out.
    out
        The file; by default ``difference-NAME.html`` in the folder of the first, with the name of the second.
    overwrite
        Replace a file that is not a report, too.
    progress
        Called with the stage in words and the share of it that is done.

    Returns
    -------
    Report
        The path and size of the file, and how many samples it carries.

    Examples
    --------
    ``runs/fox`` and ``runs/elu1`` are folders of runs of one model:

    >>> import softgap
    >>> softgap.load("runs/fox").select("elu1").save("runs/elu1")
    >>> softgap.report.write_difference("runs/fox", "runs/elu1", "pair.html").samples
    2
    """
    names = pair_names(os.fspath(first), os.fspath(second))
    local = "://" not in os.fspath(first)
    folder = Path(first).expanduser() if local else Path()
    target = Path(out) if out is not None else folder / f"difference-{names[1].replace('/', '-')}.html"
    opened = open_study(first), open_study(second)
    check_report_target(target, overwrite)
    if not _same_heads(*map(_first_run, opened)):
        size = write_page(target, render_documents([depth_document(*opened, names)]))
        return Report(target, size, sum(map(len, opened)), 0)
    data = pair_payload(*opened, names, progress=progress)
    size = write_page(target, render(data))
    entries = data.document["samples"]
    return Report(target, size, len(entries), sum(entry["data"] is not None for entry in entries))


def pair_names(first: str, second: str) -> tuple[str, str]:
    """What the two studies are called: as much of their paths as tells them apart."""
    one, other = ([part for part in path.split("/") if part] or [path] for path in (first, second))
    for count in range(1, max(len(one), len(other)) + 1):
        names = "/".join(one[-count:]), "/".join(other[-count:])
        if names[0] != names[1]:
            return names
    raise ValueInputError(f"two different studies can be compared, got '{first}' twice; name another one")


def pair_payload(first: Study, second: Study, names: tuple[str, str], *, progress: Progress | None = None) -> Payload:
    """The data of the explorer on the samples of both studies, each labelled by its study."""
    studies = first, second
    one, other = (_first_run(study) for study in studies)
    if not _same_heads(one, other):
        raise ValueInputError(
            f"a difference needs the same heads on both sides, got {len(one.layers)} layers with {one.n_heads} heads "
            f"in '{names[0]}' and {len(other.layers)} layers with {other.n_heads} in '{names[1]}'; softgap report on "
            "both compares them by relative depth"
        )
    common = _common_mechanisms(one, other, names)
    # What the page opens with: a fixed map mostly says how concentrated softmax is.
    shown = FITTED if FITTED in common else common[0]
    with tempfile.TemporaryDirectory(prefix="softgap-") as folder:
        path = Path(folder) / "pair"
        means = _write_pair(path, studies, names, common, set(one.focus) & set(other.focus))
        data = payload(open_study(path), progress=progress)
    document = data.document
    single = [len(of_study) for of_study in means] == [1, 1]
    carried = all(entry["data"] is not None for entry in document["samples"])
    same = first.manifest.weights == second.manifest.weights
    document |= {
        "title": f"{names[1]} minus {names[0]}",
        "model": first.manifest.model if same else f"{first.manifest.model} and {second.manifest.model}",
        "headline": _sentence(means, one, names, shown),
        "heldOut": "",
        "opening": {"quantity": "divergence", "mechanism": shown, "scope": "difference"},
        "compare": {
            "names": list(names),
            # Of single runs token by token, of studies the means over their samples.
            "samples": [0, 1] if single and carried else None,
            "groups": [1, 2],
        },
        "about": [
            ["Compared", f"{names[1]} minus {names[0]}: a description of two measurements, not a test."],
            *_settings(studies, names),
            *([heading, words] for heading, words in document["about"] if heading not in ("Text", "Command", "Time")),
        ],
    }
    return Payload(document, data.arrays)


def _first_run(study: Study) -> Trajectories:
    run = next((run for run in study if run.n_steps), None)
    if run is None:
        raise StoreError(f"a difference needs steps, but no sample of the study at '{study.path}' has any")
    return run


def _write_pair(
    path: Path, studies: tuple[Study, Study], names: tuple[str, str], mechanisms: Sequence[str], focus: set[str]
) -> list[list[Means]]:
    """Write the samples of both as one study, one at a time; the means of each, by study."""
    first, second = (study.manifest for study in studies)
    manifest = replace(
        first,
        mechanisms={name: first.mechanisms.get(name, {}) for name in mechanisms},
        # Kinds of heads and what a calibration left hold for one model.
        extra=first.extra if first.weights == second.weights else {},
    )
    means: list[list[Means]] = [[], []]
    with StudyWriter(path, manifest) as writer:
        for study, name, of_study in zip(studies, names, means, strict=True):
            for run in study:
                if not run.n_steps:
                    continue
                sample_id = f"{name}: {run.sample_id}"
                part = replace(_part_of(run, mechanisms, focus), sample_id=sample_id, label=name)
                batch = writer.append([part])
                of_study.append(head_means(part))
                heads = study.anatomy(run.sample_id) if study.has_anatomy else ()
                if heads:
                    writer.append_anatomy([replace(entry, sample_id=sample_id) for entry in heads], batch=batch)
    return means


def _same_heads(one: Trajectories, other: Trajectories) -> bool:
    return one.layers == other.layers and one.heads_per_layer == other.heads_per_layer


def _common_mechanisms(one: Trajectories, other: Trajectories, names: tuple[str, str]) -> tuple[str, ...]:
    common = tuple(name for name in one.mechanisms if name in other.mechanisms)
    if not common:
        raise ValueInputError(
            f"two studies need a mechanism in common, got {', '.join(one.mechanisms)} in '{names[0]}' and "
            f"{', '.join(other.mechanisms)} in '{names[1]}'; measure one of them again"
        )
    return common


@dataclass(frozen=True)
class _Side:
    """One of two models: its heads by relative depth, and the mean divergence of each head by mechanism."""

    name: str
    run: Trajectories
    divergence: Mapping[str, Float64[np.ndarray, " head"]]

    @property
    def depth(self) -> Float64[np.ndarray, " head"]:
        """The place of each head's layer among the attention layers: 0 is the first and 1 the last."""
        layers = len(self.run.layers)
        return np.repeat(np.arange(layers) / max(1, layers - 1), self.run.heads_per_layer)

    def mean(self, mechanism: str, low: float = 0.0, high: float = 1.0) -> float:
        """The mean over heads between two depths; NaN where there is none."""
        values = self.divergence[mechanism][(self.depth >= low) & (self.depth <= high)]
        known = values[~np.isnan(values)]
        return float(known.mean()) if len(known) else float("nan")


def depth_document(first: Study, second: Study, names: tuple[str, str]) -> Document:
    """Two models of different shape side by side, by relative depth: divergence, gap and kinds of heads."""
    runs = _first_run(first), _first_run(second)
    common = _common_mechanisms(*runs, names)
    sides = [_side(study, name, run) for study, name, run in zip((first, second), names, runs, strict=True)]
    shown = FITTED if FITTED in common else common[0]
    shapes = [f"{side.name} ({len(side.run.layers)} layers, {side.run.n_heads} heads)" for side in sides]
    sentence = (
        f"{' and '.join(shapes)} have different shapes, so their heads do not correspond. Layers are compared by "
        f"relative depth. The mean divergence from {shown} is {sides[0].mean(shown):.3f} in {names[0]} and "
        f"{sides[1].mean(shown):.3f} in {names[1]}."
    )
    try:
        figure = _draw_depth(sides, common)
        caption = "Mean divergence by relative depth: median of the heads of each layer, and half of them around it"
        pictures: tuple[Picture, ...] = (Picture("depth.svg", figure_bytes(figure, ".svg"), caption),)
    except UnsupportedError:
        pictures = ()
    tables = [_depth_table(sides, common), *_kinds_table(sides)]
    notes = (
        ("Compared", "A description of two measurements, not a test. Divergences depend on the text of each study."),
        ("Depth", "0 is the first attention layer that was measured and 1 the last; thirds share their borders."),
        *((heading, words) for heading, words in _settings((first, second), names)),
        ("Heads", "softgap report on one study shows its heads one by one."),
    )
    return Document(f"{names[0]} and {names[1]} by depth", sentence, tuple(tables), pictures, notes)


def _side(study: Study, name: str, run: Trajectories) -> _Side:
    means = [head_means(sample) for sample in study if sample.n_steps]
    divergence = {m: _over_samples([sample[f"divergence/{m}"] for sample in means]) for m in run.mechanisms}
    return _Side(name, run, divergence)


def _depth_table(sides: Sequence[_Side], mechanisms: Sequence[str]) -> Table:
    """By mechanism and model the mean over all heads and over thirds of the depth, and the share of the gap left."""
    rows: list[tuple[Cell, ...]] = []
    for mechanism in mechanisms:
        for side in sides:
            thirds = [side.mean(mechanism, low / 3, (low + 1) / 3) for low in range(3)]
            whole = side.mean(BASELINE) if BASELINE in mechanisms else 0.0
            gap = side.mean(mechanism) / whole if whole >= NO_GAP else float("nan")
            rows.append((mechanism, side.name, *(round(x, 4) for x in (side.mean(mechanism), *thirds, gap))))
    columns = ("mechanism", "study", "all heads", "first third", "middle third", "last third", "share of the gap left")
    return Table(columns, tuple(rows), "Mean divergence over heads, by depth")


def _kinds_table(sides: Sequence[_Side]) -> list[Table]:
    """The share of heads of each kind, where both models have kinds."""
    columns: list[list[Cell]] = []
    for side in sides:
        held_out = side.run.manifest.extra.get("held_out", {})
        labels = stored_kinds(held_out, side.run.layers, side.run.heads_per_layer)
        if labels is None:
            return []
        heads = [kind for row in labels for kind in row]
        columns.append(
            [f"{heads.count(kind)} of {len(heads)} ({heads.count(kind) / len(heads):.0%})" for kind in KINDS]
        )
    rows = tuple(zip(KINDS, *columns, strict=True))
    return [Table(("kind", *(side.name for side in sides)), rows, "The cheapest substitute that suffices, heads")]


def _draw_depth(sides: Sequence[_Side], mechanisms: Sequence[str]) -> Figure:
    figure = new_figure(4.2 * min(3, len(mechanisms)), 3.4 * math.ceil(len(mechanisms) / 3))
    panels = figure.subplots(math.ceil(len(mechanisms) / 3), min(3, len(mechanisms)), squeeze=False).ravel()
    for axes, mechanism in zip(panels, mechanisms, strict=False):
        for side, (colour, style) in zip(sides, (("#1f5fa8", "-"), ("#c2571a", "--")), strict=True):
            depths = np.unique(side.depth)
            rows = [side.divergence[mechanism][side.depth == depth] for depth in depths]
            low, middle, high = np.array([np.nanquantile(row, [0.25, 0.5, 0.75]) for row in rows]).T
            axes.plot(depths, middle, style, color=colour, label=side.name)
            axes.fill_between(depths, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.set(xlabel="relative depth", xlim=(0, 1), ylim=(0, None))
        axes.set_title(f"divergence from {mechanism}", fontsize="small")
    for axes in panels[len(mechanisms) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False, fontsize="small")
    return figure


def _part_of(run: Trajectories, mechanisms: Sequence[str], focus: set[str]) -> Trajectories:
    """The run with some of its mechanisms, in this order."""
    places = [run.mechanisms.index(name) for name in mechanisms]

    def fields(part: Trajectories) -> dict[str, Any]:
        return {
            "mechanisms": tuple(mechanisms),
            "quantities": {name: array[places] for name, array in part.quantities.items()},
            "focus": {name: part.focus[name] for name in part.focus if name in focus},
        }

    prompt = None if run.prompt is None else replace(run.prompt, **fields(run.prompt))
    return replace(run, **fields(run), prompt=prompt)


def _settings(studies: tuple[Study, Study], names: tuple[str, str]) -> list[list[str]]:
    """What each side is, in a sentence."""
    rows = []
    for study, name in zip(studies, names, strict=True):
        manifest = study.manifest
        weights = f" (weights {manifest.weights})" if manifest.weights else ""
        count = f"{len(study)} {'sample' if len(study) == 1 else 'samples'}"
        rows.append([name, f"{manifest.model or 'a model without a name'}{weights}; {count}. {manifest.command}"])
    return rows


def _sentence(means: Sequence[Sequence[Means]], one: Trajectories, names: tuple[str, str], mechanism: str) -> str:
    """How far the two are apart, and where most."""
    before, after = (_over_samples([sample[f"divergence/{mechanism}"] for sample in side]) for side in means)
    change = after - before
    known = np.flatnonzero(~np.isnan(change))
    if not len(known):
        return ""
    heads = [(layer, head) for i, layer in enumerate(one.layers) for head in range(one.heads_per_layer[i])]
    order = known[np.argsort(-np.abs(change[known]), kind="stable")][:_SHOWN]
    largest = ", ".join(f"{heads[i][0]}.{heads[i][1]} ({_signed(change[i], 2)})" for i in order)
    return (
        f"The mean divergence from {mechanism} is {before[known].mean():.3f} in {names[0]} and "
        f"{after[known].mean():.3f} in {names[1]} ({_signed(float(change[known].mean()), 3)}). It changes most in the "
        f"heads {largest}."
    )


def _over_samples(rows: Sequence[Float64[np.ndarray, " head"]]) -> Float64[np.ndarray, " head"]:
    """Means over samples, NaN left out."""
    values = np.array(rows)
    count = np.count_nonzero(~np.isnan(values), axis=0)
    return np.where(count > 0, np.nansum(values, axis=0) / np.maximum(count, 1), np.nan)


def _signed(number: float, digits: int) -> str:
    return f"{number:+.{digits}f}".replace("-", "\u2212")

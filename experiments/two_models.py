"""The calibration reports of several models side by side: what was found on one and what carries over.

Run: python experiments/two_models.py FITTED FITTED ...

Every file is one that ``softgap calibrate MODEL --text FILE --out FITTED`` wrote. No model is loaded.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import numpy as np

from harness import FINDINGS, write_section
from softgap.calibration import Calibration
from softgap.calibration.memory_ladder import KEYS, SUBSTITUTES
from softgap.intervals import Interval
from softgap.kinds import KINDS

Cell = Callable[[Calibration], str]


def model_name(calibration: Calibration) -> str:
    """The name of the model, without the folder and the hash of a converted copy."""
    name = Path(str(calibration.metadata["model"])).name
    return name.rsplit("-", 2)[0] if name.endswith("-v2") else name


def shape(calibration: Calibration) -> str:
    """Layers, heads, KV heads and the dimension of a value."""
    layers, heads, dim = calibration.tensors["constant.mean"].shape
    kv_heads = calibration.tensors["fitted.key_weight"].shape[1]
    windows = calibration.metadata.get("windows", [])
    sliding = sum(window is not None for window in windows)
    return f"{layers} x {heads}, {kv_heads} KV, d = {dim}" + (f", {sliding} layers slide" if sliding else "")


def text_of_fit(calibration: Calibration) -> str:
    """The longest sequence that was fitted on, and all tokens of the fit."""
    lengths = calibration.metadata["lengths"]
    written = sum(calibration.metadata.get("generated_lengths", []))
    return f"{max(lengths):,} ({sum(lengths) + written:,})"


def share(value: Interval | None) -> str:
    """A share with its interval, which one text does not have."""
    if value is None:
        return ""
    return f"{value.value:.3f}" + ("" if value.low == value.high else f" ({value.low:.3f} to {value.high:.3f})")


def named(field: Callable[[Calibration], Mapping[str, Interval]], name: str) -> Cell:
    """A cell with one share out of several."""
    return lambda calibration: share(field(calibration).get(name))


def names_of(calibrations: Iterable[Calibration], field: Callable[[Calibration], Iterable[str]]) -> list[str]:
    """Names that any of the reports has, in their order."""
    return list(dict.fromkeys(name for calibration in calibrations for name in field(calibration)))


def kind_share(kind: str) -> Cell:
    """The share of the heads for which a kind is the cheapest that suffices."""

    def cell(calibration: Calibration) -> str:
        suffices = calibration.sufficiency
        if suffices is None or kind not in suffices.counts:
            return ""
        heads, count = sum(map(len, suffices.labels)), suffices.counts[kind]
        return f"{count.value / heads:.0%} ({count.low / heads:.0%} to {count.high / heads:.0%})"

    return cell


def kinds_by_layer(slides: bool) -> Cell:
    """How many heads of either kind of layer need what; empty for a model that has only one kind of layer."""

    def cell(calibration: Calibration) -> str:
        windows, suffices = calibration.metadata.get("windows", []), calibration.sufficiency
        rows = [i for i, window in enumerate(windows) if (window is not None) == slides]
        if suffices is None or len(rows) in (0, len(windows)):
            return ""
        counts = Counter(label for row in rows for label in suffices.labels[row])
        return ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])

    return cell


def left_by_layer(kind: str, slides: bool) -> Cell:
    """The share of the gap that a kind closes in the mean head of either kind of layer."""

    def cell(calibration: Calibration) -> str:
        windows, suffices = calibration.metadata.get("windows", []), calibration.sufficiency
        rows = [i for i, window in enumerate(windows) if (window is not None) == slides]
        if suffices is None or len(rows) in (0, len(windows)):
            return ""
        left = [x for row in rows for x in suffices.gap_left[kind][row] if x is not None]
        return f"{1 - np.mean(left):.3f}"

    return cell


def ladder_cell(keys: int) -> Cell:
    """Window, fitted map and hybrid at one memory."""

    def cell(calibration: Calibration) -> str:
        ladder = calibration.memory_ladder
        rung = next((x for x in ladder.rungs if x.keys == keys), None) if ladder is not None else None
        if rung is None:
            return ""
        return " / ".join(f"{getattr(rung, name).gap_closed.value:.3f}" for name in SUBSTITUTES)

    return cell


def table_rows(calibrations: list[Calibration]) -> list[tuple[str, Cell]]:
    """What is compared, and how it is told of one calibration."""
    suffices = [c for c in calibrations if c.sufficiency is not None]
    rows: list[tuple[str, Cell]] = [("layers x heads", shape), ("positions of the fit (tokens)", text_of_fit)]
    mechanisms = names_of(calibrations, lambda c: c.held_out.gap_closed)
    rows += [(f"gap closed by {name}", named(lambda c: c.held_out.gap_closed, name)) for name in mechanisms]
    rows.append(("of the gap that profile leaves, by fitted", named(lambda c: c.held_out.against, "profile")))
    for field in (lambda c: c.held_out.by_window, lambda c: c.held_out.by_position, lambda c: c.held_out.by_sink):
        rows += [(f"fitted, {name}", named(field, name)) for name in names_of(calibrations, field)]
    rows.append(("energy explained by fitted, median head", lambda c: f"{c.held_out.explained:.3f}"))
    rows.append(("rank correlation of gap and energy", lambda c: f"{c.held_out.rank_correlation or np.nan:.3f}"))
    conditions = names_of(calibrations, lambda c: c.conditions)
    rows += [(f"fitted, {name}, 512 tokens", named(lambda c: c.conditions, name)) for name in conditions]
    kinds = names_of(suffices, lambda c: () if c.sufficiency is None else c.sufficiency.gap_closed)
    rows += [
        (f"gap closed by {kind}, all held-out text", named(lambda c: getattr(c.sufficiency, "gap_closed", {}), kind))
        for kind in kinds
    ]
    for slides, layers in ((True, "sliding layers"), (False, "full layers")):
        rows += [(f"gap closed by {kind}, mean head of {layers}", left_by_layer(kind, slides)) for kind in kinds]
        rows.append((f"heads of {layers} that need", kinds_by_layer(slides)))
    rows += [(f"heads for which {kind} suffices first", kind_share(kind)) for kind in KINDS if kind != "softmax"]
    rows.append(("heads that need softmax", kind_share("softmax")))
    rows += [(f"{n} keys' worth: {' / '.join(SUBSTITUTES)}, short fits", ladder_cell(n)) for n in KEYS]
    return rows


def main() -> None:
    """Read the files, and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fitted", nargs="+")
    options = parser.parse_args()
    calibrations = [Calibration.load(path) for path in options.fitted]
    lines = [
        f"| quantity | {' | '.join(map(model_name, calibrations))} |",
        f"|---|{'---|' * len(calibrations)}",
    ]
    for label, cell in table_rows(calibrations):
        cells: list[Any] = [cell(calibration) for calibration in calibrations]
        if any(cells):
            lines.append(f"| {label} | {' | '.join(cells)} |")
    ladders = [c.memory_ladder for c in calibrations]
    layers = "; ".join("" if ladder is None else ", ".join(map(str, ladder.layers)) for ladder in ladders)
    section = (
        "`python experiments/two_models.py FITTED FITTED`, of calibrations by `softgap calibrate MODEL --text FILE` "
        "with the default recipe, and `--positions 2048` where the table says so. FILE is the first half of "
        "WikiText-2's validation text; a calibration fits on three quarters of it and is evaluated on the last. 95 % "
        "over texts, from position 64 on. Short fits are those of the ladder at equal memory, in layers "
        f"{layers}.\n\n" + "\n".join(lines)
    )
    print(section)
    write_section("two_models", "The same report of two models", section, FINDINGS)


if __name__ == "__main__":
    main()

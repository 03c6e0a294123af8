"""The kinds of heads in the terminal: a letter per head, and a table from cheap to dear."""

from __future__ import annotations

import io

from rich.console import Console

from softgap.calibration.sufficiency import Sufficiency
from softgap.cli.render.kinds import kind_map, show_kinds
from softgap.intervals import Interval
from softgap.kinds import KINDS


def example(**settings: object) -> Sufficiency:
    """Six layers of two heads; files sort their keys, so kinds come in another order."""
    values = {
        "labels": (("window", "softmax"), *((("hybrid", "constant"),) * 5)),
        "counts": {kind: Interval(n, n, n + 1) for n, kind in enumerate(sorted(KINDS))},
        "keys_worth": {"constant": 0.0, "profile": None, "window": 67.0, "fitted": 67.0, "hybrid": 67.5},
        "gap_closed": {"window": Interval(0.83, 0.8, 0.85)},
        "gap_left": {},
        "energy_left": {},
        "stability": {"512 tokens": 0.92},
        "limit": 0.1,
        "texts": 6,
        "tokens": 6144,
    }
    return Sufficiency(**{**values, **settings})  # type: ignore[arg-type]


def shown(sufficiency: Sufficiency) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False)
    show_kinds(console, sufficiency)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_the_map_has_a_letter_for_each_head_and_names_the_layers() -> None:
    lines = kind_map(example().labels, colour=False).plain.splitlines()
    assert lines[:3] == ["  0 whhhhh", "  1 Sccccc", "    0    5"]
    assert lines[3].strip().startswith("c constant, p profile, w window, f fitted, h hybrid, S softmax")
    coloured = kind_map(example().labels, colour=True)
    assert coloured.plain == kind_map(example().labels, colour=False).plain
    assert len({str(span.style) for span in coloured.spans}) == 4


def test_the_table_goes_from_cheap_to_dear() -> None:
    text = shown(example())
    rows = [line.split("\u2502")[1].strip() for line in text.splitlines() if line.startswith("\u2502")]
    assert rows == list(KINDS)
    assert "at most 10% of the output's energy" in text
    assert "Heads that keep their kind: 92% (512 tokens)." in text
    assert "was not measured" in shown(example(stability={}))


def test_a_wide_model_goes_on_below_and_layers_keep_their_numbers() -> None:
    labels = [("window",), ("softmax",), (None,), ("fitted", "hybrid")] * 3
    lines = kind_map(labels, range(10, 34, 2), colour=False, width=9).plain.splitlines()
    assert lines[:3] == ["  0 wS fw", "  1    h ", "    10"]
    assert lines[3:6] == ["  0 S fwS", "  1   h  ", "    20"]
    assert lines[6:9] == ["  0  f", "  1  h", "    30"]

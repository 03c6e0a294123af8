"""Results of labs as documents: a verdict for each claim, its numbers, and the figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from softgap.errors import StoreError, UnsupportedError
from softgap.report.document import Document, Picture, Table, picture_at
from softgap.report.pictures import figure_bytes

__all__ = ["RESULT", "lab_document", "lab_in"]

RESULT = "result.json"
FIGURE = "figure.svg"
# The figure of each result, by the name of its type.
_FIGURES = {
    "FocusFindings": ("focus_figure", "draw_focus"),
    "ModelFocus": ("focus_figure", "draw_focus_in_model"),
    "Injectivity": ("injectivity_figure", "draw_injectivity"),
    "ModelInjectivity": ("injectivity_figure", "draw_injectivity_in_model"),
    "Position": ("position_figure", "draw_position"),
    "Separation": ("separation_figure", "draw_separation"),
}
_LONGEST_SETTING = 200


def lab_document(result: Any) -> Document:
    """The document of a lab's result, as it came from the lab; without matplotlib without its figure."""
    values = result.to_json()
    pictures: tuple[Picture, ...] = ()
    if type(result).__name__ in _FIGURES:
        module, name = _FIGURES[type(result).__name__]
        draw: Callable[[Any], Any] = getattr(import_module(f"softgap.report.{module}"), name)
        try:
            pictures = (Picture(FIGURE, figure_bytes(draw(result), ".svg"), _caption(values)),)
        except UnsupportedError:
            pictures = ()
    return _document(values, pictures)


def lab_in(folder: Path) -> Document:
    """The document of the result that `softgap lab ... --out` has written."""
    path = folder / RESULT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pictures = (picture_at(folder, FIGURE, _caption(values)),) if (folder / FIGURE).is_file() else ()
        return _document(values, pictures)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"'{path}' is no result of a lab of softgap ({error}); run the lab again") from error


def _caption(values: Mapping[str, Any]) -> str:
    return f"Figure of the lab {values['lab']}"


def _document(values: Mapping[str, Any], pictures: tuple[Picture, ...]) -> Document:
    claims = list(values["claims"])
    rows = []
    for claim in claims:
        numbers = ", ".join(f"{name} {_number(value)}" for name, value in claim["numbers"].items())
        verdict = f"{claim['verdict']} {claim['condition']}".strip()
        rows.append((f"{claim['statement']} [{claim['source']}]", verdict, numbers))
    settings = dict(values.get("settings", {}))
    notes = tuple((name, _short(value)) for name, value in settings.items() if value is not None)
    where = f" in {settings['model']}" if settings.get("model") else ""
    return Document(
        title=f"Lab: {values['lab']}{where}",
        verdict=_verdict([claim["verdict"] for claim in claims]),
        tables=(
            Table(("claim", "verdict", "numbers"), tuple(rows), "What the sources claim, and what this run found"),
        ),
        pictures=pictures,
        notes=notes,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _verdict(verdicts: list[str]) -> str:
    counted = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    words = {"holds": "hold", "holds only when": "hold under a condition", "does not hold": "do not hold"}
    said = ", ".join(f"{count} {words.get(verdict, f'are {verdict}')}" for verdict, count in counted.items())
    return f"Of {len(verdicts)} claims {said}." if verdicts else "This lab made no claim."


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST_SETTING else f"{shown[: _LONGEST_SETTING - 1]}…"

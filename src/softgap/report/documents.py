"""Results as documents in the look of the explorer: comparisons, plans and labs."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.checkpoints import written_whole
from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.inputs import as_items
from softgap.report.figures import draw_plan, figure_bytes

if TYPE_CHECKING:
    from softgap.analysis import ComparisonFindings
    from softgap.linearize.plan import Plan

__all__ = [
    "RESULT",
    "Document",
    "Picture",
    "Table",
    "comparison_document",
    "document_values",
    "lab_document",
    "plan_document",
    "read_documents",
    "read_lab",
    "save_document",
    "sections",
]


FORMAT = "softgap-findings"
VERSION = 1


_MEDIA = {".svg": "image/svg+xml", ".png": "image/png"}


_LARGEST_PICTURE = 8 * 2**20


Cell = str | float | int | bool | None


@dataclass(frozen=True)
class Table:
    """Rows under headings; numbers are set as numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", as_items(self.columns))
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueInputError(f"a row must have {len(self.columns)} cells, one per column, got {len(row)}")


@dataclass(frozen=True)
class Picture:
    """A figure as the bytes of its file.

    Attributes
    ----------
    name
        Of the file; it ends in .svg or .png.
    """

    name: str
    content: bytes
    caption: str = ""

    def __post_init__(self) -> None:
        if Path(self.name).suffix.lower() not in _MEDIA or Path(self.name).name != self.name:
            raise ValueInputError(f"a figure must be a plain file name ending in .svg or .png, got '{self.name}'")


@dataclass(frozen=True)
class Document:
    """What was found, for people.

    Attributes
    ----------
    verdict
        One sentence, read from the numbers.
    notes
        Pairs of a heading and a sentence: settings, nulls, what was left out.
    """

    title: str
    verdict: str
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


def save_document(document: Document, folder: str | Path, name: str = "") -> Path:
    """Write a document and its pictures into a folder, as ``findings.json`` or ``findings-NAME.json``."""
    target = Path(folder) / (f"findings-{name}.json" if name else "findings.json")
    for picture in document.pictures:
        with written_whole(target.with_name(picture.name)) as partial:
            partial.write_bytes(picture.content)
    values = document_values(document)
    with written_whole(target) as partial:
        partial.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return target


def document_values(document: Document) -> dict[str, Any]:
    """A document as the plain values of its file; pictures are named, not held."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": document.title,
        "verdict": document.verdict,
        "tables": [
            {
                "caption": table.caption,
                "columns": table.columns,
                "rows": [[_finite_cell(cell) for cell in row] for row in table.rows],
            }
            for table in document.tables
        ],
        "pictures": [{"file": picture.name, "caption": picture.caption} for picture in document.pictures],
        "notes": document.notes,
    }


def read_documents(folder: Path) -> list[Document]:
    """The documents of a folder, by name; none where there are none."""
    if not folder.is_dir():
        return []
    paths = [*sorted(folder.glob("findings*.json")), *sorted(folder.glob("comparisons/*/findings.json"))]
    return [_read(path) for path in paths if path.is_file()]


def _read(path: Path) -> Document:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        if values["version"] > VERSION:
            raise StoreError(
                f"'{path}' has findings format {values['version']}, but this softgap reads up to {VERSION}; "
                "update softgap"
            )
        return Document(
            title=str(values["title"]),
            verdict=str(values["verdict"]),
            tables=tuple(
                Table(tuple(map(str, t["columns"])), tuple(map(tuple, t["rows"])), str(t.get("caption", "")))
                for t in values.get("tables", ())
            ),
            pictures=tuple(
                read_picture(path.parent, str(p["file"]), str(p.get("caption", ""))) for p in values.get("pictures", ())
            ),
            notes=tuple((str(heading), str(words)) for heading, words in values.get("notes", ())),
        )
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"'{path}' does not hold findings of softgap ({error}); write it again") from error


def read_picture(folder: Path, name: str, caption: str = "") -> Picture:
    """A picture in a folder; its name never leads out of it."""
    picture = Picture(name, b"", caption)
    path = folder / picture.name
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the figure '{name}' is not in '{folder}'; put it there, or write the findings again")
    if path.stat().st_size > _LARGEST_PICTURE:
        raise StoreError(
            f"a figure may have at most {_LARGEST_PICTURE // 2**20} MB, but '{path}' has more; draw it smaller"
        )
    return Picture(name, path.read_bytes(), caption)


def section(document: Document, number: int = 0) -> str:
    """The document as a section of a page; everything in it is text, pictures are images and cannot run."""
    title = f"findings-title-{number}"
    parts = [
        f'<section class="card findings" aria-labelledby="{title}">',
        f'<h2 id="{title}">{html.escape(document.title)}</h2>',
        f'<p class="verdict">{html.escape(document.verdict)}</p>',
        *(_picture(picture) for picture in document.pictures),
        *(_table(table) for table in document.tables),
    ]
    if document.notes:
        pairs = (f"<dt>{html.escape(heading)}</dt><dd>{html.escape(words)}</dd>" for heading, words in document.notes)
        parts.append(f'<dl class="notes">{"".join(pairs)}</dl>')
    return "\n".join([*parts, "</section>"])


def _picture(picture: Picture) -> str:
    media = _MEDIA[Path(picture.name).suffix.lower()]
    data = base64.b64encode(picture.content).decode("ascii")
    words = html.escape(picture.caption or picture.name)
    return f'<figure><img alt="{words}" src="data:{media};base64,{data}"><figcaption>{words}</figcaption></figure>'


def _table(table: Table) -> str:
    numeric = [all(_is_number(row[i]) for row in table.rows) for i in range(len(table.columns))]
    kind = ["" if number else ' class="word"' for number in numeric]
    heads = "".join(f'<th scope="col"{kind[i]}>{html.escape(name)}</th>' for i, name in enumerate(table.columns))
    rows = "".join(f"<tr>{''.join(_cell(cell, kind[i]) for i, cell in enumerate(row))}</tr>" for row in table.rows)
    words = html.escape(table.caption or "Table")
    caption = f'<p class="caption">{words}</p>' if table.caption else ""
    return (
        f'{caption}<div class="scroll" tabindex="0" role="region" aria-label="{words}">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell, kind: str) -> str:
    shown = "–" if cell is None or cell != cell else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return f"<td{kind}>{html.escape(shown)}</td>"


def _is_number(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _finite_cell(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def sections(documents: Sequence[Document]) -> str:
    """Several documents, one after the other."""
    return "\n".join(section(document, number) for number, document in enumerate(documents))


def comparison_document(findings: ComparisonFindings, picture: bytes | None = None) -> Document:
    """The document of a comparison; ``picture`` is its figure as SVG, where it could be drawn."""
    values = findings.to_json()
    (first, second), sizes = values["groups"], values["sizes"]
    return Document(
        title=f"{first} ({sizes[0]:,}) against {second} ({sizes[1]:,})",
        verdict=values["verdict"]["sentence"],
        tables=(_steps(findings), _units(values)),
        pictures=()
        if picture is None
        else (Picture("figure.svg", picture, "Effects of all units, and their null distribution."),),
        notes=tuple(_notes(findings, values).items()),
    )


def _steps(findings: ComparisonFindings) -> Table:
    everything = {"all samples": findings.comparison, **findings.controls}
    return Table(
        (
            "comparison",
            "convincing",
            "p, any",
            "p, max-T",
            "units",
            "smallest detectable effect",
            "upper bound of the effect",
        ),
        tuple(
            (
                step.name,
                "yes" if step.convincing else "no",
                step.p,
                everything[step.name].maximum.p,
                len(step.units),
                step.smallest,
                step.bound,
            )
            for step in findings.verdict.steps
        ),
        "Each row is one control; p-values by permutation, max-T over the whole family of units",
    )


def _units(values: Mapping[str, Any]) -> Table:
    return Table(
        ("layer", "head", "feature", "Hedges' g", "from", "to", "AUROC", "from", "to", "p, max-T", "q"),
        tuple(
            (
                *(row["layer"], row["head"], row["mode"]),
                *(row["g"][end] for end in ("value", "low", "high")),
                *(row["auroc"][end] for end in ("value", "low", "high")),
                *(row["p_max"], row["q"]),
            )
            for row in values["top"]
        ),
        "Units with the largest effects, over all samples",
    )


def _notes(findings: ComparisonFindings, values: Mapping[str, Any]) -> dict[str, str]:
    family, beyond = values["family"], values["beyond_baselines"]
    notes = {
        "Preregistered or exploratory": f"{values['status']}; the log has {len(values['tried'])} entries.",
        "Family of units": f"{family['units']:,} units: {len(family['modes'])} features of {family['heads']:,} heads.",
        "Equivalence": findings.equivalence_sentence,
    }
    if beyond is not None:
        baseline, combined, difference = (beyond[name] for name in ("baseline", "combined", "difference"))
        notes["Beyond free baselines"] = (
            f"AUROC {baseline['value']:.3f} for length, entropy and log-probability alone, {combined['value']:.3f} "
            f"with heads: {difference['value']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f}), p = "
            f"{beyond['p']:.2g}."
        )
    for name, reason in values["impossible"].items():
        notes[f"Not computed: {name}"] = reason
    return notes


_WORDS = {"recall": "recall (first token of each answer)", "whole_answers": "recall (whole answers)"}


def plan_document(plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], layers: Sequence[int]) -> Document:
    """The document of a plan for a model with so many heads and KV heads in each layer; without matplotlib no picture.

    ``layers`` are the numbers of the layers.
    """
    memory, rows = plan.memory, []
    for name, interval in plan.expected.items():
        rows.append((_WORDS.get(name, name), plan.original[name], interval.value, interval.low, interval.high))
    columns = ("on unseen text", "original", "change", "from", "to")
    caption = "Cost of the plan, with 95 % intervals over texts and recall lists"
    tables = [Table(columns, tuple(rows), caption)] if rows else []
    better_window = ""
    if plan.baselines is not None:
        better_window = plan.baselines.verdict()
        names, cells = plan.baselines.table()
        tables.append(Table(names, tuple(cells), "Rise in loss of the plan and its baselines, with 95 % half-widths"))
    return Document(
        title=f"Plan for {plan.model}",
        verdict=(f"{better_window}{' ' * bool(better_window)}{plan.sentence(sum(heads), sum(kv_heads))}"),
        tables=tuple(tables),
        pictures=_plan_picture(plan, heads, kv_heads, layers),
        notes=(
            *((("Recall", plan.recall_words()),) if plan.recall else ()),
            *((("Baselines", " ".join(plan.baselines.notes())),) if plan.baselines is not None else ()),
            (
                "Memory",
                f"The KV cache needs {memory['per_token']:,.0f} bytes per token instead of "
                f"{memory['per_token_original']:,.0f}. The recurrent states need {memory['states'] / 1e6:.1f} MB, and "
                f"the plan itself {memory['parameters'] / 1e6:.1f} MB. {plan.cache_words()}".rstrip(),
            ),
            *((name, str(value)) for name, value in plan.provenance.items()),
        ),
    )


def _plan_picture(
    plan: Plan, heads: Sequence[int], kv_heads: Sequence[int], layers: Sequence[int]
) -> tuple[Picture, ...]:
    try:
        content = figure_bytes(draw_plan(plan, heads, kv_heads, layers), ".svg")
    except UnsupportedError:
        return ()
    return (Picture("plan.svg", content, "Heads that keep softmax, and swapped heads."),)


RESULT = "result.json"


FIGURE = "figure.svg"


# The figure of each result, by the name of its type.
_FIGURES = {
    "FocusFindings": ("focus_figure", "draw_focus"),
    "ModelFocus": ("focus_figure", "draw_focus_in_model"),
    "Injectivity": ("lab_figures", "draw_injectivity"),
    "ModelInjectivity": ("lab_figures", "draw_injectivity_in_model"),
    "Position": ("lab_figures", "draw_position"),
    "Separation": ("lab_figures", "draw_separation"),
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


def read_lab(folder: Path) -> Document:
    """The document of the result that `softgap lab ... --out` has written."""
    path = folder / RESULT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        pictures = (read_picture(folder, FIGURE, _caption(values)),) if (folder / FIGURE).is_file() else ()
        return _document(values, pictures)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"'{path}' is not the result of a softgap lab ({error}); run the lab again") from error


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
            Table(("claim", "verdict", "numbers"), tuple(rows), "Claims of the sources, and the result of this run"),
        ),
        pictures=pictures,
        notes=notes,
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _verdict(verdicts: list[str]) -> str:
    counted = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    words = {"holds": "hold", "holds only when": "hold under a condition", "does not hold": "do not hold"}
    outcomes = ", ".join(f"{count} {words.get(verdict, f'are {verdict}')}" for verdict, count in counted.items())
    return f"Of {len(verdicts)} claims, {outcomes}." if verdicts else "This lab tested no claim."


def _short(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _LONGEST_SETTING else f"{shown[: _LONGEST_SETTING - 1]}…"

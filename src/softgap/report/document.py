"""Findings that are no study: a title, a verdict, tables and pictures, shown in the look of the explorer.

Labs, comparisons of groups and plans of swapped heads all come as one :class:`Document`. On disk it is a file
``findings.json`` (or ``findings-NAME.json``) with its pictures beside it; in the folder of a study, or of one of its
comparisons, it becomes a section of the study's report, in a folder of its own a page.
"""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softgap.errors import StoreError, ValueInputError
from softgap.inputs import as_items
from softgap.report.files import written_whole

__all__ = [
    "Document",
    "Picture",
    "Table",
    "document_values",
    "documents_in",
    "picture_at",
    "save_document",
    "section",
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
                raise ValueInputError(f"a row must have a cell for each of {len(self.columns)} columns, got {len(row)}")


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
            raise ValueInputError(f"a picture must be a plain file name ending in .svg or .png, got '{self.name}'")


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
                "rows": [[_plain(cell) for cell in row] for row in table.rows],
            }
            for table in document.tables
        ],
        "pictures": [{"file": picture.name, "caption": picture.caption} for picture in document.pictures],
        "notes": document.notes,
    }


def documents_in(folder: Path) -> list[Document]:
    """The documents of a folder, by name; none where there are none."""
    if not folder.is_dir():
        return []
    found = [*sorted(folder.glob("findings*.json")), *sorted(folder.glob("comparisons/*/findings.json"))]
    return [_read(path) for path in found if path.is_file()]


def _read(path: Path) -> Document:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise ValueError(f"its format is {values['format']!r}")
        if values["version"] > VERSION:
            raise StoreError(
                f"'{path}' has findings format {values['version']}, newer than {VERSION}, which this softgap reads; "
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
                picture_at(path.parent, str(p["file"]), str(p.get("caption", ""))) for p in values.get("pictures", ())
            ),
            notes=tuple((str(heading), str(words)) for heading, words in values.get("notes", ())),
        )
    except StoreError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"'{path}' cannot be read as findings of softgap ({error}); write it again") from error


def picture_at(folder: Path, name: str, caption: str = "") -> Picture:
    """A picture in a folder; its name never leads out of it."""
    found = Picture(name, b"", caption)
    path = folder / found.name
    if path.is_symlink() or not path.is_file():
        raise StoreError(f"the picture '{name}' is not in '{folder}'; put it there, or write the findings again")
    if path.stat().st_size > _LARGEST_PICTURE:
        raise StoreError(f"a picture may have {_LARGEST_PICTURE // 2**20} MB, and '{path}' has more; draw it smaller")
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


def _plain(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def sections(documents: Sequence[Document]) -> str:
    """Several documents, one after the other."""
    return "\n".join(section(document, number) for number, document in enumerate(documents))

"""A payload as one HTML page that needs nothing else.

Three rules keep text from models and prompts from ever being code. It stands in the page only as JSON whose `<`, `>`
and `&` are escaped, inside an element that browsers do not run; our scripts put it on the screen only as text nodes;
and a content security policy allows exactly the scripts and the style of this file, by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path

from softgap import __version__
from softgap.errors import UnsupportedError
from softgap.report.documents import Document, sections
from softgap.report.payload import Payload

__all__ = ["GENERATOR", "REPORT", "Look", "policy_of", "render", "render_documents"]

GENERATOR = "softgap explorer"
"""What the generator tag of a report begins with; by it a report is known."""


@dataclass(frozen=True)
class Look:
    """What a page is made of: files of the folder ``assets``.

    Attributes
    ----------
    scripts
        In this order: each uses what stands before it.
    allowed
        Directives of the content security policy besides those that every page has.
    """

    template: str
    styles: tuple[str, ...]
    scripts: tuple[str, ...]
    allowed: str = ""


# Every page begins with it; a template holds the body.
_HEAD = "head.html"
_STYLE = "explorer.css"
REPORT = Look(
    "page.html",
    (_STYLE,),
    (
        "data.js",
        "measures.js",
        "colours.js",
        "state.js",
        "quantities.js",
        "download.js",
        "text.js",
        "anatomy.js",
        "map.js",
        "lines.js",
        "profile.js",
        "plane.js",
        "table.js",
        "samples.js",
        "theme.js",
        "main.js",
    ),
)
"""The file that `softgap report` writes."""

_ENDS_A_SCRIPT = re.compile(r"<(?:/script|script|!--)", re.IGNORECASE)
_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def render(payload: Payload, look: Look = REPORT) -> str:
    """The page."""
    style, ours, charts = _style(look), _script(look), _charts()
    for name, script in (("ours", ours), ("D3", charts)):
        if _ENDS_A_SCRIPT.search(script):
            raise UnsupportedError(f"a script of the page contains its own end tag ({name}); this is a bug in softgap")
    parts = {
        "policy": policy_of(look),
        "generator": f"{GENERATOR} {__version__}",
        "title": html.escape(f"{payload.document['title']} · {GENERATOR}"),
        "style": style,
        "payload": _json(payload),
        "arrays": "\n".join(_array(i, array.text) for i, array in enumerate(payload.arrays)),
        "charts": charts,
        "licence": html.escape(_asset("licences/d3.txt").strip()),
        "script": ours,
        "findings": sections(payload.findings),
    }
    return _fill(look.template, parts)


def render_documents(documents: Sequence[Document]) -> str:
    """A page of findings alone; it needs no script, and may run none."""
    style = _asset(_STYLE)
    parts = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'",
        "generator": f"{GENERATOR} {__version__}",
        "title": html.escape(f"{documents[0].title} · {GENERATOR}"),
        "subject": html.escape(documents[0].title),
        "style": style,
        "findings": sections(documents),
    }
    return _fill("document.html", parts)


def _fill(template: str, parts: Mapping[str, str]) -> str:
    # Split first, so that nothing that is put in is looked through for places again.
    pieces = re.split(r"\{\{(\w+)\}\}", _asset(_HEAD) + _asset(template))
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def policy_of(look: Look) -> str:
    """The content security policy of a page: its own scripts and style by their hashes, and nothing from elsewhere."""
    scripts = f"{_hash(_charts())} {_hash(_script(look))}"
    return (
        f"default-src 'none'; script-src {scripts}; style-src {_hash(_style(look))}; img-src data:; base-uri 'none'; "
        f"form-action 'none'; {look.allowed}require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _style(look: Look) -> str:
    return "\n".join(_asset(name) for name in look.styles)


def _script(look: Look) -> str:
    return "\n".join(_asset(name) for name in look.scripts)


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode('ascii')}'"


def _json(payload: Payload) -> str:
    text = json.dumps(payload.document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda match: _UNSAFE[match[0]], text)


def _array(index: int, text: str) -> str:
    return f'<script type="text/plain" id="array-{index}">{text}</script>'


def _asset(name: str) -> str:
    return (files("softgap.report") / "assets" / name).read_text(encoding="utf-8")


def _charts() -> str:
    """D3, as the installed package mpld3 carries it; without importing mpld3, which would import matplotlib."""
    try:
        package = distribution("mpld3")
    except PackageNotFoundError as error:
        remedy = "install it with: pip install 'softgap[report]'"
        raise UnsupportedError(f"a report needs D3 from the package mpld3; {remedy}") from error
    versions = {
        int(match[1]): file
        for file in package.files or ()
        if (match := re.fullmatch(r"mpld3/js/d3\.v(\d+)\.min\.js", file.as_posix()))
    }
    if not versions:
        raise UnsupportedError(
            f"a report needs D3 from mpld3, but mpld3 {package.version} does not contain it; install mpld3 0.5.12"
        )
    text = Path(str(versions[max(versions)].locate())).read_text(encoding="utf-8")
    # The hash is of what a browser parses, which knows no carriage returns.
    return text.replace("\r\n", "\n").strip()

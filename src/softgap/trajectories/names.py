"""Names for studies that nobody has named: some words of their text, and the time."""

from __future__ import annotations

import re
from collections.abc import Container
from datetime import datetime
from pathlib import Path

__all__ = ["new_name", "slug"]

_LONGEST = 31


def slug(text: str) -> str:
    """The first words of a text as part of a folder's name."""
    words = re.findall(r"\w+", text.lower())
    name = ""
    for word in words:
        if name and len(name) + len(word) > _LONGEST:
            break
        name = f"{name}-{word}" if name else word[: _LONGEST + 1]
    return name or "run"


def new_name(parent: Path, words: str, taken: Container[str] = ()) -> str:
    """The name of a new folder in ``parent``, made of some words and the time; none of the ``taken`` ones."""
    base = f"{words}-{datetime.now():%Y%m%d-%H%M%S}"
    name, number = base, 2
    while name in taken or (parent / name).exists():
        name, number = f"{base}-{number}", number + 1
    return name

"""Pictures on disk: whole or not at all, PNG or SVG, the same bytes for the same findings."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.errors import StoreError, UnsupportedError, ValueInputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "new_figure", "save_figure"]

PICTURES = (".png", ".svg")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches; matplotlib is an extra, and says so where it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("a picture needs matplotlib; install it with: pip install 'softgap[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure, as its path ends."""
    import matplotlib

    target = Path(path)
    ending = target.suffix.lower()
    if ending not in PICTURES:
        raise ValueInputError(f"a picture must end in .png or .svg, got '{target.name}'; choose one of them")
    content = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if ending == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "softgap", "svg.fonttype": "none"}):
        figure.savefig(content, format=ending[1:], dpi=150, metadata=metadata)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.getvalue())
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
    finally:
        if target.parent.is_dir():
            partial.unlink(missing_ok=True)
    return target

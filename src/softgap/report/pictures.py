"""Pictures on disk: whole or not at all, PNG or SVG, the same bytes for the same findings."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.errors import UnsupportedError, ValueInputError
from softgap.report.files import written_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PICTURES", "check_ending", "figure_bytes", "new_figure", "require_matplotlib", "save_figure"]

PICTURES = (".png", ".svg")


def require_matplotlib() -> None:
    """Matplotlib is an extra: say so where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("a picture needs matplotlib; install it with: pip install 'softgap[plot]'") from error


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure, as its path ends."""
    target = Path(path)
    content = figure_bytes(figure, check_ending(target))
    with written_whole(target) as partial:
        partial.write_bytes(content)
    return target


def check_ending(path: Path) -> str:
    """The ending of a picture's name, if it is one."""
    ending = path.suffix.lower()
    if ending not in PICTURES:
        raise ValueInputError(f"a picture must end in .png or .svg, got '{path.name}'; choose one of them")
    return ending


def figure_bytes(figure: Figure, ending: str) -> bytes:
    """A figure as the bytes of a file with this ending."""
    import matplotlib

    content = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if ending == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "softgap", "svg.fonttype": "none"}):
        figure.savefig(content, format=ending[1:], dpi=150, metadata=metadata)
    return content.getvalue()

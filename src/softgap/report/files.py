"""Files and figures on disk, whole or absent; the same bytes for the same findings."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softgap.errors import StoreError, UnsupportedError, ValueInputError
from softgap.trajectories.folder import Folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "PICTURES",
    "check_ending",
    "check_output_file",
    "figure_bytes",
    "new_figure",
    "require_matplotlib",
    "save_figure",
    "written_whole",
]


def check_output_file(path: str | os.PathLike[str], option: str = "--out") -> None:
    """Refuse, before the work begins, a file that could not be written after it; nothing is left behind."""
    name = os.fspath(path)
    target = Path(name).expanduser()
    if not name or "\0" in name:
        raise StoreError(f"{option} must name a file, got {name!r}; give a file name")
    try:
        folder = target.is_dir()
    except OSError as error:
        raise StoreError(f"cannot write '{name}': {error.strerror or error}; choose another path") from error
    if folder:
        raise StoreError(f"{option} must name a file, but '{name}' is a folder; add a file name")
    Folder.at(target.parent).try_writing("files are")


@contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to: it takes the place of ``path`` when the block ends well, and is gone if it does not."""
    target = Path(path)
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another path") from error
    finally:
        if target.parent.is_dir():
            partial.unlink(missing_ok=True)


PICTURES = (".png", ".svg")


def require_matplotlib() -> None:
    """Matplotlib is an extra: say so where it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UnsupportedError("a figure needs matplotlib; install it with: pip install 'softgap[plot]'") from error


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
        raise ValueInputError(f"the file of a figure must end in .png or .svg, got '{path.name}'; choose one of them")
    return ending


def figure_bytes(figure: Figure, ending: str) -> bytes:
    """A figure as the bytes of a file with this ending."""
    import matplotlib

    content = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None} if ending == ".svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "softgap", "svg.fonttype": "none"}):
        figure.savefig(content, format=ending[1:], dpi=150, metadata=metadata)
    return content.getvalue()

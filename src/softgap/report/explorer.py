"""The explorer: a study as one self-contained HTML file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from softgap.errors import StoreError
from softgap.report.page import GENERATOR, render
from softgap.report.payload import payload
from softgap.trajectories import Study, open_study

__all__ = ["Report", "explorer", "explorer_of", "write_explorer"]

_HEAD_BYTES = 4096

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Report:
    """A report on disk.

    Attributes
    ----------
    path
        The HTML file.
    size
        Its bytes.
    samples, carried
        Samples of the study, and those whose text and trajectories are in the file.
    """

    path: Path
    size: int
    samples: int
    carried: int


def explorer(study: Study, *, samples: Sequence[str] = (), progress: Progress | None = None) -> str:
    """The explorer of a study as HTML; see :func:`softgap.report.payload.payload` for the arguments."""
    return render(payload(study, samples=samples, progress=progress))


def explorer_of(path: str | os.PathLike[str]) -> str:
    """The explorer of what lies in a folder."""
    return explorer(open_study(path))


def write_explorer(
    study: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    samples: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write the explorer of the study at a path or URI.

    Parameters
    ----------
    out
        The file; by default ``report.html`` in the study's folder, or here for a study behind a URI. A report that is
        there is replaced.
    samples
        Names of the samples to carry token by token; by default as many as the file holds.
    overwrite
        Replace a file that is not a report, too.

    Raises
    ------
    StoreError
        If the study cannot be read, or the file not written. What was there stays then.
    """
    opened = open_study(study)
    target = Path(out) if out is not None else _beside(os.fspath(study))
    _check_target(target, overwrite)
    data = payload(opened, samples=samples, progress=progress)
    content = render(data).encode()
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
    finally:
        if target.parent.is_dir():
            partial.unlink(missing_ok=True)
    entries = data.document["samples"]
    return Report(target, len(content), len(entries), sum(entry["data"] is not None for entry in entries))


def _beside(study: str) -> Path:
    return Path("report.html") if "://" in study else Path(study).expanduser() / "report.html"


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise StoreError(f"a report is a file, but '{target}' is a folder; add a file name")
    if not target.exists() or overwrite:
        return
    try:
        with target.open("rb") as file:
            start = file.read(_HEAD_BYTES)
    except OSError as error:
        raise StoreError(f"cannot look at '{target}': {error.strerror or error}; choose another place") from error
    if f'name="generator" content="{GENERATOR}'.encode() not in start:
        raise StoreError(
            f"'{target}' is there and is not a report of softgap; choose another file, or add --overwrite to replace it"
        )

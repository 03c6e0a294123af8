"""Files on disk that are whole or absent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softgap.errors import StoreError

__all__ = ["written_whole"]


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
        raise StoreError(f"cannot write '{target}': {error.strerror or error}; choose another place") from error
    finally:
        if target.parent.is_dir():
            partial.unlink(missing_ok=True)

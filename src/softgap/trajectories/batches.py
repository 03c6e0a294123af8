"""One batch on disk: two parts of the same name that appear together or not at all, whoever writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from softgap.trajectories import tables
from softgap.trajectories.folder import Folder
from softgap.trajectories.reader import part_name, read_part, read_samples
from softgap.trajectories.run import Trajectories

__all__ = ["KINDS", "publish_batch", "published_ids", "relabel"]

KINDS = ("samples", "trajectories")


def publish_batch(
    folder: Folder, number: int, runs: Sequence[Trajectories], *, before: Callable[[], None] = lambda: None
) -> None:
    """Stage both parts, call ``before``, then publish them: trajectories first, since readers go by the samples."""
    samples, trajectories = (f"{kind}/{part_name(number)}" for kind in KINDS)
    staged: list[str] = []
    try:
        staged.append(folder.stage(trajectories, lambda sink: tables.write_trajectories(sink, runs)))
        staged.append(folder.stage(samples, lambda sink: tables.write_samples(sink, runs)))
        before()
        folder.publish(staged[0], trajectories)
        folder.publish(staged[1], samples)
    except BaseException:
        for name in staged:
            folder.discard(name)
        # An interrupt can also arrive just after the last rename: then the batch is published and stays.
        if folder.kind(samples) == "absent":
            folder.discard(trajectories)
        raise


def published_ids(folder: Folder, number: int) -> tuple[str, ...] | None:
    """Names of the samples of a batch, or None where it is not published."""
    name = f"samples/{part_name(number)}"
    return None if folder.kind(name) == "absent" else tuple(read_part(folder, name)["sample_id"].to_pylist())


def relabel(folder: Folder, labels: dict[str, str | None]) -> int:
    """Give samples other labels and return how many changed; all parts are staged before the first is replaced."""
    staged: list[tuple[str, str]] = []
    changed = 0
    try:
        for name in folder.parts("samples").values():
            table = read_samples(folder, name)
            old = table["label"].to_pylist()
            new = [labels.get(i, label) for i, label in zip(table["sample_id"].to_pylist(), old, strict=True)]
            if new == old:
                continue
            changed += sum(a != b for a, b in zip(new, old, strict=True))
            place = table.schema.get_field_index("label")
            replaced = table.set_column(place, "label", pa.array(new, pa.string()))
            staged.append((folder.stage(name, partial(_write_to, replaced)), name))
        while staged:
            folder.publish(*staged[0])
            staged.pop(0)
    finally:
        for temporary, _ in staged:
            folder.discard(temporary)
    return changed


def _write_to(table: pa.Table, sink: Any) -> None:
    tables.write_table(sink, table)

"""Head anatomy: the keys that a head attends to at every query, by softmax and by each substitute, and its table.

anatomy, one row per sample, head and mechanism (``softmax`` first)
    sample_id, layer, head, mechanism; top, how many keys each query keeps at most; first, the text of the first token,
    which no step predicts; and as lists over the queries from position 0 on: keys and weights, ``top`` numbers for
    every query, the largest weights first, and rest, the sum of the weights of all other keys. A query that gives
    weight to fewer keys has -1 for a key and 0 for its weight.

The parts lie in the folder ``anatomy`` of a study, one for each batch that has any, under the name of the batch. They
are optional: a reader that knows nothing of them reads the study as it always did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32

from softgap.errors import ValueInputError
from softgap.trajectories.tables import write_row_groups

__all__ = ["ANATOMY", "MOST_HEADS", "TOP_KEYS", "Anatomy", "parse_heads", "read_anatomy", "write_anatomy"]

TOP_KEYS = 16
"""Keys that are kept for each query and mechanism."""
MOST_HEADS = 32
"""Heads whose anatomy one run stores at most."""
SOFTMAX = "softmax"

ANATOMY = pa.schema(
    [
        ("sample_id", pa.string()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("mechanism", pa.string()),
        ("top", pa.int32()),
        ("first", pa.string()),
        ("keys", pa.list_(pa.int32())),
        ("weights", pa.list_(pa.float32())),
        ("rest", pa.list_(pa.float32())),
    ]
)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Where one head looks, at every query of a sequence.

    Attributes
    ----------
    layer, head
        The head, by the index of its layer in the model.
    mechanisms
        ``softmax`` first, then every substitute that has weights. A constant has none, and the mean of values has the
        same for all keys.
    keys : int32 [mechanism, query, top]
        Positions of the keys with the largest weights, the largest first; -1 where a query gives
        weight to fewer.
    weights : float32 [mechanism, query, top]
        Their weights. Those of softmax sum to at most 1; those of a signed mechanism may be negative.
    rest : float32 [mechanism, query]
        The sum of the weights of all other keys. Learned sinks of a model hold what is missing to 1.
    first
        The text of the token at position 0, which no step predicts.
    """

    layer: int
    head: int
    mechanisms: tuple[str, ...]
    keys: Int32[np.ndarray, "mechanism query top"]
    weights: Float32[np.ndarray, "mechanism query top"]
    rest: Float32[np.ndarray, "mechanism query"]
    sample_id: str = "0"
    first: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.mechanisms), *self.rest.shape[1:], *self.keys.shape[2:])
        if self.keys.ndim != 3 or self.keys.shape != self.weights.shape or self.keys.shape != shape:
            raise ValueInputError(
                f"keys and weights must be [mechanism, query, top] and rest [mechanism, query], got "
                f"{list(self.keys.shape)}, {list(self.weights.shape)} and {list(self.rest.shape)} for "
                f"{len(self.mechanisms)} mechanisms"
            )
        if self.keys.size and int(self.keys.max()) >= self.keys.shape[1]:
            raise ValueInputError(
                f"keys must lie in a sequence of {self.keys.shape[1]} queries, got {int(self.keys.max())}"
            )

    @property
    def name(self) -> str:
        """Layer and head, as everywhere in softgap."""
        return f"{self.layer}.{self.head}"


def parse_heads(names: str | Sequence[str], *, most: int = MOST_HEADS) -> tuple[tuple[int, int], ...]:
    """Layers and heads from names like ``18.8``, separated by commas or in a list; each head once.

    >>> parse_heads("18.8, 3.2")
    ((18, 8), (3, 2))
    """
    listed = names.split(",") if isinstance(names, str) else [part for name in names for part in name.split(",")]
    heads: list[tuple[int, int]] = []
    for name in listed:
        match = re.fullmatch(r"\s*(\d{1,6})\.(\d{1,6})\s*", name)
        if match is None:
            raise ValueInputError(
                f"heads must be named LAYER.HEAD and separated by commas, such as 18.8,3.2, got '{name}'"
            )
        heads.append((int(match[1]), int(match[2])))
    unique = tuple(dict.fromkeys(heads))
    if len(unique) > most:
        raise ValueInputError(f"the anatomy of at most {most} heads can be stored, got {len(unique)}; name fewer")
    return unique


def write_anatomy(sink: Any, samples: Iterable[Sequence[Anatomy]]) -> None:
    """Write the anatomy part of a batch, a row group for every sample that has any."""
    write_row_groups(sink, ANATOMY, (_table(heads) for heads in samples if heads))


def _table(heads: Sequence[Anatomy]) -> pa.Table:
    rows = [
        {
            "sample_id": entry.sample_id,
            "layer": entry.layer,
            "head": entry.head,
            "mechanism": mechanism,
            "top": entry.keys.shape[2],
            "first": entry.first,
            "keys": entry.keys[i].ravel(),
            "weights": entry.weights[i].ravel(),
            "rest": entry.rest[i],
        }
        for entry in heads
        for i, mechanism in enumerate(entry.mechanisms)
    ]
    return pa.Table.from_pylist(rows, schema=ANATOMY)


def read_anatomy(file: pq.ParquetFile, wanted: Callable[[str], bool]) -> list[Anatomy]:
    """The heads of the wanted samples in an anatomy part; ValueError if its rows do not fit together."""
    heads: list[Anatomy] = []
    for group in range(file.num_row_groups):
        names = file.read_row_group(group, columns=["sample_id"])["sample_id"].unique().to_pylist()
        if len(names) == 1 and wanted(names[0]):
            heads += _decode(file.read_row_group(group))
    return heads


def _decode(table: pa.Table) -> list[Anatomy]:
    by_head: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    columns = {name: table[name].to_pylist() for name in ("sample_id", "layer", "head", "mechanism", "top", "first")}
    for i in range(table.num_rows):
        row = {name: column[i] for name, column in columns.items()}
        for name in ("keys", "weights", "rest"):
            row[name] = table[name][i].values.to_numpy(zero_copy_only=False)
        by_head.setdefault((row["sample_id"], row["layer"], row["head"]), []).append(row)
    heads = []
    for (sample_id, layer, head), rows in by_head.items():
        shape = (len(rows), len(rows[0]["rest"]), rows[0]["top"])
        try:
            keys, weights = (np.stack([row[name] for row in rows]).reshape(shape) for name in ("keys", "weights"))
            rest = np.stack([row["rest"] for row in rows])
        except ValueError as error:
            raise ValueError(f"the anatomy of head {layer}.{head} has lists of different lengths") from error
        names = tuple(row["mechanism"] for row in rows)
        heads.append(Anatomy(layer, head, names, keys, weights, rest, sample_id, rows[0]["first"]))
    return heads

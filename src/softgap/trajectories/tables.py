"""The two Parquet tables of the store, and their conversion to and from Trajectories.

samples, one row per sample
    sample_id, prompt, completion, label (null without one), n_prompt, and the vectors over the steps of the completion:
    token_ids, tokens, positions, logprob, entropy. The same five for the steps of the prompt have the prefix
    ``prompt_`` and are null where the prompt's queries were not kept.
trajectories, one row per sample, part, layer, head and mechanism
    sample_id, mechanism, part (prompt | completion), layer, head, kv_group, and as lists over the steps of that part
    divergence, relative_l2, norm_ratio. sparsity, attention_entropy and largest_weight are null where not measured;
    they do not depend on the mechanism and repeat for each (adjacent rows, which cost next to nothing compressed).

Row group i of a trajectories part holds the sample in row i of the samples part of the same name: one sample is read
without touching the others. The order in which mechanisms appear is their order in the run. Padding is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from softgap.trajectories.manifest import Manifest
from softgap.trajectories.run import PartName, Trajectories
from softgap.trajectories.validation import FOCUS, QUANTITIES

__all__ = [
    "SAMPLES",
    "TRAJECTORIES",
    "decode",
    "write_row_groups",
    "write_samples",
    "write_table",
    "write_trajectories",
]

_STEP_TYPES = {
    "token_ids": pa.list_(pa.int32()),
    "tokens": pa.list_(pa.string()),
    "positions": pa.list_(pa.int32()),
    "logprob": pa.list_(pa.float32()),
    "entropy": pa.list_(pa.float32()),
}
_PREFIX: dict[PartName, str] = {"prompt": "prompt_", "completion": ""}

SAMPLES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("label", pa.string()),
        ("n_prompt", pa.int32()),
        *_STEP_TYPES.items(),
        *((f"prompt_{name}", kind) for name, kind in _STEP_TYPES.items()),
    ]
)

TRAJECTORIES = pa.schema(
    [
        ("sample_id", pa.string()),
        ("mechanism", pa.string()),
        ("part", pa.string()),
        ("layer", pa.int32()),
        ("head", pa.int32()),
        ("kv_group", pa.int32()),
        *((name, pa.list_(pa.float32())) for name in (*QUANTITIES, *FOCUS)),
    ]
)


def write_row_groups(sink: Any, schema: pa.Schema, row_groups: Iterable[pa.Table]) -> None:
    """Write one Parquet file, each table a row group; floats split by byte, which is what lets zstd shrink them."""
    floats = [field.name for field in schema if field.type == pa.list_(pa.float32())]
    dictionary = [f.name if not pa.types.is_list(f.type) else f"{f.name}.list.element" for f in schema]
    split = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in floats}
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        use_dictionary=[name for name in dictionary if name not in split],
        column_encoding=split,
        write_page_checksum=True,
    ) as writer:
        for table in row_groups:
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def write_samples(sink: Any, runs: Iterable[Trajectories]) -> None:
    """Write the samples part of these runs."""
    write_table(sink, pa.Table.from_pylist([_sample_row(run) for run in runs], schema=SAMPLES))


def write_table(sink: Any, samples: pa.Table) -> None:
    """Write a samples part as it is."""
    write_row_groups(sink, samples.schema, [samples])


def _sample_row(run: Trajectories) -> dict[str, Any]:
    row: dict[str, Any] = {
        "sample_id": run.sample_id,
        "prompt": run.prompt_text,
        "completion": run.completion_text,
        "label": run.label,
        "n_prompt": run.n_prompt,
    }
    for name in _STEP_TYPES:
        row[name] = getattr(run, name)
        row[f"prompt_{name}"] = None if run.prompt is None else getattr(run.prompt, name)
    return row


def write_trajectories(sink: Any, runs: Iterable[Trajectories]) -> None:
    """Write the trajectories part of these runs, one at a time."""
    write_row_groups(sink, TRAJECTORIES, (_run_table(run) for run in runs))


def _run_table(run: Trajectories) -> pa.Table:
    return pa.concat_tables([_part_table(part) for part in (run.prompt, run) if part is not None])


def _part_table(run: Trajectories) -> pa.Table:
    real = np.arange(run.kv_group.shape[1]) < np.array(run.heads_per_layer)[:, None]
    layer, head = np.nonzero(real)
    times, steps = len(run.mechanisms), run.n_steps
    rows = len(layer) * times
    offsets = np.arange(rows + 1, dtype=np.int32) * steps

    def lists(values: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values).ravel()))

    columns: dict[str, Any] = {
        "sample_id": [run.sample_id] * rows,
        "mechanism": list(run.mechanisms) * len(layer),
        "part": [run.part] * rows,
        "layer": np.repeat(np.array(run.layers, dtype=np.int32)[layer], times),
        "head": np.repeat(head.astype(np.int32), times),
        "kv_group": np.repeat(run.kv_group[real], times),
    }
    for name in QUANTITIES:
        columns[name] = lists(np.moveaxis(run.quantities[name][:, real], 0, 1))
    for name in FOCUS:
        absent = pa.nulls(rows, TRAJECTORIES.field(name).type)
        columns[name] = lists(np.repeat(run.focus[name][real], times, axis=0)) if name in run.focus else absent
    return pa.table(columns, schema=TRAJECTORIES)


def decode(sample: Mapping[str, Any], table: pa.Table, manifest: Manifest) -> Trajectories:
    """The run whose row of the samples table and whose row group these are; ValueError if they do not fit."""
    if pc.unique(table["sample_id"]).to_pylist() != [sample["sample_id"]]:
        raise ValueError(f"its rows do not belong to sample '{sample['sample_id']}'")
    has_prompt = sample["prompt_positions"] is not None
    prompt = _decode_part("prompt", sample, table, {}) if has_prompt else None
    whole = {
        "prompt": prompt,
        "sample_id": sample["sample_id"],
        "prompt_text": sample["prompt"],
        "completion_text": sample["completion"],
        "label": sample["label"],
        "n_prompt": sample["n_prompt"],
        "manifest": manifest,
    }
    return _decode_part("completion", sample, table, whole)


def _decode_part(part: PartName, sample: Mapping[str, Any], table: pa.Table, others: Mapping[str, Any]) -> Trajectories:
    rows = table.filter(pc.equal(table["part"], part))
    if rows.num_rows == 0:
        raise ValueError(f"it has no rows of the {part} of sample '{sample['sample_id']}'")
    vectors = {name: sample[f"{_PREFIX[part]}{name}"] for name in _STEP_TYPES}
    mechanisms = tuple(pc.unique(rows["mechanism"]).to_pylist())
    mechanism = pc.index_in(rows["mechanism"], pa.array(mechanisms)).to_numpy()
    layers, layer = np.unique(rows["layer"].to_numpy(), return_inverse=True)
    head = rows["head"].to_numpy()
    counts = np.zeros(len(layers), dtype=np.int64)
    np.maximum.at(counts, layer, head + 1)
    shape = (len(mechanisms), len(layers), int(counts.max()))
    where = np.ravel_multi_index((mechanism, layer, head), shape)
    if len(np.unique(where)) != len(where) or len(where) != len(mechanisms) * counts.sum():
        raise ValueError(f"it lacks or repeats heads of sample '{sample['sample_id']}'")
    steps = len(vectors["positions"])
    matrices = {name: _matrix(rows[name], steps, where, shape) for name in (*QUANTITIES, *FOCUS)}
    measured = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    kv_group = np.full(shape[1:], -1, dtype=np.int32)
    kv_group[layer, head] = rows["kv_group"].to_numpy()
    return Trajectories(
        mechanisms=mechanisms,
        layers=tuple(layers.tolist()),
        kv_group=kv_group,
        quantities={name: measured[name] for name in QUANTITIES if name in measured},
        heads_per_layer=tuple(counts.tolist()),
        focus={name: measured[name][0] for name in FOCUS if name in measured},
        part=part,
        **vectors,
        **others,
    )


def _matrix(column: pa.ChunkedArray, steps: int, where: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """The lists of a column placed at the flat indices ``where``, NaN elsewhere; None if the column is null."""
    if column.null_count == len(column):
        return None
    lengths = pc.list_value_length(column)
    if column.null_count or not pc.all(pc.equal(lengths, steps)).as_py():
        raise ValueError(f"its lists are not all of length {steps}")
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    result = np.full((int(np.prod(shape)), steps), np.nan, dtype=np.float32)
    result[where] = values.reshape(len(where), steps)
    return result.reshape(*shape, steps)

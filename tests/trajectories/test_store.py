"""What is written is what is read: by softgap, and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from softgap.errors import StoreError, UnknownNameError, ValueInputError
from softgap.trajectories import (
    FOCUS,
    FORMAT_VERSION,
    QUANTITIES,
    Anatomy,
    Manifest,
    StudyWriter,
    Trajectories,
    load,
    open_study,
    save,
)
from softgap.trajectories.folder import Folder
from support.trajectory_examples import MANIFEST, example_run


def write_study(path: Path | str, *batches: list[Trajectories], **options: Any) -> None:
    with StudyWriter(path, MANIFEST, **options) as writer:
        for runs in batches:
            writer.append(runs)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two batches: samples a and b (with prompts of different lengths), then c without focus, label or prompt."""
    first = [example_run(sample_id="a", seed=1, prompt_steps=3), example_run(sample_id="b", seed=2, prompt_steps=0)]
    second = [example_run(sample_id="c", seed=3, steps=9, focus=(), label=None)]
    write_study(tmp_path / "study", first, second)
    return tmp_path / "study"


def test_a_run_comes_back_as_it_was(tmp_path: Path) -> None:
    run = example_run(prompt_steps=3)
    run.save(tmp_path / "runs" / "fox")
    again = load(tmp_path / "runs" / "fox")
    assert again.equals(run)
    assert again.prompt is not None
    assert again.divergence.dtype == np.float32


def test_the_layout_is_that_of_the_design(study: Path) -> None:
    files = sorted(path.relative_to(study).as_posix() for path in study.rglob("*") if path.is_file())
    parts = ("part-00000.parquet", "part-00001.parquet")
    assert files == ["manifest.json", *(f"{kind}/{part}" for kind in ("samples", "trajectories") for part in parts)]


def test_the_manifest_is_plain_json(study: Path) -> None:
    document = json.loads((study / "manifest.json").read_text())
    assert document["format"] == "softgap-study"
    assert document["format_version"] == FORMAT_VERSION == 1
    assert document["state"] == "finished"
    assert document["mechanisms"] == [{"name": "elu1", "options": {}}, {"name": "uniform", "options": {}}]
    assert document["started"] <= document["finished"]
    assert Manifest.from_json(document).equals(MANIFEST)


def test_times_that_were_given_are_kept(tmp_path: Path) -> None:
    manifest = Manifest(started="2026-01-01T00:00:00+00:00", finished="2026-01-01T00:00:01+00:00")
    example_run(manifest=manifest).save(tmp_path / "fox")
    assert load(tmp_path / "fox").manifest == manifest


def test_a_study_is_read_sample_by_sample(study: Path) -> None:
    opened = open_study(study)
    assert opened.ids == ("a", "b", "c")
    assert len(opened) == 3
    assert opened.state == "finished"
    assert opened.manifest.equals(MANIFEST)
    expected = [
        example_run(sample_id="a", seed=1, prompt_steps=3),
        example_run(sample_id="b", seed=2, prompt_steps=0),
        example_run(sample_id="c", seed=3, steps=9, focus=(), label=None),
    ]
    assert [run.equals(other) for run, other in zip(opened, expected, strict=True)] == [True] * 3
    assert [opened.sample(run.sample_id).equals(run) for run in expected] == [True] * 3


def test_only_the_asked_sample_is_read(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = pq.ParquetFile.read_row_group

    def noted(self: pq.ParquetFile, row: int) -> pa.Table:
        read.append(row)
        return original(self, row)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    opened = open_study(study)
    assert read == []
    opened.sample("b")
    assert read == [1]


def test_an_unknown_sample_is_named(study: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"^unknown sample 'd'; choose one of: a, b, c$"):
        open_study(study).sample("d")


def test_the_samples_table(study: Path) -> None:
    frame = open_study(study).samples()
    assert frame["sample_id"].tolist() == ["a", "b", "c"]
    assert frame["label"].isna().tolist() == [False, False, True]
    assert frame["prompt_positions"].isna().tolist() == [False, False, True]
    assert list(frame["tokens"][0]) == list(example_run().tokens)


def test_an_empty_study_can_be_read(tmp_path: Path) -> None:
    write_study(tmp_path / "a")
    write_study(tmp_path / "b", [])
    for name in ("a", "b"):
        opened = open_study(tmp_path / name)
        assert (len(opened), list(opened), len(opened.samples())) == (0, [], 0)


def test_a_file_uri_is_a_folder(tmp_path: Path) -> None:
    run = example_run(prompt_steps=2)
    uri = (tmp_path / "fox").as_uri()
    assert uri.startswith("file:///")
    save(run, uri)
    assert load(uri).equals(run)
    assert load(tmp_path / "fox").equals(run)
    assert open_study(uri + "/").path == uri + "/"


def test_a_relative_path_and_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = example_run()
    run.save("here")
    run.save("~/there")
    assert load(tmp_path / "here").equals(run)
    assert load(tmp_path / "home" / "there").equals(run)


def test_a_filesystem_that_is_not_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    monkeypatch.setattr(Folder, "at", lambda path: Folder(elsewhere, str(path), f"else://{path}"))
    run = example_run(prompt_steps=2)
    run.save("runs/fox")
    assert load("runs/fox").equals(run)
    with pytest.raises(OSError, match="'else://runs/fox' already holds this study"):
        run.save("runs/fox")


def test_pandas_reads_it_without_softgap(study: Path) -> None:
    run = open_study(study).sample("a")
    frame = pd.read_parquet(study / "trajectories")
    chosen = frame[(frame.sample_id == "a") & (frame.part == "completion") & (frame["mechanism"] == "uniform")]
    assert len(chosen) == run.n_heads
    for row in chosen.to_dict("records"):
        layer, head = run.layers.index(row["layer"]), row["head"]
        assert row["kv_group"] == run.kv_group[layer, head]
        for name in QUANTITIES:
            np.testing.assert_array_equal(row[name], run.quantities[name][1, layer, head])
        for name in FOCUS:
            np.testing.assert_array_equal(row[name], run.focus[name][layer, head])
    samples = pd.read_parquet(study / "samples").set_index("sample_id")
    np.testing.assert_array_equal(samples.logprob["a"], run.logprob)
    np.testing.assert_array_equal(samples.prompt_logprob["a"], run.prompt.logprob)  # type: ignore[union-attr]
    assert list(samples.tokens["a"]) == list(run.tokens)


def test_the_columns_have_plain_types(study: Path) -> None:
    samples = pyarrow.dataset.dataset(study / "samples").schema
    trajectories = pyarrow.dataset.dataset(study / "trajectories").schema
    listed = "sample_id prompt completion label n_prompt token_ids tokens positions logprob entropy"
    assert samples.names[:10] == listed.split()
    assert samples.field("tokens").type == pa.list_(pa.string())
    assert samples.field("logprob").type == pa.list_(pa.float32())
    listed = "sample_id mechanism part layer head kv_group divergence relative_l2 norm_ratio"
    assert trajectories.names == [*listed.split(), *FOCUS]
    assert all(trajectories.field(name).type == pa.list_(pa.float32()) for name in (*QUANTITIES, *FOCUS))
    assert {trajectories.field(name).type for name in ("sample_id", "mechanism", "part")} == {pa.string()}


def test_floats_are_compressed_and_strings_written_once(study: Path) -> None:
    group = pq.ParquetFile(study / "trajectories" / "part-00000.parquet").metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert "BYTE_STREAM_SPLIT" in columns["divergence.list.element"].encodings
    assert "RLE_DICTIONARY" in columns["mechanism"].encodings


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_study(tmp_path / name, [example_run(prompt_steps=2)])
    for part in ("samples/part-00000.parquet", "trajectories/part-00000.parquet"):
        assert (tmp_path / "a" / part).read_bytes() == (tmp_path / "b" / part).read_bytes()


def test_row_order_does_not_matter(study: Path) -> None:
    part = study / "trajectories" / "part-00001.parquet"
    expected = open_study(study).sample("c").select("elu1")
    table = pq.read_table(part)
    pq.write_table(table.take(np.random.default_rng(0).permutation(table.num_rows)), part)
    again = open_study(study).sample("c").select("elu1")
    assert all(np.array_equal(getattr(again, n), getattr(expected, n), equal_nan=True) for n in QUANTITIES)


def test_batches_are_numbered_by_the_plan(tmp_path: Path) -> None:
    with StudyWriter(tmp_path / "study", MANIFEST) as writer:
        assert writer.append([example_run(sample_id="late")], batch=12) == 12
        assert writer.append([example_run(sample_id="early")], batch=3) == 3
        assert writer.batches == (3, 12)
        assert writer.append([example_run(sample_id="last")]) == 13
    assert open_study(tmp_path / "study").ids == ("early", "late", "last")


@pytest.mark.parametrize(
    ("runs", "batch", "message"),
    [
        (
            [example_run(sample_id="x")],
            0,
            r"a batch is written once, under a number from 0 that is not in \[0\], got 0",
        ),
        ([example_run(sample_id="x")], -1, r"under a number from 0 that is not in \[0\], got -1"),
        ([example_run(sample_id="a")], None, "sample_id must be unique in a study, got 'a' twice"),
        ([example_run(sample_id="x")] * 2, None, "sample_id must be unique in a study, got 'x' twice"),
        ([example_run(part="prompt")], None, "a prompt is saved with its run, got the prompt of sample 'fox' alone"),
        (
            [example_run(sample_id="x").select("uniform")],
            None,
            r"must have the mechanisms of its manifest, \['elu1', 'uniform'\], got \['uniform'\] in sample 'x'",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    tmp_path: Path, runs: list[Trajectories], batch: int | None, message: str
) -> None:
    with StudyWriter(tmp_path / "study", MANIFEST) as writer:
        writer.append([example_run(sample_id="a")])
        with pytest.raises(ValueInputError, match=message):
            writer.append(runs, batch=batch)
    assert open_study(tmp_path / "study").ids == ("a",)


def test_a_prompt_alone_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueInputError, match="save the run itself"):
        example_run(part="prompt").save(tmp_path / "fox")
    assert list(tmp_path.iterdir()) == []


def test_anatomy_is_an_optional_part_that_old_readers_do_not_look_at(study: Path) -> None:
    before = {path.relative_to(study): path.read_bytes() for path in study.rglob("*") if path.is_file()}
    keys = np.array([[[0, -1], [1, 0]]], np.int32)
    weights = np.array([[[1.0, 0.0], [0.7, 0.2]]], np.float32)
    heads = [
        Anatomy(1, 0, ("softmax",), keys, weights, np.array([[0.0, 0.1]], np.float32), name, "<s>") for name in "ab"
    ]
    with StudyWriter(study, MANIFEST, resume=True) as writer:
        with pytest.raises(ValueInputError, match=r"belongs to its samples \['c'\], got \['a', 'b'\]"):
            writer.append_anatomy(heads, batch=1)
        writer.append_anatomy(heads, batch=0)
    after = {path.relative_to(study): path.read_bytes() for path in study.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {Path("anatomy/part-00000.parquet")}
    assert all(after[path] == content for path, content in before.items() if path.name != "manifest.json")
    opened = open_study(study)
    assert [run.sample_id for run in opened] == ["a", "b", "c"]
    assert opened.anatomy("b")[0].first == "<s>"
    np.testing.assert_array_equal(opened.anatomy("a")[0].weights, weights)
    assert opened.anatomy("c") == ()
    (study / "anatomy" / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(StoreError, match=r"anatomy/part-00000\.parquet in '.*' is damaged"):
        opened.anatomy("a")

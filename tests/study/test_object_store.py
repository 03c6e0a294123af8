"""Studies in an object store, through pyarrow's S3 client: measured, cut off, resumed, labelled and compared there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyarrow import fs

from softgap.cli import main
from softgap.errors import StoreError
from softgap.study import StudySettings, run_study
from softgap.tasks import Prompt
from softgap.trajectories import open_study
from softgap.trajectories.folder import Folder
from support.cli_examples import failure, loads_once, tiny_folder
from support.object_store import bucket_uri, object_store, stored
from support.stats_cases import planted
from support.study_examples import named, simulated_study

QUICK = ["--permutations", "99", "--refits", "19", "--feature", "mean"]
PROMPTS = [Prompt(str(i), "x" * (1 + (5 * i) % 23)) for i in range(9)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with object_store() as address:
        yield address


@pytest.fixture
def uri(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The URI of a study in a new bucket, with a place for its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    return bucket_uri(server, f"softgap-{uuid4().hex[:12]}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        loads_once(patch)
        yield tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


def settings(model: Path, **other: Any) -> StudySettings:
    given = {"chat": False, "max_new_tokens": 4, "batch_size": 3, "threads": 1, "seed": 3, **other}
    return StudySettings(model=str(model), **given)


def on_disk(folder: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def same_data(one: dict[str, bytes], other: dict[str, bytes]) -> bool:
    """All files the same bytes, times in the manifest aside."""
    return {**one, "manifest.json": b""} == {**other, "manifest.json": b""}


def test_a_study_in_a_store_is_the_one_on_disk(uri: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = uri.format("deep/fox")
    assert run_study(PROMPTS, place, settings(model)).measured == len(PROMPTS)
    assert run_study(PROMPTS, "fox", settings(model)).measured == len(PROMPTS)
    assert same_data(stored(place), on_disk("fox"))
    study = open_study(place)
    assert (study.state, study.manifest.differences(open_study("fox").manifest)) == ("finished", [])
    again = run_study(PROMPTS, place, settings(model))
    assert (again.resumed, again.failures) == (len(PROMPTS), ())
    Path("l.csv").write_text("id,label\n" + "".join(f"{i},{'ab'[i % 2]}\n" for i in range(9)))
    assert main(["study", "label", place, "l.csv", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changed"] == 9
    assert {run.sample_id: run.label for run in open_study(place)} == {str(i): "ab"[i % 2] for i in range(9)}


def test_a_study_cut_off_in_a_store_goes_on_as_if_it_had_not_been(uri: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "stopping.py").write_text(
        "import pathlib\n"
        "def judge(answer, fields):\n"
        "    if fields['id'] == '5' and pathlib.Path('stop').exists():\n"
        "        raise KeyboardInterrupt\n"
        "    return len(answer) % 2 == 0\n"
    )
    place, asked = uri.format("fox"), settings(model, scoring="stopping:judge")
    assert run_study(PROMPTS, uri.format("whole"), asked).measured == len(PROMPTS)
    Path("stop").touch()
    with pytest.raises(KeyboardInterrupt, match="6 of 9 samples are done; run the same command again to resume"):
        run_study(PROMPTS, place, asked)
    half = open_study(place)
    assert (half.state, len(half)) == ("running", 6)
    # What a process leaves that dies between the two parts of a batch, and in the middle of a third.
    folder, whole = Folder.at(place), stored(uri.format("whole"))
    for name in ("trajectories/part-00002.parquet", "samples/.part-00002.parquet.0123abcd.partial"):
        with folder.filesystem.open_output_stream(folder.path(name)) as sink:
            sink.write(b"PAR1")
    assert len(open_study(place)) == 6
    kept = {name: content for name, content in stored(place).items() if "part-00000" in name or "part-00001" in name}
    Path("stop").unlink()
    assert run_study(PROMPTS, place, asked).resumed == 6
    finished = stored(place)
    assert same_data(finished, whole)
    assert len(kept) == 4
    assert kept.items() <= finished.items()


def test_a_comparison_in_a_store_says_and_keeps_what_one_on_disk_does(
    uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, labels = planted(2, 120, 30, {7: 2.5})
    simulated_study(tmp_path / "s", x, named(labels))
    place = uri.format("s")
    folder = Folder.at(place)
    fs.copy_files(str(tmp_path / "s"), folder.root, destination_filesystem=folder.filesystem)
    results = []
    for study in ("s", place, place):
        assert main(["compare", study, "--confirm", "0.3", *QUICK]) == 0
        results.append(capsys.readouterr().out.splitlines())
    assert results[0][0] == results[1][0]
    assert results[0][2:-1] == results[1][2:-1]
    assert [lines[-1] for lines in results] == [
        "saved s/comparisons/0001",
        f"saved {uri.format('s/comparisons/0001')}",
        f"saved {uri.format('s/comparisons/0002')}",
    ]
    assert (
        json.loads(folder.read("comparisons/0001/result.json"))["units"]
        == json.loads(Path("s/comparisons/0001/result.json").read_text())["units"]
    )
    log = [json.loads(line)["event"] for line in folder.read("comparisons/log.jsonl").decode().splitlines()]
    assert log == ["locked", "looked", "looked"]
    assert main(["compare", place, "--open-confirmation", *QUICK]) == 0
    capsys.readouterr()
    assert failure(["compare", place, "--open-confirmation", *QUICK], capsys).startswith(
        "confirmation samples are opened once"
    )


def test_a_store_that_cannot_be_written_is_said_before_a_model_is_loaded(
    uri: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("softgap.models.load_model", load)
    lost = re.sub("softgap-[0-9a-f]+", "softgap-elsewhere", uri.format("fox"))
    said = failure(["study", "task", "recall", "--n", "2", "--out", lost], capsys)
    assert said.startswith(f"cannot write to '{lost}': ")
    assert said.endswith("; choose a folder you may write to")
    secret = uri.format("fox").replace("s3://", "s3://key:hush@")
    said = failure(["study", "task", "recall", "--n", "2", "--out", secret], capsys)
    assert said.startswith("the URI of a study must not hold a password, since a study keeps the command that made it")
    assert "hush" not in said
    assert failure(["compare", uri.format("none")], capsys) == (
        f"there is no study at '{uri.format('none')}'; check the path"
    )


def test_a_subfolder_keeps_the_options_of_its_uri(uri: str, tmp_path: Path) -> None:
    below = Folder.at(uri.format("fox")).below("comparisons/0001")
    assert below.address == uri.format("fox/comparisons/0001")
    assert Folder.at(below.address).root == below.root
    odd = Folder.at(tmp_path / "what?").below("x")
    assert (odd.address, odd.root) == (f"{tmp_path}/what?/x", f"{tmp_path}/what?/x")
    with pytest.raises(StoreError, match="must not hold a password"):
        Folder.at("s3://a:b@c/d")

"""A study on a real local Ray cluster, with a worker killed in the middle, equals that of the local engine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from softgap import cluster as ray_cluster
from softgap.errors import UnsupportedError
from softgap.study import StudySettings, run_study
from softgap.tasks import Prompt
from softgap.trajectories import open_study
from support.cli_examples import failure, tiny_folder
from support.object_store import bucket_uri, object_store, stored


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_worker_that_dies_is_replaced_and_the_study_is_that_of_this_machine(cluster: str, tmp_path: Path) -> None:
    model = tiny_folder(tmp_path / "tiny")
    prompts = [Prompt(str(i), "x" * (1 + (5 * i) % 23)) for i in range(12)]
    settings = StudySettings(
        model=str(model), chat=False, max_new_tokens=5, batch_size=3, threads=1, seed=3, scoring="deadly:judge"
    )
    local = run_study(prompts, "local", settings)
    spread = run_study(prompts, "spread", settings, engine="ray", address=cluster)
    assert Path("marker/died").exists()
    assert int(Path("marker/died").read_text()) != os.getpid()
    assert (local.measured, spread.measured, spread.failures) == (12, 12, ())
    one, other = open_study("local"), open_study("spread")
    assert one.manifest.differences(other.manifest) == []
    assert (one.ids, one.state) == (other.ids, other.state)
    for part in ("samples", "trajectories"):
        names = sorted(path.name for path in Path("local", part).iterdir())
        assert names == sorted(path.name for path in Path("spread", part).iterdir())
        assert all(Path("local", part, name).read_bytes() == Path("spread", part, name).read_bytes() for name in names)
    assert Path("local/prompts.jsonl").read_bytes() == Path("spread/prompts.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_workers_write_straight_to_an_object_store(cluster: str, tmp_path: Path) -> None:
    """With a worker that dies, too; and a study that is there already is found finished."""
    model = tiny_folder(tmp_path / "tiny")
    prompts = [Prompt(str(i), "x" * (1 + (5 * i) % 23)) for i in range(9)]
    settings = StudySettings(
        model=str(model), chat=False, max_new_tokens=5, batch_size=3, threads=1, seed=3, scoring="deadly:judge"
    )
    run_study(prompts, "here", settings)
    with object_store() as server:
        place = bucket_uri(server, "softgap-ray").format("spread")
        spread = run_study(prompts, place, settings, engine="ray", address=cluster)
        assert Path("marker/died").exists()
        assert (spread.measured, spread.failures, open_study(place).state) == (9, (), "finished")
        there = stored(place)
        assert run_study(prompts, place, settings, engine="ray", address=cluster).resumed == 9
    here = {str(path.relative_to("here")): path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    assert {**there, "manifest.json": b""} == {**here, "manifest.json": b""}


def test_a_missing_ray_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert failure(["study", "task", "recall", "--n", "2", "--engine", "ray", "--out", "x"], capsys) == (
        "the engine 'ray' needs Ray; install it with: pip install 'softgap[ray]'"
    )
    assert not Path("x").exists()


class SlowRay:
    """Ray on a machine where no cluster runs and so many starts time out."""

    def __init__(self, failing: int) -> None:
        self.failing, self.calls = failing, list[str]()

    def init(self, address: str | None = None, **_: object) -> None:
        self.calls.append(address or "start")
        if address is not None:
            raise ConnectionError("nothing there")
        if self.calls.count("start") <= self.failing:
            raise Exception("The current node timed out during startup.\nMore of it")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_cluster_that_is_slow_to_start_is_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for failing, calls in ((0, ["auto", "start"]), (1, ["auto", "start", "shutdown", "start"])):
        ray = SlowRay(failing)
        ray_cluster.join(ray, None)
        assert ray.calls == calls
    ray = SlowRay(2)
    with pytest.raises(UnsupportedError) as raised:
        ray_cluster.join(ray, None)
    assert str(raised.value) == (
        "a Ray cluster did not start on this machine in 2 attempts (The current node timed out during startup.); try "
        "again when the machine is less busy, name a running one with --ray-address, or use --engine local"
    )
    assert ray.calls[-1] == "shutdown"


def test_a_cluster_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "cannot reach a Ray cluster at '{}' (nothing there); check --ray-address or use --engine local"
    with pytest.raises(UnsupportedError, match=re.escape(sentence.format("10.0.0.9:6379"))):
        ray_cluster.join(SlowRay(0), "10.0.0.9:6379")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.8:6379")
    with pytest.raises(UnsupportedError, match=re.escape(sentence.format("10.0.0.8:6379"))):
        ray_cluster.join(SlowRay(0), None)

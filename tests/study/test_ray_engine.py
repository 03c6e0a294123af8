"""A study on a real local Ray cluster, with a worker killed in the middle, equals that of the local engine."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softgap import cluster as ray_cluster
from softgap.errors import UnsupportedError, ValueInputError
from softgap.study import StudySettings, run_study
from softgap.tasks import Prompt, resolve_scorer
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


class FakeRay:
    """The part of Ray that bounds are taken from."""

    def __init__(self, *nodes: tuple[int, float]) -> None:
        self._nodes = [{"Alive": True, "Resources": {"CPU": cpu, "memory": memory}} for cpu, memory in nodes]

    def nodes(self) -> list[dict[str, Any]]:
        return [*self._nodes, {"Alive": False, "Resources": {}}]


def test_workers_and_their_memory_are_bounded() -> None:
    ray = FakeRay((4, 16e9), (2, 6e9))
    limits = ray_cluster.ClusterLimits
    assert ray_cluster._bounds(ray, limits(), 1) == (12, int(0.9 * 6e9 / 2))
    assert ray_cluster._bounds(ray, limits(workers=1), 2) == (1, int(0.9 * 6e9))
    assert ray_cluster._bounds(ray, limits(memory=2 * 10**9), 4) == (2, 2 * 10**9)
    with pytest.raises(UnsupportedError, match=r"^a task needs 8 processors of one machine, and no machine"):
        ray_cluster._bounds(ray, limits(), 8)
    with pytest.raises(ValueInputError, match=r"^the number of workers must be at least 1, got 0$"):
        limits(workers=0)
    with pytest.raises(ValueInputError, match=r"^a worker needs at least 1\.1 GB of memory, got 0\.5 GB; allow more$"):
        limits(memory=500_000_000)


def test_what_a_worker_allocates_beyond_its_memory_is_an_error_and_the_bound_is_taken_back() -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    in_use = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024
    with pytest.raises(MemoryError), ray_cluster._bounded_memory(in_use + 2**28):
        torch.ones(2**29)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_workers_import_from_the_current_folder_last_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), str(tmp_path / "mine"), "/elsewhere", "."])
    assert ray_cluster.module_paths(current_folder=False) == [str(tmp_path / "mine"), "/elsewhere"]
    assert ray_cluster.module_paths(current_folder=True) == [str(tmp_path / "mine"), "/elsewhere", str(tmp_path)]


def test_a_study_inside_a_worker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTGAP_WORKER", "1")
    said = r"cannot be started from inside a worker; if a module of yours starts one when it is imported, put"
    with pytest.raises(UnsupportedError, match=f"^a study {said}"):
        run_study([Prompt("0", "a")], str(tmp_path / "out"), StudySettings(model=str(tmp_path / "none")))
    with pytest.raises(UnsupportedError, match=f"^a task of a cluster {said}"):
        next(iter(ray_cluster.run_tasks(print, {})))
    assert not (tmp_path / "out").exists()


def test_a_file_named_like_a_library_is_not_imported_for_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "colorsys.py").write_text("rgb_to_hsv = None\n")
    judge = "import colorsys\ndef judge(answer, fields): return colorsys.rgb_to_hsv is not None\n"
    (tmp_path / "softgap_judge.py").write_text(judge)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert resolve_scorer("softgap_judge:judge").judge("a", Prompt("0", "a")) == "right"
    assert str(tmp_path) not in sys.path

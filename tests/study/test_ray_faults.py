"""Studies on a real Ray cluster whose driver is killed, whose worker runs out of memory, whose node disappears.

Every process is bounded: two workers on the head node, one on another, and each command has a time limit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from softgap.trajectories import open_study
from support.cli_examples import SCRIPT, tiny_folder
from support.ray_cluster import second_node

PATIENCE = 900
PARTS = ("samples", "trajectories")


def asked(folder: Path, count: int) -> list[str]:
    """Arguments of a study of so many prompts in batches of two."""
    rows = [{"id": str(i), "prompt": "x" * (1 + (5 * i) % 23)} for i in range(count)]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tiny_folder(folder / "tiny")
    options = ["--model", str(model), "--raw", "--max-new-tokens", "24", "--batch-size", "2", "--threads", "1"]
    return [str(SCRIPT), "study", "run", str(folder / "p.jsonl"), *options]


def on(cluster: str) -> list[str]:
    return ["--engine", "ray", "--ray-address", cluster, "--workers", "2"]


def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=PATIENCE)


def parts(study: Path) -> dict[str, bytes]:
    return {
        f"{kind}/{path.name}": path.read_bytes() for kind in PARTS for path in sorted((study / kind).glob("part-*"))
    }


def wait_for_parts(study: Path, count: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE
    while len(list(study.glob("trajectories/part-*"))) < count:
        assert process.poll() is None, "the study ended before it could be disturbed"
        assert time.monotonic() < end, "no part was published"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_study_whose_driver_is_killed_resumes_to_the_same_bytes(cluster: str, tmp_path: Path) -> None:
    arguments = asked(tmp_path, 40)
    local, spread = tmp_path / "local", tmp_path / "spread"
    assert run([*arguments, "--out", str(local)]).returncode == 0
    command = [*arguments, "--out", str(spread), *on(cluster)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as driver:
        wait_for_parts(spread, 2, driver)
        driver.send_signal(signal.SIGKILL)
        assert driver.wait(PATIENCE) == -signal.SIGKILL
    left = len(parts(spread))
    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    assert 4 <= left < len(parts(local))
    assert parts(spread) == parts(local)
    assert open_study(spread).state == "finished"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_worker_out_of_memory_is_a_sentence_and_the_study_resumes(cluster: str, tmp_path: Path) -> None:
    arguments = [*asked(tmp_path, 8), "--score", "deadly:hoard"]
    local, spread = tmp_path / "local", tmp_path / "spread"
    assert run([*arguments, "--out", str(local)]).returncode == 0
    (Path.cwd() / "marker" / "hoard").touch()
    command = [*arguments, "--out", str(spread), *on(cluster), "--worker-memory", "4"]
    ended = run(command)
    assert ended.returncode == 2, ended.stderr
    assert "needs more than the 4.0 GB that a worker may take; allow more, or make batches smaller, and" in ended.stderr
    resumed = run(command)
    assert resumed.returncode == 0, resumed.stderr
    assert parts(spread) == parts(local)
    assert not (spread / "failures").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_node_that_disappears_takes_nothing_with_it(head: tuple[str, Path], cluster: str, tmp_path: Path) -> None:
    arguments = asked(tmp_path, 60)
    local, spread = tmp_path / "local", tmp_path / "spread"
    assert run([*arguments, "--out", str(local)]).returncode == 0
    command = [*arguments, "--out", str(spread), *on(cluster)[:-1], "3"]
    with (
        second_node(cluster, tmp_path) as node,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as driver,
    ):
        wait_for_parts(spread, 3, driver)
        os.killpg(node.pid, signal.SIGKILL)
        assert driver.wait(PATIENCE) == 0
    assert parts(spread) == parts(local)
    assert open_study(spread).state == "finished"

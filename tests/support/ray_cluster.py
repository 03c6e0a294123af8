"""A real Ray cluster on this machine, and work that kills its worker once."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

# The first call of this scoring for one sample kills its own process, as a machine that is taken away would. So does
# the first worker that unpickles a recipe or a substitute of this module.
DEADLY = """
import os, pathlib, signal
from softgap import calibration
from softgap.intervene.substitute import Substitute as Plain

def die_once():
    marker = pathlib.Path(os.environ["SOFTGAP_TEST_MARKER"])
    if marker.is_dir() and not (marker / "died").exists():
        (marker / "died").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)

def judge(answer, fields):
    if fields["id"] == "4":
        die_once()
    return len(answer) % 2 == 0

def hoard(answer, fields):
    # More than any worker may take, once for sample 4.
    marker = pathlib.Path(os.environ["SOFTGAP_TEST_MARKER"])
    if fields["id"] == "4" and (marker / "hoard").exists():
        (marker / "hoard").unlink()
        return len(bytearray(1 << 40)) == 0
    return len(answer) % 2 == 0

class Recipe(calibration.Recipe):
    def __setstate__(self, state):
        die_once()
        self.__dict__.update(state)

class Substitute(Plain):
    def __setstate__(self, state):
        die_once()
        self.__dict__.update(state)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A head node with two processors and its folder; ports are given, since a busy machine is slow to tell them.

    One for all tests of a process: Ray reads its token when it is imported, and never again.
    """
    folder = tmp_path_factory.mktemp("ray")
    (folder / "deadly.py").write_text(DEADLY)
    with pytest.MonkeyPatch.context() as patch:
        # A token of this cluster's own, which head, workers and driver share; made up here and gone with the tests.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("RAY_raylet_start_wait_time_s", "180")
        # For workers that write to an object store; they have the head node's environment.
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        # Only workers are to die, not this process.
        patch.setenv("SOFTGAP_TEST_MARKER", str(folder / "nowhere"))
        pytest.importorskip("ray")
        with started(folder) as address:
            yield address, folder


@pytest.fixture
def cluster(head: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the cluster, whose next worker to judge sample 4 will die; this folder is where it looks."""
    address, folder = head
    shutil.rmtree(folder / "marker", ignore_errors=True)
    (folder / "marker").mkdir()
    monkeypatch.chdir(folder)
    return address


def end_with_parent() -> None:
    """In a child: end when the process that started it does, however it does, so that no node is left behind."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, of Linux


def _bound_process(command: list[str], environment: dict[str, str], log: IO[str]) -> subprocess.Popen[bytes]:
    """A node as a process group of its own, which ends with this process."""
    return subprocess.Popen(
        command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
    )


@contextmanager
def second_node(address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another node of the cluster with one processor, as a process group that can be killed."""
    command = [str(Path(sys.executable).with_name("ray")), "start", f"--address={address}", "--block", "--num-cpus=1"]
    command += ["--disable-usage-stats", "--object-store-memory=100000000"]
    environment = {**os.environ, "SOFTGAP_TEST_MARKER": str(folder / "marker")}
    with (folder / "node.log").open("w") as log:
        node = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
        )
    try:
        for _ in range(1200):
            said = (folder / "node.log").read_text()
            if "Ray runtime started" in said:
                break
            assert node.poll() is None, said
            time.sleep(0.1)
        yield node
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
        node.wait(30)


@contextmanager
def started(folder: Path) -> Iterator[str]:
    """The address of a head node that runs for the block."""
    ports = {
        name: free_port()
        for name in (
            "port",
            "metrics-export-port",
            "dashboard-agent-grpc-port",
            "dashboard-agent-listen-port",
            "runtime-env-agent-port",
        )
    }
    given = [f"--{name}={port}" for name, port in ports.items()]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=2", *given]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000"]
    environment = {**os.environ, "SOFTGAP_TEST_MARKER": str(folder / "marker")}
    with (folder / "ray.log").open("w") as log:
        head = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent
        )
    try:
        for _ in range(1200):
            said = (folder / "ray.log").read_text()
            if "Ray runtime started" in said:
                break
            assert head.poll() is None, said
            time.sleep(0.1)
        yield f"127.0.0.1:{ports['port']}"
    finally:
        import ray

        ray.shutdown()
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)

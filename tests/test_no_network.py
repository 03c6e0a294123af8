"""Nothing asks the network unless a hub id was given: commands run with every connection refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support.cli_examples import tiny_folder

# An audit hook sees every connection that Python makes, in whatever library; it cannot be taken off again.
OFFLINE = """
import sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "socket.bind"):
        address = arguments[1] if event in ("socket.connect", "socket.sendto", "socket.bind") else arguments[0]
        print(f"NETWORK {event} {address}", flush=True)
        raise OSError("the network is refused")

sys.addaudithook(refuse)
from softgap.cli import main

for line in sys.argv[1:]:
    code = main(line.split("|"))
    print(f"CODE {line.split('|')[0]} {code}", flush=True)
"""


def run(folder: Path, *commands: str) -> list[str]:
    environment = {**os.environ, "SOFTGAP_CALIBRATIONS": str(folder / "none"), "OMP_NUM_THREADS": "1"}
    del environment["HF_HUB_OFFLINE"]  # which the tests set; users do not
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return [line for line in done.stdout.splitlines() if line.startswith(("NETWORK", "CODE"))]


def test_the_commands_ask_no_network(tmp_path: Path) -> None:
    tiny_folder(tmp_path / "tiny")
    commands = ("doctor", "models", "mechanisms", "run|a fox|--model|./tiny|--out|fox|--max-new-tokens|2", "report|fox")
    # Whether an installation is complete is not the question here.
    said = [line.replace("CODE doctor 1", "CODE doctor 0") for line in run(tmp_path, *commands)]
    assert said == [f"CODE {command.partition('|')[0]} 0" for command in commands]


def test_a_hub_id_asks_and_the_refusal_is_a_sentence(tmp_path: Path) -> None:
    said = run(tmp_path, "run|a fox|--model|nobody/nothing|--out|fox")
    assert said[-1] == "CODE run 2"
    assert said[0].startswith("NETWORK socket.")

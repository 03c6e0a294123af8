"""Whether --dry-run tells the truth: what it expects of every command, beside what the command takes.

With --cpu both are seconds of the processor on one thread, which a busy machine leaves alone; without, they are seconds
as they pass, on a quiet machine.

    python benchmarks/dry_run.py --text FILE --cpu --only run read
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness import machine, require_quiet_machine, write_section
from softgap.models.catalogue import EMBEDDED

# Runs the command line; with "cpu" the clock of the probe is that of the processor.
CHILD = """
import sys, time
from softgap.costs.probe import Probe
if sys.argv[1] == "cpu":
    Probe.clock = Probe.since_start = staticmethod(time.process_time)
from softgap.cli import main
sys.exit(main(sys.argv[2:]))
"""
STORY = "Tell me a long story about a fox, a crow and a piece of cheese."


@dataclass(frozen=True)
class Taken:
    """What a command took."""

    seconds: float
    memory: int
    disk: int


def case_lines(folder: Path, text: str) -> dict[str, dict[str, str | list[str]]]:
    """Command lines by command and size."""
    for name, size in (("short.txt", 1_500), ("page.txt", 9_000), ("small.txt", 16_000), ("medium.txt", 60_000)):
        (folder / name).write_text(text[:size])
    for name, count in (("few.jsonl", 4), ("many.jsonl", 16)):
        rows = [{"prompt": f"{STORY} It happens in the year {1900 + n}."} for n in range(count)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    at = str(folder)
    calibrate = ["calibrate", "--no-stability", "--text"]
    plan = ["linearize", "--text", f"{at}/medium.txt", "--no-recall-budget", "--out", "OUT.json", "--tokens"]
    evaluate = ["evaluate", "--out", "OUT.json", "--contexts"]
    return {
        "run": {
            "small": ["run", STORY, "--max-new-tokens", "24", "--out", "OUT"],
            "medium": ["run", STORY, "--max-new-tokens", "192", "--out", "OUT"],
        },
        "read": {
            "small": ["read", f"{at}/short.txt", "--out", "OUT"],
            "medium": ["read", f"{at}/page.txt", "--out", "OUT"],
        },
        "study": {
            "small": ["study", "run", f"{at}/few.jsonl", "--max-new-tokens", "16", "--out", "OUT"],
            "medium": ["study", "run", f"{at}/many.jsonl", "--max-new-tokens", "64", "--out", "OUT"],
        },
        "calibrate": {
            "small": [*calibrate, f"{at}/small.txt", "--positions", "512", "--steps", "15", "--out", "OUT.safetensors"],
            "medium": [
                *calibrate, f"{at}/medium.txt", "--positions", "1024", "--steps", "60", "--out", "OUT.safetensors",
            ],
        },
        "linearize": {
            "small": [*plan, "512", "--length", "64", "--mechanism", "elu1", "--no-baselines"],
            "medium": [*plan, "2048", "--length", "128", "--no-baselines"],
        },
        "evaluate": {
            "small": [*evaluate, "8", "--tasks", "recall", "--lengths", "256"],
            "medium": [*evaluate, "16", "--tasks", "loss,recall,needle", "--lengths", "512,1k"],
        },
    }  # fmt: skip


def command(mode: str, line: list[str], model: str) -> list[str]:
    """The command line of a process."""
    place = 2 if line[0] in ("run", "read") else 3 if line[0] == "study" else 1
    named = ["--model", model] if line[0] in ("run", "read", "study") else [model]
    return [sys.executable, "-c", CHILD, mode, *line[:place], *named, *line[place:]]


def expected(mode: str, line: list[str], model: str) -> dict[str, float]:
    """What --dry-run prints."""
    done = subprocess.run([*command(mode, line, model), "--dry-run", "--json"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads(done.stdout))


def take(mode: str, line: list[str], model: str, folder: Path) -> Taken:
    """Run a command, and look what it took."""
    own = [part.replace("OUT", str(folder / "out")) for part in line]
    before = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    start = os.times()
    process = subprocess.Popen(command(mode, own, model), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(own)} failed with status {status}")
    seconds = usage.ru_utime + usage.ru_stime if mode == "cpu" else os.times().elapsed - start.elapsed
    written = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path not in before}
    # The document that goes with a plan is for softgap report.
    disk = sum(size for path, size in written.items() if "findings" not in path.name)
    return Taken(seconds, 1024 * usage.ru_maxrss, disk)


def main() -> None:
    """Compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default=EMBEDDED, help="each has a table of its own")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--sizes", nargs="*", default=["small", "medium"])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--results", type=Path, help="JSON lines to add to, so that a table can be made in parts")
    options = parser.parse_args()
    if not options.cpu:
        require_quiet_machine()
    mode = "cpu" if options.cpu else "wall"
    rows = []
    if options.results and options.results.exists():
        rows = [row for row in map(json.loads, options.results.read_text().splitlines()) if row[0] == options.model]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, sizes in case_lines(folder, options.text.read_text()).items():
            for size in options.sizes if not options.only or name in options.only else ():
                line = list(sizes[size])
                cost = expected(mode, line, options.model)
                work = folder / f"{name}-{size}"
                work.mkdir()
                taken = take(mode, line, options.model, work)
                rows.append(
                    [options.model, name, size, cost["seconds"], taken.seconds, cost["memory_bytes"], taken.memory,
                     cost["disk_bytes"], taken.disk, cost["probe_seconds"]]
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
                if options.results:
                    with options.results.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    clock = "seconds of the processor, one thread" if options.cpu else "seconds"
    table = [
        f"| model | command | size | expected, {clock} | taken | ratio | expected MB | taken | ratio | probe |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, name, size, a, b, c, d, _, _, probe in rows:
        table.append(
            f"| {model} | {name} | {size} | {a:.0f} | {b:.0f} | {a / b:.2f} "
            f"| {c / 1e6:,.0f} | {d / 1e6:,.0f} | {c / d:.2f} | {probe:.0f} s |"
        )
    within = sum(1 / 1.5 <= row[3] / row[4] <= 1.5 for row in rows)
    model_option = "" if options.model == EMBEDDED else f" --model {options.model}"
    text = (
        f"`python benchmarks/dry_run.py --text FILE{' --cpu' if options.cpu else ''}{model_option}`; {machine()}. What "
        f"`--dry-run` expects beside what the command takes: {within} of {len(rows)} times are within a factor of 1.5. "
        "One run of each.\n\n"
    )
    embedded = options.model == EMBEDDED
    name, title = ("dry-run", "") if embedded else (f"dry-run-{options.model}", f": {options.model}")
    write_section(name, f"What --dry-run expects{title}", text + "\n".join(table))


if __name__ == "__main__":
    main()

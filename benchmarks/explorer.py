"""Size of the explorer's file, and how soon it can be used in headless Chromium.

Run: python benchmarks/explorer.py [--rounds 7]   (writes its section of docs/benchmarks.md)
Run: python benchmarks/explorer.py --check        (only the size with aims; writes nothing, and exits with 1 on a miss)
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from harness import machine, require_quiet_machine, write_section
from softgap.report import write_explorer
from softgap.trajectories import QUANTITIES, Anatomy, Manifest, StudyWriter, Trajectories
from softgap.trajectories.anatomy import TOP_KEYS

# Layers, heads of each, tokens, mechanisms, heads whose anatomy is stored.
WITH_AIMS = (30, 9, 2000, ("elu1", "taylor2", "relu", "uniform"), 8)
SIZES = (
    (30, 9, 2000, ("elu1", "taylor2", "uniform"), 0),
    WITH_AIMS,
    (32, 32, 1000, ("elu1", "uniform"), 0),
)
# The aims: megabytes of the file, and milliseconds until it is ready (median).
MOST_MEGABYTES, LATEST = 14.0, 2000.0


@dataclass(frozen=True)
class Row:
    """What was measured of one file."""

    name: str
    megabytes: float
    written: float
    ready: list[float]


def noisy_run(layers: int, heads: int, tokens: int, mechanisms: tuple[str, ...]) -> Trajectories:
    """A run of noise around levels of their own, which compresses worse than any model's."""
    rng = np.random.default_rng(0)
    shape = (len(mechanisms), layers, heads, tokens)
    words = ("The", " quick", " brown", " fox", " jumps", " over", " the", " lazy", " dog", ".")
    shown = tuple(words[i % len(words)] for i in range(tokens))
    return Trajectories(
        mechanisms=mechanisms,
        layers=tuple(range(layers)),
        kv_group=np.tile(np.arange(heads) // 3, (layers, 1)).astype(np.int32),
        quantities={name: rng.gamma(4.0, 0.1, shape).astype(np.float32) for name in QUANTITIES},
        positions=np.arange(tokens, dtype=np.int32),
        token_ids=np.zeros(tokens, np.int32),
        tokens=shown,
        logprob=-rng.exponential(1.0, tokens).astype(np.float32),
        entropy=rng.exponential(1.0, tokens).astype(np.float32),
        completion_text="".join(shown),
        manifest=Manifest(model="noise", mechanisms={name: {} for name in mechanisms}),
    )


def noisy_anatomy(run: Trajectories, count: int) -> list[Anatomy]:
    """Keys and weights of noise for some heads: 16 keys per token for softmax and each mechanism but the baseline."""
    rng = np.random.default_rng(1)
    names = ("softmax", *run.mechanisms[:-1])
    n = run.n_steps
    entries = []
    for head in range(count):
        keys = (rng.random((len(names), n, TOP_KEYS)) * np.arange(1, n + 1)[:, None]).astype(np.int32)
        weights = -np.sort(-rng.dirichlet(np.full(TOP_KEYS + 1, 0.5), (len(names), n)), axis=2).astype(np.float32)
        entries.append(Anatomy(head, 0, names, keys, weights[..., :TOP_KEYS].copy(), weights[..., TOP_KEYS].copy()))
    return entries


def ready_after(browser: Browser, path: Path) -> float:
    """Milliseconds from navigation until text, map and trajectories are drawn and answer."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.absolute().as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    milliseconds = float(page.evaluate("Number(document.documentElement.dataset.ready)"))
    page.close()
    return milliseconds


def measure(browser: Browser, folder: Path, rounds: int, sizes: Sequence[Any]) -> list[Row]:
    """Every size, opened in turn so that a slow minute of the machine hits all of them."""
    rows = []
    for size in sizes:
        layers, heads, tokens, mechanisms, looked_into = size
        name = f"{layers * heads:,} heads x {tokens:,} tokens x {len(mechanisms)} mechanisms"
        name += f", anatomy of {looked_into} heads" if looked_into else ""
        run = noisy_run(layers, heads, tokens, mechanisms)
        with StudyWriter(folder / name, run.manifest) as writer:
            batch = writer.append([run])
            if looked_into:
                writer.append_anatomy(noisy_anatomy(run, looked_into), batch=batch)
        start = time.perf_counter()
        report = write_explorer(folder / name)
        rows.append(Row(name, report.size / 1e6, time.perf_counter() - start, []))
    for _ in range(rounds):
        for row in rows:
            row.ready.append(ready_after(browser, folder / row.name / "report.html"))
    return rows


def missed(row: Row) -> list[str]:
    """The aims that a row misses."""
    ready = statistics.median(row.ready)
    words = [f"{row.megabytes:.2f} MB (aim: below {MOST_MEGABYTES:g})"] if row.megabytes >= MOST_MEGABYTES else []
    return [*words, *([f"ready after {ready:.0f} ms (aim: below {LATEST:g})"] if ready >= LATEST else [])]


def main() -> None:
    """Measure and write the table, or check the aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="only check the aims, and write nothing")
    asked = parser.parse_args()
    rounds = asked.rounds
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("this benchmark needs a browser, and none was found; install chromium and try again")
    require_quiet_machine()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        rows = measure(browser, Path(folder), rounds, (WITH_AIMS,) if asked.check else SIZES)
        version = browser.version
        browser.close()
    lines = [
        f"| {row.name} | {row.megabytes:.2f} | {row.written:.1f} | {statistics.median(row.ready):.0f} "
        f"({min(row.ready):.0f} to {max(row.ready):.0f}) |"
        for row in rows
    ]
    table = "\n".join(["| run | file, MB | written in, s | ready after, ms |", "|---|---|---|---|", *lines])
    intro = (
        f"`python benchmarks/explorer.py --rounds {rounds}`: runs of noise, which compress worse than a model's; "
        f"headless Chromium {version}, opened from disk in a fresh page each time; {machine()}. *Ready* is the time "
        "from navigation until the text, the map and the trajectories are drawn and answer (median and range); "
        "*written* includes the analysis of the dynamics of every mechanism. Aims for the file with anatomy: below "
        f"{MOST_MEGABYTES:g} MB, and ready within {LATEST / 1000:g} seconds."
    )
    print(table)
    if asked.check:
        misses = [words for row in rows for words in missed(row)]
        sys.exit("missed: " + "; ".join(misses) if misses else 0)
    write_section("explorer", "The explorer's file and how soon it is ready", f"{intro}\n\n{table}")


if __name__ == "__main__":
    main()

"""What benchmarks and experiments share: a quiet machine, interleaved pairs, medians, peak memory, tables in docs."""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

DOCS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
FINDINGS = DOCS.with_name("findings.md")
RELIABILITY = DOCS.with_name("reliability.md")
_OPENING = {
    DOCS: "# Benchmarks\n\nEach table was written by the command named in it.\n",
    FINDINGS: "# Findings\n\nEach section was written by the command named in it.\n",
    RELIABILITY: "# Reliability\n\nEach section was written by the command named in it.\n",
}
BUSY_PERCENT = 20.0


def require_quiet_machine(seconds: float = 3.0) -> None:
    """Stop with one sentence where other work would be measured too."""
    busy = psutil.cpu_percent(interval=seconds)
    if busy > BUSY_PERCENT:
        sys.exit(
            f"benchmarks need a quiet machine: at most {BUSY_PERCENT:g} % of the cores may be busy, got {busy:g} %; "
            "stop the other work and try again"
        )


def machine() -> str:
    """The machine and the settings a table is read with."""
    return (
        f"{psutil.cpu_count(logical=True)} cores ({platform.machine()}), torch {torch.__version__.split('+')[0]} "
        f"with {torch.get_num_threads()} threads, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d', time.gmtime())}"
    )


@dataclass(frozen=True)
class Ratio:
    """Times of one side over another's, pair by pair."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interleaved(
    sides: Sequence[Callable[[], object]],
    pairs: int = 7,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Seconds of each side, run in turn so that a slow minute of the machine hits all of them."""
    for _ in range(warm_up):
        for side in sides:
            side()
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(pairs):
        for times, side in zip(seconds, sides, strict=True):
            start = clock()
            side()
            times.append(clock() - start)
    return seconds


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    """Median of the pairwise ratios, with the smallest and largest."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def peak_memory(script: str, *arguments: str) -> int | None:
    """Bytes that a script run with these arguments reports on its last line, in a process of its own.

    A process that has computed before would hide what a call needs behind memory it has kept.
    """
    done = subprocess.run([sys.executable, script, *arguments], check=True, capture_output=True, text=True)
    last = done.stdout.split()[-1]
    return None if last == "None" else int(last)


def added_memory(call: Callable[[], object]) -> int | None:
    """Bytes by which a call raises this process's peak resident memory; None where the system cannot tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = psutil.Process().memory_info().rss
    call()
    return max(0, (peak_of_process() or 0) - before)


def peak_of_process() -> int | None:
    """Peak resident memory of this process in bytes; None where the system cannot tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return int(next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))) * 1024


def field_words(name: str) -> str:
    """The name of a substitute as tables show it, where files still say repaired and tuned."""
    return name.replace(", repaired", ", corrected").replace(", tuned", ", distilled")


def write_section(name: str, title: str, text: str, page: Path = DOCS) -> None:
    """Replace one section of docs/benchmarks.md, or of another page, or add it; all other sections stay.

    The section names the script that is running.
    """
    script = Path(sys.argv[0]).resolve()
    begin, end = f"<!-- {name}: written by {script.parent.name}/{script.name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n## {title}\n\n{text.strip()}\n{end}"
    content = page.read_text() if page.exists() else _OPENING[page]
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    known = pattern.search(content)
    page.write_text(pattern.sub(lambda _: section, content) if known else f"{content.rstrip()}\n\n{section}\n")

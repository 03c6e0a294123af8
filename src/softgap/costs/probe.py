"""Short timings of one model on this machine, and the cost that they add up to.

Time is a sum over the stages of a command. The probe runs the very function of a stage on texts of two lengths and
draws a t + b t^2 through the seconds of each; the stage then counts as the sum of that over the texts that it will
read. Steps of a fit and generated tokens are timed and multiplied by their number. Memory is what the probe holds at
its peak, continued to the longest text in the same way, above what the process holds with the model loaded.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import psutil
import torch

from softgap.models.loading import Model

__all__ = ["LONG", "SHORT", "Cost", "Curve", "Probe"]

# Tokens of the two texts that a stage is timed on.
SHORT, LONG = 96, 256
# Seconds between two looks at the memory of the process.
_LOOK = 0.002


@dataclass(frozen=True)
class Cost:
    """What a command would cost.

    Attributes
    ----------
    command
        Its name.
    stages
        Seconds by stage, loading the model included.
    memory_bytes
        The most memory of this process; that of an accelerator does not count.
    disk_bytes
        Files that stay.
    scratch_bytes
        Files that are removed at the end.
    counts
        How much work that is, by name.
    probe_seconds
        What the probe took.
    note
        What may make it cost less or more.
    """

    command: str
    stages: Mapping[str, float]
    memory_bytes: int
    disk_bytes: int
    scratch_bytes: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    probe_seconds: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(self.stages.values())

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "seconds": self.seconds}


@dataclass(frozen=True)
class Curve:
    """y(t) = linear t + square t^2, for texts of t tokens."""

    linear: float
    square: float = 0.0

    @classmethod
    def through(cls, *points: tuple[int, float]) -> Curve:
        """Through one point or two, with no part below 0.

        >>> Curve.through((10, 20.0), (20, 60.0)).at(30)
        120.0
        """
        *rest, (n, y) = points
        slope = (y / n - rest[0][1] / rest[0][0]) / (n - rest[0][0]) if rest else 0.0
        square = min(max(0.0, slope), y / n**2)
        return cls(max(0.0, y / n - square * n), square)

    def at(self, n: float) -> float:
        """The value for a text of ``n`` tokens."""
        return n * (self.linear + self.square * n)

    def over(self, lengths: Iterable[int]) -> float:
        """The sum over texts of these lengths."""
        return sum(map(self.at, lengths))


class Probe:
    """Times short calls, and the memory that they hold at their peak.

    ``loading`` is what has passed since the process began, loading the model included. ``memory`` is the most that the
    process has held or would hold. The model reads a few tokens at once, since weights that are mapped from a file take
    memory only once they are used.
    """

    def __init__(self, model: Model) -> None:
        self.loading = self.since_start()
        self._process = psutil.Process()
        self._begin = self.clock()
        with torch.inference_mode():
            model(torch.full((1, 8), 5, device=model.device), use_cache=False)
        self.memory = max(self._process.memory_info().rss, _peak_so_far())

    @staticmethod
    def since_start() -> float:
        """Seconds since the process began."""
        return time.time() - psutil.Process().create_time()

    @staticmethod
    def clock() -> float:
        """Seconds as they pass; a benchmark on a busy machine puts those of the processor in their place."""
        return time.perf_counter()

    @property
    def seconds(self) -> float:
        """What it has taken so far."""
        return self.clock() - self._begin

    def call(self, function: Callable[[], Any]) -> tuple[Any, float, int]:
        """What a call returns, its seconds, and the bytes that it held at its peak."""
        before = self._process.memory_info().rss
        with _peak_memory(self._process) as peak:
            start = self.clock()
            result = function()
            seconds = self.clock() - start
        self.memory = max(self.memory, peak[0])
        return result, seconds, max(0, peak[0] - before)

    def curve(self, function: Callable[[int], Any], lengths: Sequence[int], longest: int) -> Curve:
        """Seconds of a call by the tokens that it reads; its memory counts up to the longest text."""
        times, peaks = [], []
        for n in sorted(set(lengths)):
            _, seconds, held = self.call(partial(function, n))
            times.append((n, seconds))
            peaks.append((n, float(held)))
        self.hold(Curve.through(*peaks).at(longest))
        return Curve.through(*times)

    def hold(self, extra: float) -> None:
        """Count a peak of so many bytes above what the process holds now."""
        self.memory = max(self.memory, int(self._process.memory_info().rss + extra))


@contextmanager
def _peak_memory(process: psutil.Process) -> Iterator[list[int]]:
    """Watch the resident memory while the block runs; yields a list whose only entry is the peak so far."""
    peak, done = [process.memory_info().rss], threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()
        peak[0] = max(peak[0], process.memory_info().rss)


def _peak_so_far() -> int:
    """The most memory that the process has held, where the system tells."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held

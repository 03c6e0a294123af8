"""Server-sent events: what happens, told to every page over one connection.

The identifier of an event is ``BOOT.NUMBER``. A page that lost its connection sends the last one it got, and is told
what came after; one of an earlier server is told everything again, and sees by the name in ``hello`` that it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

from starlette.responses import JSONResponse, Response, StreamingResponse

from softgap.report.live.limits import Limits
from softgap.report.live.runs import Queue
from softgap.report.live.studies import Studies

__all__ = ["Streams"]

# A line now and then keeps a connection open, and shows when it is not; the end of the server is looked for as often.
_QUIET_SECONDS = 0.5
_RETRY_MILLISECONDS = 700


class Streams:
    """All open streams."""

    def __init__(self, boot: str, limits: Limits, closing: Callable[[], bool]) -> None:
        self._boot = boot
        self._limits = limits
        self._closing = closing
        self._waiting: set[asyncio.Event] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say in which loop the streams live."""
        self._loop = loop

    def wake(self) -> None:
        """Something has happened; called from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for event in self._waiting:
            event.set()

    def open(self, queue: Queue, studies: Studies, runs: Sequence[str], last: str) -> Response:
        """A stream of the list of runs, and of the events of some of them after the last one that was seen."""
        if len(self._waiting) >= self._limits.streams:
            return JSONResponse({"error": f"at most {self._limits.streams} pages may watch; close one"}, 503)
        boot, _, number = last.partition(".")
        after = int(number) if boot == self._boot and number.isdigit() else 0
        return StreamingResponse(self._told(queue, studies, runs, after), media_type="text/event-stream")

    async def _told(self, queue: Queue, studies: Studies, runs: Sequence[str], after: int) -> AsyncIterator[str]:
        news = asyncio.Event()
        self._waiting.add(news)
        told: tuple[int, list[str]] | None = None
        try:
            yield f"retry: {_RETRY_MILLISECONDS}\n" + _event("hello", json.dumps({"boot": self._boot}))
            while not self._closing():
                news.clear()
                version, listed = queue.snapshot()
                names = studies.names()
                if (version, names) != told:
                    told = version, names
                    yield _event("runs", json.dumps({"runs": listed, "studies": names}))
                for _, event in queue.events(runs, after):
                    after = event.number
                    yield _event(event.kind, event.data, f"{self._boot}.{event.number}")
                try:
                    await asyncio.wait_for(news.wait(), _QUIET_SECONDS)
                except TimeoutError:
                    yield ":\n\n"
        finally:
            self._waiting.discard(news)


def _event(kind: str, data: str, number: str = "") -> str:
    # JSON has no line break of its own, so an event is always one line of data.
    return f"{f'id: {number}' + chr(10) if number else ''}event: {kind}\ndata: {data}\n\n"

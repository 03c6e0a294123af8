"""The addresses of the server, and what each answers."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import IO, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from softgap.errors import SoftgapError, UnknownNameError
from softgap.report.live.guard import Guard
from softgap.report.live.limits import Limits
from softgap.report.live.pages import PANE, SHELL, pane, policy, shell
from softgap.report.live.runs import Queue, TooManyError
from softgap.report.live.stream import Streams
from softgap.report.live.studies import Studies
from softgap.report.live.wishes import wishes
from softgap.report.live.writer import Writer

__all__ = ["create_app"]

# A report has a policy of its own in its head; this one takes it away from our origin as well.
_REPORT_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"
_CHUNK = 2**16


def create_app(
    writer: Writer,
    studies: Studies,
    limits: Limits,
    names: tuple[str, ...],
    *,
    started: Callable[[], None] = lambda: None,
    closing: Callable[[], bool] = lambda: False,
) -> Guard:
    """The whole server as an ASGI application.

    Parameters
    ----------
    names
        What a Host header may say; see :func:`softgap.report.live.guard.allowed_names`.
    started
        Called when the application is ready.
    closing
        Whether the server is about to end, so that open streams must.
    """
    # A new server has a new name, by which pages of an earlier one see that it is gone.
    boot, token = secrets.token_hex(8), secrets.token_urlsafe(24)
    streams = Streams(boot, limits, closing)
    queue = Queue(writer, studies, limits, streams.wake)
    addresses = _Addresses(writer, studies, limits, queue, streams, boot=boot, token=token)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        streams.attach(asyncio.get_running_loop())
        queue.start()
        started()
        yield
        await run_in_threadpool(queue.close)

    app = Starlette(
        routes=[
            Route("/", addresses.first),
            Route("/events", addresses.events),
            Route("/runs", addresses.add, methods=["POST"]),
            Route("/runs/{run_id}", addresses.pane),
            Route("/runs/{run_id}/stop", addresses.stop, methods=["POST"]),
            Route("/studies/{name}", addresses.study),
            Route("/studies/{name}/report.html", addresses.report),
            Route("/studies/{name}/study.zip", addresses.zipped),
        ],
        lifespan=lifespan,
        exception_handlers={SoftgapError: _refused, HTTPException: _missing},
    )
    return Guard(app, names, token, limits)


class _Addresses:
    """One method for each address."""

    def __init__(
        self,
        writer: Writer,
        studies: Studies,
        limits: Limits,
        queue: Queue,
        streams: Streams,
        *,
        boot: str,
        token: str,
    ) -> None:
        self._writer = writer
        self._studies = studies
        self._limits = limits
        self._queue = queue
        self._streams = streams
        self._boot = boot
        self._token = token

    async def first(self, request: Request) -> Response:
        """The page."""
        content = shell(self._writer, self._limits, boot=self._boot, token=self._token)
        return HTMLResponse(content, headers={"Content-Security-Policy": policy(SHELL)})

    async def events(self, request: Request) -> Response:
        """Everything that happens, over one connection."""
        runs = request.query_params.getlist("run")[: self._limits.prompts]
        last = request.headers.get("last-event-id", "")
        return self._streams.open(self._queue, self._studies, runs, last)

    async def add(self, request: Request) -> Response:
        """Ask for runs."""
        known = self._writer.mechanisms
        wanted = wishes(await _body(request, self._limits.request_bytes), known, self._limits)
        for wish in wanted:
            await run_in_threadpool(self._writer.check, wish, self._limits)
        return JSONResponse({"runs": self._queue.add(wanted)}, 202)

    async def pane(self, request: Request) -> Response:
        """The explorer of a run."""
        content = pane(self._writer, self._queue.run(request.path_params["run_id"]))
        return HTMLResponse(content, headers={"Content-Security-Policy": policy(PANE)})

    async def stop(self, request: Request) -> Response:
        """End a run."""
        self._queue.stop(request.path_params["run_id"])
        return JSONResponse({}, 202)

    async def study(self, request: Request) -> Response:
        """The report on a saved study."""
        content = await run_in_threadpool(self._studies.html, request.path_params["name"])
        return HTMLResponse(content, headers={"Content-Security-Policy": _REPORT_POLICY})

    async def report(self, request: Request) -> Response:
        """The same, as a file to keep."""
        name = request.path_params["name"]
        content = await run_in_threadpool(self._studies.html, name)
        return HTMLResponse(content, headers=_as_file(f"{name}.html"))

    async def zipped(self, request: Request) -> Response:
        """A study as a file to keep."""
        name = request.path_params["name"]
        file = await run_in_threadpool(self._studies.zipped, name)
        return StreamingResponse(_chunks(file), media_type="application/zip", headers=_as_file(f"{name}.zip"))


async def _body(request: Request, most: int) -> bytes:
    """The body, if it is no longer than it may be, whatever its header says."""
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise HTTPException(413, f"a request may have {most:,} bytes; shorten the prompt")
    return body


def _chunks(file: IO[bytes]) -> Any:
    with file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _as_file(name: str) -> dict[str, str]:
    safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
    return {"Content-Disposition": f'attachment; filename="{safe}"'}


async def _refused(request: Request, error: Exception) -> Response:
    missing = isinstance(error, UnknownNameError) and bool(request.path_params)
    status = 429 if isinstance(error, TooManyError) else 404 if missing else 400
    return Response(json.dumps({"error": str(error)}), status, media_type="application/json")


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    sentence = getattr(error, "detail", "") if status not in (404, 405) else "there is nothing at this address"
    return JSONResponse({"error": sentence}, status)

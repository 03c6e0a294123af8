"""The routes of the live server, its pages, and its stream of server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import IO, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from softgap import __version__
from softgap.errors import SoftgapError, UnknownNameError, ValueInputError
from softgap.kinds import NOT_CALIBRATED, UNMEASURED
from softgap.report.kinds import opening_view
from softgap.report.live.planned import PlannedWriter
from softgap.report.live.requests import (
    Access,
    Guard,
    Limits,
    parse_anatomy_request,
    parse_requests,
    whole_number,
)
from softgap.report.live.runs import LiveRun, Queue, Studies, TooManyError
from softgap.report.live.writer import SAMPLE, Writer
from softgap.report.page import REPORT, Look, policy_of, render
from softgap.report.payload import OPENING, Payload
from softgap.report.samples import keys_of
from softgap.trajectories.validation import BASELINE

__all__ = ["create_app"]


SHELL = Look(
    "live/shell.html",
    ("explorer.css", "live/live.css"),
    (
        "data.js",
        "theme.js",
        "live/stream.js",
        "live/panes.js",
        "live/runs.js",
        "live/form.js",
        "live/shell.js",
    ),
    allowed="connect-src 'self'; frame-src 'self'; ",
)


PANE = replace(
    REPORT,
    styles=(*REPORT.styles, "live/live.css"),
    scripts=(*REPORT.scripts[:-1], "live/pane.js", REPORT.scripts[-1]),
)


PLANNED = Look(
    "live/planned.html",
    ("explorer.css", "live/live.css"),
    ("data.js", "theme.js", "live/planned.js"),
)


def policy(look: Look) -> str:
    """The policy of a page for the header, where it can also say who may show it in a frame."""
    who = "'none'" if look is SHELL else "'self'"
    return f"{policy_of(look)}; frame-ancestors {who}"


def shell(writer: Writer, limits: Limits, *, boot: str, token: str) -> str:
    """The page that a visitor opens."""
    document = {
        **_frame(writer),
        "mechanisms": list(writer.mechanisms),
        "chosen": list(writer.defaults),
        "boot": boot,
        "token": token,
        "limits": {"newTokens": limits.new_tokens},
        "plan": list(writer.notes) if isinstance(writer, PlannedWriter) else None,
    }
    return render(Payload(document, ()), SHELL)


def planned_pane(writer: PlannedWriter, run: LiveRun) -> str:
    """The page of a run under a plan, empty: its events fill it."""
    document = {**_frame(writer), "run": run.run_id, "prompt": run.request.prompt, "notes": list(writer.notes)}
    return render(Payload(document, ()), PLANNED)


def pane(writer: Writer, run: LiveRun) -> str:
    """The explorer of a run, empty: its events fill it."""
    keys = keys_of(run.request.mechanisms)
    unknown = [None] * len(run.request.mechanisms)
    data: dict[str, Any] = {
        "promptSteps": 0,
        "pieces": {"prompt": [[run.request.prompt, -1, 0, True]], "completion": []},
        **{name: [] for name in ("tokens", "positions", "logprob", "entropy")},
        "arrays": {key: i for i, key in enumerate(keys)},
        "means": {},
        "empty": "The model has not started yet.",
    }
    sample = {
        "id": run.run_id,
        "label": None,
        "promptTokens": 0,
        "steps": 0,
        "excerpt": "",
        "divergence": unknown,
        "logprob": None,
        "entropy": None,
        "data": data,
    }
    kinds = writer.kinds(run.request.mechanisms)
    view = OPENING if {"fitted", BASELINE} <= set(run.request.mechanisms) else {}
    document = {
        **_frame(writer),
        "mechanisms": list(run.request.mechanisms),
        "keys": list(keys),
        "about": [
            ["The model", f"{writer.name} is writing; what was measured and how is said here when it has ended."]
        ],
        "samples": [sample],
        "opening": opening_view(kinds, view),
        "kinds": kinds,
        "headline": _before_run(writer, calibrated=kinds is not None),
        "groups": [],
        "dynamics": {"reason": "entropies are computed when the run ends"},
        "shapes": [],
        "live": {"run": run.run_id, "sample": SAMPLE, "keys": list(keys)},
    }
    return render(Payload(document, ()), PANE)


def _before_run(writer: Writer, *, calibrated: bool) -> str:
    """What the page of a run opens with until the run has ended."""
    if calibrated and writer.sufficiency is not None:
        return writer.sufficiency.sentence
    return UNMEASURED if writer.calibrated else NOT_CALIBRATED


def _frame(writer: Writer) -> dict[str, Any]:
    layout = writer.layout
    return {
        "softgap": __version__,
        "title": writer.name,
        "model": writer.name,
        "layers": list(layout.layers),
        "headsPerLayer": list(layout.heads_per_layer),
        "kvGroup": layout.kv_group.tolist(),
    }


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
            return JSONResponse({"error": f"at most {self._limits.streams} pages may be connected; close one"}, 503)
        boot, _, number = last.partition(".")
        after = (whole_number(number) or 0) if boot == self._boot else 0
        # Counted here and not where the stream begins: many may be asked for before the first one does.
        news = asyncio.Event()
        self._waiting.add(news)
        events = self._send_events(queue, studies, runs, after, news)
        return _EventStream(events, lambda: self._waiting.discard(news))

    async def _send_events(
        self, queue: Queue, studies: Studies, runs: Sequence[str], after: int, news: asyncio.Event
    ) -> AsyncIterator[str]:
        sent: tuple[int, list[str]] | None = None
        yield f"retry: {_RETRY_MILLISECONDS}\n" + _event("hello", json.dumps({"boot": self._boot}))
        while not self._closing():
            news.clear()
            version, listed = queue.snapshot()
            names = studies.names()
            if (version, names) != sent:
                sent = version, names
                yield _event("runs", json.dumps({"runs": listed, "studies": names}))
            for _, event in queue.events(runs, after):
                after = event.number
                yield _event(event.kind, event.data, f"{self._boot}.{event.number}")
            try:
                await asyncio.wait_for(news.wait(), _QUIET_SECONDS)
            except TimeoutError:
                yield ":\n\n"


class _EventStream(StreamingResponse):
    """A stream that says when it is over, also where its reader has gone before it began."""

    def __init__(self, events: AsyncIterator[str], over: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._over()


def _event(kind: str, data: str, number: str = "") -> str:
    # JSON has no line break of its own, so an event is always one line of data.
    return f"{f'id: {number}' + chr(10) if number else ''}event: {kind}\ndata: {data}\n\n"


# A report has a policy of its own in its head; this one takes it away from our origin as well.
_REPORT_POLICY = "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"


_CHUNK = 2**16


def create_app(
    writer: Writer,
    studies: Studies,
    limits: Limits,
    names: tuple[str, ...],
    *,
    access: str | None = None,
    started: Callable[[], None] = lambda: None,
    closing: Callable[[], bool] = lambda: False,
) -> Guard:
    """The whole server as an ASGI application.

    Parameters
    ----------
    names
        What a Host header may say; see ``softgap.report.live.requests.allowed_names``.
    access
        The token without which nothing is answered; None for a server that only this machine can reach.
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
            Route("/anatomy", addresses.anatomy, methods=["POST"]),
            Route("/runs/{run_id}", addresses.pane),
            Route("/runs/{run_id}/stop", addresses.stop, methods=["POST"]),
            Route("/studies/{name}", addresses.study),
            Route("/studies/{name}/report.html", addresses.report),
            Route("/studies/{name}/minus/{other}", addresses.difference),
            Route("/studies/{name}/study.zip", addresses.zipped),
        ],
        lifespan=lifespan,
        exception_handlers={SoftgapError: _refused, HTTPException: _missing, ClientDisconnect: _gone},
    )
    return Guard(app, names, token, limits, None if access is None else Access(f"softgap-{boot}", access))


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
        body, known = await _body(request, self._limits.request_bytes), self._writer.mechanisms
        run_requests = parse_requests(body, known, self._limits, measured=not isinstance(self._writer, PlannedWriter))
        for run_request in run_requests:
            await run_in_threadpool(self._writer.check, run_request, self._limits)
        return JSONResponse({"runs": self._queue.add(run_requests)}, 202)

    async def pane(self, request: Request) -> Response:
        """The explorer of a run."""
        run = self._queue.run(request.path_params["run_id"])
        if isinstance(self._writer, PlannedWriter):
            content, look = planned_pane(self._writer, run), PLANNED
        else:
            content, look = pane(self._writer, run), PANE
        return HTMLResponse(content, headers={"Content-Security-Policy": policy(look)})

    async def anatomy(self, request: Request) -> Response:
        """The keys that a head attends to in a saved sample."""
        wanted = parse_anatomy_request(await _body(request, self._limits.request_bytes))
        if isinstance(self._writer, PlannedWriter):
            raise ValueInputError("a model under a plan shows no heads; start softgap serve without --plan")
        study = await run_in_threadpool(self._studies.opened, wanted.study)
        heads = await run_in_threadpool(self._writer.anatomy, study, wanted.sample, wanted.head)
        return JSONResponse({"heads": heads})

    async def stop(self, request: Request) -> Response:
        """End a run."""
        self._queue.stop(request.path_params["run_id"])
        return JSONResponse({}, 202)

    async def study(self, request: Request) -> Response:
        """The report on a saved study."""
        content = await run_in_threadpool(self._studies.html, request.path_params["name"])
        return HTMLResponse(content, headers={"Content-Security-Policy": _REPORT_POLICY})

    async def difference(self, request: Request) -> Response:
        """The difference between two saved studies."""
        names = request.path_params["other"], request.path_params["name"]
        content = await run_in_threadpool(self._studies.difference, *names)
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
            raise HTTPException(413, f"a request may have at most {most:,} bytes; shorten the prompt")
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


async def _gone(request: Request, error: Exception) -> Response:
    """For nobody: a request whose sender has gone, or was too slow, is no error of ours to write about."""
    return Response(status_code=400)


async def _missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 500)
    sentence = getattr(error, "detail", "") if status not in (404, 405) else "nothing exists at this address"
    return JSONResponse({"error": sentence}, status)

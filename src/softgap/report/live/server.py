"""Listening: an address that is free, and a server on it until somebody ends it."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from softgap.errors import UnsupportedError, ValueInputError
from softgap.linearize import Plan
from softgap.models.loading import Loaded
from softgap.report.live.requests import Limits

__all__ = ["bind_socket", "require_server", "serve"]

_LATE_SECONDS = 3


def require_server() -> None:
    """Refuse early where the packages of the extra are missing."""
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise UnsupportedError(
            f"the live explorer needs the package {error.name}; install it with: pip install 'softgap[serve]'"
        ) from error
    del starlette, uvicorn


def bind_socket(host: str, port: int) -> socket.socket:
    """A socket at this address; port 0 takes any that is free."""
    if not 0 <= port <= 65535:
        raise ValueInputError(f"--port must be from 0 to 65535, got {port}; 0 chooses a free port")
    if not host.strip():
        raise ValueInputError(f"--host must be an address of this machine, got '{host}'; leave --host out")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
            # Before the model is loaded, so that nobody else takes the port meanwhile.
            listening.listen()
        except OSError:
            listening.close()
            raise
    except (socket.gaierror, UnicodeError) as error:
        raise UnsupportedError(
            f"'{host}' is not an address of this machine ({getattr(error, 'strerror', error)}); leave --host out"
        ) from error
    except OSError as error:
        remedy = "leave --port out to use a free port" if port else "leave --host out"
        raise UnsupportedError(f"cannot listen at {host}:{port}: {error.strerror or error}; {remedy}") from error
    return listening


def serve(
    load: Callable[[], Loaded],
    studies: str | Path = "runs",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    limits: Limits | None = None,
    plan: tuple[Plan, str] | None = None,
    started: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve the live explorer of a model until it is interrupted.

    Parameters
    ----------
    load
        Gives the model and its tokenizer, once the address is known to be free.
    studies
        Folder that runs are saved to and studies are opened from.
    host, port
        Where to listen; port 0 takes one that is free. Where other machines can reach the address, every request must
        bring a token, which is part of the address that ``started`` is called with.
    plan
        A plan to run the model under, and the name of its file; heads are not measured then.
    started
        Called with the address once pages can be opened.
    """
    require_server()
    import uvicorn

    from softgap.report.live.planned import PlannedWriter
    from softgap.report.live.requests import allowed_names, is_loopback
    from softgap.report.live.routes import create_app
    from softgap.report.live.runs import Studies
    from softgap.report.live.writer import Writer

    limits = limits or Limits()
    folder = Studies.at(Path(studies).expanduser(), limits)
    with bind_socket(host, port) as listening:
        writer = Writer.of(load()) if plan is None else PlannedWriter.under(load(), *plan)
        names = allowed_names(host, socket.gethostname())
        access = None if is_loopback(host) else secrets.token_urlsafe(24)
        server: uvicorn.Server | None = None
        app = create_app(
            writer,
            folder,
            limits,
            names,
            access=access,
            started=lambda: started(_address(host, listening, access)),
            closing=lambda: server is not None and server.should_exit,
        )
        config = uvicorn.Config(
            app,
            http=_prompt_protocol(limits.request_seconds),
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            limit_concurrency=limits.connections,
            timeout_graceful_shutdown=_LATE_SECONDS,
        )
        server = uvicorn.Server(config)
        server.run(sockets=[listening])


def _prompt_protocol(seconds: float) -> type[asyncio.Protocol]:
    """HTTP/1.1 by uvicorn, which closes a connection whose request has not arrived whole after so many seconds."""
    from uvicorn.protocols.http import h11_impl

    # Waiting for the head of a request, and for its body.
    h11: Any = vars(h11_impl)["h11"]  # a requirement of uvicorn's, and none of ours
    arriving = (h11.IDLE, h11.SEND_BODY)

    class PromptProtocol(h11_impl.H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._deadline = self.loop.call_later(seconds, transport.close)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            waiting = self.conn.their_state in arriving
            if waiting and self._deadline is None:
                self._deadline = self.loop.call_later(seconds, self.transport.close)
            elif not waiting:
                self._forget_deadline()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_deadline()
            super().connection_lost(exc)

        def _forget_deadline(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return PromptProtocol


def _address(host: str, listening: socket.socket, access: str | None) -> str:
    port = listening.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}/" + ("" if access is None else f"?token={access}")

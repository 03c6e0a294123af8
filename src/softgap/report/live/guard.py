"""What every request must be before any of our code sees it.

A browser is the visitor we have, and other pages in it are who might misuse us. A page under a name that was made to
point here (DNS rebinding) sends that name as Host; a page of another origin says so in Origin and Sec-Fetch-Site, and
cannot read our pages, so it does not know the token.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from softgap.report.live.limits import Limits

__all__ = ["TOKEN_HEADER", "Guard", "allowed_names", "refusal"]

TOKEN_HEADER = "x-softgap-token"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
# For what has no page's own policy.
_NOTHING = "default-src 'none'; frame-ancestors 'none'"


def allowed_names(host: str, machine: str) -> tuple[str, ...]:
    """Names that a Host header may have where the server listens at ``host``; "*" stands for any address of numbers."""
    if _is_loopback(host):
        return _LOCAL
    wildcard = host in ("0.0.0.0", "::", "")
    return (*_LOCAL, machine.lower(), *(("*",) if wildcard else (host.lower(),)))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Guard:
    """Refuses what is not ours, and closes every answer against misuse.

    Attributes
    ----------
    names
        See :func:`allowed_names`.
    token
        That every request which changes something must carry.
    """

    app: ASGIApp
    names: Sequence[str]
    token: str
    limits: Limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def closed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", _NOTHING)
            await send(message)

        wrong = refusal(scope["method"], scope["path"], Headers(scope=scope), self.names, self.token, self.limits)
        if wrong is not None:
            await _answer(closed, *wrong)
            return
        await self.app(scope, receive, closed)


def refusal(
    method: str, path: str, headers: Headers, names: Sequence[str], token: str, limits: Limits
) -> tuple[int, str] | None:
    """Status and sentence, or None for a request that may pass."""
    host = headers.get("host", "")
    if not _known(_without_port(host), names):
        return 421, "this server answers to its own address only; open the address that softgap serve has printed"
    if method not in ("GET", "HEAD", "POST"):
        return 405, f"only GET and POST are understood, got {method[:16]}"
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "requests from other pages are not accepted"
    # Coming to the first page from a link elsewhere is fine; everything else is asked for by our own pages.
    if site is not None and site not in ("same-origin", "none") and not (method != "POST" and path == "/"):
        return 403, "requests from other pages are not accepted"
    if method != "POST":
        return None
    if not secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), token.encode()):
        return 403, "the token is missing or of an earlier server; reload the page"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "a request must be application/json"
    length = headers.get("content-length", "")
    if not length.isdigit():
        return 411, "a request must say its length"
    if int(length) > limits.request_bytes:
        return 413, f"a request may have {limits.request_bytes:,} bytes, got {int(length):,}; shorten the prompt"
    return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _known(name: str, names: Sequence[str]) -> bool:
    if name in names:
        return True
    if "*" not in names:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # Whatever body was on its way is not read.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

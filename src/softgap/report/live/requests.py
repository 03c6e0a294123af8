"""Requests to the live server: who may send them, how much they may ask, and what they must hold."""

from __future__ import annotations

import ipaddress
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from softgap.attention import resolve
from softgap.errors import ValueInputError, unknown_name
from softgap.probe.capture import COLDEST
from softgap.trajectories.anatomy import parse_heads
from softgap.trajectories.validation import BASELINE

__all__ = [
    "Access",
    "AnatomyRequest",
    "Guard",
    "Limits",
    "RunRequest",
    "allowed_names",
    "is_loopback",
    "parse_anatomy_request",
    "parse_requests",
    "refusal",
    "whole_number",
]


@dataclass(frozen=True)
class Limits:
    """What is refused beyond; every refusal says its number.

    Attributes
    ----------
    request_bytes
        Of the body of one request.
    prompt_tokens, new_tokens
        Of one run.
    prompts
        That one request may send, to be compared.
    mechanisms
        That one run may be compared with, the control aside.
    queue
        Runs that may wait.
    runs
        Runs held in memory; older ones that are over are let go, and stay in the folder of studies.
    streams
        Connections that are told what happens.
    connections
        Of any kind, at the same time.
    studies
        Listed, the newest first.
    zip_bytes
        Of a study that may be downloaded.
    request_seconds
        That a request may take to arrive whole; a connection that is slower is closed.
    """

    request_bytes: int = 64 * 1024
    prompt_tokens: int = 2000
    new_tokens: int = 1000
    prompts: int = 2
    mechanisms: int = 4
    queue: int = 6
    runs: int = 12
    streams: int = 24
    connections: int = 96
    studies: int = 200
    zip_bytes: int = 2**30
    request_seconds: float = 5.0


_FIELDS = ("prompts", "mechanisms", "max_new_tokens", "temperature", "seed")


_GREATEST_SEED = 2**32 - 1


_HOTTEST = 10.0


@dataclass(frozen=True)
class RunRequest:
    """One generation.

    Attributes
    ----------
    mechanisms
        The control is among them; none where nothing is measured.
    temperature
        None for greedy search.
    """

    prompt: str
    mechanisms: tuple[str, ...]
    max_new_tokens: int
    temperature: float | None
    seed: int

    def to_json(self) -> dict[str, Any]:
        """As a page shows it."""
        return {
            "prompt": self.prompt,
            "mechanisms": list(self.mechanisms),
            "maxNewTokens": self.max_new_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }


def parse_requests(body: bytes, known: Sequence[str], limits: Limits, *, measured: bool = True) -> list[RunRequest]:
    """The generations that a request asks for, one per prompt; ``known`` are the mechanisms at hand."""
    document = _document(body)
    for name in document:
        if name not in _FIELDS:
            raise unknown_name("field of a request", name, _FIELDS)
    length = _whole("max_new_tokens", document.get("max_new_tokens", 128), 1, limits.new_tokens)
    temperature = _temperature(document.get("temperature"))
    seed = document.get("seed")
    number = _whole("seed", 0 if seed is None else seed, 0, _GREATEST_SEED)
    mechanisms = _mechanisms(document.get("mechanisms"), known, limits) if measured else ()
    if not measured and document.get("mechanisms"):
        raise ValueInputError("a server under a plan compares with no mechanisms; leave mechanisms out")
    return [
        RunRequest(prompt, mechanisms, length, temperature, number)
        for prompt in _prompts(document.get("prompts"), limits)
    ]


@dataclass(frozen=True)
class AnatomyRequest:
    """A look into one head of a sample of a saved study."""

    study: str
    sample: str
    head: str


def parse_anatomy_request(body: bytes) -> AnatomyRequest:
    """What a page asks of one head: the fields study, sample and head, all of them texts."""
    document = _document(body)
    fields = ("study", "sample", "head")
    for name in document:
        if name not in fields:
            raise unknown_name("field of a request", name, fields)
    values = {name: document.get(name) for name in fields}
    for name, value in values.items():
        if not isinstance(value, str) or not value:
            raise ValueInputError(f"{name} must be a text, got {value!r}")
    heads = parse_heads(str(values["head"]))
    if len(heads) > 1:
        raise ValueInputError(f"head must name one head, such as 18.8, got '{values['head']}'")
    return AnatomyRequest(str(values["study"]), str(values["sample"]), ".".join(map(str, heads[0])))


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueInputError(f"a request must be JSON ({error})") from error
    if not isinstance(document, dict):
        raise ValueInputError(f"a request must be a JSON object, got {type(document).__name__}")
    return document


def _prompts(prompts: Any, limits: Limits) -> list[str]:
    if not isinstance(prompts, list) or not 1 <= len(prompts) <= limits.prompts:
        count = len(prompts) if isinstance(prompts, list) else 0
        raise ValueInputError(f"prompts must be a list of 1 to {limits.prompts} texts, got {count}")
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueInputError("a prompt must contain text, got none; write a prompt")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueInputError(
                f"a prompt must be valid Unicode, got an unpaired surrogate at {error.start}"
            ) from error
    return prompts


def _mechanisms(names: Any, known: Sequence[str], limits: Limits) -> tuple[str, ...]:
    listed = ["elu1"] if names is None else names
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise ValueInputError("mechanisms must be a list of names")
    mechanisms = [name for name in dict.fromkeys(_known_label(name, known) for name in listed) if name != BASELINE]
    if len(mechanisms) > limits.mechanisms:
        raise ValueInputError(
            f"a run is compared with at most {limits.mechanisms} mechanisms besides {BASELINE}, got {len(mechanisms)}; "
            "choose fewer"
        )
    return (*mechanisms, BASELINE)


def _known_label(name: str, known: Sequence[str]) -> str:
    """The name of a mechanism at hand; a window or a hybrid may have other numbers than the one on offer."""
    if name in known or name == BASELINE:
        return name
    if name.partition(":")[0] in {label.partition(":")[0] for label in known if ":" in label}:
        return resolve(name).label
    raise unknown_name("mechanism", name, known)


def _temperature(value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not COLDEST <= value <= _HOTTEST:
        raise ValueInputError(
            f"temperature must be from {COLDEST:g} to {_HOTTEST:g}, got {value!r}; leave it empty for greedy decoding"
        )
    return float(value)


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueInputError(f"{name} must be a whole number from {least} to {most:,}, got {value!r}")
    return value


TOKEN_HEADER = "x-softgap-token"


_LONGEST_NUMBER = 15


def whole_number(text: str) -> int | None:
    """The number that these digits write; None for anything else, such as superscript digits or thousands of them."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER else None


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
    if is_loopback(host):
        return _LOCAL
    wildcard = host in ("0.0.0.0", "::", "")
    return (*_LOCAL, machine.lower(), *(("*",) if wildcard else (host.lower(),)))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
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
        See ``allowed_names``.
    token
        That every request which changes something must carry.
    access
        Where other machines can reach the server: what every request must show, in its address or in a cookie.
    """

    app: ASGIApp
    names: Sequence[str]
    token: str
    limits: Limits
    access: Access | None = None

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
        if self.access is not None and not self.access.shown_in_cookie(Headers(scope=scope)):
            if not self.access.shown_in_address(scope["query_string"]):
                await _answer(closed, 403, _NO_ACCESS)
            else:
                await _move(closed, scope["path"], self.access.cookie)
            return
        await self.app(scope, receive, closed)


_NO_ACCESS = (
    "this server answers only to whoever has its token; open the whole address that softgap serve printed, ?token= "
    "included"
)


@dataclass(frozen=True)
class Access:
    """The token of a server that other machines can reach.

    Attributes
    ----------
    name
        Of the cookie: another one for each server, since cookies do not tell ports apart.
    token
        The secret.
    """

    name: str
    token: str

    @property
    def cookie(self) -> str:
        """What a browser is told to keep, away from scripts and from other sites."""
        return f"{self.name}={self.token}; HttpOnly; SameSite=Strict; Path=/"

    def shown_in_address(self, query: bytes) -> bool:
        """Whether the query of an address holds the token."""
        return self._is_token(next(iter(parse_qs(query.decode("latin-1")).get("token", [])), ""))

    def shown_in_cookie(self, headers: Headers) -> bool:
        """Whether a request brings the cookie."""
        pairs = (pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";"))
        return any(name == self.name and self._is_token(value) for name, _, value in pairs)

    def _is_token(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.token.encode())


def refusal(
    method: str, path: str, headers: Headers, names: Sequence[str], token: str, limits: Limits
) -> tuple[int, str] | None:
    """Status and sentence, or None for a request that may pass."""
    host = headers.get("host", "")
    if not _is_known(_without_port(host), names):
        return 421, "this server answers only at its own address; open the address that softgap serve printed"
    if method not in ("GET", "HEAD", "POST"):
        return 405, f"the method must be GET or POST, got {method[:16]}"
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return 403, "requests from other pages are not allowed"
    # Coming to the first page from a link elsewhere is fine; everything else is asked for by our own pages.
    if site is not None and site not in ("same-origin", "none") and not (method != "POST" and path == "/"):
        return 403, "requests from other pages are not allowed"
    if method != "POST":
        return None
    if not secrets.compare_digest(headers.get(TOKEN_HEADER, "").encode(), token.encode()):
        return 403, "the token is missing or belongs to an earlier server; reload the page"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "the content type of a request must be application/json"
    length = whole_number(headers.get("content-length", ""))
    if length is None:
        return 411, "a request must have a Content-Length header"
    if length > limits.request_bytes:
        return (
            413,
            f"a request may have at most {limits.request_bytes:,} bytes, got {length:,}; shorten the prompt",
        )
    return None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_known(name: str, names: Sequence[str]) -> bool:
    if name in names:
        return True
    if "*" not in names:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _move(send: Send, path: str, cookie: str) -> None:
    """Send a browser to the same place without the token in its address, where histories and pictures would show it."""
    # From the root: two slashes at the start would name another machine.
    place = "/" + quote(path.lstrip("/"))
    headers = [(b"location", place.encode()), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 303, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _answer(send: Send, status: int, sentence: str) -> None:
    body = json.dumps({"error": sentence}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    # Whatever body was on its way is not read.
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

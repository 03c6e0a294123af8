"""A real server, started through the command line, and ways to talk to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Frame, Page

from support.cli_examples import SCRIPT
from support.explorer_examples import settle
from support.ray_cluster import end_with_parent

# Generous: other work may share the machine.
PATIENCE = 120


@dataclass
class Live:
    """A server under test."""

    address: str
    studies: Path
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.address.partition("/?")[0].rstrip("/").rpartition(":")[2])

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Plain HTTP, the path exactly as given."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.putrequest(method, path, skip_host="Host" in (headers or {}), skip_accept_encoding=True)
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            if body is not None and "Content-Length" not in (headers or {}):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def token(self) -> str:
        """As a page of ours knows it."""
        found = re.search(rb'"token":"([^"]+)"', self.request("GET", "/")[2])
        assert found is not None
        return found[1].decode()

    def post(self, path: str, values: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """What our own page would send."""
        body = values if isinstance(values, bytes) else json.dumps(values).encode()
        given = {"Content-Type": "application/json", "X-Softgap-Token": self.token(), **headers}
        status, _, answer = self.request("POST", path, body, given)
        return status, json.loads(answer)

    def runs(self) -> list[dict[str, Any]]:
        """The list of runs, as the stream tells it first."""
        return list(next(data for kind, _, data in self.events() if kind == "runs")["runs"])

    def events(self, *runs: str, last: str = "") -> Generator[tuple[str, str, dict[str, Any]], None, None]:
        """Kind, identifier and data of what the stream tells, until the caller has enough."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        query = "&".join(f"run={run}" for run in runs)
        connection.request("GET", f"/events?{query}", headers={"Last-Event-ID": last} if last else {})
        answer = connection.getresponse()
        assert answer.status == 200
        try:
            entry: dict[str, str] = {}
            for raw in answer:
                line = raw.decode().rstrip("\n")
                if line:
                    name, _, value = line.partition(": ")
                    entry[name] = value
                elif "event" in entry:
                    yield entry["event"], entry.get("id", ""), json.loads(entry["data"])
                    entry = {}
        finally:
            connection.close()

    def until_idle(self) -> None:
        """Stop whatever runs or waits, and wait for it."""
        for run in reversed(self.runs()):
            if run["state"] in ("waiting", "running"):
                self.post(f"/runs/{run['id']}/stop", {})
        waited(lambda: all(run["state"] in ("finished", "stopped", "failed") for run in self.runs()))


def waited(condition: Any) -> None:
    """Wait until something is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)


@contextmanager
def served(folder: Path, *options: str, port: int = 0) -> Iterator[Live]:
    """``softgap serve`` in a process of its own, ended by Ctrl-C."""
    studies = folder / "runs"
    command = [str(SCRIPT), "serve", "--studies", str(studies), "--port", str(port), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=end_with_parent,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            lines = [process.stdout.readline().strip() for _ in range(2)]
            if not lines[1].startswith("http://"):
                raise AssertionError(f"no address in {lines}: {process.stderr.read()}")
            yield Live(lines[1], studies, process)
        finally:
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and the patience for what it has to save."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


@contextmanager
def context(browser: Browser, problems: list[str], **options: Any) -> Iterator[BrowserContext]:
    """A window whose pages may not do anything wrong."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True, **options})
    made.add_init_script(
        "addEventListener('securitypolicyviolation',"
        " (e) => console.error(`policy: ${e.violatedDirective} ${e.blockedURI} ${e.sample}`));"
    )
    try:
        yield made
        assert problems == []
    finally:
        made.close()


def visit(made: BrowserContext, live: Live, problems: list[str], fragment: str = "") -> Page:
    """The live page, ready."""
    page = made.new_page()
    page.set_default_timeout(1000 * PATIENCE)
    page.on("console", lambda said: _note(problems, said.type, said.text))
    page.on("pageerror", lambda error: problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda asked: (
            None if asked.url.startswith((live.address, "data:", "blob:")) else problems.append(f"network: {asked.url}")
        ),
    )
    page.goto(live.address + fragment)
    page.wait_for_selector("html[data-ready]", state="attached")
    return page


def _note(problems: list[str], kind: str, text: str) -> None:
    # A browser notes every refusal, and the page shows it in words; what is missing (404) would be our mistake.
    if kind == "error" and not any(f"status of {status} " in text for status in (400, 413)):
        problems.append(f"{kind}: {text}")


def generate(page: Page, prompt: str, length: int, second: str = "") -> None:
    """Fill in the form and send it."""
    page.locator("#prompt").fill(prompt)
    page.locator("#length").fill(str(length))
    if second:
        page.get_by_text("Compare with a second prompt").click()
        page.locator("#second").fill(second)
    before = page.evaluate("location.hash")
    page.locator("#generate").click()
    # The address names the runs that are shown: until it changes, panes are those of earlier runs.
    waited(lambda: page.evaluate("location.hash") != before)


def pane(page: Page, index: int = 0) -> Frame:
    """The explorer of a run inside the page, ready."""
    page.locator("iframe").nth(index).wait_for()
    handle = page.locator("iframe").nth(index).element_handle()
    frame = handle.content_frame()
    assert frame is not None
    frame.wait_for_selector("html[data-ready]", state="attached")
    return frame


def steps(frame: Frame, at_least: int = 1) -> int:
    """Tokens that a pane shows, once there are some."""
    # Not wait_for_function, which evaluates text in the page, and the page's policy forbids that.
    waited(lambda: frame.evaluate("SAMPLE.steps") >= at_least)
    return int(frame.evaluate("SAMPLE.steps"))


def ended(frame: Frame) -> str:
    """How a run ended, once it has and is drawn."""
    frame.wait_for_selector("html[data-ended]", state="attached")
    settle(frame.page)
    frame.page.wait_for_timeout(250)
    return str(frame.evaluate("document.documentElement.dataset.ended"))

"""The live server over plain HTTP: its stream, and everything it must refuse."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import os
import re
import socket
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from softgap.kinds import NOT_CALIBRATED
from softgap.report.live.requests import _move
from support.cli_examples import tiny_folder
from support.explorer_examples import save_study, story
from support.kind_examples import calibrated_folder
from support.live_examples import Live, served, waited

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "runs").mkdir()
    (folder / "secret.txt").write_text("secret")
    save_study(folder / "runs" / "saved", [story(steps=4)])
    linked = save_study(folder / "runs" / "linked", [story(steps=4)])
    (linked / "notes.txt").symlink_to(folder / "secret.txt")
    save_study(folder / "outside", [story(steps=4)])
    (folder / "runs" / "away").symlink_to(folder / "outside")
    with served(folder, "--model", str(tiny_folder(folder / "tiny"))) as started:
        yield started


def ask(live: Live, **changes: object) -> str:
    status, answer = live.post("/runs", {"prompts": ["hello"], "max_new_tokens": 5, **changes})
    assert status == 202
    return str(answer["runs"][0])


@pytest.mark.slow
def test_a_calibrated_model_opens_with_kinds_and_ends_with_the_share_of_the_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTGAP_CALIBRATIONS", str(tmp_path / "calibrations"))
    with served(tmp_path, "--model", str(calibrated_folder(tmp_path / "tiny"))) as live:
        run = ask(live, mechanisms=["elu1", "fitted"])
        end = next(data for kind, _, data in live.events(run) if kind == "end")
        assert end["headline"].startswith("Of 8 heads, 1 need only a constant")
        assert end["heldOut"].startswith("On this text a fitted linear attention closes")
        assert "On held-out text the calibration closes" in end["heldOut"]
        page = live.request("GET", f"/runs/{run}")[2]
        assert b'"opening":{"quantity":"kind","mechanism":"fitted","ranking":"gap"}' in page
        assert b'"labels":[2,5,3,4,0,1,2,2],"left":{"window":' in page
        plain = live.request("GET", f"/runs/{ask(live, mechanisms=['elu1'])}")[2]
        assert b'"opening":{},"kinds":null,"headline":"Measured without a calibrated mechanism' in plain
        assert b'"headline":"Of 8 heads, 1 need only a constant' in page


def test_a_stream_tells_a_run_from_its_beginning_and_after_what_was_seen(live: Live) -> None:
    run = ask(live)
    told = []
    for kind, identifier, data in live.events(run):
        if kind in ("begin", "step", "end"):
            told.append((kind, identifier, data))
        if kind == "end":
            break
    assert [kind for kind, _, _ in told] == ["begin", *["step"] * 5, "end"]
    assert told[-1][2]["state"] == "finished"
    assert told[-1][2]["headline"] == NOT_CALIBRATED
    assert told[-1][2]["heldOut"] == ""
    assert [data["step"] for kind, _, data in told if kind == "step"] == [4, 5, 6, 7, 8]
    seen = told[3][1]
    again = []
    for kind, identifier, _ in live.events(run, last=seen):
        if kind in ("begin", "step", "end"):
            again.append(identifier)
        if kind == "end":
            break
    assert again == [identifier for _, identifier, _ in told[4:]]
    # An identifier of another server says nothing: everything is told.
    first = next(kind for kind, _, _ in live.events(run, last="0123.9") if kind not in ("hello", "runs"))
    assert first == "begin"


def test_a_run_that_waits_can_be_taken_out(live: Live) -> None:
    status, answer = live.post("/runs", {"prompts": ["one", "two"], "max_new_tokens": 55})
    assert status == 202
    second = answer["runs"][1]
    live.post(f"/runs/{second}/stop", {})
    waited(lambda: next(run for run in live.runs() if run["id"] == second)["state"] in ("stopped", "finished"))
    live.until_idle()


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "169.254.0.1"])
def test_another_host_is_refused(live: Live, host: str) -> None:
    status, _, body = live.request("GET", "/", headers={"Host": host})
    assert status == 421
    assert b"answers only at its own address" in body
    assert b"token" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:9999", "[::1]:80"])
def test_its_own_names_are_served(live: Live, host: str) -> None:
    assert live.request("GET", "/", headers={"Host": host})[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"X-Softgap-Token": "wrong"}, 403),
        ({"X-Softgap-Token": ""}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Length": "70000"}, 413),
        ({"Content-Length": "x"}, 400),
    ],
    ids=str,
)
def test_a_post_of_another_page_is_refused(live: Live, headers: dict[str, str], status: int) -> None:
    given = {**JSON, "X-Softgap-Token": live.token(), **headers}
    before = len(live.runs())
    found, _, _ = live.request("POST", "/runs", b'{"prompts": ["hello"]}', given)
    assert found == status
    assert len(live.runs()) == before


@pytest.mark.parametrize("path", ["/events", "/studies/saved", "/studies/saved/study.zip", "/runs/x"])
def test_other_pages_cannot_read(live: Live, path: str) -> None:
    assert live.request("GET", path, headers={"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert live.request("GET", path, headers={"Origin": "http://evil.example"})[0] == 403


def test_a_body_longer_than_it_says_is_not_read(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as raw:
        head = (
            f"POST /runs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"X-Softgap-Token: {live.token()}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        raw.sendall(head.encode() + b"10000\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 411")


@pytest.mark.parametrize(
    "path",
    [
        "/studies/../secret.txt",
        "/studies/..%2fsecret.txt",
        "/studies/%2e%2e/secret.txt",
        "/studies/..%5csecret.txt",
        "/studies/%2fetc%2fpasswd",
        "/studies/../outside",
        "/studies/away",
        "/studies/..",
        "/studies/.",
        "/studies/saved/../../secret.txt",
        "/studies/saved/manifest.json",
        "/studies/saved%00",
        "/studies/away/study.zip",
        "/../secret.txt",
        "/secret.txt",
        "/assets/data.js",
    ],
)
def test_nothing_outside_the_folder_is_served(live: Live, path: str) -> None:
    status, _, body = live.request("GET", path)
    assert status in (400, 404)
    assert b"secret\n" not in body
    assert "error" in json.loads(body)


@pytest.mark.parametrize("file", ["", "/report.html", "/study.zip"])
def test_links_inside_a_study_are_not_followed(live: Live, file: str) -> None:
    status, _, body = live.request("GET", f"/studies/linked{file}")
    assert status == 400
    assert b"contains a symbolic link, which softgap does not follow" in body


def test_answers_are_closed_against_misuse(live: Live) -> None:
    run = ask(live)
    for path, policy in (
        ("/", "frame-ancestors 'none'"),
        (f"/runs/{run}", "frame-ancestors 'self'"),
        ("/studies/saved", "sandbox allow-scripts allow-downloads; frame-ancestors 'self'"),
        ("/nowhere", "default-src 'none'"),
    ):
        _, headers, _ = live.request("GET", path)
        assert policy in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert "server" not in headers
    _, headers, _ = live.request("GET", "/")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in headers["content-security-policy"]
    live.until_idle()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"{", "a request must be JSON"),
        (b"[]", "a request must be a JSON object, got list"),
        ({"prompts": []}, "prompts must be a list of 1 to 2 texts, got 0"),
        ({"prompts": ["a", "b", "c"]}, "prompts must be a list of 1 to 2 texts, got 3"),
        ({"prompts": [" "]}, "a prompt must contain text"),
        ({"prompts": [1]}, "a prompt must contain text"),
        (b'{"prompts": ["\\ud800"]}', "a prompt must be valid Unicode, got an unpaired surrogate at 0"),
        ({"prompts": ["a"], "max_new_tokens": 0}, "max_new_tokens must be a whole number from 1 to 1,000, got 0"),
        ({"prompts": ["a"], "max_new_tokens": 1001}, "from 1 to 1,000, got 1001"),
        ({"prompts": ["a"], "max_new_tokens": True}, "from 1 to 1,000, got True"),
        ({"prompts": ["a"], "max_new_tokens": 64}, "the model's context is 64 tokens, got 1 tokens and 64 new ones"),
        ({"prompts": ["a" * 3000]}, "a prompt may have at most 2,000 tokens here, got 3,000"),
        ({"prompts": ["a"], "temperature": 0}, "temperature must be from 0.001 to 10, got 0"),
        (b'{"prompts": ["a"], "temperature": NaN}', "temperature must be from 0.001 to 10, got nan"),
        ({"prompts": ["a"], "seed": -1}, "seed must be a whole number from 0 to 4,294,967,295, got -1"),
        ({"prompts": ["a"], "mechanisms": "elu1"}, "mechanisms must be a list of names"),
        ({"prompts": ["a"], "mechanisms": ["elu2"]}, "unknown mechanism 'elu2'; did you mean"),
        ({"prompts": ["a"], "mechanisms": ["fitted"]}, "unknown mechanism 'fitted'"),
        ({"prompts": ["a"], "mechanisms": ["elu1", "relu", "dpfp", "favor", "inline"]}, "at most 4 mechanisms"),
        ({"prompts": ["a"], "prompt": "b"}, "unknown field of a request 'prompt'; did you mean 'prompts'?"),
    ],
)
def test_bad_requests_get_a_sentence(live: Live, body: object, sentence: str) -> None:
    before = len(live.runs())
    status, answer = live.post("/runs", body)
    assert status == 400
    assert sentence in answer["error"]
    assert len(live.runs()) == before


def test_the_queue_has_an_end(live: Live) -> None:
    live.until_idle()
    refused = None
    for _ in range(12):
        status, answer = live.post("/runs", {"prompts": ["hello", "hello"], "max_new_tokens": 55})
        if status != 202:
            refused = status, answer["error"]
            break
    assert refused is not None
    assert refused[0] == 429
    assert "at most 6 runs may wait, and" in refused[1]
    live.until_idle()
    assert len(live.runs()) <= 12


def test_only_so_many_pages_may_watch(live: Live) -> None:
    streams = []
    try:
        for _ in range(24):
            stream = live.events()
            next(stream)
            streams.append(stream)
        status, _, body = live.request("GET", "/events")
        assert status == 503
        assert b"at most 24 pages may be connected" in body
        assert live.request("GET", "/")[0] == 200
    finally:
        for stream in streams:
            stream.close()
    waited(lambda: live.request("HEAD", "/")[0] == 200)


def test_streams_that_are_asked_for_at_once_are_counted_too(live: Live) -> None:
    connections = [socket.create_connection(("127.0.0.1", live.port), timeout=60) for _ in range(60)]
    try:
        for connection in connections:
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [connection.recv(20) for connection in connections]
        assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) == 24
        assert sum(answer.startswith(b"HTTP/1.1 503") for answer in answers) == 36
    finally:
        for connection in connections:
            connection.close()
    # Those that are gone count no more, whether or not their stream had begun.
    waited(lambda: watching(live) == 0)
    waited(lambda: first_bytes(live, "/events", {})[0] == 200)


def watching(live: Live) -> int:
    """How many streams are open, as the refusal of one more tells: 0 where 24 can be opened."""
    connections = [socket.create_connection(("127.0.0.1", live.port), timeout=60) for _ in range(24)]
    try:
        for connection in connections:
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return sum(connection.recv(20).startswith(b"HTTP/1.1 503") for connection in connections)
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("last", ["²", "9" * 5000, "-1", "1_0", "³7", ""])
def test_an_odd_last_event_is_none(live: Live, last: str) -> None:
    boot = next(data["boot"] for kind, _, data in live.events() if kind == "hello")
    status, _, stream = first_bytes(live, "/events", {"Last-Event-ID": f"{boot}.{last}"})
    assert status == 200
    assert b"event: hello" in stream


def first_bytes(live: Live, path: str, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and the first bytes of an answer that has no end."""
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=60)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read1(200)
    finally:
        connection.close()


@pytest.mark.parametrize("begun", ["", "GET / HT", "POST /runs HTTP/1.1\r\n{headers}\r\nContent-Length: 9\r\n\r\nab"])
def test_a_request_that_does_not_arrive_is_closed(live: Live, begun: str) -> None:
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nX-Softgap-Token: {live.token()}"
    sent = begun.format(headers=headers).encode()
    connections = [socket.create_connection(("127.0.0.1", live.port), timeout=30) for _ in range(30)]
    try:
        for connection in connections:
            connection.sendall(sent)
        assert live.request("GET", "/")[0] == 200
        start = time.monotonic()
        for connection in connections:
            while connection.recv(1000):
                pass  # a refusal may come before the end
        assert time.monotonic() - start < 25
    finally:
        for connection in connections:
            connection.close()


def test_a_server_for_other_machines_wants_its_token(tmp_path: Path) -> None:
    with served(tmp_path, "--model", str(tiny_folder(tmp_path / "tiny")), "--host", "0.0.0.0") as live:
        token = live.address.partition("?token=")[2]
        assert len(token) == 32
        for path in ("/", "/events", "/runs/x", "/studies/x", "/?token=", "/?token=wrong", f"/?token={token}x"):
            status, headers, body = live.request("GET", path)
            assert status == 403
            assert b"answers only to whoever has its token" in body
            assert token.encode() not in body
            assert b'"token"' not in body  # of the page, which changes need
            assert "set-cookie" not in headers
        status, headers, body = live.request("GET", f"/?token={token}")
        assert (status, headers["location"], body) == (303, "/", b"")
        assert headers["set-cookie"].endswith("; HttpOnly; SameSite=Strict; Path=/")
        cookie = {"Cookie": headers["set-cookie"].partition(";")[0]}
        status, _, page = live.request("GET", "/", headers=cookie)
        assert status == 200
        assert token.encode() not in page
        assert first_bytes(live, "/events", cookie)[0] == 200
        assert live.request("GET", "/", headers={"Cookie": cookie["Cookie"] + "x"})[0] == 403
        # A change needs both tokens.
        found = re.search(rb'"token":"([^"]+)"', page)
        assert found is not None
        sent = {"Content-Type": "application/json", "X-Softgap-Token": found[1].decode()}
        body = json.dumps({"prompts": ["hello"], "max_new_tokens": 2}).encode()
        assert live.request("POST", "/runs", body, sent)[0] == 403
        assert live.request("POST", "/runs", body, {**sent, **cookie})[0] == 202


def test_a_place_that_starts_with_two_slashes_is_ours(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    # In a thread of its own: a browser of another test may have left an event loop in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(_move(send, "//evil.example/\r\nx: y", "a=b"))).result()
    assert dict(sent[0]["headers"])[b"location"] == b"/evil.example/%0D%0Ax%3A%20y"


def test_runs_are_saved_and_downloaded(live: Live) -> None:
    run = ask(live, temperature=0.9, seed=5)
    waited(lambda: next(entry for entry in live.runs() if entry["id"] == run)["saved"])
    status, headers, body = live.request("GET", f"/studies/{run}/study.zip")
    assert status == 200
    assert headers["content-disposition"] == f'attachment; filename="{run}.zip"'
    assert f"{run}/manifest.json" in zipfile.ZipFile(io.BytesIO(body)).namelist()
    status, headers, body = live.request("GET", f"/studies/{run}/report.html")
    assert status == 200
    assert headers["content-disposition"] == f'attachment; filename="{run}.html"'
    assert b"softgap explorer" in body


def test_a_study_that_cannot_be_read_is_a_sentence(live: Live) -> None:
    folder = live.studies / "broken"
    folder.mkdir()
    (folder / "manifest.json").write_text("{")
    status, _, body = live.request("GET", "/studies/broken")
    assert status == 400
    assert "broken" in json.loads(body)["error"]
    newer = save_study(live.studies / "newer", [story(steps=3)])
    manifest = json.loads((newer / "manifest.json").read_text())
    key = next(name for name in manifest if "version" in name and isinstance(manifest[name], int))
    (newer / "manifest.json").write_text(json.dumps({**manifest, key: 99}))
    status, _, body = live.request("GET", "/studies/newer")
    assert status == 400
    assert "99" in json.loads(body)["error"]


def test_another_server_cannot_take_the_port(live: Live, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from support.cli_examples import failure

    sentence = failure(["serve", "--port", str(live.port), "--studies", str(tmp_path / "runs")], capsys)
    assert sentence.startswith(f"cannot listen at 127.0.0.1:{live.port}: ")
    assert sentence.endswith("leave --port out to use a free port")
    assert os.strerror(98) in sentence or "in use" in sentence


def test_windows_of_any_size_and_hybrids_are_measured(live: Live) -> None:
    run = ask(live, mechanisms=["window", "window:w=3,sinks=1", "elu1+window:w=3"])
    end = next(data for kind, _, data in live.events(run) if kind == "end")
    labels = ["window:w=60,sinks=4", "window:w=3,sinks=1", "elu1+window:w=3,sinks=4", "uniform"]
    assert end["state"] == "finished"
    page = live.request("GET", f"/runs/{run}")[2].decode()
    assert all(label in page for label in labels)
    assert "a window's w must be" in live.post("/runs", {"prompts": ["a"], "mechanisms": ["window:w=0"]})[1]["error"]

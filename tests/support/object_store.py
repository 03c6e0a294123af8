"""An object store of the tests: enough of Amazon's S3 protocol, in memory, for pyarrow's own S3 client.

Objects are whole or absent, there are no folders, and nothing can be renamed: what a study has to live with there.
`SOFTGAP_TEST_S3=http://host:port` runs the same tests against another server, such as `moto_server`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase, BytesIO
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.etree import ElementTree as xml

from pyarrow import fs

from softgap.trajectories.folder import Folder

__all__ = ["Bucket", "bucket_uri", "object_store", "stored"]

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_PAGE = 1000


@dataclass
class Bucket:
    """What a server holds: objects by key, and uploads in parts that are not complete yet."""

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def bucket_uri(server: str, bucket: str) -> str:
    """The URI of a new bucket on a server, with everything that pyarrow has to know of it."""
    host = server.removeprefix("http://")
    options = {"endpoint_override": host, "scheme": "http", "region": "us-east-1"}
    fs.S3FileSystem(access_key="a", secret_key="b", allow_bucket_creation=True, **options).create_dir(bucket)
    return f"s3://{bucket}/{{}}?" + "&".join(f"{name}={value}" for name, value in options.items())


def stored(uri: str) -> dict[str, bytes]:
    """Every object below a URI by its name there; without the markers that stand for folders."""
    folder = Folder.at(uri)
    found = folder.filesystem.get_file_info(fs.FileSelector(folder.root, recursive=True))
    names = [info.path.removeprefix(folder.root + "/") for info in found if info.type == fs.FileType.File]
    return {name: folder.read(name) for name in sorted(names)}


@contextmanager
def object_store() -> Iterator[str]:
    """The address of an object store that is there for the block."""
    given = os.environ.get("SOFTGAP_TEST_S3")
    if given:
        yield given
        return
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Requests)
    server.buckets = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Requests(BaseHTTPRequestHandler):
    """One connection; paths are /bucket/key, as a client asks that was given an address of its own."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._answer_object(body=False)

    def do_GET(self) -> None:
        if self._key:
            self._answer_object(body=True)
        elif self._bucket is not None:
            self._answer(200, _listing(self._bucket, self._query))
        else:
            self._refuse(404, "NoSuchBucket")

    def do_PUT(self) -> None:
        content, bucket = self._content(), self._bucket
        if not self._key:
            self._buckets.setdefault(self._bucket_name, Bucket())
            self._answer(200)
            return
        if bucket is None:
            self._refuse(404, "NoSuchBucket")
            return
        source = self.headers.get("x-amz-copy-source")
        if source is not None:
            self._copy(bucket, unquote(source))
            return
        upload = self._query.get("uploadId")
        with bucket.lock:
            if upload is None:
                bucket.objects[self._key] = content
            else:
                bucket.uploads[upload][int(self._query["partNumber"])] = content
        self._answer(200, headers={"ETag": _etag(content)})

    def do_POST(self) -> None:
        content, bucket = self._content(), self._bucket
        if bucket is None:
            self._refuse(404, "NoSuchBucket")
        elif "delete" in self._query:
            keys = [found.text or "" for found in xml.fromstring(content).iter(f"{{{_NAMESPACE}}}Key")]
            with bucket.lock:
                for key in keys:
                    bucket.objects.pop(key, None)
            self._answer(200, _document("DeleteResult", {}))
        elif "uploads" in self._query:
            upload = os.urandom(8).hex()
            bucket.uploads[upload] = {}
            names = {"Bucket": self._bucket_name, "Key": self._key, "UploadId": upload}
            self._answer(200, _document("InitiateMultipartUploadResult", names))
        else:
            with bucket.lock:
                parts = bucket.uploads.pop(self._query["uploadId"])
                whole = bucket.objects[self._key] = b"".join(parts[number] for number in sorted(parts))
            names = {"Bucket": self._bucket_name, "Key": self._key, "ETag": _etag(whole)}
            self._answer(200, _document("CompleteMultipartUploadResult", names))

    def do_DELETE(self) -> None:
        bucket = self._bucket
        if bucket is None:
            self._refuse(404, "NoSuchBucket")
            return
        with bucket.lock:
            if "uploadId" in self._query:
                bucket.uploads.pop(self._query["uploadId"], None)
            else:
                bucket.objects.pop(self._key, None)
        self._answer(204)

    @property
    def _buckets(self) -> dict[str, Bucket]:
        found: dict[str, Bucket] = self.server.buckets  # type: ignore[attr-defined]
        return found

    @property
    def _bucket_name(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[0]

    @property
    def _bucket(self) -> Bucket | None:
        return self._buckets.get(self._bucket_name)

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    @property
    def _query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    def _content(self) -> bytes:
        """The body, which a client may send in chunks of HTTP, of S3 with a checksum behind them, or of both."""
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = _joined(self.rfile)
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        signed = "aws-chunked" in self.headers.get("Content-Encoding", "")
        return _joined(BytesIO(body)) if signed else body

    def _answer_object(self, *, body: bool) -> None:
        bucket = self._bucket
        if bucket is None:
            self._refuse(404, "NoSuchBucket", body=body)
            return
        content = bucket.objects.get(self._key) if self._key else b""
        if content is None:
            self._refuse(404, "NoSuchKey", body=body)
            return
        headers = {"ETag": _etag(content), "Last-Modified": formatdate(usegmt=True), "Accept-Ranges": "bytes"}
        status, wanted = 200, self.headers.get("Range")
        if wanted is not None and content:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        self._answer(status, content, headers, body=body)

    def _copy(self, bucket: Bucket, source: str) -> None:
        name, _, key = source.lstrip("/").partition("/")
        content = self._buckets[name].objects.get(key)
        if content is None:
            self._refuse(404, "NoSuchKey")
            return
        with bucket.lock:
            bucket.objects[self._key] = content
        changed = {"LastModified": "2026-01-01T00:00:00.000Z", "ETag": _etag(content)}
        self._answer(200, _document("CopyObjectResult", changed))

    def _refuse(self, status: int, code: str, *, body: bool = True) -> None:
        self._content()
        self._answer(status, _document("Error", {"Code": code, "Message": code}, namespace=False), body=body)

    def _answer(
        self, status: int, content: bytes = b"", headers: Mapping[str, str] | None = None, *, body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/xml", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


def _joined(stream: BufferedIOBase) -> bytes:
    """Chunks without the lines before and the trailer behind them."""
    pieces = []
    while size := int(stream.readline().partition(b";")[0], 16):
        pieces.append(stream.read(size))
        stream.readline()
    while stream.readline().strip():
        pass
    return b"".join(pieces)


def _listing(bucket: Bucket, query: Mapping[str, str]) -> bytes:
    """ListObjectsV2: keys below a prefix in order; what lies behind a delimiter only as a common prefix."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    most = min(int(query.get("max-keys", _PAGE)), _PAGE)
    after = query.get("continuation-token") or query.get("start-after", "")
    with bucket.lock:
        sizes = {key: len(content) for key, content in bucket.objects.items() if key.startswith(prefix)}
    entries: dict[str, int | None] = {}
    for key in sorted(sizes):
        head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        entries[prefix + head + cut if cut else key] = None if cut else sizes[key]
    left = [name for name in entries if name > after]
    shown = left[:most]
    document = _document(
        "ListBucketResult",
        {
            "Prefix": prefix,
            "KeyCount": str(len(shown)),
            "MaxKeys": str(most),
            "IsTruncated": str(len(left) > most).lower(),
            **({"NextContinuationToken": shown[-1]} if len(left) > most else {}),
        },
    )
    root = xml.fromstring(document)
    for name in shown:
        size = entries[name]
        entry = xml.SubElement(root, f"{{{_NAMESPACE}}}{'CommonPrefixes' if size is None else 'Contents'}")
        facts = {"Prefix": name} if size is None else {"Key": name, "Size": str(size), "ETag": '"x"'}
        if size is not None:
            facts["LastModified"] = "2026-01-01T00:00:00.000Z"
        for tag, text in facts.items():
            xml.SubElement(entry, f"{{{_NAMESPACE}}}{tag}").text = text
    return _bytes(root)


def _document(name: str, facts: Mapping[str, str], *, namespace: bool = True) -> bytes:
    space = f"{{{_NAMESPACE}}}" if namespace else ""
    root = xml.Element(f"{space}{name}")
    for tag, text in facts.items():
        xml.SubElement(root, f"{space}{tag}").text = text
    return _bytes(root)


def _bytes(root: xml.Element) -> bytes:
    xml.register_namespace("", _NAMESPACE)
    return bytes(xml.tostring(root, encoding="utf-8", xml_declaration=True))


def _etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'

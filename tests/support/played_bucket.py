"""A server of objects, as S3, Google Cloud Storage and Azure Blob Storage are asked for them by path: slow,
refusing, hanging or breaking off on demand."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

HEADERS = {"ETag": '"1"', "Last-Modified": "Sat, 28 Nov 2026 20:00:00 GMT", "x-ms-version": "2023-11-03"}
BATCH = "HTTP/1.1 202 Accepted\r\nx-ms-request-id: 1\r\n\r\n"
BATCH = f"--b\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\n{BATCH}\r\n--b--\r\n"


class PlayedBucket:
    """``failure``: a status and a body, sent to every request. ``gate``: no request is answered while it is
    closed. ``cut``: bodies end in their middle. ``lists``: a missing object is 404, else 403, as S3 answers
    if the bucket may not be listed. ``delay_s``: of each answer."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []  # METHOD path
        self.failure: tuple[int, bytes] | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.cut, self.lists, self.delay_s = False, True, 0.0
        self.most_open = 0
        self.held: set[str] = set()  # requests that are not answered yet: addresses of clients
        self.lock = threading.Lock()
        self.url = ""


class _Server(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False
    request_queue_size = 128  # a client opens a connection for each thread

    def handle_error(self, *_: Any) -> None:
        """A client has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    bucket: PlayedBucket

    def answer(self) -> None:
        bucket = self.bucket
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path)
        with bucket.lock:
            bucket.asked.append(f"{self.command} {path}")
            bucket.held.add(str(self.client_address))
            bucket.most_open = max(bucket.most_open, len(bucket.held))
            gate = bucket.gate  # a test that sees it held may put another gate there
        time.sleep(bucket.delay_s)
        gate.wait()
        with bucket.lock:
            bucket.held.discard(str(self.client_address))
            status, out, headers = self._result(path, body)
        self.send_response(status)
        for name, value in {**HEADERS, **headers, "Content-Length": str(len(out))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(out[: len(out) // 2] if bucket.cut else out)
            self.close_connection = bucket.cut

    def _result(self, path: str, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        objects = self.bucket.objects
        if self.bucket.failure is not None:
            return *self.bucket.failure, {}
        if self.command == "POST":  # of Azure: one blob is removed
            objects.pop(body.decode().partition("DELETE ")[2].partition(" ")[0], None)
            return 202, BATCH.encode(), {"Content-Type": "multipart/mixed; boundary=b"}
        if self.command == "PUT":
            objects[path] = body
            return 201, b"", {}
        if self.command == "DELETE":  # S3 answers 204 also if there is none
            return (204 if objects.pop(path, None) is not None else 404), b"", {}
        return (200, objects[path], {}) if path in objects else (404 if self.bucket.lists else 403, b"", {})

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def log_message(self, *_: object) -> None: ...


@contextmanager
def played_bucket(folder: Path, environment: pytest.MonkeyPatch) -> Iterator[PlayedBucket]:
    """Serve one, to which the variables of all three clouds lead."""
    bucket = PlayedBucket()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"bucket": bucket}))
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    account = folder / "account.json"
    fields = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    account.write_text(json.dumps({"gcs_base_url": bucket.url, "disable_oauth": True, **fields}))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": bucket.url,
        "GOOGLE_SERVICE_ACCOUNT": str(account),
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": "a2V5",
        "AZURE_STORAGE_ENDPOINT": f"{bucket.url}/account",
    }.items():
        environment.setenv(name, value)
    try:
        yield bucket
    finally:
        bucket.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()

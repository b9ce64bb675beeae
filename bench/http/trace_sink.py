"""An OTLP receiver over HTTP in a process of its own, which discards everything."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

START_S = 60.0


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """No line a request."""


@contextmanager
def trace_sink() -> Iterator[str]:
    """Its endpoint, for ``--otlp-endpoint``."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender,), name="trace sink", daemon=True)
    process.start()
    try:
        if not receiver.poll(START_S):
            raise TimeoutError("the trace sink did not start")
        yield f"http://127.0.0.1:{receiver.recv()}/v1/traces"
    finally:
        process.terminate()
        process.join()


def _serve(port_pipe: Connection) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Sink) as server:
        server.daemon_threads = True
        port_pipe.send(server.server_port)
        server.serve_forever()

"""One request's trace across coordinator, prefill and decode worker, as an OTLP receiver gets it; and its
time ledger."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from e2e.cluster import HTTP, MODEL_NAME, running, wait_for
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from transformers import PreTrainedModel

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
EXPECTED = {
    ("splitserve-coordinator", "POST /v1/completions"),
    ("splitserve-prefill", "prefill"),
    ("splitserve-decode", "handoff"),
    ("splitserve-decode", "decode"),
}


@contextmanager
def otlp_receiver(received: list[tuple[str, str, str, bytes]]) -> Iterator[str]:
    """Its address; ``heard`` gets (service, span, trace id, parent)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (service,) = [
                    a.value.string_value for a in resource.resource.attributes if a.key == "service.name"
                ]
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                received.extend(
                    (service, span.name, span.trace_id.hex(), span.parent_span_id) for span in spans
                )
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def check_ledger(server_timing: str, took: float) -> dict[str, float]:
    """The stages sum to the end-to-end time within 1%, and that is within what the client saw. Returns
    them."""
    seconds = {name: float(ms) / 1e3 for name, ms in re.findall(r"(\w+);dur=([\d.]+)", server_timing)}
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.01)
    assert total <= took
    return seconds


def test_one_trace_across_three_processes(tiny: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    received: list[tuple[str, str, str, bytes]] = []
    with (
        otlp_receiver(received) as endpoint,
        running(tiny[0], tmp_path, "--kv-cache-gib", "0.1", "--otlp-endpoint", endpoint) as cluster,
    ):
        body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 5, "ignore_eos": True}

        def ask(headers: dict[str, str]) -> dict[str, float]:
            began = time.monotonic()
            answer = HTTP.post(f"{cluster.url}/v1/completions", json=body, headers=headers).raise_for_status()
            return check_ledger(answer.headers["server-timing"], time.monotonic() - began)

        ask({"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"})
        # Messages that a coordinator reads together, after it waited for a core, have no time between them.
        wait_for(
            "time in every stage",
            lambda: min(ask({})[stage] for stage in ("prefill", "handoff", "decode")) > 0,
        )
        wait_for(
            "spans of all three", lambda: {span[:2] for span in received if span[2] == TRACE_ID} >= EXPECTED
        )
        parents = {
            span[3] for span in received if span[0] != "splitserve-coordinator" and span[2] == TRACE_ID
        }
        assert len(parents) == 1  # the workers' spans lie below the coordinator's

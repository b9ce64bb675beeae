"""Traces of the coordinator: the client's context goes on, the stages are there, the workers get it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanKind, format_trace_id
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.lifecycle.time_ledger import NAMES
from splitserve.coordinator.metrics.request_trace import end_trace
from splitserve.coordinator.server import HttpServer
from splitserve.transport.process.otel import Tracing

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
BODY: dict[str, Any] = {"prompt": "quick", "max_tokens": 5, "stream": True}
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
ASKED = pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", BODY), ("/v1/responses", {"input": "Hi"}), ("/v1/messages", MESSAGES)],
)


@pytest.fixture
def spans(server: HttpServer) -> Iterator[InMemorySpanExporter]:
    """What the server exports."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    server.app.generation.tracing = Tracing(provider)
    server.app.metrics.listeners.add("tracing", end_trace)
    yield exporter
    provider.shutdown()


async def test_the_clients_trace_goes_on(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, spans: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    response = await http.post("/v1/completions", json=BODY, headers=headers)
    (request,) = spans.get_finished_spans()
    assert (request.name, request.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert request.parent is not None
    assert request.parent.span_id == 0xB7AD6B7169203331
    assert request.attributes is not None
    assert request.attributes["splitserve.request_id"] == response.headers["x-request-id"]
    assert request.attributes["gen_ai.request.model"] == "tiny"
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert [event.name for event in request.events] == list(NAMES)
    assert request.context is not None
    assert format_trace_id(request.context.trace_id) == TRACE_ID
    seconds = sum(float(str(request.attributes[f"splitserve.{name}_s"])) for name in NAMES)
    assert seconds * 1e9 == pytest.approx((request.end_time or 0) - (request.start_time or 0), rel=0.01)
    (asked,) = dispatcher.requests
    assert asked.traceparent == f"00-{TRACE_ID}-{request.context.span_id:016x}-01"


@ASKED
@pytest.mark.parametrize("sampled", [False, True])
async def test_the_client_decides_whether_it_leaves_a_trace(
    http: httpx.AsyncClient,
    dispatcher: FakeDispatcher,
    spans: InMemorySpanExporter,
    path: str,
    body: dict[str, Any],
    sampled: bool,
) -> None:
    context = f"00-{TRACE_ID}-b7ad6b7169203331-0{sampled:d}"
    await http.post(path, json=body, headers={"traceparent": context})
    if sampled:
        (span,) = spans.get_finished_spans()
        assert span.parent is not None
        assert span.parent.span_id == 0xB7AD6B7169203331
        assert dispatcher.requests[0].traceparent.startswith(f"00-{TRACE_ID}-")
        return
    assert spans.get_finished_spans() == ()
    assert dispatcher.requests[0].traceparent == ""


async def test_without_tracing_nothing_is_sent_on(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    await http.post(
        "/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    )
    assert dispatcher.requests[0].traceparent == ""


async def test_what_is_no_context_is_a_new_trace(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher, spans: InMemorySpanExporter
) -> None:
    await http.post("/v1/completions", json=BODY, headers={"traceparent": "00-zz-yy-01"})
    span = spans.get_finished_spans()[-1]
    assert span.parent is None
    assert span.context is not None
    assert (
        dispatcher.requests[0].traceparent
        == f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-03"
    )


def test_spans_have_the_ids_that_were_told_when_they_began() -> None:
    """Whichever ends first."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing(provider)
    began = [tracing.begin(name, {}, 1.0) for name in ("a", "b", "c")]
    for trace in (began[1], began[0], began[2]):
        assert trace is not None
        trace.end(2.0, {}, [], failed=False)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["b", "a", "c"]
    reported = {trace.traceparent for trace in began if trace is not None}
    assert {
        f"00-{s.context.trace_id:032x}-{s.context.span_id:016x}-03" for s in spans if s.context is not None
    } == reported
    assert len({trace.trace_id for trace in began if trace is not None}) == 3


def test_what_is_not_sampled_is_not_begun() -> None:
    assert (
        Tracing(TracerProvider(sampler=TraceIdRatioBased(0.0), shutdown_on_exit=False)).begin("a", {}, 1.0)
        is None
    )

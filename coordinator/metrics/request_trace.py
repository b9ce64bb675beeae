"""A request's trace in the coordinator: one span, an event at the begin of each stage, and their sums."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ...transport.process.otel import RequestTrace, Tracing
from ...transport.process.worker_trace import Attribute
from ..lifecycle.time_ledger import NAMES
from ..listeners import ListenerFailures
from .request_record import RequestRecord
from .settings import RecordSettings

CONTEXT_HEADERS = (b"traceparent", b"tracestate")
"""The client's trace, as W3C's Trace Context writes it."""


def tracing_of(settings: RecordSettings, port: int) -> Tracing | None:
    """Make what exports spans, if there is an --otlp-endpoint. Raises TracingUnavailable."""
    if settings.otlp_endpoint is None:
        return None
    name = f"{socket.gethostname()}:{port}"
    return Tracing.open(settings.otlp_endpoint, "coordinator", name, settings.trace_sample_ratio)


def begin_trace(
    tracing: Tracing,
    endpoint: str,
    headers: Mapping[bytes, bytes],
    arrival: float,
    failures: ListenerFailures,
) -> RequestTrace | None:
    """Begin a request's span, within its client's trace if there is one; None if the library fails."""
    names = [name for name in CONTEXT_HEADERS if headers.get(name)]
    try:
        context = {name.decode(): headers[name].decode("latin-1") for name in names}
        return tracing.begin(f"POST {endpoint}", context, arrival)
    except Exception as error:  # of the library
        failures.note("tracing", error)
        return None


def end_trace(record: RequestRecord) -> None:
    """End a request's span: a listener of ``Metrics``. Names follow OpenTelemetry's conventions."""
    if record.trace is None:
        return
    attributes: dict[str, Attribute] = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
        "gen_ai.request.model": record.model,
        "gen_ai.usage.input_tokens": record.num_prompt_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "splitserve.request_id": record.id,
        "splitserve.status": record.status,
        "splitserve.cached_tokens": record.num_cached_tokens,
        "splitserve.dispatches": record.num_dispatches,
        "splitserve.prefill_worker": record.prefill_worker,
        "splitserve.decode_worker": record.decode_worker,
        **{f"splitserve.{name}_s": getattr(record.stages, name) for name in NAMES},
    }
    if record.status.isdigit():
        attributes["http.response.status_code"] = int(record.status)
    if record.tenant:
        attributes["splitserve.tenant"] = record.tenant
    events = [(span.stage, span.begin) for span in record.ledger.spans()]
    record.trace.end(record.ledger.end, attributes, events, failed=record.status.startswith("5"))

"""A request's trace as the coordinator tells it: one span, with an event where each stage of its ledger
begins, and their sums."""

from __future__ import annotations

import socket

from ...transport.process.otel import Tracing
from ...transport.process.worker_trace import Attribute
from ..lifecycle.time_ledger import NAMES
from .request_record import RequestRecord
from .settings import RecordSettings


def tracing_of(settings: RecordSettings, port: int) -> Tracing | None:
    """Make what exports spans, if there is an --otlp-endpoint. Raises TracingUnavailable."""
    if settings.otlp_endpoint is None:
        return None
    name = f"{socket.gethostname()}:{port}"
    return Tracing.open(settings.otlp_endpoint, "coordinator", name, settings.trace_sample_ratio)


def end_trace(record: RequestRecord) -> None:
    """A listener of ``Metrics``; by the names of OpenTelemetry's semantic conventions where there are any."""
    if record.trace is None:
        return
    attributes: dict[str, Attribute] = {
        "http.request.method": "POST",
        "http.route": record.endpoint,
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

"""Spans to OpenTelemetry, where an OTLP endpoint is configured. Needs the extra ``splitserve[otel]``; nothing else imports it.

Spans are exported from a thread of the SDK's own. A collector that does not answer costs spans, never a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .errors import TracingUnavailable
from .worker_trace import Attribute, WorkerSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TIMEOUT_S = 5.0
EXPORT_EVERY_MS = 1000
FLUSH_MS = 2000
PREFIX = "splitserve."


class Tracing:
    """One process's spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("splitserve")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def open(cls, endpoint: str, role: str, instance: str, sample_ratio: float = 1.0) -> Tracing:
        """``endpoint``: of an OTLP receiver over HTTP. Raises TracingUnavailable."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        except ImportError as error:
            raise TracingUnavailable(f"traces need OpenTelemetry ({error}): pip install 'splitserve[otel]'") from error
        resource = Resource.create({"service.name": f"splitserve-{role}", "service.instance.id": instance})
        provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(sample_ratio)), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS))
        return cls(provider)

    def begin(self, name: str, headers: Mapping[str, str], begin: float) -> RequestTrace | None:
        """The span of a client's request; its parent is in the client's headers. None where it is not sampled."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers) if headers else None
        span = self._tracer.start_span(name, context, kind=SpanKind.SERVER, start_time=_wall_ns(begin))
        return RequestTrace(span) if span.is_recording() else None

    def emit(self, span: WorkerSpan) -> None:
        """A span that has ended, below the request's own."""
        from opentelemetry.trace import Status, StatusCode

        context = self._propagator.extract({"traceparent": span.traceparent})
        attributes = {PREFIX + name: value for name, value in span.attributes.items()}
        emitted = self._tracer.start_span(span.name, context, attributes=attributes, start_time=_wall_ns(span.begin))
        if span.error:
            emitted.set_status(Status(StatusCode.ERROR, span.error))
        emitted.end(_wall_ns(span.end))

    def close(self) -> None:
        """Sends what is left, for at most two seconds."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class RequestTrace:
    """A request's own span, open until ``end``."""

    def __init__(self, span: Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.trace_id = f"{context.trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"
        """For the spans below it, in whatever process."""

    def end(self, now: float, attributes: Mapping[str, Attribute], events: Iterable[tuple[str, float]], failed: bool) -> None:
        """``events``: what began when; times in monotonic seconds."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attributes(dict(attributes))
        for name, at in events:
            self._span.add_event(name, timestamp=_wall_ns(at))
        if failed:
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_wall_ns(now))


def _wall_ns(monotonic_s: float) -> int:
    """Nanoseconds since 1970 of a moment of the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)

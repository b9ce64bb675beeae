"""Spans to OpenTelemetry, where an OTLP endpoint is configured. Needs the extra ``splitserve[otel]``; nothing
else imports it.

A request costs two random numbers when it comes in; its span is made when it has ended, under the ids that
were drawn at the beginning. Spans are exported from a thread of the SDK's own. A collector that does not
answer costs spans, never a request.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ..errors import TracingUnavailable
from .worker_trace import Attribute, WorkerSpan

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

TIMEOUT_S = 5.0
EXPORT_EVERY_MS = 1000
PREFIX = "splitserve."
SAMPLED, RANDOM = 1, 2
"""Flags of a trace: https://www.w3.org/TR/trace-context-2/"""


class Tracing:
    """One process's spans."""

    def __init__(self, provider: TracerProvider) -> None:
        """Takes the provider over: its spans get their ids here."""
        from opentelemetry.sdk.trace.sampling import Decision
        from opentelemetry.trace import NoOpTracer
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.ids = cast(Any, provider).id_generator = _Ids()
        self._provider = provider
        self.tracer = provider.get_tracer("splitserve")
        self._sampled = Decision.RECORD_AND_SAMPLE
        self._is_on = not isinstance(self.tracer, NoOpTracer)  # OTEL_SDK_DISABLED turns it off
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
            raise TracingUnavailable(
                f"traces need OpenTelemetry ({error}): pip install 'splitserve[otel]'"
            ) from error
        resource = Resource.create({"service.name": f"splitserve-{role}", "service.instance.id": instance})
        provider = TracerProvider(
            resource=resource, sampler=ParentBased(TraceIdRatioBased(sample_ratio)), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint, timeout=TIMEOUT_S)
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_EVERY_MS))
        return cls(provider)

    def begin(self, name: str, headers: Mapping[str, str], begin: float) -> RequestTrace | None:
        """The span of a client's request; its parent is in the client's headers. None where it is not
        sampled."""
        context, trace_id, is_random = None, 0, True
        if headers:
            from opentelemetry.trace import get_current_span

            context = self._propagator.extract(headers)
            parent = get_current_span(context).get_span_context()
            if parent.is_valid:
                trace_id, is_random = parent.trace_id, parent.trace_flags.random_trace_id
        trace_id = trace_id or self.ids.generate_trace_id()
        # asked again when the span is made: it goes by the parent and the trace's id
        sampler = self._provider.sampler
        if not self._is_on or sampler.should_sample(context, trace_id, name).decision is not self._sampled:
            return None
        return RequestTrace(
            self, name, context, trace_id, self.ids.generate_span_id(), SAMPLED | RANDOM * is_random, begin
        )

    def emit(self, span: WorkerSpan) -> None:
        """A span that has ended, below the request's own."""
        from opentelemetry.trace import Status, StatusCode

        context = self._propagator.extract({"traceparent": span.traceparent})
        attributes = {PREFIX + name: value for name, value in span.attributes.items()}
        emitted = self.tracer.start_span(
            span.name, context, attributes=attributes, start_time=_wall_ns(span.begin)
        )
        if span.error:
            emitted.set_status(Status(StatusCode.ERROR, span.error))
        emitted.end(_wall_ns(span.end))

    def close(self) -> None:
        """Sends what is left. That takes up to TIMEOUT_S where the collector does not answer."""
        self._provider.shutdown()


class RequestTrace:
    """A request's own span, open until ``end``."""

    __slots__ = ("_begin", "_context", "_ids", "_name", "_tracing", "trace_id", "traceparent")

    def __init__(
        self,
        tracing: Tracing,
        name: str,
        context: Context | None,
        trace_id: int,
        span_id: int,
        flags: int,
        begin: float,
    ) -> None:
        self._tracing, self._name, self._context, self._begin = tracing, name, context, begin
        self._ids = trace_id, span_id
        self.trace_id = f"{trace_id:032x}"
        self.traceparent = f"00-{self.trace_id}-{span_id:016x}-{flags:02x}"
        """For the spans below it, in whatever process."""

    def end(
        self,
        now: float,
        attributes: Mapping[str, Attribute],
        events: Iterable[tuple[str, float]],
        failed: bool,
    ) -> None:
        """``events``: what began when; times in monotonic seconds. On the thread that began it."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        tracing, began = self._tracing, _wall_ns(self._begin)
        tracing.ids.next = self._ids
        span = tracing.tracer.start_span(
            self._name, self._context, SpanKind.SERVER, attributes, start_time=began
        )
        for name, at in events:
            span.add_event(name, timestamp=_wall_ns(at))
        if failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(_wall_ns(now))


class _Ids:
    """Draws ids of traces and spans, unless they are given in ``next``. An ``IdGenerator`` of OpenTelemetry,
    without its base."""

    def __init__(self) -> None:
        self.next = (0, 0)

    def generate_trace_id(self) -> int:
        return self.next[0] or random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """Called last for each span."""
        (_, given), self.next = self.next, (0, 0)
        return given or random.getrandbits(64) or 1

    def is_trace_id_random(self) -> bool:
        return True


def _wall_ns(monotonic_s: float) -> int:
    """Nanoseconds since 1970 of a moment of the monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)

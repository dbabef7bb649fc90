"""OpenTelemetry spans for requests. Owns the exporter and the span names; takes no decision.

Every service records *finished* spans from timestamps that it took anyway, so that nothing of OpenTelemetry runs
inside a step loop. Context crosses the bus as a W3C ``traceparent`` in the messages (not as NATS headers: parsing
headers costs, and plans have none). Export is batched off the hot path; without an endpoint everything here is a no-op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
Event = tuple[str, int, Attributes]  # (name, unix ns, attributes)

_propagator = TraceContextTextMapPropagator()


class RequestSpan:
    """An open span of a request; ``traceparent`` is what children, here or in another service, hang on."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")

    @property
    def sampled(self) -> bool:
        return self._span.get_span_context().trace_flags.sampled

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, end_ns: int, error: str = "") -> None:
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


class Tracing:
    """Tracing of one service process."""

    def __init__(self, service: str, instance: str, endpoint: str, sampling: float) -> None:
        self.enabled = bool(endpoint)
        self._provider: TracerProvider | None = None
        if self.enabled:
            resource = Resource.create(
                {
                    "service.name": f"headrace-{service}",
                    "service.namespace": "headrace",
                    "service.instance.id": instance,
                }
            )
            self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(sampling)))
            exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=5)
            self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
            self._tracer: trace.Tracer = self._provider.get_tracer("headrace")
        else:
            self._tracer = trace.NoOpTracer()

    def start(
        self, name: str, start_ns: int, traceparent: str = "", attributes: Attributes | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> RequestSpan:  # fmt: skip
        """Open a span at ``start_ns`` (unix ns) under ``traceparent``; a malformed one counts as none (W3C 3.2.2)."""
        context = _propagator.extract({"traceparent": traceparent}) if traceparent else None
        span = self._tracer.start_span(
            name, context=context, kind=kind, start_time=start_ns, attributes=dict(attributes or {})
        )
        return RequestSpan(span)

    def record(
        self, name: str, start_ns: int, end_ns: int, traceparent: str, attributes: Attributes | None = None,
        events: Sequence[Event] = (), error: str = "",
    ) -> None:  # fmt: skip
        """Record a finished span from its times (unix ns). Nothing happens unless ``traceparent`` is sampled."""
        if not self.enabled or not is_sampled(traceparent):
            return
        span = self._tracer.start_span(
            name,
            context=_propagator.extract({"traceparent": traceparent}),
            start_time=start_ns,
            attributes=dict(attributes or {}),
        )
        for event, at_ns, event_attributes in events:
            span.add_event(event, dict(event_attributes), at_ns)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_ns, end_ns))

    def shutdown(self) -> None:
        """Export what is left. Blocks for at most some seconds; call it off the event loop."""
        if self._provider is not None:
            self._provider.shutdown()


def is_sampled(traceparent: str) -> bool:
    """True if a W3C ``traceparent`` carries the sampled flag."""
    if not traceparent:
        return False
    context: SpanContext = trace.get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()
    return context.is_valid and bool(context.trace_flags & TraceFlags.SAMPLED)

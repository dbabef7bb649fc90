"""Spans recorded with OpenTelemetry and exported over OTLP/HTTP, for :mod:`observability.tracing`. Owns the exporter.

A collector that is away costs the spans, nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability.conventions import ERROR_TYPE
from observability.tracing import Attributes, Event

log = logging.getLogger("headrace.tracing")

_propagator = TraceContextTextMapPropagator()

EXPORT_TIMEOUT_S = 5.0


class _Exporter(SpanExporter):
    """OTLP over HTTP that says once that the collector is away, and once that it is back."""

    def __init__(self, endpoint: str) -> None:
        for name in ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # a line and a stack for each batch
        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_TIMEOUT_S)
        self._away = False
        self.closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.closing and self._away:
            return SpanExportResult.FAILURE  # nobody waits at the end for a collector that is away
        result = self._exporter.export(spans)
        away = result is not SpanExportResult.SUCCESS
        if away != self._away:
            self._away = away
            if away:
                log.warning("no collector at %s: traces are lost until there is one", self._endpoint)
            else:
                log.info("traces are exported to %s again", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


class RecordedSpan:
    """An open span of a request."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, trace.set_span_in_context(span))
        self.traceparent = carrier.get("traceparent", "")

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, end_ns: int, error: str = "") -> None:
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


class Recorder:
    """What :class:`~observability.tracing.Tracing` does where there is an endpoint; every context here is sampled."""

    def __init__(self, service: str, instance: str, endpoint: str, sampling: float) -> None:
        resource = Resource.create(
            {
                "service.name": f"headrace-{service}",
                "service.namespace": "headrace",
                "service.instance.id": instance,
            }
        )
        self._exporter = _Exporter(endpoint)
        # Every 5 s unless OTEL_BSP_SCHEDULE_DELAY says otherwise: an export costs a millisecond however small it is.
        processor = BatchSpanProcessor(self._exporter)
        self._providers: list[TracerProvider] = []
        tracers = []
        # The second one is for spans that the caller has chosen himself.
        for sampler in (ParentBased(TraceIdRatioBased(sampling)), ALWAYS_ON):
            provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._providers.append(provider)
            tracers.append(provider.get_tracer("headrace"))
        self._tracer, self._kept = tracers

    def start(self, name: str, start_ns: int, traceparent: str, attributes: Attributes, server: bool) -> RecordedSpan:
        context = _propagator.extract({"traceparent": traceparent}) if traceparent else None
        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        span = self._tracer.start_span(
            name, context=context, kind=kind, start_time=start_ns, attributes=dict(attributes)
        )
        return RecordedSpan(span)

    def record(
        self, name: str, start_ns: int, end_ns: int, traceparent: str, attributes: Attributes,
        events: Sequence[Event], error: str,
    ) -> None:  # fmt: skip
        span = self._tracer.start_span(
            name,
            context=_propagator.extract({"traceparent": traceparent}),
            start_time=start_ns,
            attributes=dict(attributes),
        )
        for event, at_ns, event_attributes in events:
            span.add_event(event, dict(event_attributes), at_ns)
        if error:
            span.set_attribute(ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_ns, end_ns))

    def record_linked(
        self, name: str, start_ns: int, end_ns: int, traceparents: Iterable[str], attributes: Attributes
    ) -> None:
        span = self._kept.start_span(
            name, context=Context(), links=[Link(_context(one)) for one in traceparents], start_time=start_ns,
            attributes=dict(attributes),
        )  # fmt: skip
        span.end(max(start_ns, end_ns))

    def shutdown(self) -> None:
        self._exporter.closing = True
        for provider in self._providers:
            provider.shutdown()


def _context(traceparent: str) -> SpanContext:
    return trace.get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()

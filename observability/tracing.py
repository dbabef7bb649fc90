"""OpenTelemetry spans. Owns the exporter and what is kept; takes no decision. Names: ``observability/conventions.py``.

Every service records *finished* spans from timestamps that it took anyway, so that nothing of OpenTelemetry runs
inside a step loop. Context crosses the bus as a W3C ``traceparent`` in the messages (not as NATS headers: parsing
headers costs, and plans have none). Export is batched off the hot path; without an endpoint everything here is a no-op,
and a collector that is away costs the spans, nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability.context import is_sampled
from observability.conventions import ERROR_TYPE

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
Event = tuple[str, int, Attributes]  # (name, unix ns, attributes)

log = logging.getLogger("headrace.tracing")

_propagator = TraceContextTextMapPropagator()

STEPS_PER_TRACED_REQUEST = 100
"""Steps are sampled so many times more thinly than requests: there are many more of them."""

SLOW = 3.0
"""A step that takes so many times what such steps take of late is slow, and its span is always kept."""

EXPORT_TIMEOUT_S = 5.0

_SETTLE_STEPS = 20  # of a kind, before any of it can be called slow
_NEWEST = 0.05  # weight of the newest step in what is usual


class StepSampler:
    """Which iterations get a span: every n-th, and each that is slow. One caller, some arithmetic, nothing else."""

    def __init__(self, request_sampling: float) -> None:
        """``request_sampling``: share of requests that are traced; 0: no step is."""
        self._every = round(STEPS_PER_TRACED_REQUEST / request_sampling) if request_sampling else 0
        self._count = 0
        self._seen = {False: 0, True: 0}
        self._usual_us = {False: 0.0, True: 0.0}

    def look(self, duration_us: int, with_prompt: bool) -> tuple[bool, bool, int]:
        """(kept, slow, what such a step takes usually in µs). Steps with prompt tokens are a kind of their own."""
        self._count += 1
        seen, usual_us = self._seen[with_prompt], self._usual_us[with_prompt]
        slow = seen >= _SETTLE_STEPS and duration_us > SLOW * usual_us
        self._seen[with_prompt] = seen + 1
        weight = max(_NEWEST, 1 / (seen + 1))
        self._usual_us[with_prompt] = usual_us + weight * (duration_us - usual_us)
        kept = self._every > 0 and (slow or self._count % self._every == 0)
        return kept, slow, round(usual_us)


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

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def end(self, end_ns: int, error: str = "") -> None:
        if error:
            self._span.set_attribute(ERROR_TYPE, error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(end_ns)


class Tracing:
    """Tracing of one service process."""

    def __init__(self, service: str, instance: str, endpoint: str, sampling: float) -> None:
        self.enabled = bool(endpoint)
        self.sampling = sampling if endpoint else 0.0
        self._providers: list[TracerProvider] = []
        self._tracer: trace.Tracer = trace.NoOpTracer()
        self._kept: trace.Tracer = trace.NoOpTracer()
        if not self.enabled:
            return
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
        tracers = []
        # The second one is for spans that the caller has chosen himself.
        for sampler in (ParentBased(TraceIdRatioBased(sampling)), ALWAYS_ON):
            provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._providers.append(provider)
            tracers.append(provider.get_tracer("headrace"))
        self._tracer, self._kept = tracers

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
            span.set_attribute(ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(max(start_ns, end_ns))

    def record_linked(
        self, name: str, start_ns: int, end_ns: int, traceparents: Iterable[str], attributes: Attributes
    ) -> None:
        """Record a finished span as a trace of its own, linked to the sampled ones of ``traceparents``. Never sampled
        away: the caller has chosen it."""
        contexts = [_context(one) for one in traceparents if is_sampled(one)]
        span = self._kept.start_span(
            name, context=Context(), links=[Link(one) for one in contexts], start_time=start_ns,
            attributes=dict(attributes),
        )  # fmt: skip
        span.end(max(start_ns, end_ns))

    def shutdown(self) -> None:
        """Export what is left. Blocks for at most some seconds; call it off the event loop."""
        if self.enabled:
            self._exporter.closing = True
        for provider in self._providers:
            provider.shutdown()


def _context(traceparent: str) -> SpanContext:
    return trace.get_current_span(_propagator.extract({"traceparent": traceparent})).get_span_context()

"""Spans of one service process: what is traced at all. Takes no decision. Names: ``observability/conventions.py``.

Every service records *finished* spans from timestamps that it took anyway, so that nothing of OpenTelemetry runs
inside a step loop. Context crosses the bus as a W3C ``traceparent`` in the messages (not as NATS headers: parsing
headers costs, and plans have none). Export is batched off the hot path (:mod:`observability.otlp`); without an endpoint
everything here is a no-op, and OpenTelemetry is not even imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from observability.context import is_sampled, passed_on

if TYPE_CHECKING:
    from observability.otlp import Recorder

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
Event = tuple[str, int, Attributes]  # (name, unix ns, attributes)

STEPS_PER_TRACED_REQUEST = 100
"""Steps are sampled so many times more thinly than requests: there are many more of them."""

SLOW = 3.0
"""A step that takes so many times what such steps take of late is slow, and its span is always kept."""

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


class RequestSpan(Protocol):
    """An open span of a request; ``traceparent`` is what children, here or in another service, hang on."""

    @property
    def traceparent(self) -> str: ...

    def rename(self, name: str) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def end(self, end_ns: int, error: str = "") -> None: ...


class _NoSpan:
    """Nothing is recorded here; others may record children of the caller's span."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = passed_on(traceparent)

    def rename(self, name: str) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        pass

    def end(self, end_ns: int, error: str = "") -> None:
        pass


class Tracing:
    """Tracing of one service process."""

    def __init__(self, service: str, instance: str, endpoint: str, sampling: float) -> None:
        self.enabled = bool(endpoint)
        self.sampling = sampling if endpoint else 0.0
        self._recorder: Recorder | None = None
        if self.enabled:
            from observability.otlp import Recorder  # a fifth of a scheduler's start, for who asks for it

            self._recorder = Recorder(service, instance, endpoint, sampling)

    def start(
        self, name: str, start_ns: int, traceparent: str = "", attributes: Attributes | None = None,
        server: bool = False,
    ) -> RequestSpan:  # fmt: skip
        """Open a span at ``start_ns`` (unix ns) under ``traceparent``; a malformed one counts as none (W3C 3.2.2).

        ``server``: it is of a request that came from outside.
        """
        if self._recorder is None:
            return _NoSpan(traceparent)
        return self._recorder.start(name, start_ns, traceparent, attributes or {}, server)

    def record(
        self, name: str, start_ns: int, end_ns: int, traceparent: str, attributes: Attributes | None = None,
        events: Sequence[Event] = (), error: str = "",
    ) -> None:  # fmt: skip
        """Record a finished span from its times (unix ns). Nothing happens unless ``traceparent`` is sampled."""
        if self._recorder is not None and is_sampled(traceparent):
            self._recorder.record(name, start_ns, end_ns, traceparent, attributes or {}, events, error)

    def record_linked(
        self, name: str, start_ns: int, end_ns: int, traceparents: Iterable[str], attributes: Attributes
    ) -> None:
        """Record a finished span as a trace of its own, linked to the sampled ones of ``traceparents``. Never sampled
        away: the caller has chosen it."""
        if self._recorder is not None:
            linked = [one for one in traceparents if is_sampled(one)]
            self._recorder.record_linked(name, start_ns, end_ns, linked, attributes)

    def shutdown(self) -> None:
        """Export what is left. Blocks for at most some seconds; call it off the event loop."""
        if self._recorder is not None:
            self._recorder.shutdown()

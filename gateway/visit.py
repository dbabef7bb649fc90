"""One request to one endpoint: what is noted while it is answered, and the spans that this makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gateway.access import Access
from gateway.flight import Flight
from gateway.idempotency import Keyed, Place
from gateway.models import Target
from observability import conventions as names
from observability.context import is_sampled
from observability.tracing import RequestSpan, Tracing
from shared.messages import Sampling


@dataclass(slots=True)
class Visit:
    """One request to one endpoint."""

    request_id: str  # the client's, or ours; for people
    arrival_ns: int
    flight: Flight
    span: RequestSpan
    headers: list[tuple[bytes, bytes]]
    model: str = ""  # that is asked, the base model of an adapter; empty: not known yet
    pool: str = ""  # that the client asked for
    deadline_ns: int = 0  # unix time; 0: none
    outcome: str = "failed"
    access: Access = field(default_factory=Access)
    keyed: Keyed | None = None  # with an Idempotency-Key
    place: Place | None = None  # of its stream, where that has event ids
    read_ns: int = 0  # unix times at which stages ended; 0: it did not come to that
    tokenised_ns: int = 0
    accepted_ns: int = 0
    finished_ns: int = 0  # its last byte was handed to the connection
    answer_id: str = ""
    blocked: list[tuple[int, int]] = field(default_factory=list)  # when the client took nothing of what was there
    answered: bool = False  # the response has gone out, whole or with its error in the stream

    def enter(self) -> None:
        """Count the request for its key."""
        try:
            self.access.enter()
        finally:
            self.headers[1:] = self.access.headers()

    def aim(self, target: Target, operation: str) -> None:
        """It is known now which model is asked."""
        if self.model != target.name:
            self.span.rename(f"{operation} {target.name}")
            self.span.set({names.REQUEST_MODEL: target.name})
        self.model = target.served.name
        self.flight.metrics = target.served.metrics

    def charge(self, tokens: int) -> None:
        try:
            self.access.charge(tokens)
        finally:
            self.headers[1:] = self.access.headers()


def record_answer(tracing: Tracing, visit: Visit, now_ns: int) -> None:
    """Close the request's span, whichever way it ended, after those of its body and of its stream."""
    flight, traceparent = visit.flight, visit.span.traceparent
    error = "" if visit.outcome == "finished" else visit.outcome
    if tracing.enabled and is_sampled(traceparent):
        read_ns = visit.read_ns or now_ns
        tracing.record(names.RECEIVE, visit.arrival_ns, read_ns, traceparent, error="" if visit.read_ns else error)
        if flight.first_token_s:
            first_ns = visit.arrival_ns + int((flight.first_token_s - flight.arrival_s) * 1e9)
            slow = [
                (names.CLIENT_SLOW, begin, {names.DURATION_MS: (end - begin) / 1e6}) for begin, end in visit.blocked
            ]
            tracing.record(
                names.STREAM, first_ns, now_ns, traceparent, {names.OUTPUT_TOKENS: flight.completion_tokens}, slow,
                error,
            )  # fmt: skip
        visit.span.set({
            names.INPUT_TOKENS: flight.prompt_tokens,
            names.OUTPUT_TOKENS: flight.completion_tokens,
            names.CACHED_INPUT_TOKENS: flight.cached_tokens,
            names.RESPONSE_ID: visit.answer_id if visit.accepted_ns else "",  # else its client has not seen it
            names.RESPONSE_FINISH_REASONS: [choice.text.finish_reason or "" for choice in flight.choices[:16]],
        })  # fmt: skip
    visit.span.end(now_ns, error)


def sampling_attributes(sampling: Sampling, n: int, stream: bool) -> dict[str, Any]:
    """What the request asked for, as attributes of its span."""
    return {
        names.REQUEST_MAX_TOKENS: sampling.max_tokens,
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_CHOICE_COUNT: n,
        names.REQUEST_STREAM: stream,
    }

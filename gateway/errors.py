"""What a request can end in besides an answer: one table from outcomes to HTTP, one body shape (OpenAI's)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.messages import Outcome, SubmitReply

RATE_LIMITED, UNAUTHORIZED = "rate_limited", "unauthorized"
"""Outcomes that no scheduler hears of: a key beyond its own limit, and no key that opens."""


@dataclass(slots=True)
class ApiError(Exception):
    """An error for the client. ``outcome`` is its metric label; ``retry_after_s`` becomes ``Retry-After``."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None
    outcome: str = Outcome.INVALID.value

    def __str__(self) -> str:
        return self.message

    def body(self) -> bytes:
        """``{"error": {...}}`` as strict JSON in UTF-8, whatever the message quotes."""
        return msgspec.json.encode({"error": self.fields()})

    def fields(self) -> dict[str, Any]:
        return {
            "message": self.message.encode("utf-8", "replace").decode(),
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after_s is None:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after_s))).encode())]


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def unavailable(message: str, outcome: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, message, "service_unavailable", None, outcome, retry_after_s, outcome)


def interrupted(message: str) -> ApiError:
    """A request that had been accepted and cannot go on. Its text so far is not the whole answer."""
    return ApiError(503, message, "server_error", None, "interrupted", 1.0, "failed")


def queue_full(message: str, retry_after_s: float) -> ApiError:
    status, kind, code, _ = REFUSALS[Outcome.QUEUE_FULL]
    return ApiError(status, message, kind, None, code, retry_after_s, Outcome.QUEUE_FULL.value)


def rate_limited(message: str, retry_after_s: float) -> ApiError:
    """A key is over a limit of its own, however idle the mesh is."""
    return ApiError(
        429, message, "rate_limit_error", None, "rate_limit_exceeded", retry_after_s, outcome=RATE_LIMITED
    )  # fmt: skip


def late(message: str) -> ApiError:
    """It cannot be done, or could not, by the time that the client named."""
    status, kind, code, _ = REFUSALS[Outcome.DEADLINE]
    return ApiError(status, message, kind, None, code, None, Outcome.DEADLINE.value)


# outcome -> (HTTP status, OpenAI error type, code, default Retry-After in seconds)
REFUSALS: dict[Outcome, tuple[int, str, str, float | None]] = {
    Outcome.QUEUE_FULL: (429, "rate_limit_error", "queue_full", 1.0),
    Outcome.TOO_LONG: (400, "invalid_request_error", "context_length_exceeded", None),
    Outcome.NEVER_FITS: (400, "invalid_request_error", "never_fits", None),
    Outcome.INVALID: (400, "invalid_request_error", "invalid", None),
    Outcome.NO_WORKER: (503, "service_unavailable", "no_worker", 1.0),
    # Only what the gateway lists is submitted: a new leader, or workers that are there just now, do not know it yet.
    Outcome.UNKNOWN_MODEL: (503, "service_unavailable", "no_worker", 1.0),
    Outcome.DRAINING: (503, "service_unavailable", "draining", 1.0),
    Outcome.DEADLINE: (504, "timeout_error", "deadline_exceeded", None),
    Outcome.STALE_EPOCH: (503, "service_unavailable", "stale_epoch", 1.0),
}


def refusal(reply: SubmitReply) -> ApiError:
    """The error for a scheduler's refusal."""
    status, kind, code, retry_after_s = REFUSALS[reply.outcome]
    if retry_after_s is not None and reply.retry_after_ms > 0:
        retry_after_s = reply.retry_after_ms / 1000
    message = reply.reason or f"refused: {reply.outcome.value}"
    return ApiError(status, message, kind, None, code, retry_after_s, reply.outcome.value)
